"""Splits of a machine's cores between prefill and decode workers, as flags of `baton up`. Pure.

A split is written P:D, numbers of workers; `0:D` is aggregated. The cores are shared out in order, prefill first, each worker an equal
share and one compute thread per core.
"""

from __future__ import annotations

from collections.abc import Sequence


def parse_split(text: str) -> tuple[int, int]:
    """`"1:1"` → (1, 1). Raises ValueError for another form and for no decode worker."""
    prefill, colon, decode = text.partition(":")
    if not (colon and prefill.isdecimal() and decode.isdecimal()) or int(decode) < 1:
        raise ValueError(f"split {text!r}: P:D is expected, numbers of workers, D at least 1 (0:1 is one worker that does both)")
    return int(prefill), int(decode)


def split_flags(text: str, cores: Sequence[int]) -> tuple[str, ...]:
    """The flags for a split on these cores. Raises ValueError when the cores cannot be shared out equally."""
    prefill, decode = parse_split(text)
    num_workers = prefill + decode
    if len(set(cores)) != len(cores) or len(cores) < num_workers or len(cores) % num_workers:
        raise ValueError(f"split {text!r} has {num_workers} workers, which cannot share the cores {list(cores)} equally")
    share = len(cores) // num_workers
    lists = [",".join(str(core) for core in cores[at : at + share]) for at in range(0, len(cores), share)]
    flags = (
        "--prefill",
        str(prefill),
        "--decode",
        str(decode),
        "--threads",
        str(share),
        "--cpus-decode",
        ";".join(lists[prefill:]),
    )
    return (*flags, "--cpus-prefill", ";".join(lists[:prefill])) if prefill else flags
