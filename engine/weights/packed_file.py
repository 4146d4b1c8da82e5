"""A file of packed linear layers that every worker of a host maps read-only, so that the host holds the weights once.

Owns the format and its checks; knows neither where such files lie nor when one is written. The layout is data first, page by page
as it is mapped, each tensor on a 4 KiB border; then a JSON description; then a footer of fixed size that vouches for both.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from kernels.ops import PackedLinear

MAGIC = b"batonpk1"
_FOOTER = struct.Struct("<8sQQ16s")
"""magic, bytes of data, bytes of the description, BLAKE2b-128 of the description"""
_DESCRIPTION_BYTES_MAX = 64 << 20
SEGMENT_BYTES = 16 << 20
"""Bytes under one CRC-32: pieces that several threads check at the same time."""
ALIGNMENT = 4096
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class PackedFileError(Exception):
    """The file is not what it should be: damaged, cut off, of another key, or writable by others. The message says which."""


def write_packed_file(path: Path, key: str, linears: Iterable[tuple[str, PackedLinear]]) -> None:
    """Writes the layers, one in memory at a time, to a new file that only its owner may read. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        writer = _Writer(file)
        described = {
            name: {
                "num_outputs": linear.num_outputs,
                "num_inputs": linear.num_inputs,
                "layout": linear.layout,
                "weight": writer.add(linear.weight),
                "bias": None if linear.bias is None else writer.add(linear.bias),
            }
            for name, linear in linears
        }
        checksums = writer.finish()
        description = json.dumps({"key": key, "checksums": checksums, "linears": described}).encode()
        file.write(description)
        file.write(_FOOTER.pack(MAGIC, writer.num_bytes, len(description), _digest(description)))


def map_packed_file(path: Path, key: str, num_threads: int, progress: Progress | None = None) -> dict[str, PackedLinear]:
    """Maps the file, reads all of it once to check it, and gives its layers; their tensors must never be written to.

    Raises PackedFileError for a file that cannot be trusted, OSError for one that cannot be read (FileNotFoundError: none there).
    """
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid not in (0, os.getuid()) or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PackedFileError(f"belongs to user {info.st_uid} with mode {info.st_mode & 0o777:o}")
        description, data_bytes = _read_description(file, info.st_size, key)
        region = mmap.mmap(file.fileno(), data_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    _check_data(region, description["checksums"], num_threads, progress)
    return {name: _linear(region, described) for name, described in description["linears"].items()}


class _Writer:
    """Appends tensors on aligned borders and keeps the checksums of the segments that have passed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._checksums: list[int] = []
        self._segment_bytes = 0
        self._crc = 0
        self.num_bytes = 0

    def add(self, tensor: torch.Tensor) -> dict[str, Any]:
        offset = self.num_bytes
        self._write(memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        self._write(memoryview(bytes(-self.num_bytes % ALIGNMENT)))
        return {"offset": offset, "shape": list(tensor.shape), "dtype": _DTYPE_NAMES[tensor.dtype]}

    def finish(self) -> list[int]:
        if self._segment_bytes:
            self._end_segment()
        return self._checksums

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self.num_bytes += data.nbytes
        while data.nbytes:
            piece = data[: SEGMENT_BYTES - self._segment_bytes]
            self._crc = zlib.crc32(piece, self._crc)
            self._segment_bytes += piece.nbytes
            data = data[piece.nbytes :]
            if self._segment_bytes == SEGMENT_BYTES:
                self._end_segment()

    def _end_segment(self) -> None:
        self._checksums.append(self._crc)
        self._crc = self._segment_bytes = 0


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16, person=b"baton.packed").digest()


def _read_description(file: BinaryIO, file_bytes: int, key: str) -> tuple[dict[str, Any], int]:
    if file_bytes < _FOOTER.size:
        raise PackedFileError(f"has {file_bytes} bytes, not even a footer")
    file.seek(file_bytes - _FOOTER.size)
    magic, data_bytes, description_bytes, digest = _FOOTER.unpack(file.read(_FOOTER.size))
    expected = data_bytes + description_bytes + _FOOTER.size
    if magic != MAGIC or file_bytes != expected or not data_bytes or description_bytes > _DESCRIPTION_BYTES_MAX:
        raise PackedFileError(f"has {file_bytes} bytes and no footer that fits them")
    file.seek(data_bytes)
    text = file.read(description_bytes)
    if _digest(text) != digest:
        raise PackedFileError("has a damaged description")
    description: dict[str, Any] = json.loads(text)
    if description["key"] != key:
        raise PackedFileError(f"was written for {description['key']!r}, not for {key!r}")
    if len(description["checksums"]) != -(-data_bytes // SEGMENT_BYTES):
        raise PackedFileError(f"has {len(description['checksums'])} checksums for {data_bytes} bytes")
    return description, data_bytes


def _check_data(region: mmap.mmap, checksums: list[int], num_threads: int, progress: Progress | None) -> None:
    """Reading everything once also brings it from a cold disk before the first request has to wait for it."""
    view = memoryview(region)

    def is_intact(index: int) -> bool:
        return zlib.crc32(view[index * SEGMENT_BYTES : (index + 1) * SEGMENT_BYTES]) == checksums[index]

    with ThreadPoolExecutor(max(1, num_threads), thread_name_prefix="check-weights") as pool:
        for index, intact in enumerate(pool.map(is_intact, range(len(checksums)))):
            if not intact:
                raise PackedFileError(f"is damaged between byte {index * SEGMENT_BYTES} and {(index + 1) * SEGMENT_BYTES}")
            if progress is not None:
                progress(min((index + 1) * SEGMENT_BYTES, view.nbytes), view.nbytes)


def _linear(region: mmap.mmap, described: dict[str, Any]) -> PackedLinear:
    bias = described["bias"]
    return PackedLinear(
        weight=_tensor(region, described["weight"]),
        bias=None if bias is None else _tensor(region, bias),
        num_outputs=described["num_outputs"],
        num_inputs=described["num_inputs"],
        layout=described["layout"],
    )


def _tensor(region: mmap.mmap, described: dict[str, Any]) -> torch.Tensor:
    """A tensor on the mapping, which it keeps alive. torch has no read-only tensors and warns of it: a write would be a fault."""
    count = 1
    for extent in described["shape"]:
        count *= extent
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(region, dtype=DTYPES[described["dtype"]], count=count, offset=described["offset"])
    return flat.view(described["shape"])
