"""The fabric against its limits: gather -> read -> scatter between two real processes, beside the transport alone and memcpy.

Run as `python -m bench.fabric`. Owns which transports are compared and in which order, and the report (JSON and a Markdown table with
date, commit and processor); `bench.fabric_pair` measures. Rounds alternate between the transports; all figures are medians over rounds.
Rates are GB/s (10^9 bytes). A share compares with what the same process measured in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.fabric_ends import LAYOUTS
from bench.fabric_pair import PairSpec, pair_spec_json
from kvtransfer.planes.select import available_planes

PAIR_TIMEOUT_S = 600.0
GOAL_OF_TRANSPORT = 0.9


@dataclass(frozen=True, slots=True)
class Variant:
    """A transport as people know it; `env` chooses the way UCX reads."""

    name: str
    transport: str
    env: Mapping[str, str]


VARIANTS = (
    Variant("ucx, shared memory (CMA)", "ucx", {}),
    Variant("ucx over TCP", "ucx", {"UCX_TLS": "tcp"}),
    Variant("tcp", "tcp", {}),
)


def run_pair(variant: Variant, spec: PairSpec) -> dict[str, Any]:
    """One pair of processes, from start to end. Raises RuntimeError with the end of its log."""
    environment = {key: value for key, value in os.environ.items() if key != "UCX_TLS"} | dict(variant.env)
    ended = subprocess.run(
        [sys.executable, "-m", "bench.fabric_pair"],
        input=pair_spec_json(spec),
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=PAIR_TIMEOUT_S,
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{variant.name}: exit code {ended.returncode}: {ended.stderr.decode(errors='replace')[-2000:]}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def medians(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each size, of the rounds of one variant and layout."""
    rows = []
    for index in range(len(rounds[0]["sizes"])):
        sizes = [one["sizes"][index] for one in rounds]

        def median(name: str, sizes: list[dict[str, Any]] = sizes) -> float:
            return statistics.median(size[name] for size in sizes)

        def median_share(name: str, sizes: list[dict[str, Any]] = sizes) -> float:
            """Of the better of the transport's two contiguous rates, round by round."""
            return statistics.median(
                size[name] / max(size["transport_whole_rate"], size["transport_frames_rate"]) for size in sizes
            )

        def cpu_s_per_gb(name: str, end: int, sizes: list[dict[str, Any]] = sizes) -> float:
            return statistics.median(size[name][end] / (size["num_bytes"] / 1e9) for size in sizes)

        rows.append(
            {
                "num_bytes": sizes[0]["num_bytes"],
                "memcpy": median("memcpy_rate") / 1e9,
                "transport_alone": statistics.median(
                    max(size["transport_whole_rate"], size["transport_frames_rate"]) / 1e9 for size in sizes
                ),
                "scattered": median("scattered_rate") / 1e9,
                "contiguous": median("contiguous_rate") / 1e9,
                "concurrent": median("concurrent_rate") / 1e9,
                "concurrent_spread": median("concurrent_spread"),
                "share_of_memcpy": statistics.median(size["scattered_rate"] / size["memcpy_rate"] for size in sizes),
                "share_of_transport": median_share("scattered_rate"),
                "frames": {
                    "scattered": sorted({size["scattered_frames"] for size in sizes}),
                    "contiguous": sorted({size["contiguous_frames"] for size in sizes}),
                },
                "sender_cpu_s_per_gb": cpu_s_per_gb("scattered_cpu_s", 0),
                "receiver_cpu_s_per_gb": cpu_s_per_gb("scattered_cpu_s", 1),
                "transport_receiver_cpu_s_per_gb": cpu_s_per_gb("transport_frames_cpu_s", 1),
            }
        )
    return rows


def latencies(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "single_block_p50_ms": 1e3 * statistics.median(one["single_block"]["p50_s"] for one in rounds),
        "single_block_p90_ms": 1e3 * statistics.median(one["single_block"]["p90_s"] for one in rounds),
        "beside_large_p50_ms": 1e3 * statistics.median(one["beside_a_large_one"]["p50_s"] for one in rounds),
        "beside_large_max_ms": 1e3 * max(one["beside_a_large_one"]["max_s"] for one in rounds),
        "idle_sender_cores": statistics.median(one["idle"]["sender"] for one in rounds),
        "idle_receiver_cores": statistics.median(one["idle"]["receiver"] for one in rounds),
    }


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    head = report["machine"]
    lines = [
        f"Date {head['date']}, commit {head['commit']}, {head['cpu']}, {head['num_cpus']} cores, load before {head['load_before']:.1f}, "
        f"{report['rounds']} rounds. GB/s; a goal is {GOAL_OF_TRANSPORT:.0%} of the transport alone.",
        "",
        "| transport | blocks | MB | memcpy, one core | transport alone | scattered blocks | of memcpy | of transport | contiguous blocks "
        "| 4 at once (spread) | frames scattered / contiguous | CPU s per GB, P / D / D of transport alone |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for one in report["results"]:
        for row in one["sizes"]:
            frames = " / ".join(",".join(map(str, row["frames"][order])) for order in ("scattered", "contiguous"))
            lines.append(
                f"| {one['variant']} | {one['layout']} | {row['num_bytes'] / 1e6:.0f} | {row['memcpy']:.2f} | "
                f"{row['transport_alone']:.2f} | "
                f"{row['scattered']:.2f} | {row['share_of_memcpy']:.0%} | {row['share_of_transport']:.0%} | {row['contiguous']:.2f} | "
                f"{row['concurrent']:.2f} ({row['concurrent_spread']:.2f}) | {frames} | {row['sender_cpu_s_per_gb']:.2f} / "
                f"{row['receiver_cpu_s_per_gb']:.2f} / {row['transport_receiver_cpu_s_per_gb']:.2f} |"
            )
    lines += [
        "",
        "| transport | blocks | 1 block: p50, p90 ms | 1 block beside a large handoff: p50, max ms | idle cores P, D |",
        "|---|---|---|---|---|",
    ]
    for one in report["results"]:
        t = one["latencies"]
        lines.append(
            f"| {one['variant']} | {one['layout']} | {t['single_block_p50_ms']:.2f}, {t['single_block_p90_ms']:.2f} | "
            f"{t['beside_large_p50_ms']:.2f}, {t['beside_large_max_ms']:.2f} | "
            f"{t['idle_sender_cores']:.4f}, {t['idle_receiver_cores']:.4f} |"
        )
    lines += [""] + [f"Round {one['round']}, {one['variant']}, {one['layout']}: {one['reason']}" for one in report["failures"]]
    return "\n".join(lines).rstrip()


def this_machine() -> dict[str, Any]:
    names = [
        line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or "unknown",
        "cpu": names[0] if names else "unknown",
        "num_cpus": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
    }


def split_cpus(choice: str) -> tuple[str, str]:
    """`split`: half of the cores for each end (what P and D have on one machine); `none`: both ends use all."""
    cpus = sorted(os.sched_getaffinity(0))
    if choice == "none" or len(cpus) < 2:
        return "", ""
    half = len(cpus) // 2
    return ",".join(map(str, cpus[:half])), ",".join(map(str, cpus[half:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes-mb", type=int, nargs="+", default=[64, 1000], help="MB (10^6 bytes) per handoff")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--variants", nargs="+", default=["0", "1", "2"], choices=["0", "1", "2"], help="ucx CMA, ucx TCP, tcp")
    parser.add_argument(
        "--pin", choices=["split", "none"], default="split", help="half of the cores for each end, or all for both"
    )
    parser.add_argument("--num-slabs", type=int, default=16)
    parser.add_argument("--slab-bytes", type=int, default=4 << 20)
    parser.add_argument("--json", type=Path, default=Path("bench-fabric.json"))
    arguments = parser.parse_args()
    missing = available_planes()
    variants = [VARIANTS[int(index)] for index in arguments.variants]
    for variant in variants:
        if (reason := missing[variant.transport]) is not None:
            print(f"left out: {variant.name}: {reason}")
    variants = [variant for variant in variants if missing[variant.transport] is None]
    sender_cpus, receiver_cpus = split_cpus(arguments.pin)
    machine = this_machine()
    collected: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:
            for layout in arguments.layouts:
                spec = PairSpec(
                    layout=layout,
                    transport=variant.transport,
                    sizes=tuple(mb * 1_000_000 for mb in arguments.sizes_mb),
                    sender_cpus=sender_cpus,
                    receiver_cpus=receiver_cpus,
                    num_slabs=arguments.num_slabs,
                    slab_bytes=arguments.slab_bytes,
                    num_single=100,
                    num_concurrent=4,
                    idle_s=3.0,
                )
                try:
                    collected.setdefault((variant.name, layout), []).append(run_pair(variant, spec))
                    outcome = "done"
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    # The other transports are worth measuring all the same; the report says which rounds are missing and why.
                    outcome = f"FAILED: {str(error).strip().splitlines()[-1][:300]}"
                    failures.append({"round": number + 1, "variant": variant.name, "layout": layout, "reason": outcome})
                print(f"round {number + 1}: {variant.name}, {layout}: {outcome}", file=sys.stderr, flush=True)
    report = {
        "machine": machine,
        "rounds": arguments.rounds,
        "pin": arguments.pin,
        "results": [
            {"variant": name, "layout": layout, "sizes": medians(rounds), "latencies": latencies(rounds), "rounds": rounds}
            for (name, layout), rounds in collected.items()
            if rounds
        ],
        "failures": failures,
    }
    arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
