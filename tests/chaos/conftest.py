"""The same fleets as the end-to-end tests, with two workers of each role where something is going to die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Fleet, Store, demo_model


@pytest.fixture(scope="package")
def model() -> Path:
    return demo_model()


@pytest.fixture(scope="package")
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.stop()


@pytest.fixture(scope="module")
def pairs(model: Path, store: Store) -> Iterator[Fleet]:
    """Two prefill and two decode workers."""
    with Fleet(model, store.url, prefill=2, decode=2, num_blocks=256) as fleet:
        yield fleet
