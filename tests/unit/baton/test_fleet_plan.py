"""Which processes `baton up` runs for which options."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from baton.fleet_plan import FleetOptions, PlanError, Surroundings, check_options, plan_fleet, served_model_name
from baton.main import build_parser
from baton.up import options_from
from common.settings import load_settings
from router.settings import RouterSettings

AROUND = Surroundings(
    python="/py",
    model_folder="/models/m",
    redis_url="redis://r",
    cluster="c",
    num_cpus=8,
    port=8123,
    transport="ucx",
    env={"A": "1"},
)


def options(**changes: object) -> FleetOptions:
    values: dict[str, object] = {
        "num_prefill": 1, "num_decode": 1, "host": "127.0.0.1", "port": 0, "transport": "auto", "model_name": "m",
    }  # fmt: skip
    return FleetOptions(**{**values, **changes})  # type: ignore[arg-type]


def flag(argv: Sequence[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def test_one_router_and_the_wanted_workers_each_under_its_own_name() -> None:
    specs = plan_fleet(options(num_prefill=2, num_decode=3), AROUND)
    assert [spec.name for spec in specs] == ["router", "prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"]
    assert [spec.argv[2] for spec in specs] == ["router.main", *["prefill_service.main"] * 2, *["decode_service.main"] * 3]
    assert [flag(spec.argv, "--worker-id") for spec in specs[1:]] == [spec.name for spec in specs[1:]]
    assert all(flag(spec.argv, "--cluster") == "c" and flag(spec.argv, "--redis-url") == "redis://r" for spec in specs)


def test_prompts_queue_where_there_is_no_prefill_worker_on_purpose() -> None:
    assert flag(plan_fleet(options(), AROUND)[0].argv, "--local-prefill-tokens-max") is None, "the router's own bound"
    router = plan_fleet(options(num_prefill=0), AROUND)[0]
    assert flag(router.argv, "--local-prefill-tokens-max") == "65536"
    assert load_settings(RouterSettings, router.argv[3:], {"BATON_CLUSTER_SECRET": "s" * 32}).local_prefill_tokens_max == 65536


def test_the_router_stops_before_the_workers() -> None:
    router, *workers = plan_fleet(options(), AROUND)
    assert all(router.stop_stage < worker.stop_stage for worker in workers)


def test_the_chosen_port_and_transport_are_used_not_the_wishes() -> None:
    router, worker, _ = plan_fleet(options(), AROUND)
    assert flag(router.argv, "--port") == "8123"
    assert flag(worker.argv, "--transport") == "ucx"


def test_the_secret_travels_by_environment_never_by_flags() -> None:
    for spec in plan_fleet(options(), AROUND):
        assert spec.env["A"] == "1"
        assert not any("secret" in word for word in spec.argv)


def test_cores_are_shared_out_as_threads() -> None:
    specs = plan_fleet(options(num_prefill=1, num_decode=2), AROUND)
    assert [flag(spec.argv, "--threads") for spec in specs[1:]] == ["2"] * 3
    crowded = plan_fleet(options(num_prefill=8, num_decode=8), AROUND)
    assert {flag(spec.argv, "--threads") for spec in crowded[1:]} == {"1"}


def test_pinned_workers_take_their_cores_as_threads() -> None:
    specs = plan_fleet(options(num_decode=2, cpus_prefill="0-1", cpus_decode="2; 3"), AROUND)
    assert [flag(spec.argv, "--cpus") for spec in specs[1:]] == ["0-1", "2", "3"]
    assert all(flag(spec.argv, "--threads") is None for spec in specs)
    assert flag(plan_fleet(options(cpus_prefill="0", threads=3), AROUND)[1].argv, "--threads") == "3"


def test_what_is_not_asked_for_is_left_to_the_workers() -> None:
    worker = plan_fleet(options(), AROUND)[1].argv
    assert not {"--dtype", "--block-size", "--num-blocks"} & set(worker)
    worker = plan_fleet(options(dtype="float32", block_size=8, num_blocks=99), AROUND)[1].argv
    assert [flag(worker, name) for name in ("--dtype", "--block-size", "--num-blocks")] == ["float32", "8", "99"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_decode": 0}, "at least one decode"),
        ({"num_prefill": -1}, "negative"),
        ({"num_decode": 2, "cpus_decode": "0"}, "1 CPU lists for 2 workers"),
        ({"cpus_prefill": "0;1"}, "2 CPU lists for 1 workers"),
    ],
)
def test_options_that_do_not_fit_are_refused_with_the_reason(changes: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_options(options(**changes))


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("org/model", "org/model"),
        ("/data/models/llama/", "llama"),
        ("./here", "here"),
        ("~/models/x", "x"),
        ("folder/tiny.gguf", "tiny"),
        ("tiny.gguf", "tiny"),
    ],
)
def test_the_name_towards_clients(model: str, name: str) -> None:
    assert served_model_name(model) == name


def test_the_command_line_reaches_the_plan() -> None:
    words = "up --prefill 2 --decode 3 --model org/m --port 0 --host ::1 --transport tcp --dtype float32 --block-size 32"
    words += " --num-blocks 7 --threads 2 --redis-url redis://x --no-self-check --instance other"
    words += " --cpus-prefill 0;1 --cpus-decode 2;3;4"
    chosen = options_from(build_parser().parse_args(words.split()))
    assert (chosen.instance, chosen.redis_url, chosen.has_self_check, chosen.model) == ("other", "redis://x", False, "org/m")
    fleet = chosen.fleet
    assert (fleet.num_prefill, fleet.num_decode, fleet.host, fleet.port, fleet.transport) == (2, 3, "::1", 0, "tcp")
    assert (fleet.dtype, fleet.block_size, fleet.num_blocks, fleet.threads) == ("float32", 32, 7, 2)
    assert (fleet.model_name, fleet.cpus_prefill, fleet.cpus_decode) == ("org/m", "0;1", "2;3;4")
