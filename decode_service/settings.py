"""Settings of a decode worker beyond those of every worker."""

from __future__ import annotations

from pydantic import Field

from engine.serving.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    local_prefill_tokens: int = Field(
        default=64,
        ge=1,
        description="prompt tokens that one step may compute beside decoding, each of which delays it; --token-budget when none decodes",
    )
    transfer_deadline_s: float = Field(
        default=60.0, gt=0, description="seconds that one handoff may take from reservation to commit"
    )
