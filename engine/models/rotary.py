"""Cosines and sines of rotary position embeddings for every position a model can see, computed once at load.

Owns the frequency rules (plain, linear, llama3, yarn); knows no model layers. A table makes a row's rotation independent
of the batch it is computed in, and of the vector width and threads of the machine's math library.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.model_spec import ModelSpec, RopeScaling


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """cos, sin fp32 [P, Dr/2], row p for position p."""

    cos: torch.Tensor
    sin: torch.Tensor


def build_rotary_table(spec: ModelSpec, num_positions: int, device: torch.device) -> RotaryTable:
    """The table for positions [0, num_positions).

    Angles are rounded to fp32 as every published implementation does (at position 8,000 that rounding is larger than all
    other errors together, and models were trained with it); cos and sin of that angle are then exact to fp32.
    """
    frequencies, amplitude = rotary_frequencies(spec)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).numpy().astype(np.float64)
    cos, sin = (np.float32(amplitude) * values.astype(np.float32) for values in (np.cos(angles), np.sin(angles)))
    return RotaryTable(torch.from_numpy(cos).to(device), torch.from_numpy(sin).to(device))


def rotary_frequencies(spec: ModelSpec) -> tuple[torch.Tensor, float]:
    """(radians per position fp32 [Dr/2], factor on cos and sin). Plain: arXiv 2104.09864, section 3.4.2."""
    exponents = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float32) / spec.rotary_dim
    wave = spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling.kind == "linear":
        return 1.0 / wave / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3_frequencies(1.0 / wave, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn_frequencies(wave, spec.rope_theta, scaling), _yarn_amplitude(scaling)
    return 1.0 / wave, 1.0


def _llama3_frequencies(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow rotations are stretched, fast ones kept, those between blended by their wavelength (Llama 3.1's reference code)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = ((scaling.original_positions / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


def _yarn_frequencies(wave: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Blend of stretched and kept rotations over a ramp of dimensions (arXiv 2309.00071, section 3.2)."""
    dim = 2 * wave.numel()

    def dimension_of(num_rotations: float) -> float:
        return dim * math.log(scaling.original_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * wave) * stretched + 1.0 / wave * (1 - stretched)


def _yarn_amplitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)
