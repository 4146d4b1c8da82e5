"""One pair of processes of the fabric benchmark: this one receives, its child sends; measures everything of one round.

Run as `python -m bench.fabric_pair` with one line of JSON (`PairSpec`) on standard input; prints one line of JSON with the results.
It must not know which transports are compared. Rates are bytes per second, times are seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from bench.fabric_ends import BLOCK_SIZE, LAYOUTS, ORDERS, SECRET, End, EndSpec, block_table, open_end, pin
from common.clock import SystemClock
from common.types import HandoffTimeline
from kvtransfer.planes.process_exit import exit_process
from kvtransfer.receiver import KVReceiver

_PEER = "bench-p@1"
_COPY_BYTES = 64 << 20
_READS_IN_FLIGHT = 2
_DEADLINE_S = 120.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PairSpec:
    """`sizes` are bytes per handoff. The pair is pinned to `sender_cpus` and `receiver_cpus` (comma-separated, or empty)."""

    layout: str
    transport: str
    sizes: tuple[int, ...]
    sender_cpus: str
    receiver_cpus: str
    num_slabs: int
    slab_bytes: int
    num_single: int
    num_concurrent: int
    idle_s: float


class _Pair:
    def __init__(self, spec: PairSpec, end: End, receiver: KVReceiver, sender: asyncio.subprocess.Process, address: str) -> None:
        self._spec = spec
        self._end = end
        self._receiver = receiver
        self._sender = sender
        self._address = address
        self._block_bytes = LAYOUTS[spec.layout].block_bytes
        self._ids = itertools.count()
        self._asking = asyncio.Lock()

    async def ask(self, **request: Any) -> dict[str, Any]:
        assert self._sender.stdin is not None and self._sender.stdout is not None
        async with self._asking:
            self._sender.stdin.write(json.dumps(request).encode() + b"\n")
            line = await self._sender.stdout.readline()
        if not line:
            raise RuntimeError("the sending process ended")
        reply: dict[str, Any] = json.loads(line)
        return reply

    async def cpu_s(self) -> tuple[float, float]:
        """Processor seconds that sender and receiver have used so far."""
        return (await self.ask(do="cpu"))["cpu_s"], time.process_time()

    async def handoff(self, num_blocks: int, order: str, seed: int) -> tuple[float, HandoffTimeline]:
        """Seconds from the opening of a handoff, whose blocks are all final, to its commit."""
        handoff_id = f"h{next(self._ids)}"
        await self.ask(do="offer", id=handoff_id, num_blocks=num_blocks, order=order, seed=seed)
        table = block_table(order, num_blocks, self._end.cache.num_blocks, seed + 1)
        started_s = time.perf_counter()
        received = await self._receiver.receive(
            handoff_id=handoff_id, epoch=1, peer=_PEER, address=self._address, num_prompt_tokens=num_blocks * BLOCK_SIZE,
            first_block_index=0, block_ids=table, deadline_s=_DEADLINE_S,
        )  # fmt: skip
        return time.perf_counter() - started_s, received.timeline

    async def with_cpu(self, what: Awaitable[_T]) -> tuple[_T, tuple[float, float]]:
        """A result, and the processor seconds that both ends used for it: unlike the clock, hardly touched by other load."""
        before = await self.cpu_s()
        result = await what
        after = await self.cpu_s()
        return result, (after[0] - before[0], after[1] - before[1])

    # what is measured -------------------------------------------------------------------------------------------------

    def copy_rate(self) -> float:
        """One core's memcpy between two halves of the cache, 64 MiB at a time, as far as they reach."""
        data = self._end.bytes()
        piece = min(_COPY_BYTES, data.size // 2)
        num_pieces = max(1, data.size // (2 * piece))
        started_s = time.perf_counter()
        for n in range(num_pieces):
            np.copyto(data[(2 * n + 1) * piece : (2 * n + 2) * piece], data[2 * n * piece : (2 * n + 1) * piece])
        return num_pieces * piece / (time.perf_counter() - started_s)

    async def contiguous_rate(self, num_bytes: int, read_bytes: int) -> float:
        """The transport alone: reads of `read_bytes` out of the sender's slabs into ours, until `num_bytes` have come."""
        slabs, plane = self._end.endpoint.slabs, self._end.endpoint.plane
        places = itertools.cycle(range(0, len(slabs.region) - read_bytes + 1, read_bytes))
        num_reads = max(1, num_bytes // read_bytes)
        started_s = time.perf_counter()
        running: list[asyncio.Future[float]] = []
        for _ in range(num_reads):
            if len(running) >= _READS_IN_FLIGHT:
                await running.pop(0)
            place = next(places)
            running.append(plane.fetch(_PEER, place, place, read_bytes).done)
        for done in running:
            await done
        return num_reads * read_bytes / (time.perf_counter() - started_s)

    async def of_size(self, num_bytes: int) -> dict[str, Any]:
        region_bytes = len(self._end.endpoint.slabs.region)
        num_blocks = num_bytes // self._block_bytes
        result: dict[str, Any] = {"num_bytes": num_blocks * self._block_bytes, "memcpy_rate": self.copy_rate()}
        for name, read_bytes in (("whole", region_bytes), ("frames", self._spec.slab_bytes)):
            rate, cpu_s = await self.with_cpu(self.contiguous_rate(num_bytes, read_bytes))
            result[f"transport_{name}_rate"], result[f"transport_{name}_cpu_s"] = rate, cpu_s
        for order in ORDERS:
            await self.handoff(num_blocks, order, seed=10)
            (seconds, timeline), cpu_s = await self.with_cpu(self.handoff(num_blocks, order, seed=20))
            result[f"{order}_cpu_s"] = cpu_s
            result[f"{order}_rate"] = num_blocks * self._block_bytes / seconds
            result[f"{order}_frames"] = timeline.num_frames
            result[f"{order}_read_s"], result[f"{order}_scatter_s"] = timeline.transfer_s, timeline.scatter_s
        share = max(1, num_blocks // self._spec.num_concurrent)
        started_s = time.perf_counter()
        each = await asyncio.gather(*(self.handoff(share, "scattered", seed=100 + n) for n in range(self._spec.num_concurrent)))
        result["concurrent_rate"] = len(each) * share * self._block_bytes / (time.perf_counter() - started_s)
        result["concurrent_spread"] = max(s for s, _ in each) / min(s for s, _ in each)
        return result

    async def verify(self) -> None:
        """What arrived is what was sent, block for block: the benchmark measures nothing that is wrong."""
        num_blocks = min(16, self._end.cache.num_blocks)
        await self.handoff(num_blocks, "scattered", seed=3)
        sent = await self.ask(do="digest", num_blocks=num_blocks, order="scattered", seed=3)
        got = self._end.digest(block_table("scattered", num_blocks, self._end.cache.num_blocks, 4))
        if sent["digest"] != got:
            raise RuntimeError("the blocks that arrived are not those that were sent")

    async def single_block(self) -> dict[str, float]:
        times = [(await self.handoff(1, "scattered", seed=n))[0] for n in range(self._spec.num_single)]
        return {"p50_s": statistics.median(times), "p90_s": sorted(times)[int(0.9 * len(times))]}

    async def beside_a_large_one(self) -> dict[str, float]:
        """One-block handoffs, one after the other, for as long as a handoff of the largest size runs."""
        num_blocks = max(self._spec.sizes) // self._block_bytes
        alone_s, _ = await self.handoff(num_blocks, "scattered", seed=30)
        large = asyncio.create_task(self.handoff(num_blocks, "scattered", seed=30))
        times: list[float] = []
        await asyncio.sleep(alone_s / 20)
        while not large.done():
            times.append((await self.handoff(1, "scattered", seed=len(times)))[0])
        seconds, _ = await large
        return {"p50_s": statistics.median(times), "max_s": max(times), "num": len(times), "large_slowdown": seconds / alone_s}

    async def idle(self) -> dict[str, float]:
        """Share of a core that each process takes while a link is open and nothing moves."""
        await asyncio.sleep(0.3)
        started_s = time.perf_counter()
        _, (sender_s, receiver_s) = await self.with_cpu(asyncio.sleep(self._spec.idle_s))
        seconds = time.perf_counter() - started_s
        return {"sender": sender_s / seconds, "receiver": receiver_s / seconds}


async def measure(spec: PairSpec) -> dict[str, Any]:
    end_spec = EndSpec(spec.layout, spec.transport, max(spec.sizes), spec.num_slabs, spec.slab_bytes)
    arguments = [spec.layout, spec.transport, end_spec.num_bytes, spec.sender_cpus, spec.num_slabs, spec.slab_bytes]
    sender = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.fabric_ends", *map(str, arguments),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
    )  # fmt: skip
    assert sender.stdin is not None and sender.stdout is not None
    try:
        end = await open_end(end_spec, "bench-d@1", fill_seed=2)
        hello = json.loads(await sender.stdout.readline())
        receiver = KVReceiver(
            worker="bench-d@1", layout=LAYOUTS[spec.layout], copier=end.cache, plane=end.endpoint.plane, slabs=end.endpoint.slabs,
            clock=SystemClock(), cluster_secret=SECRET, settings=end.endpoint.settings,
        )  # fmt: skip
        pair = _Pair(spec, end, receiver, sender, hello["address"])
        await pair.verify()
        results = {
            "sizes": [await pair.of_size(size) for size in spec.sizes],
            "single_block": await pair.single_block(),
            "beside_a_large_one": await pair.beside_a_large_one(),
            "idle": await pair.idle(),
        }
        await receiver.close()
        await end.endpoint.close()
        return results
    finally:
        sender.stdin.close()
        try:
            async with asyncio.timeout(10):
                await sender.wait()
        except TimeoutError:
            sender.kill()
            await sender.wait()


def pair_spec_json(spec: PairSpec) -> bytes:
    return json.dumps(asdict(spec)).encode()


def main(write: Callable[[str], object] = print) -> None:
    given = json.load(sys.stdin)
    spec = PairSpec(**(given | {"sizes": tuple(given["sizes"])}))
    pin(spec.receiver_cpus)
    write(json.dumps(asyncio.run(measure(spec))))
    exit_process(0)


if __name__ == "__main__":
    main()
