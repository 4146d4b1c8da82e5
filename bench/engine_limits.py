"""What a step costs at least: bytes and multiply-adds that it cannot avoid, over what this machine was measured to do.

Builds the probe of bench/native once per source and machine and measures with the threads of the engine; knows the shapes of a
loaded model and no timings of it. Seconds, bytes, and multiply-adds (one is two floating-point operations).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from engine.model_runner import LoadedModel

SOURCE = Path(__file__).parent / "native" / "limits.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fopenmp", "-shared", "-fPIC")
READ_BYTES = 512 << 20
"""Far more than any cache holds."""
GEMM = (1024, 1536, 576)


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates per second: bytes read from memory, multiply-adds in registers, and those of torch's matrix product [1024, 576] x 1536."""

    read_bytes: float
    multiply_adds: float
    torch_gemm_fp32: float
    torch_gemm_bf16: float

    def seconds(self, work: Work) -> tuple[float, float]:
        """The least time for the bytes and for the arithmetic; a step cannot take less than the larger of the two."""
        return work.num_bytes / self.read_bytes, work.num_multiply_adds / self.multiply_adds


@dataclass(frozen=True, slots=True)
class Work:
    num_bytes: float
    num_multiply_adds: float


def load_probe() -> ctypes.CDLL:
    """Compiles the probe if this machine has no build of this source yet. Raises RuntimeError with the compiler's words."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise RuntimeError("no C++ compiler on PATH: the limits of this machine cannot be measured")
    digest = hashlib.blake2b(SOURCE.read_bytes() + " ".join((compiler, platform.node(), *FLAGS)).encode(), digest_size=8)
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "baton" / "bench"
    library = base / f"limits-{digest.hexdigest()}.so"
    if not library.exists():
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=base) as folder:
            built = Path(folder) / "limits.so"
            done = subprocess.run([compiler, *FLAGS, "-o", str(built), str(SOURCE)], capture_output=True, text=True, timeout=120)
            if done.returncode != 0:
                raise RuntimeError(f"{compiler}: {done.stderr.strip()[:500]}")
            built.replace(library)
    probe = ctypes.CDLL(str(library))
    probe.limits_read_seconds.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    probe.limits_read_seconds.restype = ctypes.c_double
    probe.limits_fma_seconds.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.POINTER(ctypes.c_double)]
    probe.limits_fma_seconds.restype = ctypes.c_double
    return probe


def measure_limits(threads: int, rounds: int) -> Limits:
    """Medians over rounds."""
    probe = load_probe()
    data = np.random.default_rng(1).integers(0, 255, READ_BYTES >> 4, dtype=np.uint8)
    data = np.tile(data, 16)  # touched, and not one page twice
    count = ctypes.c_double()
    reads, adds = [], []
    for _ in range(rounds):
        reads.append(READ_BYTES / probe.limits_read_seconds(data.ctypes.data, READ_BYTES, threads))
        seconds = probe.limits_fma_seconds(10_000_000, threads, ctypes.byref(count))
        adds.append(count.value / seconds)
    gemms = {dtype: statistics.median(_gemm(dtype) for _ in range(rounds)) for dtype in (torch.float32, torch.bfloat16)}
    return Limits(statistics.median(reads), statistics.median(adds), gemms[torch.float32], gemms[torch.bfloat16])


def _gemm(dtype: torch.dtype, repeats: int = 2) -> float:
    rows, columns, inner = GEMM
    x, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    with torch.inference_mode():
        torch.nn.functional.linear(x, weight)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.nn.functional.linear(x, weight)
        return repeats * rows * columns * inner / (time.perf_counter() - start)


def step_work(loaded: LoadedModel, rows: list[tuple[int, int]], num_sampled: int) -> Work:
    """The unavoidable work of one step: each weight read once, each key and value once, nothing for what stays in caches.

    `rows`: (new tokens, context after the step) of each sequence. Rows that are not sampled pay no vocabulary projection.
    """
    spec, cache = loaded.spec, loaded.kv_cache
    itemsize = cache.tensor.element_size()
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layer = spec.hidden_size * (query + 2 * key) + query * spec.hidden_size + 3 * spec.hidden_size * spec.intermediate_size
    body, head = spec.num_layers * layer, spec.hidden_size * spec.vocab_size
    num_tokens = sum(new for new, _ in rows)
    token_bytes = 2 * spec.num_layers * key * itemsize
    num_bytes = (body + (head if num_sampled else 0)) * itemsize + token_bytes * sum(context for _, context in rows)
    # Each new token multiplies with all keys up to its own, and their values.
    pairs = sum(new * (context - new) + new * (new + 1) / 2 for new, context in rows)
    num_multiply_adds = body * num_tokens + head * num_sampled + 2 * spec.num_layers * query * pairs
    return Work(num_bytes, num_multiply_adds)
