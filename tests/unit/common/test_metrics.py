"""What a worker's scrape shows, through the method and through any server on its registry."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.metrics import WorkerMetrics
from common.types import BlockCensus, EngineCounts, HandoffTimeline, WorkerLoad

LABELS = {"role": "decode", "worker_id": "d0", "model": "tiny"}


def samples(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float:
    return samples(metrics.render())[name, tuple(sorted(labels.items()))]


def make() -> WorkerMetrics:
    return WorkerMetrics(**LABELS)


def test_two_objects_share_nothing() -> None:
    one, two = make(), make()
    one.store_error()
    assert value(one, "baton_store_errors_total") == 1
    assert value(two, "baton_store_errors_total") == 0


def test_gauges_show_the_moment_of_the_scrape_whoever_serves_the_registry() -> None:
    metrics = make()
    moment = {"running": 0}
    metrics.on_scrape(lambda: metrics.update(WorkerLoad(num_running=moment["running"]), BlockCensus(8, 5, 1, 2), EngineCounts()))
    moment["running"] = 3
    direct = samples(generate_latest(metrics.registry))
    assert direct["baton_sequences_running", tuple(sorted(LABELS.items()))] == 3
    moment["running"] = 0
    assert value(metrics, "baton_sequences_running", **LABELS) == 0
    blocks = {state: value(metrics, "baton_kv_blocks", **LABELS, state=state) for state in ("free", "cached", "held")}
    assert blocks == {"free": 5, "cached": 1, "held": 2}


def test_preemptions_are_a_counter_that_scraping_threads_do_not_count_twice() -> None:
    metrics = make()
    metrics.on_scrape(lambda: metrics.update(WorkerLoad(), BlockCensus(8, 8, 0, 0), EngineCounts(num_preemptions=5)))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: metrics.render(), range(40)))
    assert value(metrics, "baton_preemptions_total", **LABELS) == 5
    metrics.on_scrape(lambda: metrics.update(WorkerLoad(), BlockCensus(8, 8, 0, 0), EngineCounts(num_preemptions=3)))
    assert value(metrics, "baton_preemptions_total", **LABELS) == 5, "a snapshot that is overtaken by a newer one changes nothing"


def test_a_handoff_counts_bytes_frames_and_its_three_times() -> None:
    metrics = make()
    timeline = HandoffTimeline(
        last_announced_s=10.0,
        first_decode_s=10.25,
        num_frames=3,
        num_bytes=4096,
        transfer_s=0.5,
        scatter_s=0.125,
        transport="ucx",
    )
    metrics.handoff_received(timeline)
    assert value(metrics, "baton_handoff_bytes_total", transport="ucx") == 4096
    assert value(metrics, "baton_handoff_frames_total", transport="ucx") == 3
    assert value(metrics, "baton_handoff_transfer_seconds_sum") == 0.5
    assert value(metrics, "baton_handoff_scatter_seconds_sum") == 0.125
    assert value(metrics, "baton_handoff_handover_seconds_sum") == 0.25


def test_a_handoff_without_a_decode_step_has_no_handover_time() -> None:
    metrics = make()
    metrics.handoff_received(HandoffTimeline(last_announced_s=10.0, transport="tcp"))
    assert value(metrics, "baton_handoff_handover_seconds_count") == 0
    assert value(metrics, "baton_handoff_transfer_seconds_count") == 1


def test_ends_errors_and_fabric_counts_carry_their_labels() -> None:
    metrics = make()
    metrics.attempt_ended("failed", "KVCorrupt")
    metrics.protocol_error("command")
    metrics.unauthenticated()
    metrics.fabric_count("bytes_sent", 100)
    metrics.fabric_count("bytes_sent", 28)
    assert value(metrics, "baton_attempts_total", reason="failed", kind="KVCorrupt") == 1
    assert value(metrics, "baton_protocol_errors_total", place="command") == 1
    assert value(metrics, "baton_calls_unauthenticated_total") == 1
    assert value(metrics, "baton_fabric_total", count="bytes_sent") == 128


def test_every_name_is_ours_or_the_process_collectors() -> None:
    names = {name for name, _ in samples(make().render())}
    assert [name for name in names if not re.match(r"baton_|process_", name)] == []
    assert "process_resident_memory_bytes" in names


def test_engine_counts_and_step_times_are_shown() -> None:
    metrics = make()
    counts = [EngineCounts(2, 30, 4, 16, 1), EngineCounts(5, 30, 9, 48, 1)]
    for snapshot in counts:
        metrics.update(WorkerLoad(), BlockCensus(8, 8, 0, 0), snapshot)
    shown = {
        name: value(metrics, f"baton_{name}_total", **LABELS)
        for name in ("engine_steps", "engine_prompt_tokens", "engine_decode_tokens", "engine_prefix_hit_tokens", "preemptions")
    }
    assert list(shown.values()) == [5, 30, 9, 48, 1], shown
    for seconds in (0.004, 0.02, 0.02):
        metrics.step_ran(seconds)
    assert value(metrics, "baton_engine_step_seconds_count") == 3
    assert value(metrics, "baton_engine_step_seconds_bucket", le="0.01") == 1
