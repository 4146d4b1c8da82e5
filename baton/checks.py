"""What one check of `baton doctor` found, and the checks that only read files of the kernel or ask the operating system.

Each check is a function without arguments that returns one Finding and raises nothing. `warn` means that Baton works with less
(slower, smaller, fewer transports), `fail` that it does not work; both come with a fix.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]

SHM_BYTES_MIN = 64 << 20
OPEN_FILES_MIN = 4096
MEMORY_BYTES_MIN = 4 << 30
DISK_BYTES_MIN = 2 << 30
CPU_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is what to do; empty when all is well."""

    name: str
    status: Status
    detail: str
    fix: str = ""


def check_python() -> Finding:
    version = platform.python_version()
    if sys.platform != "linux":
        return Finding(
            "python", "warn", f"{version} on {sys.platform}", "workers are built for Linux: use a Linux machine or container"
        )
    return Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def check_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    num_cores = len(os.sched_getaffinity(0))
    try:
        flags = cpu_flags(cpuinfo.read_text())
    except OSError as error:
        return Finding("cpu", "warn", f"{num_cores} cores, features unknown: {error}", "mount /proc")
    found = [flag for flag in CPU_FLAGS if flag in flags]
    detail = f"{num_cores} usable cores, {' '.join(found) or 'no vector extension that we know'}"
    if not {"avx2", "asimd"} & flags:
        return Finding("cpu", "warn", detail, "a CPU with AVX2 is much faster; everything works without it")
    if num_cores < 2:
        return Finding("cpu", "warn", detail, "give it at least two cores: prefill and decode compute at the same time")
    return Finding("cpu", "ok", detail)


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """The feature flags of the first processor in the text of /proc/cpuinfo (x86 `flags`, ARM `Features`)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def check_memory(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    try:
        kibibytes = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return Finding("memory", "warn", "available memory unknown", "mount /proc")
    available = kibibytes << 10
    detail = f"{available / (1 << 30):.1f} GiB available"
    if available < MEMORY_BYTES_MIN:
        return Finding("memory", "warn", detail, "free some, or start smaller pools with --num-blocks")
    return Finding("memory", "ok", detail)


def check_compiler() -> Finding:
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        if name and (path := shutil.which(name)):
            return Finding("c++ compiler", "ok", path)
    return Finding("c++ compiler", "warn", "none: plain-torch kernels are used", "install g++ (Debian, Ubuntu: apt install g++)")


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    try:
        size = shutil.disk_usage(folder).total
    except OSError as error:
        return Finding("shared memory", "warn", f"{folder}: {error.strerror}", "mount a tmpfs there; in a container set shm_size")
    detail = f"{folder} has {size / (1 << 20):.0f} MiB"
    if size < SHM_BYTES_MIN:
        return Finding("shared memory", "warn", detail, "in a container set shm_size (docker run --shm-size=256m)")
    return Finding("shared memory", "ok", detail)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft} (may be raised to {hard})"
    if soft < OPEN_FILES_MIN:
        return Finding(
            "open files", "warn", detail, f"ulimit -n {max(OPEN_FILES_MIN, min(hard, 65536))}: each stream of a client takes one"
        )
    return Finding("open files", "ok", detail)


def check_same_host_copy(yama: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> Finding:
    """Whether one process may read a sibling's memory (process_vm_readv): UCX copies KV that way between workers of one host."""
    try:
        scope = yama.read_text().strip()
    except OSError:
        scope = "not there"
    reason = try_sibling_read()
    detail = f"kernel.yama.ptrace_scope: {scope}"
    if reason is None:
        return Finding("same-host copy", "ok", f"a worker may read another's memory (CMA); {detail}")
    fix = "sysctl kernel.yama.ptrace_scope=0, or in a container cap_add SYS_PTRACE; until then UCX uses TCP on this host"
    return Finding("same-host copy", "warn", f"CMA does not work ({reason}); {detail}", fix)


_TARGET = "import ctypes,sys; b=ctypes.create_string_buffer(b'baton'); print(ctypes.addressof(b),flush=True); sys.stdin.read()"
_READER = """
import ctypes, os, sys
class Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
pid, address = int(sys.argv[1]), int(sys.argv[2])
buffer = ctypes.create_string_buffer(5)
ours, theirs = Piece(ctypes.addressof(buffer), 5), Piece(address, 5)
libc = ctypes.CDLL(None, use_errno=True)
one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
num = libc.process_vm_readv(pid, ctypes.byref(ours), one, ctypes.byref(theirs), one, none)
if num != 5 or buffer.raw != b"baton":
    sys.exit(os.strerror(ctypes.get_errno()))
"""


def try_sibling_read() -> str | None:
    """Starts two processes and lets one read the other's memory. None when it works, else why not."""
    if not hasattr(ctypes.CDLL(None), "process_vm_readv"):
        return "the C library has no process_vm_readv"
    with subprocess.Popen([sys.executable, "-c", _TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as target:
        try:
            assert target.stdout is not None
            address = target.stdout.readline().strip()
            reader = subprocess.run(
                [sys.executable, "-c", _READER, str(target.pid), address], capture_output=True, text=True, timeout=20, check=False
            )
        except subprocess.TimeoutExpired:
            return "no answer within 20 s"
        finally:
            target.kill()
    return None if reader.returncode == 0 else reader.stderr.strip()[-100:]


def check_rdma(folder: Path = Path("/sys/class/infiniband")) -> Finding:
    devices = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return Finding(
        "rdma", "ok", ", ".join(devices) or "no device: UCX works within one host (CMA); between hosts use --transport tcp"
    )


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/baton`, by default `~/.cache/baton`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def check_model_cache() -> Finding:
    folder = cache_home() / "models"
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Finding("model cache", "fail", f"{existing} cannot be written", "set XDG_CACHE_HOME to a folder of yours")
    models = (
        sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
        if folder.is_dir()
        else []
    )
    free = shutil.disk_usage(existing).free
    detail = f"{folder}: {', '.join(models) or 'empty'}; {free / (1 << 30):.1f} GiB free"
    if free < DISK_BYTES_MIN:
        return Finding("model cache", "warn", detail, "free some disk, or set XDG_CACHE_HOME to another one")
    return Finding("model cache", "ok", detail)
