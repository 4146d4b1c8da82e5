"""Where packed weights lie on this host, who writes them, and what happens when they cannot be had.

Owns `<cache>/baton/packed`: one file per (weights, dtype, layout), written once under a lock and mapped by every worker; files that
nobody used for longest go when a new one comes. Whatever is wrong with the cache, a worker starts: then it packs in its own memory
and the reason stands in the log and in `PackedWeights.where`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from common import log
from engine.model_spec import ModelSpec
from engine.models.llama_weights import TensorSource, pack_linears
from engine.weights.model_files import weight_files
from engine.weights.packed_file import PackedFileError, Progress, map_packed_file, write_packed_file
from engine.weights.tensor_names import required_tensors
from kernels.ops import Ops, PackedLinear

FILES_MAX = 4
"""Files kept, the most recently used ones. Each is as large as the model's linear layers in the serving dtype."""
SUFFIX = ".packed"
WEIGHTS_BYTES_MIN = 16 << 20
"""A model below this is packed in memory: nothing worth sharing, and toy models would push the real ones out."""

OpenSource = Callable[[], AbstractContextManager[TensorSource]]
"""Opens the model's tensors; on leaving the context their mapping may go."""

LOG = log.get_logger("engine.packed_weights")


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeights:
    """The linear layers by name. `where`: one line for people, the file or why there is none."""

    linears: Mapping[str, PackedLinear]
    where: str


class _NotUsable(Exception):
    """No packed file can be used here; the message says why."""


def default_packed_dir() -> Path:
    """`$XDG_CACHE_HOME/baton/packed`, else `~/.cache/baton/packed`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "packed"


def load_packed(
    folder: Path,
    spec: ModelSpec,
    fingerprint: str,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    open_source: OpenSource,
    cache_dir: Path | None,
    progress: Progress | None = None,
    weights_bytes_min: int = WEIGHTS_BYTES_MIN,
) -> PackedWeights:
    """The linear layers of the model in `folder`, packed for `ops`: from the shared file where possible, else in memory.

    `cache_dir` None: no file is looked for or written. Raises ModelError for an unusable folder, nothing because of the cache.
    """
    try:
        if cache_dir is None:
            raise _NotUsable("no cache asked for")
        if device.type != "cpu":
            raise _NotUsable(f"device {device.type!r} has memory of its own")
        weights_bytes = _weights_bytes(spec, dtype)
        if weights_bytes < weights_bytes_min:
            raise _NotUsable(f"{weights_bytes >> 10} KiB of weights are below {weights_bytes_min >> 10} KiB")
        layout = _layout(ops, dtype)
        try:
            return _from_cache(cache_dir, _key(folder, fingerprint, dtype, layout), spec, ops, open_source, progress)
        except OSError as error:
            raise _NotUsable(f"{error.filename or cache_dir}: {error.strerror or error}") from error
        except PackedFileError as error:
            raise _NotUsable(str(error)) from error
    except _NotUsable as error:
        if cache_dir is not None and error.__cause__ is not None:
            LOG.warn("packed_weights_not_shared", reason=str(error))
        with open_source() as source:
            return PackedWeights(dict(pack_linears(spec, source, ops)), f"packed in memory: {error}")


def _from_cache(
    cache_dir: Path, key: str, spec: ModelSpec, ops: Ops, open_source: OpenSource, progress: Progress | None
) -> PackedWeights:
    """Raises OSError or PackedFileError when the cache is of no use."""
    cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    info = cache_dir.stat()
    if info.st_uid not in (0, os.getuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PackedFileError(f"{cache_dir} belongs to user {info.st_uid} with mode {info.st_mode & 0o777:o}")
    path = cache_dir / f"{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}{SUFFIX}"
    linears = _try_map(path, key, spec, ops, open_source, progress)
    if linears is None:
        with _exclusive(cache_dir):
            linears = _try_map(path, key, spec, ops, open_source, progress)  # another worker may have been first
            if linears is None:
                _write(path, key, spec, ops, open_source)
                linears = map_packed_file(path, key, torch.get_num_threads(), progress)
    with contextlib.suppress(OSError):  # a read-only cache is used all the same; only the order of clean-up suffers
        os.utime(path)
    return PackedWeights(linears, f"shared: {path} ({path.stat().st_size >> 20} MiB)")


def _try_map(
    path: Path, key: str, spec: ModelSpec, ops: Ops, open_source: OpenSource, progress: Progress | None
) -> dict[str, PackedLinear] | None:
    """The file's layers, or None when there is no file that can be used: it is written (again) then."""
    try:
        linears = map_packed_file(path, key, torch.get_num_threads(), progress)
        with open_source() as source:
            name, packed = next(pack_linears(spec, source, ops))
            _check_same(name, packed, linears.get(name))
        return linears
    except FileNotFoundError:
        return None
    except PackedFileError as error:
        LOG.warn("packed_weights_rewritten", path=str(path), reason=str(error))
        return None


def _check_same(name: str, packed: PackedLinear, stored: PackedLinear | None) -> None:
    """One layer packed anew must be what the file holds: kernels whose packing changed under the same name are found out."""
    if stored is None or (packed.num_outputs, packed.num_inputs, packed.layout, packed.weight.shape) != (
        stored.num_outputs,
        stored.num_inputs,
        stored.layout,
        stored.weight.shape,
    ):
        raise PackedFileError(f"layer {name} is not packed as it is now")
    if not torch.equal(packed.weight.view(torch.uint8), stored.weight.view(torch.uint8)):
        raise PackedFileError(f"layer {name} holds other values than it would now")


def _write(path: Path, key: str, spec: ModelSpec, ops: Ops, open_source: OpenSource) -> None:
    """Writes a temporary neighbour and renames it; the caller holds the lock, so left-over neighbours belong to nobody."""
    for left_over in path.parent.glob(".writing-*"):
        left_over.unlink(missing_ok=True)
    temporary = path.parent / f".writing-{os.getpid()}"
    try:
        with open_source() as source:
            write_packed_file(temporary, key, pack_linears(spec, source, ops))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    by_use = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for old in by_use[FILES_MAX:]:
        LOG.event("packed_weights_removed", path=str(old))
        old.unlink(missing_ok=True)  # a worker that still maps it keeps its pages until it ends


def _key(folder: Path, fingerprint: str, dtype: torch.dtype, layout: str) -> str:
    """Names the content. The fingerprint samples the files, so their sizes and times stand beside it: an edit in place shows."""
    stats = [(path.name, path.stat()) for path in weight_files(folder)]
    files = ",".join(f"{name}:{info.st_size}:{info.st_mtime_ns}" for name, info in stats)
    return f"{fingerprint}/{dtype}/{layout}/{files}"


def _layout(ops: Ops, dtype: torch.dtype) -> str:
    """The layout that `ops` packs in. Raises _NotUsable when packing copies nothing: the model's own files are shared then."""
    weight = torch.zeros((16, 16), dtype=dtype)
    packed = ops.pack_linear(weight, None)
    if packed.weight.data_ptr() == weight.data_ptr():
        raise _NotUsable(f"layout {packed.layout!r} is that of the model's files")
    return packed.layout


def _weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    num_values = 0
    for shape in required_tensors(spec).values():
        size = 1
        for extent in shape:
            size *= extent
        num_values += size
    return num_values * dtype.itemsize


@contextlib.contextmanager
def _exclusive(cache_dir: Path) -> Iterator[None]:
    """One writer at a time: workers that start together pack once. The kernel drops the lock when its holder dies."""
    descriptor = os.open(cache_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
