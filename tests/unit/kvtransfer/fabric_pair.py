"""Two fabric endpoints in one process over any plane, with numpy memory for blocks and a plane that misbehaves on request.

Blocks are rows of bytes; their content says to which (handoff, block index) they belong. `FaultyPlane` wraps a real plane and
can hold, corrupt or fail reads. The teardown checks that every slab is home and every handoff gone.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from common.clock import SystemClock
from common.errors import HandoffFailed
from kvtransfer.data_plane import DataPlane, Fetch
from kvtransfer.layout import KVLayout
from kvtransfer.planes.select import open_plane
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import HandoffOutcome, KVSender
from kvtransfer.settings import FabricSettings
from kvtransfer.staging import SlabPool

SECRET = b"a cluster secret of enough bytes"
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="float32", model_digest="m" * 32)
QUICK = FabricSettings(
    heartbeat_s=0.05,
    suspect_s=0.3,
    handshake_s=0.5,
    connect_s=2.0,
    transfer_s=2.0,
    lease_s=3.0,
    open_wait_s=3.0,
    quarantine_s=1.0,
    sweep_s=0.02,
)


class NumpyCopier:
    """Blocks as rows of bytes; a copy of a block after `give` is a use after free."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.memory = np.zeros((num_blocks, block_bytes), np.uint8)
        self.free: set[int] = set(range(num_blocks))
        self.given_back: set[int] = set()
        self.violations: list[str] = []
        self.fail: Exception | None = None
        self.before_copy: Callable[[], None] = lambda: None

    @property
    def block_bytes(self) -> int:
        return int(self.memory.shape[1])

    def take(self, num_blocks: int, rng: np.random.Generator) -> tuple[int, ...]:
        ids = rng.permutation(sorted(self.free))[:num_blocks]
        assert len(ids) == num_blocks
        self.free -= {int(i) for i in ids}
        self.given_back -= self.given_back - self.free
        return tuple(int(i) for i in ids)

    def give(self, block_ids: Sequence[int]) -> None:
        assert not self.free & set(block_ids)
        self.free |= set(block_ids)
        self.given_back |= set(block_ids)

    def _check(self, verb: str, block_ids: Sequence[int]) -> None:
        if bad := self.given_back & set(block_ids):
            self.violations.append(f"{verb} of blocks {sorted(bad)} after they were given back")

    def gather(self, block_ids: Sequence[int], slab: memoryview) -> bytes:
        self.before_copy()
        if self.fail is not None:
            raise self.fail
        self._check("gather", block_ids)
        rows = self.memory[list(block_ids)].reshape(-1)
        np.frombuffer(slab, np.uint8)[: rows.size] = rows
        self._check("gather", block_ids)
        return hashlib.blake2b(rows.tobytes(), digest_size=16).digest()

    def scatter(self, slab: memoryview, block_ids: Sequence[int]) -> bytes:
        self.before_copy()
        if self.fail is not None:
            raise self.fail
        self._check("scatter", block_ids)
        rows = np.frombuffer(slab, np.uint8).reshape(len(block_ids), -1).copy()
        self.memory[list(block_ids)] = rows
        self._check("scatter", block_ids)
        return hashlib.blake2b(rows.tobytes(), digest_size=16).digest()


class FaultyPlane:
    """A real plane behind switches: `hold` keeps reads from ending, `corrupt` flips a bit after each read, `refuse` fails."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self.scheme = plane.scheme
        self.hold = asyncio.Event()
        self.hold.set()
        self.started = asyncio.Event()
        self.corrupt = False
        self.refuse = False
        self.num_reads = 0
        self._region = memoryview(bytearray())
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, region: memoryview) -> None:
        self._region = region
        await self._plane.start(region)

    def describe(self) -> bytes:
        return self._plane.describe()

    async def connect(self, peer: str, description: bytes) -> None:
        await self._plane.connect(peer, description)

    def fetch(self, peer: str, remote_offset: int, local_offset: int, num_bytes: int) -> Fetch:
        if self.refuse:
            raise HandoffFailed("told to refuse")
        loop = asyncio.get_running_loop()
        outer = Fetch(loop.create_future(), loop.create_future())
        self.num_reads += 1
        self.started.set()

        async def read() -> None:
            await self.hold.wait()
            try:
                inner = self._plane.fetch(peer, remote_offset, local_offset, num_bytes)
                seconds = await inner.done
                await inner.settled
                if self.corrupt:
                    self._region[local_offset + num_bytes // 2] ^= 1
                outer.done.set_result(seconds)
            except HandoffFailed as error:
                outer.done.set_exception(error)
            finally:
                outer.settled.set_result(None)

        task = loop.create_task(read())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return outer

    async def disconnect(self, peer: str) -> None:
        await self._plane.disconnect(peer)

    async def close(self) -> None:
        self.hold.set()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._plane.close()


@dataclass
class End:
    worker: str
    copier: NumpyCopier
    slabs: SlabPool
    plane: FaultyPlane
    counts: Counter[str] = field(default_factory=Counter)
    fatal: list[BaseException] = field(default_factory=list)


@dataclass
class Pair:
    """One sender and one receiver with what a test needs of both."""

    p: End
    d: End
    sender: KVSender
    receiver: KVReceiver
    address: str
    outcomes: dict[str, list[HandoffOutcome]] = field(default_factory=dict)

    def offer(self, handoff_id: str, epoch: int, num_tokens: int, held: Sequence[int] = ()) -> None:
        outcomes = self.outcomes.setdefault(f"{handoff_id}/{epoch}", [])

        def released(outcome: HandoffOutcome) -> None:
            outcomes.append(outcome)
            self.p.copier.give(held)

        self.sender.offer(handoff_id, epoch, num_tokens, released)

    def receive(
        self,
        handoff_id: str,
        epoch: int,
        num_tokens: int,
        first_block_index: int,
        block_ids: Sequence[int],
        deadline_s: float = 20.0,
    ):  # type: ignore[no-untyped-def]  # noqa: E501
        return self.receiver.receive(
            handoff_id=handoff_id,
            epoch=epoch,
            peer=self.p.worker,
            address=self.address,
            num_prompt_tokens=num_tokens,
            first_block_index=first_block_index,
            block_ids=block_ids,
            deadline_s=deadline_s,
        )

    def outcome(self, handoff_id: str, epoch: int = 1) -> HandoffOutcome:
        (outcome,) = self.outcomes[f"{handoff_id}/{epoch}"]
        return outcome


async def until(condition: Callable[[], bool], timeout_s: float = 10.0, what: str = "") -> None:
    """Waits for a state that only timers and sockets bring about, with a deadline."""
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def fabric_pair(
    scheme: str = "inproc",
    *,
    num_blocks: int = 256,
    num_slabs: int = 4,
    blocks_per_slab: int = 3,
    layout: KVLayout = LAYOUT,
    receiver_layout: KVLayout | None = None,
    settings: FabricSettings = QUICK,
    secrets: tuple[bytes, bytes] = (SECRET, SECRET),
) -> AsyncIterator[Pair]:
    clock = SystemClock()
    ends = []
    for worker, own in (("p0@1", layout), ("d0@1", receiver_layout or layout)):
        slabs = SlabPool(num_slabs, blocks_per_slab * own.block_bytes, clock)
        plane = FaultyPlane(open_plane(scheme, name=worker, secret=SECRET))
        await plane.start(slabs.region)
        ends.append(End(worker, NumpyCopier(num_blocks, own.block_bytes), slabs, plane))
    p, d = ends
    p.copier.memory[:] = np.random.default_rng(1).integers(0, 256, p.copier.memory.shape, np.uint8)

    def counter(end: End) -> Callable[[str, float], None]:
        def count(name: str, amount: float) -> None:
            end.counts[name] += int(amount)

        return count

    sender = KVSender(
        worker=p.worker, layout=layout, copier=p.copier, plane=p.plane, slabs=p.slabs, clock=clock,
        cluster_secret=secrets[0], settings=settings, count=counter(p), on_fatal=p.fatal.append,
    )  # fmt: skip
    receiver = KVReceiver(
        worker=d.worker, layout=receiver_layout or layout, copier=d.copier, plane=d.plane, slabs=d.slabs, clock=clock,
        cluster_secret=secrets[1], settings=settings, count=counter(d), on_fatal=d.fatal.append,
    )  # fmt: skip
    address = await sender.start("127.0.0.1", 0)
    pair = Pair(p, d, sender, receiver, address)
    try:
        yield pair
        await until(lambda: pair.sender.census().slabs.free == num_slabs, what=f"sender's slabs home: {pair.sender.census()}")
        await until(
            lambda: pair.receiver.census().slabs.free == num_slabs, what=f"receiver's slabs home: {pair.receiver.census()}"
        )
        await until(lambda: not pair.sender.census().handoffs and not pair.receiver.census().handoffs, what="handoffs gone")
    finally:
        for end in (p, d):
            end.plane.hold.set()
        await receiver.close()
        await sender.close()
        for end in (p, d):
            await end.plane.close()
            end.slabs.close()
    assert all(len(outcomes) == 1 for outcomes in pair.outcomes.values()), pair.outcomes
    assert not p.copier.violations and not d.copier.violations, (p.copier.violations, d.copier.violations)
    assert not p.fatal and not d.fatal, (p.fatal, d.fatal)
    left = [t for t in asyncio.all_tasks() if t is not asyncio.current_task() and "kv-" in t.get_name()]
    assert not left, left
