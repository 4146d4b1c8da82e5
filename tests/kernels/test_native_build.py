"""Building the native kernels: once, safely by several processes at the same time, and with a visible reason when it fails."""

from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import native, native_build
from kernels.dispatch import select_ops
from kernels.native import NativeOps
from kernels.native_build import (
    CHOICE_VARIABLE,
    COMMON_FLAGS,
    INSTRUCTION_SETS,
    SOURCE_DIR,
    InstructionSet,
    NativeLibrary,
    NativeUnavailable,
    instruction_sets_here,
    load_library,
)
from tests.native_instructions import HERE, MISSING, native_ops

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="no C++ compiler on PATH")


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def load_in_child(cache_dir: str) -> str:
    return str(load_library(cache_dir=Path(cache_dir)).path)


@needs_compiler
def test_processes_that_come_at_the_same_time_compile_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("g++") or shutil.which("c++")
    compiler = fake_compiler(tmp_path, f'echo run >> "{tmp_path}/runs"\nexec {real} -O0 "$@" -O0')
    monkeypatch.setenv("CXX", str(compiler))
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(load_in_child, [str(tmp_path / "cache")] * 3)
    assert len(set(paths)) == 1
    num_sources = len(list(SOURCE_DIR.glob("*.cpp")))
    assert (tmp_path / "runs").read_text() == "run\n" * (num_sources + 1)  # each source once, then one link
    assert sorted(p.name for p in Path(paths[0]).parent.iterdir()) == ["libbaton_kernels.so", "lock"]


def test_a_second_load_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        built = load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("PATH", str(tmp_path))
    start = time.monotonic()
    assert load_library().path == built.path
    assert time.monotonic() - start < 1.0


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo 'no such flag' >&2; exit 3", "failed with code 3: no such flag"), ("touch a.out", "No such file")],
)
def test_a_failed_compilation_falls_back_with_one_warning_and_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, script: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, script)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        ops = select_ops(CPU, torch.bfloat16, "auto")
    assert ops.name == "reference"
    assert reason in ops.describe()
    assert len(caplog.records) == 1 and reason in caplog.text
    with pytest.raises(RuntimeError, match="BATON_KERNELS=native, but"):
        select_ops(CPU, torch.bfloat16, "native")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_without_a_compiler_the_reason_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        load_library(cache_dir=tmp_path / "cache")


def test_a_compiler_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build, "COMPILE_TIMEOUT_S", 0.2)
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "exec sleep 60")))
    with pytest.raises(NativeUnavailable, match="longer than"):
        load_library(cache_dir=tmp_path / "cache")


def test_a_cache_folder_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeUnavailable, match="Not a directory"):
        load_library(cache_dir=tmp_path / "file")


def test_a_library_that_others_may_write_is_not_loaded(tmp_path: Path) -> None:
    try:
        built = load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    copy = tmp_path / built.path.parent.name / built.path.name
    copy.parent.mkdir()
    shutil.copy(built.path, copy)
    copy.chmod(0o666)
    with pytest.raises(NativeUnavailable, match="not loaded"):
        load_library(cache_dir=tmp_path)
    copy.chmod(0o600)
    assert load_library(cache_dir=tmp_path).path == copy


def test_a_damaged_library_is_a_reason_not_a_crash(tmp_path: Path) -> None:
    try:
        built = load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    damaged = tmp_path / built.path.parent.name / built.path.name
    damaged.parent.mkdir()
    damaged.write_bytes(b"not a library")
    damaged.chmod(0o600)
    with pytest.raises(NativeUnavailable, match="libbaton_kernels.so"):
        load_library(cache_dir=tmp_path)


def test_prebuilding_prints_the_path() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "kernels.native_build"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": "."},
    )
    if result.returncode:
        assert "native kernels unavailable: " in result.stderr
    else:
        assert "libbaton_kernels.so (" in result.stdout


def test_selection_by_setting_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_ops(CPU, torch.float32, "reference").describe() == "reference (plain torch): asked for"
    assert "float64" in select_ops(CPU, torch.float64, "auto").describe()
    on_gpu = select_ops(torch.device("cuda"), torch.bfloat16, "auto")
    assert on_gpu.name == "reference" and "triton" in on_gpu.describe()
    with pytest.raises(RuntimeError, match="not on 'cuda'"):
        select_ops(torch.device("cuda"), torch.bfloat16, "native")
    monkeypatch.setenv("BATON_KERNELS", "fast")
    with pytest.raises(ValueError, match="BATON_KERNELS must be one of auto, native, triton, reference, got 'fast'"):
        select_ops(CPU, torch.float32)


def test_one_openmp_runtime_serves_torch_and_the_kernels() -> None:
    try:
        load_library()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    maps = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {line.split()[-1] for line in maps if "/lib" in line and ("gomp" in line or "iomp" in line or "libomp" in line)}
    assert len(runtimes) == 1, "two pools of busy-waiting threads would fight for the cores"


def test_the_kernels_of_every_instruction_set_ran_here() -> None:
    if MISSING:
        pytest.skip(f"this CPU has no {', '.join(MISSING)}: those kernels were compiled or emulated at most, not run")


@pytest.mark.parametrize("isa", [isa for isa in INSTRUCTION_SETS if isa.name in MISSING], ids=lambda isa: isa.name)
@needs_compiler
def test_instruction_sets_of_other_cpus_compile(isa: InstructionSet, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"{isa.name} is not for {platform.machine()}")
    command = [
        "g++",
        *COMMON_FLAGS,
        *isa.compiler_flags,
        "-O1",
        "-c",
        str(SOURCE_DIR / "linear.cpp"),
        "-o",
        str(tmp_path / "out.o"),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_an_instruction_set_that_computes_wrongly_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = native.check_arithmetic
    best = native_ops(next(iter(HERE)))  # skips without a compiler

    def refuse_the_best(library: NativeLibrary) -> None:
        if library.instruction_set in best.describe():
            raise NativeUnavailable("wrong by 1")
        real(library)

    monkeypatch.setattr(native, "check_arithmetic", refuse_the_best)
    ops = NativeOps(torch.float32)
    assert ops.describe() != best.describe()
    assert "wrong by 1" in caplog.text


def test_the_environment_names_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "portable")
    assert [isa.name for isa in instruction_sets_here()] == ["portable"]
    monkeypatch.setenv(CHOICE_VARIABLE, "sse9")
    with pytest.raises(ValueError, match="BATON_CPU_INSTRUCTIONS must be one of auto, amx, avx512, avx2, portable, got 'sse9'"):
        instruction_sets_here()
    if MISSING:
        monkeypatch.setenv(CHOICE_VARIABLE, MISSING[0])
        with pytest.raises(NativeUnavailable, match="this CPU lacks"):
            instruction_sets_here()


def unproven(monkeypatch: pytest.MonkeyPatch) -> InstructionSet:
    """The best instruction set of this CPU as one that we never ran."""
    best = next(iter(HERE.values()))
    native_ops(best)  # skips without a compiler
    first = replace(best, has_run_here=False)
    monkeypatch.setattr(native, "instruction_sets_here", lambda: [first, *list(HERE.values())[1:2]])
    return first


def test_an_instruction_set_that_we_never_ran_is_checked_apart_once(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = unproven(monkeypatch)
    mark = load_library(isa).path.with_name("checked")
    mark.unlink(missing_ok=True)
    try:
        assert f", {isa.name}," in NativeOps(torch.float32).describe()
        assert mark.exists()
        monkeypatch.setattr(native.subprocess, "run", None)  # would fail
        assert f", {isa.name}," in NativeOps(torch.float32).describe()
    finally:
        mark.unlink(missing_ok=True)


def test_a_process_that_dies_of_an_instruction_set_costs_only_that_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    isa = unproven(monkeypatch)
    load_library(isa).path.with_name("checked").unlink(missing_ok=True)
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\nkill -ILL $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(native.sys, "executable", str(dying))
    assert f", {isa.name}," not in NativeOps(torch.float32).describe()
    assert "ended with code -4" in caplog.text
