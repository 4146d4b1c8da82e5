"""The command line of `bench.pd`: flags, what they mean together, and the plan they make.

Refuses what cannot be run before anything is started; resolves the model, which may fetch the demo model. Times are seconds.
"""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.openai_stream import base_url
from baton.subprocess_probe import run_python
from bench.pd_plan import Workload, all_workloads, quick
from bench.pd_prompts import TokenPrompts
from bench.servers import OurFleet, Peer, Side, topologies


class UsageError(Exception):
    """A line for the user; nothing has been started."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of the suite. `idle_s`: how long each side is watched doing nothing."""

    sides: dict[str, Side]
    workloads: list[Workload]
    skipped: frozenset[tuple[str, str]]
    rounds: int
    seed: int
    idle_s: float
    model: str
    timeout_s: float
    prompts: TokenPrompts


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pd",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="show sides and workloads, start nothing")
    parser.add_argument("--render", metavar="FILE", default="", help="print the table of an earlier result, start nothing")
    parser.add_argument("--quick", action="store_true", help="a few small requests: proves that it works, measures nothing")
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file, hub name or the demo model")
    parser.add_argument("--served-model-name", default="smollm2-135m", help="name of the model on all servers")
    parser.add_argument("--sides", default="pd,aggregated,replicas", help="which of our topologies; empty: peers alone")
    parser.add_argument("--workloads", default="", help="names, separated by commas; empty: all")
    parser.add_argument("--skip", action="append", default=[], metavar="SIDE:WORKLOAD", help="leave out one workload of one side")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="a server that runs already")
    parser.add_argument(
        "--peer-pid", action="append", default=[], metavar="NAME=PID[,PID]", help="its processes, stopped between turns"
    )
    parser.add_argument(
        "--peer-ready", action="append", default=[], metavar="NAME=SECONDS", help="its start-up time, for the table"
    )
    parser.add_argument(
        "--compare", action="append", default=[], metavar="OURS=PEER[,PEER]", help="peers of one of our sides' ratio"
    )
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; 3 or more for medians")
    parser.add_argument("--cores", default="0,1", help="the two cores for our sides")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of our sides")
    parser.add_argument("--up-flags", default="", help="more flags for `baton up`, as one text")
    parser.add_argument("--chat-rate", type=float, default=0.7, help="chats per second in mixed")
    parser.add_argument("--long-rate", type=float, default=0.15, help="long prompts per second in mixed")
    parser.add_argument("--mixed-seconds", type=float, default=60.0, help="length of mixed")
    parser.add_argument("--idle-seconds", type=float, default=10.0, help="how long each side is watched idle")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds one request may take")
    parser.add_argument("--seed", type=int, default=0, help="0: the time, so that no prefix cache of an earlier run can help")
    parser.add_argument("--out", default="bench-pd.json", help="the result; the table goes beside it as .md")
    return parser


def pairs(texts: Sequence[str], flag: str) -> dict[str, str]:
    """`NAME=VALUE` texts. Raises UsageError for another form and for a name given twice."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise UsageError(f"{flag} {text!r}: NAME=VALUE is expected")
        if name in found:
            raise UsageError(f"{flag}: {name!r} is given twice")
        found[name] = value
    return found


def peers_from(arguments: argparse.Namespace) -> dict[str, Peer]:
    """Raises UsageError."""
    urls = pairs(arguments.peer, "--peer")
    pids, ready = pairs(arguments.peer_pid, "--peer-pid"), pairs(arguments.peer_ready, "--peer-ready")
    for flag, names in (("--peer-pid", pids), ("--peer-ready", ready)):
        if unknown := sorted(set(names) - set(urls)):
            raise UsageError(f"{flag} {unknown[0]}=…: there is no --peer of that name")
    try:
        return {
            name: Peer(
                name,
                base_url(url),
                tuple(int(pid) for pid in pids.get(name, "").split(",") if pid),
                float(ready[name]) if name in ready else None,
            )
            for name, url in urls.items()
        }
    except ValueError as error:
        raise UsageError(f"--peer-pid, --peer-ready: {error}") from error


def chosen(names: str, known: Sequence[str], flag: str) -> list[str]:
    """Names separated by commas. Raises UsageError for an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise UsageError(f"{flag} {name!r}: known are {', '.join(known)}")
    return wanted


def plan_from(arguments: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    """The plan, and its settings for the result. Resolves the model, which may fetch the demo model. Raises UsageError."""
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds}: at least 1, and 3 for medians")
    try:
        ours = topologies([int(core) for core in arguments.cores.split(",")])
    except ValueError as error:
        raise UsageError(f"--cores {arguments.cores}: {error}") from error
    peers = peers_from(arguments)
    our_names = chosen(arguments.sides, list(ours), "--sides")
    if clash := sorted(set(peers) & set(ours)):
        raise UsageError(f"--peer {clash[0]}: that is the name of one of our sides")
    suite = all_workloads(arguments.chat_rate, arguments.long_rate, arguments.mixed_seconds)
    names = chosen(arguments.workloads, [one.name for one in suite], "--workloads") or [one.name for one in suite]
    workloads = [quick(one) if arguments.quick else one for one in suite if one.name in names]
    sides = [*our_names, *peers]
    if not sides:
        raise UsageError("nothing to measure: --sides is empty and there is no --peer")
    skipped = frozenset((side, workload) for side, _, workload in (text.partition(":") for text in arguments.skip))
    for side, workload in skipped:
        chosen(side, sides, "--skip")
        chosen(workload or "(nothing)", [one.name for one in suite], "--skip")
    compare = {side: chosen(text, list(peers), "--compare") for side, text in pairs(arguments.compare, "--compare").items()}
    chosen(",".join(compare), our_names, "--compare")
    folder = _model_folder(arguments.model)
    fleets = {
        name: OurFleet(
            name, ours[name], folder, arguments.served_model_name, arguments.dtype, tuple(shlex.split(arguments.up_flags))
        )
        for name in our_names
    }
    plan = Plan(
        sides={**fleets, **peers},
        workloads=workloads,
        skipped=skipped,
        rounds=arguments.rounds,
        seed=arguments.seed or int(time.time()),
        idle_s=min(2.0, arguments.idle_seconds) if arguments.quick else arguments.idle_seconds,
        model=arguments.served_model_name,
        timeout_s=arguments.timeout,
        prompts=TokenPrompts(folder),
    )
    settings = {
        "sides": sides,
        "ours": {name: " ".join(ours[name]) for name in our_names},
        "peers": {name: peer.url for name, peer in peers.items()},
        "compare": compare,
        "model": plan.model,
        "dtype": arguments.dtype,
        "up_flags": arguments.up_flags,
        "workloads": {one.name: asdict(one) for one in workloads},
        "skipped": sorted(f"{side}:{workload}" for side, workload in skipped),
        "rounds": plan.rounds,
        "seed": plan.seed,
        "quick": arguments.quick,
        "timeout_s": plan.timeout_s,
        "idle_s": plan.idle_s,
    }
    return plan, settings


def _model_folder(model: str) -> Path:
    outcome = run_python(["-m", "engine.model_folder", model], 900.0)
    lines = outcome.stdout.strip().splitlines()
    if outcome.returncode != 0 or not lines:
        raise UsageError(f"--model {model}: {outcome.reason}")
    return Path(lines[-1])
