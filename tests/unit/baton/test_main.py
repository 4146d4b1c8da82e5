"""The command line: what is parsed, what is refused, and that nothing heavy is loaded for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.main import build_parser, main
from baton.subprocess_probe import PACKAGE_ROOT
from common.api_keys import KeyRing, parse_entries

COMMANDS = ("up", "down", "chat", "ps", "doctor", "bench")


@pytest.mark.parametrize("command", (*COMMANDS, "key"))
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_defaults_for_everything(command: str) -> None:
    assert build_parser().parse_args([command]).command == command


def test_the_defaults_of_up_and_bench_are_the_documented_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDIS_URL", raising=False)
    up = build_parser().parse_args(["up"])
    assert (up.prefill, up.decode, up.port, up.host, up.model, up.transport) == (1, 1, 8000, "127.0.0.1", "smollm2-135m", "auto")
    assert (up.redis_url, up.self_check, up.detach) == ("", True, False)
    bench = build_parser().parse_args(["bench"])
    assert (bench.endpoint, bench.concurrency, bench.ignore_eos) == ("completions", 4, True)


def test_the_redis_url_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere:1")
    assert build_parser().parse_args(["up"]).redis_url == "redis://elsewhere:1"


@pytest.mark.parametrize(
    "words",
    [
        ["up", "--decode", "0"],
        ["up", "--prefill", "-1"],
        ["up", "--port", "70000"],
        ["up", "--transport", "carrier-pigeon"],
        ["up", "--dtype", "int4"],
        ["up", "--drain-grace", "nan"],
        ["bench", "--concurrency", "0"],
        ["bench", "--endpoint", "embeddings"],
        ["bench", "--timeout", "-3"],
        ["fly"],
        [],
    ],
)
def test_flags_that_make_no_sense_end_with_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_flags_that_do_not_fit_together_end_with_code_2_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["up", "--decode", "2", "--cpus-decode", "0"]) == 2
    assert "--cpus-decode names 1 CPU lists for 2 workers" in capsys.readouterr().err


def test_the_command_line_loads_neither_torch_nor_a_service() -> None:
    names = ", ".join(f"baton.{name}" for name in COMMANDS)
    code = (
        f"import sys, {names}\n"
        "bad = {'torch', 'transformers', 'nixl_cu13', 'router', 'prefill_service', 'decode_service', 'kvtransfer', 'engine'}\n"
        "print(sorted(bad & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE_ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_key_prints_the_entry_alone_to_standard_output_and_the_key_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "team-a"]) == 0
    shown = capsys.readouterr()
    ring = KeyRing(parse_entries(shown.out, "stdout"))
    key = shown.err.split()[-1]
    assert ring.find(key) == "team-a" and key not in shown.out
    assert main(["key", "not an id"]) == 2
    assert "1 to 64 letters" in capsys.readouterr().err
