"""Chooses the implementation of the operations, once per device, and says why.

Knows which implementation serves which device type and dtype; holds no state. The CPU with fp32 or bf16 runs the native kernels
when a compiler is there, CUDA the Triton kernels when triton is installed, everything else the plain-torch reference.
"""

from __future__ import annotations

import logging
import os

import torch

from kernels.native import NativeOps
from kernels.native_build import NativeUnavailable
from kernels.ops import Ops
from kernels.reference import ReferenceOps

CHOICE_VARIABLE = "BATON_KERNELS"
CHOICES = ("auto", "native", "triton", "reference")
INVARIANCE_VARIABLE = "BATON_BATCH_INVARIANT"
_log = logging.getLogger(__name__)


class _Unavailable(Exception):
    """An implementation cannot be had here; the message says why."""


def select_ops(device: torch.device, dtype: torch.dtype, choice: str | None = None) -> Ops:
    """The operations for one device. `choice` (default: the environment's BATON_KERNELS, else auto) may insist.

    Auto falls back to the reference with one logged warning whose reason stays visible in `describe()`; an insisted-on
    `native` or `triton` that cannot be had raises RuntimeError instead.
    """
    wanted = choice if choice is not None else os.environ.get(CHOICE_VARIABLE, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{CHOICE_VARIABLE} must be one of {', '.join(CHOICES)}, got {wanted!r}")
    if wanted == "reference":
        return ReferenceOps("asked for")
    if wanted == "auto" and device.type not in ("cpu", "cuda"):
        return ReferenceOps(f"no faster kernels for device type {device.type!r}")
    kind = wanted if wanted != "auto" else "native" if device.type == "cpu" else "triton"
    try:
        return _native(device, dtype) if kind == "native" else _triton(device, dtype)
    except _Unavailable as error:
        if wanted != "auto":
            raise RuntimeError(f"{CHOICE_VARIABLE}={wanted}, but: {error}") from error
        _log.warning("%s kernels unavailable, using the plain-torch reference: %s", kind, error)
        return ReferenceOps(f"{kind} kernels unavailable: {error}")


def _native(device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type != "cpu":
        raise _Unavailable(f"native kernels run on cpu, not on {device.type!r}")
    try:
        return NativeOps(dtype)
    except NativeUnavailable as error:
        raise _Unavailable(str(error)) from error


def _triton(device: torch.device, dtype: torch.dtype) -> Ops:
    try:
        from kernels.triton_launch import TritonUnavailable
        from kernels.triton_ops import TritonOps
    except ImportError as error:
        raise _Unavailable(f"triton cannot be imported ({error}); it is in the extra 'gpu'") from error
    try:
        return TritonOps(device, dtype, is_batch_invariant=_is_batch_invariant())
    except TritonUnavailable as error:
        raise _Unavailable(str(error)) from error


def _is_batch_invariant() -> bool:
    """BATON_BATCH_INVARIANT=1: matrix products on a GPU in an order that no batch changes. Off by default: cuBLAS is faster.

    The native CPU kernels are batch-invariant always.
    """
    value = os.environ.get(INVARIANCE_VARIABLE, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{INVARIANCE_VARIABLE} must be 0 or 1, got {value!r}")
    return value == "1"
