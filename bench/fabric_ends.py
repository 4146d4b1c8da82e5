"""The two ends that the fabric benchmark measures: a real KV cache, endpoint and sender or receiver in each of two processes.

Owns the layouts that are measured, the order of blocks (`scattered` or `contiguous`) and the lines between the processes. It must
not know what is timed or how results are shown. Sizes are bytes; a block is `BLOCK_SIZE` tokens.

The sending process is `python -m bench.fabric_ends LAYOUT TRANSPORT BYTES CPUS SLABS SLAB_BYTES`. It prints one line of JSON about
itself, then answers every line of JSON that it reads with one: `offer` (blocks are final at once), `digest`, `cpu`; it ends with its
standard input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from common.clock import SystemClock
from engine.kv_cache import KVCache
from kernels.digest import payload_digest
from kernels.dispatch import select_ops
from kvtransfer.endpoint import KVEndpoint, open_endpoint
from kvtransfer.layout import KVLayout
from kvtransfer.planes.process_exit import exit_process
from kvtransfer.sender import HandoffOutcome, KVSender

BLOCK_SIZE = 16
SECRET = b"the secret of a benchmark"
LAYOUTS = {
    "8b": KVLayout(32, 8, 128, BLOCK_SIZE, "bfloat16", "bench"),
    "small": KVLayout(30, 3, 64, BLOCK_SIZE, "bfloat16", "bench"),
}
ORDERS = ("scattered", "contiguous")


@dataclass(frozen=True, slots=True)
class EndSpec:
    """What one end is made of. `num_bytes` is the size of its cache; it is rounded down to whole blocks."""

    layout: str
    transport: str
    num_bytes: int
    num_slabs: int
    slab_bytes: int

    @property
    def num_blocks(self) -> int:
        return max(1, self.num_bytes // LAYOUTS[self.layout].block_bytes)


@dataclass(frozen=True, slots=True)
class End:
    """A cache whose pages are all there, and an endpoint beside it."""

    cache: KVCache
    endpoint: KVEndpoint

    def bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.cache.tensor.view(torch.uint8).view(-1).numpy()

    def digest(self, block_ids: tuple[int, ...]) -> str:
        """Of the blocks' bytes in order, computed by the specification and not by the kernels that are measured."""
        blocks = self.bytes().reshape(self.cache.num_blocks, -1)
        return payload_digest(b"".join(blocks[i].tobytes() for i in block_ids)).hex()


def block_table(order: str, num_blocks: int, pool: int, seed: int) -> tuple[int, ...]:
    """`num_blocks` distinct ids below `pool`."""
    if order == "contiguous":
        return tuple(range(num_blocks))
    return tuple(int(i) for i in np.random.default_rng(seed).permutation(pool)[:num_blocks])


async def open_end(spec: EndSpec, name: str, fill_seed: int) -> End:
    layout = LAYOUTS[spec.layout]
    ops = select_ops(torch.device("cpu"), torch.bfloat16)
    cache = KVCache(
        spec.num_blocks, layout.num_layers, layout.num_kv_heads, layout.block_size, layout.head_dim,
        torch.bfloat16, torch.device("cpu"), ops,
    )  # fmt: skip
    endpoint = await open_endpoint(
        name=name, layout=layout, transport=spec.transport, host="127.0.0.1", secret=SECRET,
        num_slabs=spec.num_slabs, slab_bytes=spec.slab_bytes, clock=SystemClock(),
    )  # fmt: skip
    end = End(cache, endpoint)
    words = end.bytes().view(np.uint64)
    for start in range(0, words.size, 1 << 20):  # every page is written, and no two blocks are alike
        piece = words[start : start + (1 << 20)]
        piece[:] = np.arange(start, start + piece.size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(fill_seed)
    np.frombuffer(endpoint.slabs.region, np.uint8)[:] = 1
    return end


class _SendingEnd:
    def __init__(self, end: End, sender: KVSender) -> None:
        self._end = end
        self._sender = sender

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "offer":
                num_tokens = request["num_blocks"] * BLOCK_SIZE
                table = block_table(request["order"], request["num_blocks"], self._end.cache.num_blocks, request["seed"])
                self._sender.offer(request["id"], 1, num_tokens, _released)
                self._sender.blocks_final(request["id"], num_tokens, table)
                self._sender.close_handoff(request["id"], 1, {})
                return {}
            case "digest":
                return {
                    "digest": self._end.digest(
                        block_table(request["order"], request["num_blocks"], self._end.cache.num_blocks, request["seed"])
                    )
                }
            case "cpu":
                return {"cpu_s": time.process_time()}
            case other:
                raise ValueError(f"no such request: {other!r}")


def _released(outcome: HandoffOutcome) -> None:
    if outcome.failure is not None:
        print(f"a handoff ended early: {outcome}", file=sys.stderr, flush=True)


async def _serve(spec: EndSpec) -> None:
    end = await open_end(spec, "bench-p@1", fill_seed=1)
    sender = KVSender(
        worker="bench-p@1", layout=LAYOUTS[spec.layout], copier=end.cache, plane=end.endpoint.plane, slabs=end.endpoint.slabs,
        clock=SystemClock(), cluster_secret=SECRET, settings=end.endpoint.settings,
    )  # fmt: skip
    address = await sender.start("127.0.0.1", 0)
    description = end.endpoint.plane.describe().hex()
    print(json.dumps({"address": address, "description": description}), flush=True)
    sending = _SendingEnd(end, sender)
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        print(json.dumps(sending.answer(json.loads(line))), flush=True)
    await sender.close()
    await end.endpoint.close()


def pin(cpus: str) -> None:
    """Pins the process to a comma-separated list of cores; empty leaves it alone. One compute thread."""
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    torch.set_num_threads(1)


def main() -> None:
    layout, transport, num_bytes, cpus, num_slabs, slab_bytes = sys.argv[1:]
    pin(cpus)
    asyncio.run(_serve(EndSpec(layout, transport, int(num_bytes), int(num_slabs), int(slab_bytes))))
    exit_process(0)


if __name__ == "__main__":
    main()
