"""The native kernels of each instruction set that can run here, for suites that hold for all of them."""

from __future__ import annotations

import pytest
import torch

from kernels.native import NativeOps
from kernels.native_build import (
    EMULATED_AMX,
    INSTRUCTION_SETS,
    InstructionSet,
    NativeUnavailable,
    instruction_sets_here,
    load_library,
)

HERE = {isa.name: isa for isa in (*instruction_sets_here(), EMULATED_AMX)}
"""By name; what a suite is run with. tests/kernels/test_native_build.py says visibly which are missing."""
MISSING = [isa.name for isa in INSTRUCTION_SETS if isa.name not in HERE]


def native_ops(isa: InstructionSet | str) -> NativeOps:
    """Operations of either dtype. Skips the test where there is no compiler."""
    try:
        return NativeOps(torch.float32, load_library(HERE[isa] if isinstance(isa, str) else isa))
    except NativeUnavailable as error:
        pytest.skip(str(error))
