"""Workloads, splits and the verdict: pure parts of a load test."""

from __future__ import annotations

import json

import pytest

from baton.bench_stats import RequestRecord
from loadtest.compare import table_of
from loadtest.measure import LOST, Outcome
from loadtest.results import ClientCost, Results
from loadtest.splits import split_flags
from loadtest.workloads import PromptKey, RequestClass, class_of_user, make_text, select_classes

CHAT = RequestClass("chat", 100, 64, 4)
LONG = RequestClass("long", 1500, 16, 1)


def outcome(error: str = "", num_lost: int = 0, label: str = "chat") -> Outcome:
    return Outcome(RequestRecord(1.0, 3.0, (1.5, 2.0), 9, 2, 0, error, None, label), 2 + num_lost, num_lost, "length", "local")


def test_prompts_repeat_by_seed_and_share_no_beginning() -> None:
    keys = [PromptKey(worker, user, number) for worker in range(2) for user in range(3) for number in range(20)]
    texts = [make_text(7, "chat", key, 30) for key in keys]
    assert texts == [make_text(7, "chat", key, 30) for key in keys]
    assert len({text.split(" ", 1)[0] for text in texts}) == len(texts)
    assert make_text(8, "chat", keys[0], 30) != texts[0] != make_text(7, "long", keys[0], 30)


def test_a_shared_prefix_is_shared_and_no_more_than_it() -> None:
    first, second = (make_text(7, "chat", PromptKey(0, user, 0), 30, 12).split() for user in range(2))
    assert first[:12] == second[:12]
    assert first[12] != second[12]


def test_weights_share_out_the_users_evenly_at_every_number() -> None:
    names = [class_of_user(user, (CHAT, LONG)).name for user in range(50)]
    assert all(sorted(names[at : at + 5]) == ["chat"] * 4 + ["long"] for at in range(46))


def test_workloads_that_cannot_be() -> None:
    assert select_classes("mixed", RequestClass("chat", 1, 1, 0), LONG) == (LONG,)
    for chat, long in ((RequestClass("chat", 1, 1, 0), RequestClass("long", 1, 1, 0)), (RequestClass("chat", 0, 1, 1), LONG)):
        with pytest.raises(ValueError):
            select_classes("mixed", chat, long)
    with pytest.raises(ValueError):
        select_classes("none", CHAT, LONG)


def test_splits_share_the_cores() -> None:
    assert split_flags("1:1", [0, 1]) == (
        *("--prefill", "1", "--decode", "1", "--threads", "1"),
        *("--cpus-decode", "1", "--cpus-prefill", "0"),
    )
    assert split_flags("0:1", [0, 1]) == ("--prefill", "0", "--decode", "1", "--threads", "2", "--cpus-decode", "0,1")
    assert split_flags("1:2", range(6))[7] == "2,3;4,5"


@pytest.mark.parametrize(
    ("split", "cores"), [("1", [0, 1]), ("1:0", [0]), ("1:2", [0, 1]), ("0:1", [0, 0]), ("-1:2", [0]), ("1:1", [0, 1, 2])]
)
def test_splits_that_cannot_be(split: str, cores: list[int]) -> None:
    with pytest.raises(ValueError):
        split_flags(split, cores)


def test_the_verdict_names_lost_tokens_and_failures_above_the_bound() -> None:
    assert Results().verdict(0.0) == ["no request has ended"]
    assert Results([outcome()]).verdict(0.0) == []
    failed = Results([outcome("stream cut"), outcome(), outcome(), outcome()])
    assert "stream cut" in failed.verdict(0.2)[0]
    assert failed.verdict(0.25) == []
    assert "3 tokens" in Results([outcome(LOST, 3)]).verdict(1.0)[0], "no bound excuses a lost token"


def test_results_of_workers_add_up_over_json() -> None:
    worker, master = Results([outcome(), outcome("x")], 1, ClientCost(0.5, [0.001])), Results([outcome(label="long")])
    master.merge(json.loads(json.dumps(worker.take())))
    assert worker.outcomes == [] and worker.take()["abandoned"] == 0
    summary = master.summary({}, 0.0)
    assert (summary["all"]["requests"], summary["all"]["failures"], summary["abandoned"]) == (3, 1, 1)
    assert {label: part["requests"] for label, part in summary["classes"].items()} == {"chat": 2, "long": 1}
    assert summary["client"]["cpu_s"] == 0.5


def test_the_table_shows_a_split_that_failed() -> None:
    run = Results([outcome()]).summary({}, 0.0) | {"exit_code": 0}
    table = table_of({"1:1": run, "0:1": {"error": "did not start"}})
    assert [column.header for column in table.columns] == ["", "1:1", "0:1 (not good)"]
