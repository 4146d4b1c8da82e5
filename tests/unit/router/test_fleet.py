"""Who is accepted into the fleet's view: one model, one KV layout, the same choice at every router."""

from __future__ import annotations

from router.fleet import accept
from tests.unit.router.test_placement import d, p


def ids(accepted) -> list[str]:  # type: ignore[no-untyped-def]
    return [info.worker_id for info in accepted.workers]


def test_another_model_is_refused_with_both_names() -> None:
    accepted = accept([d("d0").info, d("d1", model="x").info], "m", "")
    assert ids(accepted) == ["d0"]
    assert accepted.refused[("d1", "i")] == ("model", "serves model 'x', this fleet serves 'm'")


def test_the_layout_in_force_stays_while_anybody_has_it() -> None:
    workers = [d("d0", fingerprint="old").info, d("d1", fingerprint="new").info, p("p0", fingerprint="new").info]
    assert ids(accept(workers, "m", "old")) == ["d0"]
    accepted = accept(workers[1:], "m", "old")
    assert ids(accepted) == ["d1", "p0"] and accepted.fingerprint == "new" and not accepted.refused


def test_at_first_the_layout_of_most_decode_workers_wins_whatever_the_order() -> None:
    workers = [d("d0", fingerprint="b").info, d("d1", fingerprint="a").info, d("d2", fingerprint="b").info]
    prefills = [p(f"p{i}", fingerprint="a").info for i in range(3)]
    for order in ([*workers, *prefills], [*prefills, *reversed(workers)]):
        accepted = accept(order, "m", "")
        assert sorted(ids(accepted)) == ["d0", "d2"] and accepted.fingerprint == "b"
        assert all(reason == "kv_layout" for reason, _ in accepted.refused.values()) and len(accepted.refused) == 4


def test_an_empty_registry_keeps_the_layout_in_force() -> None:
    assert accept([], "m", "f").fingerprint == "f"
