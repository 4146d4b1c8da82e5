"""`python -m loadtest.compare` (`make loadtest`): the same locust load against several splits of this machine's cores, side by side.

Starts one fleet after the other with the benchmarks' starter, runs locust against each as a process of its own, and prints one table.
Whatever ends it (an error, Ctrl-C, SIGTERM, its death), the fleet and locust end with it. Latencies are milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from baton.children import die_with_parent
from baton.subprocess_probe import child_environment
from bench.machine import describe_machine, git_state
from bench.servers import OurFleet, ServerFailed
from loadtest.results import write_json
from loadtest.splits import split_flags

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
STOP_TIMEOUT_S = 10.0

ROWS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("TTFT p50, ms", ("ttft_ms", "p50"), ".1f"),
    ("TTFT p95, ms", ("ttft_ms", "p95"), ".1f"),
    ("ITL p50, ms", ("itl_ms", "p50"), ".1f"),
    ("ITL p99, ms", ("itl_ms", "p99"), ".1f"),
    ("TPOT p50, ms", ("tpot_ms", "p50"), ".1f"),
    ("tok/s", ("output_tokens_per_s",), ".1f"),
    ("requests answered", ("answered",), "d"),
    ("failures", ("failures",), "d"),
    ("tokens lost", ("tokens_lost",), "d"),
)


class LocustFailed(Exception):
    """Locust ended without a report; a line for the user."""


def locust_command(url: str, report: Path, csv: str, arguments: argparse.Namespace) -> list[str]:
    """Headless locust against one fleet. Its own flags come last, so a user's extra ones win."""
    flags = {
        "--host": url,
        "--users": str(arguments.users),
        "--spawn-rate": str(arguments.users),
        "--run-time": arguments.duration,
        "--stop-timeout": "300",
        "--workload": arguments.workload,
        "--model": arguments.served_model_name,
        "--timeline": "yes",
        "--report-json": str(report),
    }
    if csv:
        flags["--csv"] = csv
    pairs = [part for pair in flags.items() for part in pair]
    return [
        sys.executable,
        "-m",
        "locust",
        "-f",
        str(LOCUSTFILE),
        "--headless",
        "--only-summary",
        *pairs,
        *arguments.locust_flags,
    ]


def run_locust(command: Sequence[str], report: Path) -> dict[str, Any]:
    """The run's report. Locust dies with this process, and is ended when this function is left in any way."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **child_environment()},
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        process_group=0,
        preexec_fn=die_with_parent(os.getpid()),
    )
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if not report.exists():
        raise LocustFailed(f"locust ended with exit code {code} and no report")
    found: dict[str, Any] = json.loads(report.read_text())
    # Locust's own code: 1 is our verdict (which says why) or its default for any failure; anything else is locust's trouble.
    return found | {"exit_code": code}


def run_splits(arguments: argparse.Namespace, fleets: Mapping[str, OurFleet], console: Console) -> dict[str, Any]:
    """Each split in turn. One that fails has an `error` and the next one goes on."""
    runs: dict[str, Any] = {}
    for split, fleet in fleets.items():
        console.print(f"split {split}: baton up {' '.join(fleet.topology)}", markup=False, highlight=False, soft_wrap=True)
        with tempfile.TemporaryDirectory(prefix="baton-loadtest-") as folder:
            report = Path(folder) / "report.json"
            csv = f"{arguments.csv}-{split.replace(':', '-')}" if arguments.csv else ""
            try:
                with fleet.turn() as active:
                    runs[split] = run_locust(locust_command(active.url, report, csv, arguments), report)
            except (ServerFailed, LocustFailed) as error:
                runs[split] = {"error": str(error)}
                console.print(f"split {split}: {error}", style="red", markup=False)
    return runs


def is_good(run: Mapping[str, Any]) -> bool:
    return not run.get("error") and not run.get("verdict") and run.get("exit_code") == 0


def table_of(runs: Mapping[str, Any]) -> Table:
    """One column per split; all requests, then each class apart. A value that does not exist is a dash."""
    table = Table(title="the same load on each split (prefill:decode workers)", title_justify="left")
    table.add_column("")
    for split, run in runs.items():
        table.add_column(split if is_good(run) else f"{split} (not good)", justify="right")
    labels = sorted({label for run in runs.values() for label in run.get("classes", {})})
    parts = [("all", "all requests"), *((label, label) for label in labels if len(labels) > 1)]
    for part, title in parts:
        table.add_row(title, *([""] * len(runs)), style="bold")
        for name, path, form in ROWS:
            table.add_row(f"  {name}", *(_cell(_part(run, part), path, form) for run in runs.values()))
        table.add_section()
    table.add_row("disaggregated requests", *(_modes(run) for run in runs.values()))
    table.add_row("client: share of a core", *(_cell(run, ("client", "core_share"), ".2f") for run in runs.values()))
    table.add_row("client: lateness p99, ms", *(_cell(run, ("client", "lateness_ms", "p99"), ".1f") for run in runs.values()))
    return table


def _part(run: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = run.get("all", {}) if part == "all" else run.get("classes", {}).get(part, {})
    return found


def _cell(values: Mapping[str, Any], path: Sequence[str], form: str) -> str:
    value: Any = values
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "-" if value is None else format(value, form)


def _modes(run: Mapping[str, Any]) -> str:
    modes = run.get("all", {}).get("modes")
    return f"{modes.get('disaggregated', 0)} of {sum(modes.values())}" if modes else "-"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare",
        description=(__doc__ or "").splitlines()[0],
        epilog="Flags behind -- go to locust as they are, for example -- --chat-output-tokens 32.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--splits", default="1:1 0:1", help="prefill:decode workers, separated by spaces")
    parser.add_argument("--cores", default="0,1", help="the cores that each split shares out")
    parser.add_argument("--workload", choices=("chat", "long", "mixed"), default="mixed")
    parser.add_argument("--users", type=int, default=5)
    parser.add_argument("--duration", default="60s", help="as locust writes it: 30s, 5m")
    parser.add_argument("--model", default="smollm2-135m", help="folder, .gguf file, hub name or the demo model")
    parser.add_argument("--served-model-name", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--csv", default="", help="beginning of the names of locust's own CSV files; empty: none")
    parser.add_argument("--out", default="loadtest.json", help="the result")
    parser.add_argument("locust_flags", nargs="*", help="for locust")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0 when every split's run was good, 1 when one was not, 2 for flags that do not fit, 130 when interrupted."""
    arguments = build_parser().parse_args(argv)
    console = Console(stderr=True)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    try:
        cores = [int(core) for core in arguments.cores.split(",")]
        if arguments.users < 1:
            raise ValueError(f"--users is {arguments.users}: one is the least")
        fleets = {
            split: OurFleet(split, split_flags(split, cores), Path(arguments.model), arguments.served_model_name, arguments.dtype)
            for split in arguments.splits.split()
        }
        if not fleets:
            raise ValueError("--splits names none")
    except ValueError as error:
        console.print(f"loadtest: {error}", style="red", markup=False)
        return 2
    commit, is_dirty = git_state()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    try:
        runs = run_splits(arguments, fleets, console)
    except KeyboardInterrupt:
        console.print("interrupted; everything that was started has been stopped")
        return 130
    head = {
        "started": started,
        "commit": commit,
        "is_dirty": is_dirty,
        "machine": describe_machine(),
        "settings": vars(arguments),
    }
    write_json(Path(arguments.out), {**head, "splits": runs})
    Console().print(table_of(runs))
    console.print(f"written: {arguments.out}", markup=False, highlight=False)
    return 0 if all(is_good(run) for run in runs.values()) else 1


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
