"""The weights of a Hugging Face folder: memory-mapped safetensors files, single or sharded, checked against the spec.

Owns checking names and shapes before anything is read, and the mappings; knows nothing of layers. Pages are read from disk when a
tensor is used, so opening costs milliseconds whatever the size; a mapping lives as long as a tensor that still points into it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.model_spec import ModelError, ModelSpec
from engine.weights.model_files import weight_files
from engine.weights.tensor_names import required_tensors

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), at least once at the end."""


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
