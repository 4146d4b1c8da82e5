"""Handoffs in a wire format: both ends agree or refuse each other with the reason, half the bytes travel, the blocks are close."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.clock import SystemClock
from common.errors import LayoutMismatch
from kernels.wire import WireBlocks, select_wire_blocks
from kvtransfer.layout import KVLayout
from kvtransfer.planes.select import open_plane
from kvtransfer.receiver import KVReceiver
from kvtransfer.sender import HandoffOutcome, KVSender
from kvtransfer.sender_handoff import Ended
from kvtransfer.staging import SlabPool
from tests.unit.kvtransfer.fabric_pair import QUICK, SECRET

EXACT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=4, dtype="bfloat16", model_digest="m" * 32)
NUM_BLOCKS = 40


def cache_of(seed: int) -> torch.Tensor:
    shape = (NUM_BLOCKS, EXACT.num_layers, 2, EXACT.num_kv_heads, EXACT.block_size, EXACT.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


class Ends:
    """A sender and a receiver over tcp, each with a bf16 cache and its own idea of the wire format."""

    def __init__(self, sends: str, receives: str) -> None:
        self.caches = (cache_of(1), cache_of(2))
        self.layouts = tuple(replace(EXACT, wire=wire) for wire in (sends, receives))
        self.outcomes: list[HandoffOutcome] = []

    async def hand_over(self, tables: tuple[tuple[int, ...], tuple[int, ...]]) -> Any:
        clock, parts = SystemClock(), []
        for name, layout, cache in zip(("p@1", "d@1"), self.layouts, self.caches, strict=True):
            slabs = SlabPool(4, 3 * layout.wire_block_bytes, clock)
            plane = open_plane("tcp", name=name, secret=SECRET)
            await plane.start(slabs.region)
            copier = ExactBlocks(cache) if layout.wire == "none" else select_wire_blocks(cache, layout.wire)
            parts.append(
                {
                    "worker": name, "layout": layout, "copier": copier, "plane": plane, "slabs": slabs, "clock": clock,
                    "cluster_secret": SECRET, "settings": QUICK,
                }
            )  # fmt: skip
        sender, receiver = KVSender(**parts[0]), KVReceiver(**parts[1])
        num_tokens = len(tables[0]) * EXACT.block_size
        try:
            address = await sender.start("127.0.0.1", 0)
            sender.offer("h", 1, num_tokens, self.outcomes.append)
            sender.blocks_final("h", num_tokens, tables[0])
            sender.close_handoff("h", 1, {})
            return await receiver.receive(
                handoff_id="h", epoch=1, peer="p@1", address=address, num_prompt_tokens=num_tokens, first_block_index=0,
                block_ids=tables[1], deadline_s=20.0,
            )  # fmt: skip
        finally:
            await receiver.close()
            await sender.close()
            for part in parts:
                await part["plane"].close()
                part["slabs"].close()


class ExactBlocks:
    def __init__(self, cache: torch.Tensor) -> None:
        self._rows = cache.view(torch.uint8).view(NUM_BLOCKS, -1).numpy()

    @property
    def block_bytes(self) -> int:
        return int(self._rows.shape[1])

    def gather(self, block_ids: Any, slab: memoryview) -> bytes:
        rows = self._rows[list(block_ids)]
        np.frombuffer(slab, np.uint8)[: rows.size] = rows.reshape(-1)
        return bytes(16)

    def scatter(self, slab: memoryview, block_ids: Any) -> bytes:
        self._rows[list(block_ids)] = np.frombuffer(slab, np.uint8).reshape(len(block_ids), -1)
        return bytes(16)


def tables(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return tuple(int(i) for i in rng.permutation(NUM_BLOCKS)[:25]), tuple(int(i) for i in rng.permutation(NUM_BLOCKS)[:25])


@pytest.mark.parametrize("wire", ["int8", "fp8"])
async def test_blocks_arrive_as_the_format_says_in_half_the_bytes(wire: str) -> None:
    ends = Ends(wire, wire)
    p_table, d_table = tables(3)
    untouched = sorted(set(range(NUM_BLOCKS)) - set(d_table))
    before = ends.caches[1].clone()
    received = await ends.hand_over((p_table, d_table))
    expected = ends.caches[0].clone()
    reference = WireBlocks(expected, wire)
    slab = memoryview(bytearray(reference.block_bytes * len(p_table)))
    reference.gather(p_table, slab)
    reference.scatter(slab, p_table)
    assert torch.equal(ends.caches[1][list(d_table)], expected[list(p_table)])
    assert torch.equal(ends.caches[1][untouched], before[untouched])
    error = (ends.caches[1][list(d_table)].float() - ends.caches[0][list(p_table)].float()).abs().max()
    assert 0 < error < 0.2
    timeline = received.timeline
    assert timeline.transport == f"tcp+{wire}"
    assert timeline.num_bytes == 25 * ends.layouts[0].wire_block_bytes < 0.6 * 25 * EXACT.block_bytes
    assert [outcome.ended for outcome in ends.outcomes] == [Ended.ACKNOWLEDGED]


async def test_the_exact_format_stays_exact_and_is_named_as_before() -> None:
    ends = Ends("none", "none")
    p_table, d_table = tables(4)
    received = await ends.hand_over((p_table, d_table))
    assert torch.equal(ends.caches[1][list(d_table)], ends.caches[0][list(p_table)])
    assert received.timeline.transport == "tcp"


@pytest.mark.parametrize(("sends", "receives"), [("none", "int8"), ("int8", "none"), ("fp8", "int8")])
async def test_ends_that_disagree_refuse_each_other_and_say_why(sends: str, receives: str) -> None:
    ends = Ends(sends, receives)
    before = ends.caches[1].clone()
    with pytest.raises(LayoutMismatch, match=f"wire ({receives} here, {sends} there|{sends} here, {receives} there)"):
        await ends.hand_over(tables(5))
    assert torch.equal(ends.caches[1], before)
    await asyncio.sleep(0)
