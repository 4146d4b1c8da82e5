"""`bench.pd --quick` from its command line to its files, against scripted servers in processes of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import pd, pd_arguments
from bench.pd_load import WARM_UP
from bench.servers import Peer, ServerFailed
from tests.harness import ROOT
from tests.unit.bench.tiny_model import write_tokenizer

WARM_UP_REQUESTS = sum(one.requests for one in WARM_UP)


@contextlib.contextmanager
def fake_peer(*refused: str) -> Iterator[tuple[str, int]]:
    argv = [sys.executable, "-m", "tests.integration.bench.fake_peer", *refused]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
        assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED, "every peer runs again at the end"
        process.communicate(timeout=30)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(pd_arguments, "_model_folder", lambda _: write_tokenizer(tmp_path))
    return ["--quick", "--sides", "", "--idle-seconds", "0.1", "--timeout", "20", "--out", str(tmp_path / "result.json")]


def peer_flags(name: str, url: str, pid: int) -> list[str]:
    return ["--peer", f"{name}={url}", "--peer-pid", f"{name}={pid}"]


def read(flags: list[str]) -> dict[str, Any]:
    return json.loads(Path(flags[-1]).read_text())  # type: ignore[no-any-return]


def test_two_peers_are_measured_in_turns(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with fake_peer() as (url_a, pid_a), fake_peer() as (url_b, pid_b):
        others_state: list[str] = []
        before_measure = pd._measure

        def measure(plan: pd.Plan, round_index: int, name: str, active: pd.Active) -> dict[str, Any]:
            others_state.append(psutil.Process(pid_b if name == "a" else pid_a).status())
            return before_measure(plan, round_index, name, active)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pd, "_measure", measure)
            code = pd.main(
                [*peer_flags("a", url_a, pid_a), *peer_flags("b", url_b, pid_b), "--rounds", "2", "--peer-ready", "a=3", *flags]
            )
    assert code == 0
    assert others_state == [psutil.STATUS_STOPPED] * 4
    result = read(flags)
    assert [(turn["round"], turn["side"]) for turn in result["turns"]] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert result["is_complete"] and result["settings"]["quick"]
    for turn in result["turns"]:
        assert set(turn["workloads"]) == {"c1", "c4", "c16", "prefill128", "prefill1024", "mixed"}
        assert turn["workloads"]["c4"]["prompt_tokens"] == 4 * 128, "token ids of an exact length"
        assert turn["workloads"]["c4"]["completion_tokens"] == 16
        assert set(turn["workloads"]["mixed"]["classes"]) == {"chat", "long"}
        assert turn["memory_end"]["rss_mib"] > 0 and turn["workloads"]["c1"]["foreign_cpu_share"] >= 0
    table = capsys.readouterr().out
    assert table == Path(flags[-1]).with_suffix(".md").read_text()
    assert "| start to ready, s | 3.0 (3.0–3.0) | – |" in table
    assert pd.main(["--render", flags[-1]]) == 0
    assert capsys.readouterr().out == table


def test_refused_requests_are_reported_and_the_other_side_goes_on(flags: list[str]) -> None:
    first_of_c4 = WARM_UP_REQUESTS + 2
    with fake_peer(str(first_of_c4 + 1), "9999") as (url_a, pid_a), fake_peer() as (url_b, pid_b):
        peers = [*peer_flags("a", url_a, pid_a), *peer_flags("b", url_b, pid_b)]
        assert pd.main([*peers, "--rounds", "1", "--workloads", "c1,c4,c16", *flags]) == 1
    bad, good = read(flags)["turns"]
    assert bad["workloads"]["c4"]["errors"] == {"HTTP 429 overloaded_error": 3}
    assert "HTTP 429" in bad["workloads"]["c16"]["failed"], "not one was answered: no numbers"
    assert good["workloads"]["c4"]["errors"] == {}


def test_a_finished_turn_is_on_disk_when_a_later_one_breaks(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_peer() as (url_a, pid_a), fake_peer() as (url_b, pid_b):
        wait_answer = Peer._wait_answer

        def answer(peer: Peer) -> None:
            if peer.name == "b" and Path(flags[-1]).exists():
                found.append(read(flags))
                raise ServerFailed("b fell silent") if len(found) == 1 else KeyboardInterrupt
            wait_answer(peer)

        found: list[dict[str, Any]] = []
        monkeypatch.setattr(Peer, "_wait_answer", answer)
        peers = [*peer_flags("a", url_a, pid_a), *peer_flags("b", url_b, pid_b)]
        assert pd.main([*peers, "--rounds", "2", "--workloads", "c1", *flags]) == 130
    assert [turn["side"] for turn in found[0]["turns"]] == ["a"]
    result = read(flags)
    assert [turn.get("error") for turn in result["turns"]] == [None, "b fell silent"]
    assert not result["is_complete"]
    assert "Partial" in Path(flags[-1]).with_suffix(".md").read_text()


def test_a_peer_that_does_not_answer_stops_the_run_before_it_begins(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pd_arguments, "Peer", lambda *values: Peer(*values, answer_timeout_s=0.2))
    assert pd.main(["--peer", "gone=http://127.0.0.1:9", *flags]) == 2
    assert not Path(flags[-1]).exists()
