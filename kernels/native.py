"""Native CPU kernels (being built)."""

from __future__ import annotations

import torch

from kernels.reference import ReferenceOps


class NativeUnavailable(Exception):
    """The native kernels cannot run here; the message says why."""


class NativeOps(ReferenceOps):
    def __init__(self, dtype: torch.dtype) -> None:
        raise NativeUnavailable("not built yet")
