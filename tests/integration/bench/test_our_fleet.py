"""Our own side of `bench.pd`: started by `baton up`, measured, and gone after its turn."""

from __future__ import annotations

from pathlib import Path

import httpx
import psutil
import pytest

from bench.servers import OurFleet, ServerFailed, topologies
from tests.harness import demo_model
from tests.processes import live_children


def test_a_fleet_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    before = live_children()
    fleet = OurFleet("aggregated", topologies([0, 1])["aggregated"], tmp_path, "m")
    with pytest.raises(ServerFailed, match=r"aggregated did not become ready(.|\n)*config\.json"), fleet.turn():
        raise AssertionError("an empty folder is no model")
    assert live_children() <= before


@pytest.mark.slow
def test_a_turn_ends_with_every_process_gone_also_when_it_breaks() -> None:
    before = live_children()
    fleet = OurFleet(
        "pd", topologies([0, 1])["pd"], demo_model(), "smollm2-135m", up_flags=("--cpus-prefill", "", "--cpus-decode", "")
    )
    with pytest.raises(ZeroDivisionError), fleet.turn() as active:
        assert active.ready_s is not None and active.ready_s > 0
        usable = httpx.get(f"{active.url}/readyz", timeout=10, trust_env=False).json()["workers"]
        assert (usable["prefill"], usable["decode"]) == (1, 1)
        names = set(active.tree.idle_cpu(0.2)["processes"]) | {" ".join(one.cmdline()) for one in active.tree.processes()}
        assert any("prefill-0" in name for name in names) and any("decode-0" in name for name in names)
        pids = [one.pid for one in active.tree.processes()]
        raise ZeroDivisionError
    assert live_children() <= before
    assert not any(psutil.pid_exists(pid) for pid in pids)
