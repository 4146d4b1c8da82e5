"""Whole handoffs between a real sender and a real receiver in one process, over the real inproc and tcp planes.

It must not know the engine: block tables are random, and the blocks' bytes are compared after every handoff.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from common.errors import BatonError, DeadlineExceeded, HandoffFailed, KVCorrupt, LeaseExpired, StaleEpoch
from kvtransfer.sender_handoff import Ended
from tests.unit.kvtransfer.fabric_pair import LAYOUT, QUICK, Pair, fabric_pair, until

SCHEMES = ["inproc", "tcp"]


async def compute(pair: Pair, handoff_id: str, num_tokens: int, table: tuple[int, ...], chunk: int, token: int = 7) -> None:
    """What the prefill worker does: chunks become final one after the other, then the handoff is closed."""
    for end in range(chunk, num_tokens + chunk, chunk):
        num_computed = min(end, num_tokens)
        pair.sender.blocks_final(handoff_id, num_computed, table[: LAYOUT.num_blocks_of(num_computed)])
        await asyncio.sleep(0)
    pair.sender.close_handoff(handoff_id, token, {"sampled": token})


def check_equal(pair: Pair, p_table: tuple[int, ...], d_table: tuple[int, ...], first: int) -> None:
    assert np.array_equal(pair.p.copier.memory[list(p_table[first:])], pair.d.copier.memory[list(d_table[first:])])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 9, 48, 50, 203])
@pytest.mark.parametrize("offered_first", [True, False])
async def test_blocks_arrive_equal_whichever_end_comes_first(scheme: str, num_tokens: int, offered_first: bool) -> None:
    rng = np.random.default_rng(num_tokens)
    async with fabric_pair(scheme) as pair:
        num_blocks = LAYOUT.num_blocks_of(num_tokens)
        p_table, d_table = pair.p.copier.take(num_blocks, rng), pair.d.copier.take(num_blocks, rng)
        first = int(rng.integers(0, num_blocks))
        if offered_first:
            pair.offer("h", 1, num_tokens, p_table)
            await compute(pair, "h", num_tokens, p_table, 16)
            received = await pair.receive("h", 1, num_tokens, first, d_table)
        else:
            receiving = asyncio.create_task(pair.receive("h", 1, num_tokens, first, d_table))
            await until(lambda: pair.sender.census().num_pending_opens == 1)
            pair.offer("h", 1, num_tokens, p_table)
            await compute(pair, "h", num_tokens, p_table, 16)
            received = await receiving
        check_equal(pair, p_table, d_table, first)
        assert received.first_token_id == 7 and received.extra == {"sampled": 7}
        timeline = received.timeline
        assert timeline.num_blocks == num_blocks - first and timeline.num_bytes == (num_blocks - first) * LAYOUT.block_bytes
        assert timeline.transport == scheme and timeline.num_cached_tokens == first * LAYOUT.block_size
        times = [timeline.reserved_s, timeline.opened_s, timeline.first_frame_s, timeline.last_frame_s, timeline.committed_s]
        assert times == sorted(times) and timeline.transfer_s > 0 and timeline.scatter_s > 0
        await until(lambda: bool(pair.outcomes["h/1"]))
        outcome = pair.outcome("h")
        assert outcome.ended is Ended.ACKNOWLEDGED and outcome.failure is None and outcome.num_bytes == timeline.num_bytes
        assert pair.p.counts["leases_expired"] == pair.d.counts["leases_expired"] == 0
        assert pair.p.counts["protocol_error"] == pair.d.counts["protocol_error"] == 0


async def test_everything_cached_moves_no_frame_and_still_commits() -> None:
    async with fabric_pair() as pair:
        table = pair.p.copier.take(3, np.random.default_rng(0))
        pair.offer("h", 1, 10, table)
        await compute(pair, "h", 10, table, 4)
        received = await pair.receive("h", 1, 10, 3, (0, 1, 2))
        assert received.first_token_id == 7 and received.timeline.num_frames == 0 and pair.d.plane.num_reads == 0
        await until(lambda: bool(pair.outcomes["h/1"]))


async def test_number_of_frames_does_not_depend_on_fragmentation() -> None:
    num_blocks = 100
    counts = []
    for tables in ("contiguous", "shuffled"):
        async with fabric_pair(blocks_per_slab=7) as pair:
            order = np.random.default_rng(3).permutation(256)[:num_blocks] if tables == "shuffled" else np.arange(num_blocks)
            table = tuple(int(i) for i in order)
            pair.p.copier.free -= set(table)
            pair.d.copier.free -= set(table)
            pair.offer("h", 1, num_blocks * LAYOUT.block_size, table)
            pair.sender.blocks_final("h", num_blocks * LAYOUT.block_size, table)
            pair.sender.close_handoff("h", 1, {})
            received = await pair.receive("h", 1, num_blocks * LAYOUT.block_size, 0, table[::-1])
            counts.append(received.timeline.num_frames)
            check_equal(pair, table, table[::-1], 0)
            await until(lambda pair=pair: bool(pair.outcomes["h/1"]))  # type: ignore[misc]
    assert counts == [15, 15], counts


async def test_first_chunk_travels_while_the_second_is_not_computed_yet() -> None:
    async with fabric_pair() as pair:
        table = pair.p.copier.take(8, np.random.default_rng(0))
        d_table = pair.d.copier.take(8, np.random.default_rng(1))
        receiving = asyncio.create_task(pair.receive("h", 1, 32, 0, d_table))
        pair.offer("h", 1, 32, table)
        pair.sender.blocks_final("h", 18, table[:5])
        await until(lambda: pair.d.counts["bytes_received"] == 4 * LAYOUT.block_bytes, what="four whole blocks arrived")
        check_equal(pair, table[:4], d_table[:4], 0)
        assert not receiving.done()
        await compute(pair, "h", 32, table, 32)
        await receiving
        check_equal(pair, table, d_table, 0)
        await until(lambda: bool(pair.outcomes["h/1"]))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_200_concurrent_handoffs_with_few_slabs(scheme: str) -> None:
    rng = np.random.default_rng(5)
    async with fabric_pair(scheme, num_blocks=2000, num_slabs=2) as pair:

        async def one(n: int) -> None:
            num_tokens = int(rng.integers(1, 37))
            num_blocks = LAYOUT.num_blocks_of(num_tokens)
            first = int(rng.integers(0, num_blocks + 1))
            p_table, d_table = pair.p.copier.take(num_blocks, rng), pair.d.copier.take(num_blocks, rng)
            steps = [lambda: pair.offer(f"h{n}", 1, num_tokens), lambda: None]
            receiving = asyncio.create_task(pair.receive(f"h{n}", 1, num_tokens, first, d_table, 60.0))
            await asyncio.sleep(float(rng.random()) * 0.05)
            steps[0]()
            await compute(pair, f"h{n}", num_tokens, p_table, int(rng.integers(1, 17)), token=n)
            received = await receiving
            assert received.first_token_id == n
            check_equal(pair, p_table, d_table, first)

        async with asyncio.TaskGroup() as group:
            for n in range(200):
                group.create_task(one(n))
        await until(lambda: all(pair.outcomes.values()))
        assert {pair.outcome(f"h{n}").ended for n in range(200)} == {Ended.ACKNOWLEDGED}
        assert pair.p.counts["links_opened"] == pair.d.counts["links_opened"] == 1
        assert pair.p.counts["leases_expired"] == pair.p.counts["protocol_error"] == pair.d.counts["protocol_error"] == 0


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_cancel_at_random_points_leaves_slabs_home_and_holds_released(scheme: str) -> None:
    """Cancelled by the client at D, aborted by P, or neither; blocks are reused (poisoned) the moment each end lets go."""
    rng = np.random.default_rng(11)
    async with fabric_pair(scheme, num_blocks=600, num_slabs=3) as pair:
        for copier in (pair.p.copier, pair.d.copier):
            copier.before_copy = lambda: threading.Event().wait(0.0005)  # type: ignore[assignment]
        committed = 0

        async def one(n: int) -> None:
            nonlocal committed
            num_tokens = int(rng.integers(1, 80))
            num_blocks = LAYOUT.num_blocks_of(num_tokens)
            p_table, d_table = pair.p.copier.take(num_blocks, rng), pair.d.copier.take(num_blocks, rng)
            fate = ["cancel", "abort", "finish"][n % 3]
            delay_s = float(rng.random()) * 0.02
            receiving = asyncio.create_task(pair.receive(f"h{n}", 1, num_tokens, 0, d_table))
            pair.offer(f"h{n}", 1, num_tokens, p_table)
            computing = asyncio.create_task(compute(pair, f"h{n}", num_tokens, p_table, 8))
            await asyncio.sleep(delay_s)
            if fate == "cancel":
                receiving.cancel()
            elif fate == "abort":
                pair.sender.abort(f"h{n}", "the client left")
            expected = p_table and pair.p.copier.memory[list(p_table)].copy()
            try:
                await receiving
                committed += 1
                assert np.array_equal(expected, pair.d.copier.memory[list(d_table)])
            except asyncio.CancelledError:
                assert fate == "cancel"
            except HandoffFailed:
                assert fate == "abort"
            pair.d.copier.give(d_table)  # From here on a scatter into them is a violation.
            await computing

        for start in range(0, 120, 12):
            async with asyncio.TaskGroup() as group:
                for n in range(start, start + 12):
                    group.create_task(one(n))
        await until(lambda: all(pair.outcomes.values()), what="every offer released")
        assert committed >= 40
        assert len(pair.p.copier.free) == len(pair.d.copier.free) == 600
        assert pair.p.counts["leases_expired"] == pair.d.counts["leases_expired"] == pair.d.counts["checksum_failed"] == 0


async def test_a_corrupted_frame_is_kv_corrupt_at_both_ends() -> None:
    async with fabric_pair() as pair:
        pair.d.plane.corrupt = True
        pair.offer("h", 1, 8)
        await compute(pair, "h", 8, (0, 1), 8)
        with pytest.raises(KVCorrupt, match="checksum of frame 0"):
            await pair.receive("h", 1, 8, 0, (4, 5))
        await until(lambda: bool(pair.outcomes["h/1"]))
        failure = pair.outcome("h").failure
        assert failure is not None and failure.kind == "KVCorrupt" and pair.d.counts["checksum_failed"] == 1


async def test_a_read_that_cannot_start_fails_both_ends_at_once() -> None:
    async with fabric_pair() as pair:
        pair.d.plane.refuse = True
        pair.offer("h", 1, 8)
        await compute(pair, "h", 8, (0, 1), 8)
        with pytest.raises(HandoffFailed, match="told to refuse"):
            await pair.receive("h", 1, 8, 0, (4, 5))
        await until(lambda: bool(pair.outcomes["h/1"]), timeout_s=0.5)


@pytest.mark.parametrize("end", ["p", "d"])
async def test_a_copier_that_raises_fails_both_ends_at_once(end: str) -> None:
    async with fabric_pair() as pair:
        getattr(pair, end).copier.fail = RuntimeError("device lost")
        pair.offer("h", 1, 8)
        await compute(pair, "h", 8, (0, 1), 8)
        with pytest.raises(HandoffFailed, match="device lost"):
            await pair.receive("h", 1, 8, 0, (4, 5))
        await until(lambda: bool(pair.outcomes["h/1"]), timeout_s=0.5)
        assert "device lost" in str(pair.outcome("h").failure)


async def test_refusal_frees_the_sender_at_once_in_both_orders() -> None:
    async with fabric_pair() as pair:
        pair.offer("before", 1, 8)
        for handoff_id in ("before", "after"):
            assert await pair.receiver.refuse(
                address=pair.address, peer=pair.p.worker, handoff_id=handoff_id, epoch=1, reason="no blocks"
            )
        await until(lambda: bool(pair.outcomes["before/1"]), timeout_s=0.5)
        await until(lambda: pair.sender.census().num_pending_opens == 1)
        pair.offer("after", 1, 8)
        await until(lambda: bool(pair.outcomes["after/1"]), timeout_s=0.5)
        for handoff_id in ("before", "after"):
            outcome = pair.outcome(handoff_id)
            assert outcome.ended is Ended.REFUSED and outcome.failure is not None and outcome.failure.reason == "no blocks"


async def test_abort_by_the_sender_reaches_a_waiting_and_a_later_receiver_at_once() -> None:
    async with fabric_pair() as pair:
        pair.offer("h", 1, 8)
        receiving = asyncio.create_task(pair.receive("h", 1, 8, 0, (0, 1)))
        await until(lambda: pair.sender.census().handoffs == {"announcing": 1})
        pair.sender.abort("h", "out of memory", "Overloaded")
        with pytest.raises(HandoffFailed, match="out of memory"):
            await asyncio.wait_for(receiving, 0.5)
        pair.offer("later", 1, 8)
        pair.sender.abort("later", "the client left")
        with pytest.raises(HandoffFailed, match="the client left"):
            await asyncio.wait_for(pair.receive("later", 1, 8, 0, (0, 1)), 0.5)
        pair.sender.abort("never offered", "refused by the engine", epoch=1)
        with pytest.raises(HandoffFailed, match="refused by the engine"):
            await asyncio.wait_for(pair.receive("never offered", 1, 8, 0, (0, 1)), 0.5)


async def test_abort_by_the_receiver_frees_the_senders_blocks_at_once_and_its_slabs_when_settled() -> None:
    async with fabric_pair() as pair:
        pair.d.plane.hold.clear()
        table = pair.p.copier.take(2, np.random.default_rng(0))
        pair.offer("h", 1, 8, table)
        await compute(pair, "h", 8, table, 8)
        receiving = asyncio.create_task(pair.receive("h", 1, 8, 0, (0, 1)))
        await pair.d.plane.started.wait()
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(receiving, 0.5)
        await until(lambda: bool(pair.outcomes["h/1"]), timeout_s=0.5)
        assert pair.sender.census().slabs.in_use == 1 and pair.receiver.census().slabs.quarantined == 1
        pair.d.plane.hold.set()
        await until(lambda: pair.sender.census().slabs.free == pair.receiver.census().slabs.free == 4, timeout_s=0.5)


async def test_a_read_that_never_ends_costs_its_handoff_then_its_link_then_the_workers_health() -> None:
    settings = replace(QUICK, transfer_s=0.4, lease_s=1.0, quarantine_s=0.3)
    async with fabric_pair(settings=settings) as pair:
        pair.d.plane.hold.clear()
        pair.offer("h", 1, 8)
        await compute(pair, "h", 8, (0, 1), 8)
        with pytest.raises(HandoffFailed, match=r"not read within 0\.4 s"):
            await pair.receive("h", 1, 8, 0, (4, 5))
        assert pair.receiver.census().slabs.quarantined == 1
        await until(lambda: not pair.receiver.census().num_links, what="the link is given up")
        await until(lambda: pair.receiver.unhealthy is not None, what="the worker says that it is unhealthy")
        assert pair.receiver.unhealthy is not None and "p0@1" in pair.receiver.unhealthy
        await until(lambda: bool(pair.outcomes["h/1"]))
        pair.d.plane.hold.set()


async def test_deadline_of_a_sender_that_never_computes() -> None:
    async with fabric_pair() as pair:
        pair.offer("h", 1, 8)
        with pytest.raises(DeadlineExceeded):
            await pair.receive("h", 1, 8, 0, (4, 5), deadline_s=0.2)
        await until(lambda: bool(pair.outcomes["h/1"]), timeout_s=0.5)


async def test_a_slow_receiver_keeps_its_lease_for_three_times_its_length() -> None:
    settings = replace(QUICK, suspect_s=0.15, transfer_s=2.0, lease_s=2.0, sweep_s=0.02)
    async with fabric_pair(settings=settings) as pair:
        pair.offer("h", 1, 8)
        receiving = asyncio.create_task(pair.receive("h", 1, 8, 0, (4, 5)))
        await asyncio.sleep(6.2)  # The claim is about real time passing without a message of the handoff.
        await compute(pair, "h", 8, (0, 1), 8)
        assert (await receiving).first_token_id == 7
        await until(lambda: bool(pair.outcomes["h/1"]))
        assert pair.p.counts["leases_expired"] == pair.d.counts["leases_expired"] == 0


async def test_offers_and_opens_without_the_other_end_expire_by_themselves() -> None:
    settings = replace(QUICK, transfer_s=0.4, lease_s=0.5, open_wait_s=0.2)
    async with fabric_pair(settings=settings) as pair:
        pair.offer("alone", 1, 8)
        await until(lambda: bool(pair.outcomes["alone/1"]), timeout_s=2.0)
        assert pair.outcome("alone").ended is Ended.EXPIRED
        with pytest.raises(HandoffFailed, match="no prefill was started"):
            await pair.receive("lonely", 1, 8, 0, (0, 1))
        assert pair.p.counts["leases_expired"] == 2 and pair.sender.census().num_pending_opens == 0


async def test_older_epochs_are_refused_and_a_newer_one_fences_the_older() -> None:
    async with fabric_pair() as pair:
        old = asyncio.create_task(pair.receive("h", 1, 8, 0, (0, 1)))
        pair.offer("h", 1, 8)
        await until(lambda: pair.sender.census().handoffs == {"announcing": 1})
        new = asyncio.create_task(pair.receive("h", 2, 8, 0, (2, 3)))
        with pytest.raises(StaleEpoch):
            await old
        with pytest.raises(StaleEpoch):
            await pair.receive("h", 1, 8, 0, (0, 1))
        pair.offer("h", 2, 8)
        await until(lambda: bool(pair.outcomes["h/1"]))
        with pytest.raises(StaleEpoch):
            pair.offer("h", 2, 8)
        await compute(pair, "h", 8, (0, 1), 8)
        assert (await new).first_token_id == 7
        await until(lambda: bool(pair.outcomes["h/2"]))
        with pytest.raises(StaleEpoch):
            await pair.receive("h", 2, 8, 0, (0, 1))


async def test_sender_that_closes_tells_its_receivers_and_a_dead_one_is_noticed() -> None:
    async with fabric_pair() as pair:
        pair.offer("h", 1, 8)
        receiving = asyncio.create_task(pair.receive("h", 1, 8, 0, (0, 1)))
        await until(lambda: pair.sender.census().handoffs == {"announcing": 1})
        assert await pair.sender.drain(0.05) is False
        await pair.sender.close()
        with pytest.raises(BatonError, match="the worker stops"):
            await asyncio.wait_for(receiving, 1.0)
        with pytest.raises(HandoffFailed, match="no link to p0@1"):
            await pair.receive("other", 1, 8, 0, (0, 1))


async def test_receiver_that_closes_frees_the_sender_and_fails_its_callers() -> None:
    async with fabric_pair() as pair:
        pair.offer("h", 1, 8)
        receiving = asyncio.create_task(pair.receive("h", 1, 8, 0, (0, 1)))
        await until(lambda: pair.sender.census().handoffs == {"announcing": 1})
        await pair.receiver.close()
        with pytest.raises(HandoffFailed, match="the worker stops"):
            await receiving
        await until(lambda: bool(pair.outcomes["h/1"]), timeout_s=0.5)


async def test_another_incarnation_at_the_address_is_refused_by_name() -> None:
    async with fabric_pair() as pair:
        with pytest.raises(HandoffFailed, match="p0@1 answers there, not p0@0"):
            await pair.receiver.receive(
                handoff_id="h", epoch=1, peer="p0@0", address=pair.address, num_prompt_tokens=4, first_block_index=0,
                block_ids=(0,), deadline_s=5.0,
            )  # fmt: skip


async def test_idle_link_is_closed_and_dialled_again() -> None:
    async with fabric_pair(settings=replace(QUICK, idle_link_s=0.1)) as pair:
        for n in range(2):
            pair.offer(f"h{n}", 1, 8)
            await compute(pair, f"h{n}", 8, (0, 1), 8)
            await pair.receive(f"h{n}", 1, 8, 0, (0, 1))
            await until(lambda: pair.receiver.census().num_links == 0 and pair.sender.census().num_links == 0)
        assert pair.d.counts["links_opened"] == 2


async def test_lease_expired_is_what_a_receiver_says_when_the_sender_forgot_it() -> None:
    """The sender's renewals are lost (a bug or a stall of its sweeper): the receiver does not wait for ever."""
    settings = replace(QUICK, transfer_s=0.4, lease_s=0.5)
    async with fabric_pair(settings=settings) as pair:
        pair.sender._send_renewals = lambda: None  # type: ignore[method-assign]
        pair.offer("h", 1, 8)
        with pytest.raises(LeaseExpired):
            await pair.receive("h", 1, 8, 0, (0, 1))
        await until(lambda: bool(pair.outcomes["h/1"]))
