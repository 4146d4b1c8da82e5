"""The state store of one process: for tests, simulation and all-in-one use. Same promises as `redis`, TTLs included.

Time comes from the clock it is given; expired values are dropped when they are next looked at.
"""

from __future__ import annotations

from common.clock import Clock
from common.ids import RequestId, WorkerId
from common.state.store import EPOCH_TTL_S, FINAL_JOURNAL_STATES, INCARNATIONS_MAX, JOURNAL_ENTRIES_MAX, JournalEntry
from common.types import BlockCensus, WorkerInfo


class MemoryStateStore:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[WorkerId, tuple[float, WorkerInfo, BlockCensus]] = {}
        self._orders: dict[WorkerId, dict[str, int]] = {}
        self._epochs: dict[RequestId, tuple[float, int]] = {}
        self._journal: dict[RequestId, tuple[float, JournalEntry]] = {}

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def ping(self) -> bool:
        return True

    async def publish_worker(self, info: WorkerInfo, census: BlockCensus, ttl_s: float) -> bool:
        now = self._clock.monotonic()
        orders = self._orders.setdefault(info.worker_id, {})
        mine = orders.setdefault(info.incarnation, max(orders.values(), default=0) + 1)
        if len(orders) > INCARNATIONS_MAX:
            del orders[next(iter(orders))]
        current = self._workers.get(info.worker_id)
        if current is not None and current[0] > now and orders.get(current[1].incarnation, 0) > mine:
            return False
        self._workers[info.worker_id] = (now + ttl_s, info, census)
        return True

    async def remove_worker(self, worker_id: WorkerId, incarnation: str) -> None:
        current = self._workers.get(worker_id)
        if current is not None and current[1].incarnation == incarnation:
            del self._workers[worker_id]

    async def list_workers(self) -> list[WorkerInfo]:
        return [info for _, info, _ in self._live_workers()]

    async def block_ownership(self) -> dict[WorkerId, BlockCensus]:
        return {info.worker_id: census for _, info, census in self._live_workers()}

    def _live_workers(self) -> list[tuple[float, WorkerInfo, BlockCensus]]:
        now = self._clock.monotonic()
        self._workers = {worker_id: record for worker_id, record in self._workers.items() if record[0] > now}
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    async def next_epoch(self, request_id: RequestId) -> int:
        now = self._clock.monotonic()
        while self._epochs and next(iter(self._epochs.values()))[0] <= now:  # written last is last, and all live equally long
            del self._epochs[next(iter(self._epochs))]
        epoch = self._epochs.pop(request_id, (0.0, 0))[1] + 1
        self._epochs[request_id] = (now + EPOCH_TTL_S, epoch)
        return epoch

    async def write_journal(self, entry: JournalEntry, ttl_s: float) -> bool:
        current = await self.read_journal(entry.request_id)
        if current is not None and (current.epoch > entry.epoch or current.state in FINAL_JOURNAL_STATES):
            return False
        self._journal.pop(entry.request_id, None)
        self._journal[entry.request_id] = (self._clock.monotonic() + ttl_s, entry)
        while len(self._journal) > JOURNAL_ENTRIES_MAX:
            del self._journal[next(iter(self._journal))]
        return True

    async def read_journal(self, request_id: RequestId) -> JournalEntry | None:
        record = self._journal.get(request_id)
        if record is None or record[0] <= self._clock.monotonic():
            self._journal.pop(request_id, None)
            return None
        return record[1]

    async def list_journal(self, limit: int = 1000) -> list[JournalEntry]:
        now = self._clock.monotonic()
        self._journal = {request_id: record for request_id, record in self._journal.items() if record[0] > now}
        newest_first = sorted((entry for _, entry in self._journal.values()), key=lambda entry: -entry.updated_wall_s)
        return newest_first[: max(limit, 0)]
