"""Chooses the implementation of the operations, once per device, and says why.

Knows which implementation serves which device type and dtype; holds no state. Today: CPU with fp32 or bf16 runs the native
kernels when a compiler is there, everything else the plain-torch reference; Triton will take `cuda` here.
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
CHOICES = ("auto", "native", "reference")
_log = logging.getLogger(__name__)


def select_ops(device: torch.device, dtype: torch.dtype, choice: str | None = None) -> Ops:
    """The operations for one device. `choice` (default: the environment's BATON_KERNELS, else auto) may insist.

    Auto falls back to the reference with one logged warning whose reason stays visible in `describe()`; an insisted-on
    `native` that cannot be had raises RuntimeError instead.
    """
    wanted = choice if choice is not None else os.environ.get(CHOICE_VARIABLE, "auto")
    if wanted not in CHOICES:
        raise ValueError(f"{CHOICE_VARIABLE} must be one of {', '.join(CHOICES)}, got {wanted!r}")
    if wanted == "reference":
        return ReferenceOps("asked for")
    if wanted == "auto" and device.type != "cpu":
        return ReferenceOps(f"no faster kernels for device type {device.type!r} yet")
    try:
        if device.type != "cpu":
            raise NativeUnavailable(f"native kernels run on cpu, not on {device.type!r}")
        return NativeOps(dtype)
    except NativeUnavailable as error:
        if wanted == "native":
            raise RuntimeError(f"{CHOICE_VARIABLE}=native, but: {error}") from error
        _log.warning("native CPU kernels unavailable, using the plain-torch reference: %s", error)
        return ReferenceOps(f"native kernels unavailable: {error}")
