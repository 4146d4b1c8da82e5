"""The weights of a Hugging Face folder: memory-mapped safetensors files, single or sharded, checked against the spec.

Owns finding the files, checking names and shapes before anything is read, and a cheap fingerprint; knows nothing of
layers. Pages are read from disk when a tensor is taken, so opening costs milliseconds whatever the size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model_spec import ModelError, ModelSpec
from engine.weights.tensor_names import required_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), at least once at the end."""

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_HEADER_BYTES_MAX = 100 << 20
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 64, 4096


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError when it is missing or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The weight files of the folder, sorted by name. ModelError when there are none or the index names a missing one."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if not (folder / INDEX_NAME).is_file():
        raise ModelError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME}: weight_map is missing")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder / INDEX_NAME}: weight_map names {name!r}, which is not a plain file name")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: named by {INDEX_NAME} but missing")
    return [folder / name for name in names]


class SafetensorsFolder:
    """Open weight files of one model; a context manager. Raises ModelError when a tensor is missing or has another shape.

    `take` converts to the model's dtype and device and reports progress; each tensor is expected to be taken once.
    """

    def __init__(
        self, folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress | None
    ) -> None:
        self._dtype, self._device, self._progress = dtype, device, progress
        self._required = required_tensors(spec)
        self._sources: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}
        self._done_bytes = 0
        for path in weight_files(folder):
            try:
                handle = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: not a complete safetensors file ({error})") from error
            self._check_file(path, handle)
        missing = sorted(set(self._required) - set(self._sources))
        if missing:
            raise ModelError(f"{folder}: {len(missing)} tensors are missing, the first is {missing[0]}")

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sources.clear()

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())

    def take(self, name: str) -> torch.Tensor:
        """The tensor in the model's dtype, on its device, contiguous."""
        tensor: torch.Tensor = self._sources[name].get_tensor(name)
        self._done_bytes += self._sizes[name]
        if self._progress is not None:
            self._progress(self._done_bytes, self.total_bytes)
        return tensor.to(device=self._device, dtype=self._dtype).contiguous()

    def _check_file(self, path: Path, handle: Any) -> None:
        for name in handle.keys():  # noqa: SIM118  (the handle is no mapping)
            if name not in self._required:
                continue  # rotary buffers of old files, a tied head stored twice
            stored = handle.get_slice(name)
            shape, expected = tuple(stored.get_shape()), self._required[name]
            if shape != expected:
                raise ModelError(f"{path}: tensor {name} has shape {shape}, the configuration says {expected}")
            if stored.get_dtype() not in ("F32", "F16", "BF16"):
                raise ModelError(f"{path}: tensor {name} has type {stored.get_dtype()}; supported are F32, F16, BF16")
            self._sources[name] = handle
            self._sizes[name] = handle.get_tensor(name).nbytes


def weights_fingerprint(folder: Path, spec: ModelSpec) -> str:
    """Hex digest that two workers compare before KV moves between them: same model, same weights.

    Covers the parsed configuration and, per weight file, size, header and 64 evenly spaced samples of 4 KiB, so another
    fine-tune with the same shapes differs, yet no file is read whole. Independent of path, host and process.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton.weights")
    digest.update(json.dumps(dataclasses.asdict(spec), sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(size, _HEADER_BYTES_MAX):
                raise ModelError(f"{path}: not a safetensors file, header of {header_bytes} bytes")
            digest.update(file.read(header_bytes))
            last = max(0, size - _SAMPLE_BYTES)
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(last * sample // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
