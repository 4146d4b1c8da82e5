"""What a result must say of the machine and the code it was taken with: CPU, cores, memory, commit.

Reads /proc and git and changes nothing. Memory is GiB.
"""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
VECTOR_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512", "avx_vnni", "amx", "sve", "asimd", "bf16", "i8mm")
"""Beginnings of the CPU flags that decide how fast matrix work can be."""


def describe_machine() -> dict[str, Any]:
    """CPU model, its flags, the cores this process may use, and memory in GiB."""
    model, flags = platform.processor() or platform.machine(), []
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            model = value
        elif key in ("flags", "Features"):
            flags = value.split()
            break
    return {
        "cpu": model,
        "num_cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "vector_flags": [flag for flag in flags if flag.startswith(VECTOR_FLAGS)],
        "flags": flags,
    }


def git_state(folder: Path = ROOT) -> tuple[str, bool]:
    """The commit's short name and whether tracked files differ from it; `unknown` outside a checkout."""
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        return commit, bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
