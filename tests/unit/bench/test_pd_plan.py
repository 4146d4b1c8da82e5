"""The plan of an alternating benchmark: who runs when, with which prompts, and what the command line refuses."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import pd_arguments
from bench.pd_arguments import UsageError, build_parser, pairs, plan_from
from bench.pd_plan import ClosedLoop, Handover, OpenLoop, all_workloads, order, quick, seed_of
from bench.servers import OurFleet, topologies
from tests.unit.bench.tiny_model import write_tokenizer

SIDES = ["pd", "aggregated", "replicas", "peer"]


def test_every_round_gives_every_side_one_turn_and_another_one_begins() -> None:
    rounds = [order(SIDES, index) for index in range(len(SIDES))]
    assert all(sorted(one) == sorted(SIDES) for one in rounds)
    assert [one[0] for one in rounds] == SIDES


def test_neighbours_change_with_the_direction() -> None:
    assert order(SIDES, 0) == ["pd", "aggregated", "replicas", "peer"]
    assert order(SIDES, 1) == ["aggregated", "pd", "peer", "replicas"]
    assert order(["alone"], 5) == ["alone"]


def test_seeds_are_equal_for_the_sides_of_a_round_and_different_everywhere_else() -> None:
    seeds = {seed_of(7, round_index, one.name) for round_index in range(5) for one in all_workloads()}
    assert len(seeds) == 5 * len(all_workloads())
    assert seed_of(7, 1, "c4") == seed_of(7, 1, "c4") != seed_of(8, 1, "c4")


def test_the_suite_is_that_of_the_table() -> None:
    by_name = {one.name: one for one in all_workloads()}
    for name, concurrency in (("c1", 1), ("c4", 4), ("c16", 16)):
        one = by_name[name]
        assert isinstance(one, ClosedLoop)
        assert (one.concurrency, one.prompt_tokens, one.output_tokens) == (concurrency, 128, 64)
        assert one.requests > concurrency, "clients must come round at least once"
    mixed = by_name["mixed"]
    assert isinstance(mixed, OpenLoop)
    assert [(one.label, one.rate_per_s, one.prompt_tokens, one.output_tokens) for one in mixed.classes] == [
        ("chat", 0.7, 100, 64),
        ("long", 0.15, 1500, 8),
    ]


def test_quick_keeps_every_path_and_makes_it_small() -> None:
    for one in all_workloads():
        small = quick(one)
        assert type(small) is type(one) and small.name == one.name
        if isinstance(small, ClosedLoop) and isinstance(one, ClosedLoop):
            assert small.concurrency == one.concurrency and small.requests >= small.concurrency
            assert small.requests * small.output_tokens < one.requests * one.output_tokens
        elif isinstance(small, Handover):
            assert small.prompt_tokens > 64, "the router would not hand over a short prompt"


def test_topologies_use_the_same_two_cores() -> None:
    sides = topologies([2, 5])
    text = {name: " ".join(flags) for name, flags in sides.items()}
    assert "--cpus-prefill 2 --cpus-decode 5" in text["pd"]
    assert "--threads 2 --cpus-decode 2,5" in text["aggregated"]
    assert "--decode 2 --threads 1 --cpus-decode 2;5" in text["replicas"]
    fleets = {name: OurFleet(name, flags, Path("/m"), "m") for name, flags in sides.items()}
    assert [name for name, fleet in fleets.items() if fleet.has_handover] == ["pd"]
    for cores in ([1], [1, 1], [0, 1, 2]):
        with pytest.raises(ValueError):
            topologies(cores)


def test_the_fleet_is_started_as_a_user_would_and_own_flags_win() -> None:
    fleet = OurFleet("pd", topologies([0, 1])["pd"], Path("/models/m"), "m", up_flags=("--num-blocks", "64"))
    argv = fleet.argv(9)
    assert argv[1:4] == ["-m", "baton.main", "up"]
    assert argv[-2:] == ["--num-blocks", "64"]
    assert argv[argv.index("--redis-url") + 1] == "", "an address in the environment must not be used"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pd_arguments, "_model_folder", lambda _: tmp_path)
    return write_tokenizer(tmp_path)


def parsed(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(flags)


def test_a_whole_command_line_makes_a_plan_and_its_settings(model: Path) -> None:
    plan, settings = plan_from(
        parsed(
            *("--peer", "vllm=http://127.0.0.1:8100/v1", "--peer-pid", "vllm=12,13", "--peer-ready", "vllm=130"),
            *("--sides", "pd", "--workloads", "c1,handover", "--skip", "vllm:c1", "--compare", "pd=vllm", "--seed", "5"),
        )
    )
    assert list(plan.sides) == ["pd", "vllm"]
    peer = plan.sides["vllm"]
    assert (peer.url, peer.pids, peer.ready_s) == ("http://127.0.0.1:8100", (12, 13), 130.0)  # type: ignore[union-attr]
    assert [one.name for one in plan.workloads] == ["c1", "handover"]
    assert plan.skipped == {("vllm", "c1")}
    assert (plan.seed, settings["compare"]) == (5, {"pd": ["vllm"]})


def test_without_a_seed_runs_differ(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_arguments.time, "time", lambda: 1234.5)
    assert plan_from(parsed())[0].seed == 1234


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--sides", "pd,tripled"], "tripled"),
        (["--workloads", "c5"], "c5"),
        (["--sides", ""], "nothing to measure"),
        (["--peer", "nourl"], "NAME=VALUE"),
        (["--peer", "a=http://x", "--peer", "a=http://y"], "twice"),
        (["--peer", "pd=http://x"], "one of our sides"),
        (["--peer-pid", "a=3"], "no --peer of that name"),
        (["--peer", "a=http://x", "--peer-pid", "a=three"], "three"),
        (["--skip", "pd:c5"], "c5"),
        (["--skip", "pd"], "nothing"),
        (["--compare", "pd=vllm"], "vllm"),
        (["--cores", "0"], "two different cores"),
        (["--rounds", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(model: Path, flags: list[str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        plan_from(parsed(*flags))


def test_pairs_keep_equal_signs_in_the_value() -> None:
    assert pairs(["a=http://x/?q=1"], "--peer") == {"a": "http://x/?q=1"}
