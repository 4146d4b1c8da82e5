"""Settings of a prefill worker beyond those of every worker."""

from __future__ import annotations

from pydantic import Field

from engine.serving.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    prefill_chunk_tokens: int = Field(
        default=256,
        ge=16,
        le=65536,
        description="prompt tokens that one step computes; each finished chunk leaves while the next computes",
    )
