"""Fleets and reference answers shared by the end-to-end tests. Everything runs in fp32 so that equality is exact."""

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


@pytest.fixture(scope="package")
def disaggregated(model: Path, store: Store) -> Iterator[Fleet]:
    """One prefill and one decode worker; every prompt, however short, goes over UCX."""
    with Fleet(model, store.url) as fleet:
        yield fleet
        fleet.wait_idle()
        codes = fleet.stop()
    assert set(codes.values()) == {0}, codes


@pytest.fixture(scope="package")
def aggregated(model: Path, store: Store) -> Iterator[Fleet]:
    """One decode worker alone."""
    with Fleet(model, store.url, prefill=0) as fleet:
        yield fleet
        fleet.wait_idle()
        codes = fleet.stop()
    assert set(codes.values()) == {0}, codes
