"""docs/api.md against the models that requests are parsed with: nothing supported or refused is missing there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from router.api_models import LOGIT_BIAS_MAX, LOGPROBS_MAX, UNSUPPORTED_PARAMETERS, ChatCompletionRequest, CompletionRequest

DOCUMENT = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
PARAMETERS = DOCUMENT.split("## Parameters")[1].split("## Logprobs")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PARAMETERS.splitlines() if line.startswith("| `")]


def documented(column: int) -> set[str]:
    """Names of the rows whose cell in this column is not a dash."""
    return {name for row in ROWS if row[column] != "–" for name in re.findall(r"`(\w+)`", row[0])}


@pytest.mark.parametrize(("column", "model"), [(1, CompletionRequest), (2, ChatCompletionRequest)])
def test_the_table_has_exactly_the_parameters_of_each_endpoint(column: int, model: type[BaseModel]) -> None:
    assert documented(column) == set(model.model_fields)


def test_refused_parameters_are_all_named() -> None:
    refused = DOCUMENT.split("Refused unless neutral:")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", refused)) == set(UNSUPPORTED_PARAMETERS)


def test_limits_are_the_codes() -> None:
    assert f"0 to {LOGPROBS_MAX}" in DOCUMENT and f"up to {LOGIT_BIAS_MAX:,} token ids" in DOCUMENT
