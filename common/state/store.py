"""The state store: fleet registry, request journal, epochs and block ownership behind one protocol.

Everything in it is soft: each value can be rebuilt by its owner, each key has a TTL (epochs included), nothing is
written per token, and no decision about the safety of a block is made from it. Implementations: `memory` (one process) and
`redis`; both pass `tests/conformance/test_state_store.py`. A store that does not answer within its timeout raises
`StoreUnavailable`; callers go on with their last view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from common.ids import RequestId, WorkerId
from common.types import BlockCensus, WorkerInfo


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One request in flight or just ended. `state` is one of JOURNAL_STATES; times are wall seconds."""

    request_id: RequestId
    state: str
    epoch: int
    router_id: str
    model: str
    prefill_worker: str = ""
    decode_worker: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    created_wall_s: float = 0.0
    updated_wall_s: float = 0.0
    error_kind: str = ""


JOURNAL_STATES = ("admitted", "placed", "streaming", "finished", "failed", "cancelled")


class StateStore(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def ping(self) -> bool:
        """True if the store answers within its timeout; never raises."""
        ...

    # registry -----------------------------------------------------------------------------------------------------
    async def publish_worker(self, info: WorkerInfo, census: BlockCensus, ttl_s: float) -> bool:
        """Heartbeat: writes the worker's record and its block ownership in one step.

        Returns False, and writes nothing, when the record belongs to a newer incarnation of the same worker id (a
        worker that was replaced must stop publishing). Incarnations are ordered by first publication.
        """
        ...

    async def remove_worker(self, worker_id: WorkerId, incarnation: str) -> None:
        """Removes the record if it still belongs to this incarnation; otherwise does nothing."""
        ...

    async def list_workers(self) -> list[WorkerInfo]:
        """All workers whose heartbeat has not expired, ordered by worker id."""
        ...

    async def block_ownership(self) -> dict[WorkerId, BlockCensus]: ...

    # epochs -------------------------------------------------------------------------------------------------------
    async def next_epoch(self, request_id: RequestId) -> int:
        """1 for the first attempt of a request, then growing by one with each call."""
        ...

    # journal ------------------------------------------------------------------------------------------------------
    async def write_journal(self, entry: JournalEntry, ttl_s: float) -> bool:
        """Writes the entry unless the stored one has a newer epoch or is already final; returns whether it was written."""
        ...

    async def read_journal(self, request_id: RequestId) -> JournalEntry | None: ...

    async def list_journal(self, limit: int = 1000) -> list[JournalEntry]:
        """The newest entries first, at most `limit`."""
        ...


FINAL_JOURNAL_STATES = frozenset({"finished", "failed", "cancelled"})
EPOCH_TTL_S = 3600
"""An epoch counter outlives every attempt of its request: longer than any request deadline."""
INCARNATIONS_MAX = 1000
"""So many lives of one worker id are remembered, to tell an older one from a newer one."""
JOURNAL_ENTRIES_MAX = 10_000
"""The journal's index keeps this many entries; older ones drop out of listings before their TTL."""
