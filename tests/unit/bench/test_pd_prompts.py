"""Prompts have exactly the wanted number of tokens and share no prefix; the handover's numbers come from the timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.handover import NoHandover, medians, row_of
from bench.pd_prompts import TokenPrompts
from tests.unit.bench.tiny_model import write_tokenizer

TIMELINE: dict[str, Any] = {
    "mode": "disaggregated", "transport": "ucx", "stages": {"prefill": 1.5}, "prefill": {"num_chunks": 6},
    "handoff": {
        "num_bytes": 1000, "num_frames": 12, "handover_s": 0.010,
        "stages": {"transfer": 0.040, "scatter": 0.030, "first_decode": 0.025},
    },
}  # fmt: skip


def test_lengths_are_exact_and_prompts_repeat_only_with_their_seed(tmp_path: Path) -> None:
    prompts = TokenPrompts(write_tokenizer(tmp_path))
    lengths = [1, 100, 128, 1500, 128]
    made = prompts.make(1, lengths)
    assert [len(prompt) for prompt in made] == lengths
    assert made == prompts.make(1, lengths)
    starts = {tuple(prompt[:16]) for seed in (1, 2) for prompt in prompts.make(seed, lengths[1:])}
    assert len(starts) == 8, "no two share a block of 16 tokens"


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        TokenPrompts(tmp_path)


def test_the_handovers_row_and_its_medians() -> None:
    row = row_of(TIMELINE)
    assert row["handover_minus_transfer_ms"] == pytest.approx(-30.0)
    assert row["handover_over_transfer"] == pytest.approx(0.25)
    assert row["to_first_decode_token_ms"] == pytest.approx(35.0)
    middle = medians([row, row | {"handover_ms": 12.0}, row | {"handover_ms": 99.0}])
    assert middle["handover_ms"] == 12.0
    assert "transport" not in middle


def test_a_request_that_stayed_on_one_worker_is_no_handover() -> None:
    with pytest.raises(NoHandover, match="short prompt"):
        row_of(TIMELINE | {"handoff": None, "mode": "local", "placement_reason": "short prompt"})
    with pytest.raises(NoHandover, match="one host"):
        row_of(TIMELINE | {"handoff": TIMELINE["handoff"] | {"handover_s": None}})
