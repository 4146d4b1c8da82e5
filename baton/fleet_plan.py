"""Which processes `baton up` runs, with which flags: a pure function of the options and the machine.

Knows the flags of the router and of the workers, starts nothing and reads nothing. CPU lists are texts such as `0-3,6`, one
per worker of a role, separated by semicolons; threads are compute threads of one worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.children import ChildSpec

STOP_ROUTER, STOP_WORKERS, STOP_STORE = 0, 1, 2


class PlanError(Exception):
    """A line for the user: these options do not fit together."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What a user may ask for. 0 and empty leave the choice to the worker or to the plan; `transport` may be auto."""

    num_prefill: int
    num_decode: int
    host: str
    port: int
    transport: str
    model_name: str
    cpus_prefill: str = ""
    cpus_decode: str = ""
    dtype: str = ""
    block_size: int = 0
    num_blocks: int = 0
    threads: int = 0
    drain_grace_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the plan needs to know of the machine and of what was chosen or started before: the port and transport really used."""

    python: str
    model_folder: str
    redis_url: str
    cluster: str
    num_cpus: int
    port: int
    transport: str
    env: Mapping[str, str]


def served_model_name(model: str) -> str:
    """The name clients use: a hub name as it is, the folder's name of a path, a GGUF file's name without its suffix."""
    is_path = model.startswith(("/", ".", "~")) or model.endswith((".gguf", "/")) or model.count("/") > 1
    name = model.rstrip("/").rsplit("/", 1)[-1] if is_path else model
    return name.removesuffix(".gguf") or model


QUEUED_PROMPT_TOKENS_MAX = 1 << 16
"""Prompt tokens that may wait on one decode worker of a fleet without prefill workers before the router answers 429."""


def split_cpus(text: str, num_workers: int, flag: str) -> list[str]:
    """`"0;1"` for two workers → ["0", "1"]; empty → no pinning. Raises PlanError when the count differs."""
    if not text:
        return [""] * num_workers
    parts = [part.strip() for part in text.split(";")]
    if len(parts) != num_workers:
        raise PlanError(f"{flag} names {len(parts)} CPU lists for {num_workers} workers: separate one list per worker by ';'")
    return parts


def check_options(options: FleetOptions) -> None:
    """Raises PlanError for options that do not fit together; nothing has been started by then."""
    if options.num_decode < 1:
        raise PlanError(f"--decode is {options.num_decode}: at least one decode worker is needed to generate")
    if options.num_prefill < 0:
        raise PlanError(f"--prefill is {options.num_prefill}: it cannot be negative")
    _cpu_lists(options)


def _cpu_lists(options: FleetOptions) -> dict[str, list[str]]:
    return {
        "prefill": split_cpus(options.cpus_prefill, options.num_prefill, "--cpus-prefill"),
        "decode": split_cpus(options.cpus_decode, options.num_decode, "--cpus-decode"),
    }


def plan_fleet(options: FleetOptions, around: Surroundings) -> list[ChildSpec]:
    """The router and all workers, in the order in which they are started. Raises PlanError for options that do not fit."""
    check_options(options)
    cpus = _cpu_lists(options)
    workers = [
        _worker(options, around, role, index, cpu_list)
        for role, cpu_lists in cpus.items()
        for index, cpu_list in enumerate(cpu_lists)
    ]
    return [_router(options, around), *workers]


def _router(options: FleetOptions, around: Surroundings) -> ChildSpec:
    flags = {"--host": options.host, "--port": str(around.port)}
    if not options.num_prefill:
        # The router's own bound is for a fleet that lost its prefill workers. This one has none on purpose: prompts queue.
        flags["--local-prefill-tokens-max"] = str(QUEUED_PROMPT_TOKENS_MAX)
    return ChildSpec("router", _argv(around, "router.main", options, flags), around.env, STOP_ROUTER)


def _worker(options: FleetOptions, around: Surroundings, role: str, index: int, cpus: str) -> ChildSpec:
    name = f"{role}-{index}"
    flags = {"--worker-id": name, "--transport": around.transport, "--drain-grace-s": f"{options.drain_grace_s:g}"}
    threads = options.threads or (0 if cpus else _threads_each(options, around))
    if threads:
        flags["--threads"] = str(threads)
    if cpus:
        flags["--cpus"] = cpus
    if options.dtype:
        flags["--dtype"] = options.dtype
    if options.block_size:
        flags["--block-size"] = str(options.block_size)
    if options.num_blocks:
        flags["--num-blocks"] = str(options.num_blocks)
    env = dict(around.env)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return ChildSpec(name, _argv(around, f"{role}_service.main", options, flags), env, STOP_WORKERS)


def _threads_each(options: FleetOptions, around: Surroundings) -> int:
    """The machine's cores shared out: threads of several workers on one core only wait for each other."""
    return max(1, around.num_cpus // (options.num_prefill + options.num_decode))


def _argv(around: Surroundings, module: str, options: FleetOptions, flags: Mapping[str, str]) -> tuple[str, ...]:
    common = {
        "--model": around.model_folder,
        "--served-model-name": options.model_name,
        "--redis-url": around.redis_url,
        "--cluster": around.cluster,
    }
    pairs = [part for pair in (*common.items(), *flags.items()) for part in pair]
    return (around.python, "-m", module, *pairs)
