"""`python -m bench.pd`: our fleet in several topologies against peers, in alternating rounds on the same cores.

Owns the turns and the result file. A turn is one side's: it is started or woken, warmed up, measured idle, given
every workload, and stopped again before the next one's; the file is written after each turn. Peers are servers that run already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from bench.machine import describe_machine, git_state
from bench.pd_arguments import Plan, UsageError, build_parser, plan_from
from bench.pd_load import WARM_UP, LoadFailed, Target, run_workload
from bench.pd_plan import Handover, all_workloads, order, seed_of
from bench.process_tree import TreeError, cpu_shares
from bench.report import render
from bench.servers import Active, Peer, ServerFailed, paused, topologies


class Results:
    """The result object and its file, which is replaced in one step each time, so that an interrupted run loses nothing."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        commit, is_dirty = git_state()
        self._path = path
        self.data: dict[str, Any] = {
            "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "commit": commit,
            "is_dirty": is_dirty,
            "is_complete": False,
            "machine": describe_machine(),
            "settings": settings,
            "turns": [],
        }

    def add(self, turn: dict[str, Any]) -> None:
        self.data["turns"].append(turn)
        self.write()

    def write(self) -> None:
        """JSON, and the table beside it."""
        for path, text in ((self._path, json.dumps(self.data, indent=1) + "\n"), (self.table_path, render(self.data))):
            draft = path.with_name(path.name + ".new")
            draft.write_text(text)
            draft.replace(path)

    @property
    def table_path(self) -> Path:
        return self._path.with_suffix(".md")


def run_plan(plan: Plan, results: Results) -> bool:
    """All turns. False when something failed; what failed is in the results and the other sides go on."""
    all_well = True
    for round_index in range(plan.rounds):
        for name in order(list(plan.sides), round_index):
            turn: dict[str, Any] = {"round": round_index, "side": name, "at": datetime.now(UTC).isoformat(timespec="seconds")}
            try:
                with plan.sides[name].turn() as active:
                    turn |= _measure(plan, round_index, name, active)
            except (ServerFailed, LoadFailed) as error:
                turn["error"] = str(error)
                _say(f"round {round_index + 1} {name}: {error}")
            all_well = all_well and "error" not in turn and not any(_is_bad(one) for one in turn["workloads"].values())
            results.add(turn)
    results.data["is_complete"] = True
    results.write()
    return all_well


def _is_bad(report: dict[str, Any]) -> bool:
    return bool(report.get("errors") or report.get("failed"))


def _measure(plan: Plan, round_index: int, name: str, active: Active) -> dict[str, Any]:
    target = Target(active.url, plan.model, plan.timeout_s)
    for warm_up in WARM_UP:
        asyncio.run(run_workload(warm_up, target, seed_of(plan.seed, round_index, warm_up.name), plan.prompts))
    has_tree = bool(active.tree.roots)
    turn: dict[str, Any] = {"ready_s": None if active.ready_s is None else round(active.ready_s, 2), "workloads": {}}
    if has_tree:
        turn |= {"memory": active.tree.memory(), "idle": active.tree.idle_cpu(plan.idle_s)}
    for workload in plan.workloads:
        if (name, workload.name) in plan.skipped:
            continue
        if isinstance(workload, Handover) and not plan.sides[name].has_handover:
            continue
        before, started = active.tree.reading(), time.monotonic()
        try:
            report = asyncio.run(run_workload(workload, target, seed_of(plan.seed, round_index, workload.name), plan.prompts))
            # Without its processes a peer's own CPU time cannot be told from other programs': no share is better than a wrong one.
            if has_tree:
                report |= cpu_shares(before, active.tree.reading(), report["client_cpu_s"], psutil.cpu_count() or 1)
        except LoadFailed as error:
            report = {"failed": str(error)}
        turn["workloads"][workload.name] = report
        _say(f"round {round_index + 1}/{plan.rounds} {name} {_line(workload.name, report)} in {time.monotonic() - started:.0f} s")
    if has_tree:
        turn["memory_end"] = active.tree.memory()
    return turn


def _line(name: str, report: dict[str, Any]) -> str:
    if "failed" in report:
        return f"FAILED {report['failed']}"
    if "handover_ms" in report:
        return f"{name}: handover {report['handover_ms']:.1f} ms, transfer {report['transfer_ms']:.1f} ms"
    text = f"{name}: {report['output_tokens_per_s']:.1f} tok/s, TTFT p50 {report['ttft_ms']['p50']:.0f} ms"
    if report["itl_ms"]:
        text += f", ITL p99 {report['itl_ms']['p99']:.0f} ms"
    text += f", foreign CPU {report['foreign_cpu_share']:.2f}" if "foreign_cpu_share" in report else ""
    return text + (f", errors {report['errors']}" if report["errors"] else "")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _list(arguments: argparse.Namespace) -> None:
    print("our sides (flags of `baton up`):")
    for name, flags in topologies([0, 1]).items():
        print(f"  {name}: {' '.join(flags)}")
    print("workloads:")
    for one in all_workloads(arguments.chat_rate, arguments.long_rate, arguments.mixed_seconds):
        print(f"  {one.name}: {', '.join(f'{key} {value}' for key, value in asdict(one).items() if key != 'name')}")


def _run(arguments: argparse.Namespace) -> int:
    plan, settings = plan_from(arguments)
    out = Path(arguments.out)
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    peers = [side for side in plan.sides.values() if isinstance(side, Peer)]
    for peer in peers:
        peer.check()
        if not peer.pids:
            _say(
                f"{peer.name} has no --peer-pid: it keeps running in the turns of the others, and its memory and CPU are not read"
            )
    results = Results(out, settings)
    with paused(peers):
        all_well = run_plan(plan, results)
    print(results.table_path.read_text(), end="")
    return 0 if all_well else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: everything was measured; 1: a side or a request failed, the rest was measured; 2: it could not begin."""
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.list:
            _list(arguments)
            return 0
        if arguments.render:
            print(render(json.loads(Path(arguments.render).read_text())), end="")
            return 0
        return _run(arguments)
    except (UsageError, ServerFailed, TreeError, OSError) as error:
        _say(f"bench.pd: {error}")
        return 2
    except KeyboardInterrupt:
        _say("bench.pd: interrupted; finished turns are in the result file")
        return 130


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)  # an exception, so that every server is stopped on the way out


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _leave)
    sys.exit(main())
