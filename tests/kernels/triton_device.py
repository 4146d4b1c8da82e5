"""TritonOps for tests that think in CPU tensors: interpreted on the CPU, or compiled on a GPU with all tensors carried there.

Owns the carrying: arguments go to the device, results come back, and what a call changed in place is copied back.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch

from kernels.ops import Ops


def triton_ops(*, is_batch_invariant: bool = True, dtype: torch.dtype = torch.float32) -> Ops:
    """Skips the test where Triton can run neither way."""
    pytest.importorskip("triton")
    from kernels.triton_launch import INTERPRETED
    from kernels.triton_ops import TritonOps

    if INTERPRETED:
        return TritonOps(torch.device("cpu"), dtype, is_batch_invariant)
    if not torch.cuda.is_available():
        pytest.skip("Triton is not in interpreter mode and torch finds no GPU")
    return cast(Ops, _Carried(TritonOps(torch.device("cuda"), dtype, is_batch_invariant), torch.device("cuda")))


def skip_without_index_checks(ops: Ops) -> None:
    """A GPU stops for good at a bad index (a device-side assertion), so only the CPU can go on after one."""
    if isinstance(ops, _Carried):
        pytest.skip("indexes on a GPU are not looked at before the launch")


class _Carried:
    """Any object whose methods take and give tensors, as if it lived on the CPU."""

    def __init__(self, inner: Any, device: torch.device) -> None:
        self._inner = inner
        self._device = device

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        return self._carry(attribute) if callable(attribute) else attribute

    def _carry(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            there = [_moved(arg, self._device) for arg in args]
            result = function(*there, **{name: _moved(value, self._device) for name, value in kwargs.items()})
            for here, moved in zip(args, there, strict=True):
                if isinstance(here, torch.Tensor) and not torch.is_inference(here):
                    here.copy_(moved)
            return _Carried(result, self._device) if hasattr(result, "forward") else _moved(result, torch.device("cpu"))

        return call


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(item, device) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return type(value)(**fields)
    return value
