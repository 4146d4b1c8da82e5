"""Measures one engine in one process against the limits of the machine: decode, prefill, mixed steps, costs of Python and scheduler.

Run it as `python -m bench.engine --model FOLDER --threads N --cpus 0,1 [--quick] [--transformers]`. Rounds alternate over all cases,
so that a slow minute of the machine falls on all of them; values are medians over rounds. Writes JSON and a Markdown table with
date, commit and CPU. Limits are measured in the same run with the same threads.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.serving.settings import parse_cpus


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face format")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as the process may use cores")
    parser.add_argument("--cpus", default="", help="cores to pin the process to, such as 0-1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of one case and round")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a prompt chunk, as the prefill worker's setting")
    parser.add_argument("--kv-gib-max", type=float, default=7.0, help="cases whose KV needs more are left out, and named")
    parser.add_argument("--transformers", action="store_true", help="the same cases under transformers")
    parser.add_argument("--quick", action="store_true", help="small cases, two rounds: whether it works, not how fast it is")
    parser.add_argument("--output", type=Path, help="folder for engine.json and engine.md")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.cpus:  # before torch makes its threads
        os.sched_setaffinity(0, parse_cpus(options.cpus))
    threads = options.threads or len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    result = measure(options, threads)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "engine.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.output / "engine.md").write_text(tables(result))
    print(tables(result))


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    import torch

    from bench import engine_costs
    from bench.engine_limits import Limits, measure_limits, step_work
    from bench.engine_runs import DTYPES, load_engine
    from bench.machine import describe_machine, git_state

    torch.set_num_threads(threads)
    quick = options.quick
    rounds, num_steps = (2, 3) if quick else (options.rounds, options.steps)
    contexts = (128, 512) if quick else (128, 4096)
    decodes = [(streams, context) for context in contexts for streams in ((1, 4, 16) if quick else (1, 4, 16, 64))]
    slope = [(1, context) for context in ((128, 512) if quick else (128, 1024, 2048, 4096, 8000))]
    growth = [(streams, 128) for streams in ((1, 16) if quick else (1, 2, 4, 8, 16, 32, 64, 128))]
    prompts = (128, 256) if quick else (128, 1024, 4096)
    chunks = (0, 64) if quick else (0, 16, 32, 64, 128, 256)
    baselines = [case for case in decodes if case[0] <= 16 and case[1] == contexts[0]] if options.transformers else []

    probe = load_engine(options.model, options.dtype, 1024)
    token_bytes = probe.loaded.kv_cache.block_bytes // 16
    tokens_max = int(options.kv_gib_max * 2**30 / token_bytes)
    wanted = dict.fromkeys([*decodes, *slope, *growth])
    slack = 2 * (num_steps + 32)
    skipped = [f"{streams} x {context}" for streams, context in wanted if streams * (context + slack) > tokens_max]
    cases = [case for case in wanted if case[0] * (case[1] + slack) <= tokens_max]
    num_pool_tokens = max(
        [streams * (context + slack) for streams, context in cases] + [max(prompts) + slack, 16 * (128 + slack) + 256 * 16]
    )
    del probe
    engine = load_engine(options.model, options.dtype, num_pool_tokens)
    baseline = None
    if options.transformers:
        from bench.engine_transformers import Baseline

        baseline = Baseline(options.model, DTYPES[options.dtype])

    times: dict[str, list[float]] = defaultdict(list)
    native: dict[str, list[float]] = defaultdict(list)
    calls: dict[str, int] = {}
    limits: list[Limits] = []
    for _ in range(rounds):
        limits.append(measure_limits(threads, 1 if quick else 3))
        for streams, context in cases:
            steps = engine.decode(streams, context, num_steps)
            name = f"decode {streams} x {context}"
            times[name].append(statistics.median(step.seconds for step in steps))
            native[name].append(statistics.median(step.native_seconds for step in steps))
            calls[name] = steps[-1].num_native_calls
        for num_tokens in prompts:
            steps = engine.prefill(num_tokens, options.chunk)
            times[f"prefill {num_tokens}"].append(sum(step.seconds for step in steps))
            native[f"prefill {num_tokens}"].append(sum(step.native_seconds for step in steps))
        for chunk in chunks:
            steps = engine.mixed(16, 128, chunk, num_steps)
            times[f"mixed {chunk}"].append(statistics.median(step.seconds for step in steps))
        if baseline is not None:
            for streams, context in baselines:
                times[f"transformers decode {streams} x {context}"].append(
                    statistics.median(baseline.decode(streams, context, num_steps))
                )
            for num_tokens in prompts:
                times[f"transformers prefill {num_tokens}"].append(baseline.prefill(num_tokens))
    limit = Limits(*(statistics.median(values) for values in zip(*(asdict(one).values() for one in limits), strict=True)))
    rows: list[dict[str, Any]] = []
    for name, seconds in times.items():
        row: dict[str, Any] = {"case": name, "seconds": statistics.median(seconds), "rounds": seconds}
        words = name.split()
        if words[0] == "decode":
            streams, context = int(words[1]), int(words[3])
            work = step_work(engine.loaded, [(1, context + num_steps // 2)] * streams, streams)
            row["tokens_per_s"] = streams / row["seconds"]
        elif words[0] == "prefill":
            length, chunk = int(words[1]), options.chunk
            ends = [min(start + chunk, length) for start in range(0, length, chunk)]
            parts = [
                step_work(engine.loaded, [(end - start, end)], end == length)
                for start, end in zip([0, *ends], ends, strict=False)
            ]
            row["tokens_per_s"] = length / row["seconds"]
            row["limit_bytes_s"] = sum(limit.seconds(part)[0] for part in parts)
            row["limit_arithmetic_s"] = sum(limit.seconds(part)[1] for part in parts)
            row["limit_s"] = sum(max(limit.seconds(part)) for part in parts)
        if words[0] == "decode":
            row["limit_bytes_s"], row["limit_arithmetic_s"] = limit.seconds(work)
            row["limit_s"] = max(limit.seconds(work))
        if engine.native.num_calls and name in native:
            row["native_share"] = statistics.median(native[name]) / row["seconds"]
            row["num_native_calls"] = calls.get(name)
        rows.append(row)
    commit, is_dirty = git_state()
    machine = describe_machine()
    counted = {f"{streams} x 128": engine.count_calls(streams, 128) for streams in (1, 16)}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit + ("+" if is_dirty else ""),
        "machine": {key: value for key, value in machine.items() if key != "flags"},
        "model": options.model.name,
        "dtype": options.dtype,
        "threads": threads,
        "kernels": engine.kernels,
        "rounds": rounds,
        "chunk": options.chunk,
        "is_quick": quick,
        "limits": asdict(limit),
        "skipped_for_memory": skipped,
        "rows": rows,
        "calls_of_a_decode_step": {name: {"python": one, "c": other} for name, (one, other) in counted.items()},
        "slope": _slope(
            [
                (context, statistics.median(times[f"decode 1 x {context}"]))
                for _, context in slope
                if times.get(f"decode 1 x {context}")
            ]
        ),
        "scheduler": [asdict(cost) for cost in engine_costs.measure(8 if quick else 48)],
    }


def _slope(points: list[tuple[int, float]]) -> dict[str, float]:
    """The straight line through step time over context, and the largest distance from it as a share of the step."""
    if len(points) < 2:
        return {}
    slope, start = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    worst = max(abs(y - (start + slope * x)) / y for x, y in points)
    return {"us_per_1000_tokens": 1e9 * slope, "at_0_ms": 1e3 * start, "worst_deviation": worst}


def tables(result: dict[str, Any]) -> str:
    limits, machine = result["limits"], result["machine"]
    quick = ", QUICK: no measurement" if result["is_quick"] else ""
    rates = {name: f"{rate / 1e9:.1f}" for name, rate in limits.items()}
    lines = [
        f"{result['date']}, commit {result['commit']}, {machine['cpu']}, {result['threads']} threads, {result['model']} "
        f"{result['dtype']}, {result['kernels'].split(':')[0]}, medians of {result['rounds']} rounds{quick}.",
        "",
        f"Limits measured in this run: {rates['read_bytes']} GB/s read, {rates['multiply_adds']} G multiply-adds/s; torch's matrix "
        f"product {rates['torch_gemm_fp32']} (fp32) and {rates['torch_gemm_bf16']} (bf16) G multiply-adds/s.",
        "",
        "| case | ms | tok/s | least ms (bytes) | least ms (arithmetic) | limit / measured | native share | transformers ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    others = {
        row["case"].removeprefix("transformers "): row["seconds"] for row in result["rows"] if row["case"].startswith("trans")
    }
    for row in result["rows"]:
        if row["case"].startswith("transformers"):
            continue

        def cell(key: str, scale: float = 1.0, digits: int = 2, row: dict[str, Any] = row) -> str:
            return "" if row.get(key) is None else f"{scale * row[key]:.{digits}f}"

        name = row["case"].replace("mixed", "16 x 128 decode + chunk of")
        share = f"{row['limit_s'] / row['seconds']:.2f}" if "limit_s" in row else ""
        other = others.get(row["case"])
        cells = [name, cell("seconds", 1e3), cell("tokens_per_s", 1, 0), cell("limit_bytes_s", 1e3)]
        cells += [
            cell("limit_arithmetic_s", 1e3),
            share,
            cell("native_share", 1, 3),
            "" if other is None else f"{1e3 * other:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if result["slope"]:
        slope = result["slope"]
        lines += [
            "",
            f"Step time of one stream over context: {slope['at_0_ms']:.2f} ms + {slope['us_per_1000_tokens']:.0f} µs per 1,000 tokens, "
            f"at most {100 * slope['worst_deviation']:.0f} % off that line.",
        ]
    for name, counts in result["calls_of_a_decode_step"].items():
        lines.append(f"A decode step of {name}: {counts['python']} calls of Python functions, {counts['c']} of C functions.")
    if result["skipped_for_memory"]:
        lines.append(f"Left out for memory: {', '.join(result['skipped_for_memory'])}.")
    lines += ["", "| scheduler: what | running | tokens | waiting | µs |", "|---|---|---|---|---|"]
    for cost in result["scheduler"]:
        place = " | ".join(str(cost[name]) for name in ("what", "num_running", "num_tokens", "num_waiting"))
        lines.append(f"| {place} | {cost['us']:.1f} per {cost['per']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
