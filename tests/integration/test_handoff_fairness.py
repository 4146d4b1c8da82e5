"""Many handoffs over one link: who waits for whom is counted in frames, never in time."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from kvtransfer.settings import FabricSettings
from tests.unit.kvtransfer.fabric_pair import LAYOUT, Pair, fabric_pair, until

IN_FLIGHT = FabricSettings().frames_in_flight_max
SETTINGS = FabricSettings()
NUM_SLABS = 32


def offer_whole(pair: Pair, handoff_id: str, num_blocks: int, table: tuple[int, ...]) -> None:
    """All blocks are final at once, as with a prompt that was cached."""
    num_tokens = num_blocks * LAYOUT.block_size
    pair.offer(handoff_id, 1, num_tokens)
    pair.sender.blocks_final(handoff_id, num_tokens, table)
    pair.sender.close_handoff(handoff_id, 1, {})


def receive_whole(pair: Pair, handoff_id: str, table: tuple[int, ...]) -> asyncio.Task[object]:
    return asyncio.create_task(pair.receive(handoff_id, 1, len(table) * LAYOUT.block_size, 0, table))


@pytest.mark.parametrize("scheme", ["inproc", "tcp"])
async def test_a_small_handoff_waits_for_a_few_frames_of_a_large_one_and_not_for_all(scheme: str) -> None:
    rng = np.random.default_rng(0)
    async with fabric_pair(scheme, num_blocks=400, num_slabs=NUM_SLABS, blocks_per_slab=1, settings=SETTINGS) as pair:
        tables = [(pair.p.copier.take(n, rng), pair.d.copier.take(n, rng)) for n in (300, 1, 1, 1)]
        offer_whole(pair, "large", 300, tables[0][0])
        large = receive_whole(pair, "large", tables[0][1])
        waited = []
        for n, (p_table, d_table) in enumerate(tables[1:]):
            after = pair.d.counts["frames_received"] + 40
            await until(lambda after=after: pair.d.counts["frames_received"] >= after)  # type: ignore[misc]
            offer_whole(pair, f"small{n}", 1, p_table)
            before = pair.d.counts["frames_received"]
            await receive_whole(pair, f"small{n}", d_table)
            waited.append(pair.d.counts["frames_received"] - before - 1)
            assert not large.done(), "the large handoff must still run, else nothing was shared"
        # Those in flight when it opened, the same number again while its open travels and its frame is moved, and its turn.
        assert max(waited) <= 3 * IN_FLIGHT, waited
        await large
        assert pair.d.counts["frames_received"] == 303


async def test_handoffs_of_equal_size_advance_frame_by_frame_together() -> None:
    rng = np.random.default_rng(1)
    async with fabric_pair(num_blocks=600, num_slabs=NUM_SLABS, blocks_per_slab=1, settings=SETTINGS) as pair:
        tables = {f"h{n}": (pair.p.copier.take(100, rng), pair.d.copier.take(100, rng)) for n in range(4)}
        order: list[str] = []
        receiving = [receive_whole(pair, name, d_table) for name, (_, d_table) in tables.items()]
        await until(lambda: pair.sender.census().num_pending_opens == 4)
        owner = {block: name for name, (p_table, _) in tables.items() for block in p_table}
        gather = pair.p.copier.gather

        def recording(block_ids: tuple[int, ...], slab: memoryview) -> bytes:
            order.append(owner[block_ids[0]])
            return gather(block_ids, slab)

        pair.p.copier.gather = recording  # type: ignore[method-assign,assignment]
        for name, (p_table, _) in tables.items():
            offer_whole(pair, name, 100, p_table)
        await asyncio.gather(*receiving)
        for end in range(40, 400, 40):
            shares = [order[:end].count(name) for name in tables]
            assert max(shares) - min(shares) <= 2 * IN_FLIGHT, (end, shares)


async def test_one_handoff_never_holds_more_slabs_than_its_share_at_either_end() -> None:
    rng = np.random.default_rng(2)
    async with fabric_pair(num_blocks=600, num_slabs=NUM_SLABS, blocks_per_slab=1, settings=SETTINGS) as pair:
        peaks = {"gather": 0, "scatter": 0}
        used: dict[str, set[int]] = {"gather": set(), "scatter": set()}
        base = {
            verb: np.frombuffer(end.slabs.region, np.uint8).ctypes.data for verb, end in (("gather", pair.p), ("scatter", pair.d))
        }
        for verb, end in (("gather", pair.p), ("scatter", pair.d)):

            def look(verb: str = verb, end: object = end) -> None:
                peaks[verb] = max(peaks[verb], end.slabs.census().in_use)  # type: ignore[attr-defined]

            end.copier.before_copy = look
            copy = getattr(end.copier, verb)

            def note(first: object, second: object, verb: str = verb, copy: object = copy) -> bytes:
                slab = first if isinstance(first, memoryview) else second
                used[verb].add(np.frombuffer(slab, np.uint8).ctypes.data - base[verb])  # type: ignore[call-overload]
                return copy(first, second)  # type: ignore[operator]

            setattr(end.copier, verb, note)
        p_table, d_table = pair.p.copier.take(200, rng), pair.d.copier.take(200, rng)
        offer_whole(pair, "large", 200, p_table)
        await receive_whole(pair, "large", d_table)
        assert 1 < peaks["gather"] <= IN_FLIGHT + 1, peaks  # the pump may hold one more that it has not granted yet
        assert peaks["scatter"] <= IN_FLIGHT + 1, peaks
        # Reused while they are in the processor's cache: 200 frames touch only a few of the 32 slabs.
        assert len(used["gather"]) <= IN_FLIGHT + 2 and len(used["scatter"]) <= IN_FLIGHT + 2, used


async def test_the_copy_thread_has_the_next_gather_at_hand_when_one_ends() -> None:
    rng = np.random.default_rng(3)
    async with fabric_pair(num_blocks=20, num_slabs=4, blocks_per_slab=1, settings=SETTINGS) as pair:
        gate, running = threading.Event(), threading.Event()

        def held() -> None:
            running.set()
            assert gate.wait(10)

        pair.p.copier.before_copy = held  # type: ignore[assignment]
        p_table, d_table = pair.p.copier.take(4, rng), pair.d.copier.take(4, rng)
        offer_whole(pair, "h", 4, p_table)
        receiving = receive_whole(pair, "h", d_table)
        await until(running.is_set)
        await until(lambda: pair.sender.census().slabs.in_use == 2, what="a second gather has its slab while the first runs")
        gate.set()
        await receiving
