"""Builds the native CPU kernels once per machine and loads them: compiler, flags, cache folder, lock, checks.

Owns the files below `<cache>/baton/kernels/<hash>/`; the hash covers sources, flags and machine, so a changed source is another
library and a library built beforehand (`python -m kernels.native_build`, as an image does) needs no compiler. Several processes
may come first at the same time: one compiles under a file lock, the others wait for it. Knows nothing of tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "cpu"
COMPILE_TIMEOUT_S = 180.0
# The instruction set is named, never `native`: workers on different CPUs must compute the same bits. Contraction of a*b+c is
# off for the same reason: the kernels say themselves where they fuse.
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
)


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """What the compiler may use, and the flags of /proc/cpuinfo that a CPU must have for it.

    `amx` adds in another order than the others and `portable` without fused steps, so their results have other bits;
    `avx2` and `avx512` have the same. `has_run_here`: we have run it on a real CPU, so that trying it cannot end the process.
    """

    name: str
    compiler_flags: tuple[str, ...]
    needs: frozenset[str]
    has_run_here: bool = True


_AVX2_FLAGS = ("-mavx2", "-mfma")
_AVX512_FLAGS = (*_AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_AVX512_NEEDS = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"})
INSTRUCTION_SETS = (
    InstructionSet("amx", (*_AVX512_FLAGS, "-mamx-tile", "-mamx-bf16"), _AVX512_NEEDS | {"amx_tile", "amx_bf16"}, False),
    InstructionSet("avx512", _AVX512_FLAGS, _AVX512_NEEDS, False),
    InstructionSet("avx2", _AVX2_FLAGS, frozenset({"avx2", "fma"})),
    InstructionSet("portable", (), frozenset()),
)
"""From the fastest to the one that runs everywhere."""
EMULATED_AMX = InstructionSet("emulated-amx", (*_AVX2_FLAGS, "-DBATON_EMULATE_AMX"), frozenset({"avx2", "fma"}))
"""For tests: the code of `amx` on a CPU without it. Slow, and never chosen by itself."""
CHOICE_VARIABLE = "BATON_CPU_INSTRUCTIONS"


class NativeUnavailable(Exception):
    """The native kernels cannot be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library and how it was built."""

    handle: ctypes.CDLL
    path: Path
    instruction_set: str


def instruction_sets_here() -> list[InstructionSet]:
    """Those that this CPU has, fastest first; the environment's BATON_CPU_INSTRUCTIONS names the only one to use.

    Raises ValueError for an unknown name, NativeUnavailable when the named one is not there.
    """
    flags = _cpu_flags()
    wanted = os.environ.get(CHOICE_VARIABLE, "auto")
    if wanted == "auto":
        return [isa for isa in INSTRUCTION_SETS if isa.needs <= flags]
    for isa in INSTRUCTION_SETS:
        if isa.name == wanted:
            if missing := isa.needs - flags:
                raise NativeUnavailable(f"{CHOICE_VARIABLE}={wanted}, but this CPU lacks {', '.join(sorted(missing))}")
            return [isa]
    names = ", ".join(["auto", *(isa.name for isa in INSTRUCTION_SETS)])
    raise ValueError(f"{CHOICE_VARIABLE} must be one of {names}, got {wanted!r}")


def load_library(instruction_set: InstructionSet | None = None, *, cache_dir: Path | None = None) -> NativeLibrary:
    """Finds or builds the library and loads it, by default for the fastest of this CPU. Raises NativeUnavailable."""
    if sys.platform != "linux" or sys.byteorder != "little":
        raise NativeUnavailable(f"only little-endian Linux is supported, this is {sys.platform}, {sys.byteorder}-endian")
    isa = instruction_set or instruction_sets_here()[0]
    flags = COMMON_FLAGS + isa.compiler_flags
    path = (cache_dir or default_cache_dir()) / _build_key(flags) / "libbaton_kernels.so"
    try:
        if not path.exists():
            _build(path, flags)
        _refuse_foreign_file(path)
        handle = ctypes.CDLL(str(path))
        if handle.baton_prepare():
            raise NativeUnavailable("the system does not let this process use the matrix unit (AMX)")
        return NativeLibrary(handle, path, isa.name)
    except OSError as error:
        raise NativeUnavailable(f"{path}: {error}") from error


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "baton" / "kernels"


def _sources() -> list[Path]:
    return sorted(SOURCE_DIR.glob("*.cpp"))


def _build_key(flags: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    digest.update("\0".join((platform.machine(), *flags)).encode())
    for source in sorted(SOURCE_DIR.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _cpu_flags() -> set[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in [wanted] if wanted else ["g++", "c++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    raise NativeUnavailable(f"no C++ compiler ({wanted or 'g++, c++ or clang++'}) on PATH")


def _build(path: Path, flags: tuple[str, ...]) -> None:
    """Compiles to a temporary file beside `path` and renames it; holds the folder's lock meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _lock(path.parent / "lock"):
        if path.exists():  # another process was first
            return
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="building-") as folder:
            compiler, built = _compiler(), Path(folder) / path.name
            sources = _sources()
            objects = [Path(folder) / f"{source.stem}.o" for source in sources]
            commands = [
                [compiler, *flags, "-c", str(source), "-o", str(made)] for source, made in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:  # the longest file bounds the time
                list(pool.map(_compile, commands))
            _compile([compiler, *flags, "-shared", "-o", str(built), *map(str, objects)])
            built.chmod(0o600)
            os.replace(built, path)


def _compile(command: list[str]) -> None:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=COMPILE_TIMEOUT_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed with code {result.returncode}: {result.stderr.strip()[:500]}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """An exclusive lock between processes; the kernel drops it when its holder dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _refuse_foreign_file(path: Path) -> None:
    """A library that somebody else could have written is code that somebody else could run here."""
    info = path.stat()
    if info.st_uid not in (0, os.getuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable(f"{path} belongs to user {info.st_uid} with mode {info.st_mode & 0o777:o}: not loaded")


if __name__ == "__main__":
    try:
        library = load_library()
    except NativeUnavailable as unavailable:
        sys.exit(f"native kernels unavailable: {unavailable}")
    sys.stdout.write(f"{library.path} ({library.instruction_set})\n")
