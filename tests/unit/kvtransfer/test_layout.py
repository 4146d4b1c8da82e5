"""Layouts: sizes, equality across processes, and a mismatch that names each differing field. Settings keep their ladder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from common.errors import LayoutMismatch
from kernels.wire import wire_block_bytes
from kvtransfer.layout import KVLayout
from kvtransfer.settings import FabricSettings

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16", model_digest="abc")


def test_block_bytes_and_blocks_of_tokens() -> None:
    assert LAYOUT.block_bytes == 30 * 2 * 3 * 16 * 64 * 2
    assert [LAYOUT.num_blocks_of(n) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


def test_wire_formats_halve_what_travels_and_agree_with_the_kernels() -> None:
    assert LAYOUT.wire_block_bytes == LAYOUT.block_bytes
    for wire in ("int8", "fp8"):
        layout = replace(LAYOUT, wire=wire)
        assert layout.block_bytes == LAYOUT.block_bytes
        assert layout.wire_block_bytes == wire_block_bytes(30 * 2 * 3, 16 * 64) < 0.51 * LAYOUT.block_bytes
    with pytest.raises(ValueError, match="wire must be one of none, int8, fp8"):
        replace(LAYOUT, wire="int4")


def test_equal_layouts_have_equal_fingerprints_in_every_process() -> None:
    code = f"from kvtransfer.layout import KVLayout; print(({LAYOUT!r}).fingerprint())"
    prints = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert prints == {LAYOUT.fingerprint()}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 31),
        ("num_kv_heads", 1),
        ("head_dim", 32),
        ("block_size", 8),
        ("dtype", "float32"),
        ("model_digest", "x"),
        ("version", 2),
        ("wire", "int8"),
    ],
)
def test_each_differing_field_changes_the_fingerprint_and_is_named(name: str, value: Any) -> None:
    other = replace(LAYOUT, **{name: value})
    assert other.fingerprint() != LAYOUT.fingerprint()
    reason = LAYOUT.explain_mismatch(other)
    assert reason is not None and f"{name} {getattr(LAYOUT, name)} here, {value} there" in reason
    assert LAYOUT.explain_mismatch(replace(LAYOUT)) is None


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {**LAYOUT.to_wire(), "more": 1},
        {**LAYOUT.to_wire(), "dtype": "int4"},
        {**LAYOUT.to_wire(), "num_layers": 1 << 40},
        {**LAYOUT.to_wire(), "head_dim": "64"},
    ],  # noqa: E501
)
def test_what_is_no_layout_is_refused(value: Any) -> None:
    with pytest.raises(LayoutMismatch):
        KVLayout.from_wire(value)


def test_a_layout_survives_the_wire() -> None:
    assert KVLayout.from_wire(LAYOUT.to_wire()) == LAYOUT


def test_the_timeout_ladder_is_checked() -> None:
    FabricSettings()
    with pytest.raises(ValueError, match="ladder"):
        FabricSettings(suspect_s=6.0)
    with pytest.raises(ValueError, match="links_max must be positive"):
        FabricSettings(links_max=0)
