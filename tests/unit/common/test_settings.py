"""Settings: precedence, one-line errors that name the flag, secrets that stay out of command lines and messages."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from common.settings import SettingsError, load_settings, settings_or_exit
from decode_service.settings import DecodeSettings
from prefill_service.settings import PrefillSettings
from router.settings import RouterSettings


class Example(BaseModel):
    """An example service; 100 % of its settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(description="folder of the model")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="port; 0 takes a free one (50 % do)")
    heartbeat_s: float = Field(default=0.5, gt=0, description="seconds between beats")
    is_eager: bool = Field(default=False, description="whether it hurries")
    transport: Literal["ucx", "tcp"] = Field(default="ucx", description="data plane")
    note: str | None = Field(default=None, description="a remark")
    cpus: tuple[int, ...] = Field(default_factory=tuple, description="cores")
    secret: SecretStr = Field(default=SecretStr("a secret of default"), description="shared secret")

    @field_validator("secret")
    @classmethod
    def _long(cls, value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < 8:
            raise ValueError(f"has {len(value.get_secret_value())} characters, at least 8 are needed")
        return value


def load(*argv: str, **env: str) -> Example:
    return load_settings(Example, argv, env, prog="example")


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    path = config(tmp_path, 'model = "from-file"\ngrpc_port = 1\nheartbeat_s = 0.1\nnote = "file"\n')
    settings = load("--config", path, "--grpc-port", "3", BATON_GRPC_PORT="2", BATON_HEARTBEAT_S="0.2")
    assert (settings.grpc_port, settings.heartbeat_s, settings.note, settings.transport) == (3, 0.2, "file", "ucx")
    assert settings.model == Path("from-file")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("no", False)])
def test_booleans_are_read_as_words(text: str, value: bool) -> None:
    assert load("--model", "m", "--is-eager", text).is_eager is value


def test_the_result_is_frozen() -> None:
    with pytest.raises(ValidationError):
        load("--model", "m").grpc_port = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "flag", "said"),
    [
        ([], "--model", "is required"),
        (["--model", "m", "--grpc-port", "70000"], "--grpc-port", "got '70000'"),
        (["--model", "m", "--grpc-port", "x"], "--grpc-port", "got 'x'"),
        (["--model", "m", "--heartbeat-s", "0"], "--heartbeat-s", "greater than 0"),
        (["--model", "m", "--heartbeat-s", "nan"], "--heartbeat-s", "nan"),
        (["--model", "m", "--transport", "pigeon"], "--transport", "pigeon"),
        (["--model", "m", "--bogus", "1"], "--bogus", "unrecognized"),
        (["--model", "m", "--grpc", "1"], "--grpc", "unrecognized"),
        (["--model", "m", "--grpc-port"], "--grpc-port", "expected one argument"),
        (["--model", "m", "--secret", "on the command line"], "--secret", "unrecognized"),
    ],
)
def test_a_bad_flag_is_one_line_that_names_it(argv: list[str], flag: str, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(*argv)
    message = str(caught.value)
    assert flag in message
    assert said in message
    assert "\n" not in message


def test_a_bad_environment_value_names_the_flag() -> None:
    with pytest.raises(SettingsError, match=r"--grpc-port.*got 'many'"):
        load("--model", "m", BATON_GRPC_PORT="many")


def test_all_bad_values_are_told_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        load("--grpc-port", "-1", "--heartbeat-s", "-1")
    assert all(flag in str(caught.value) for flag in ("--model", "--grpc-port", "--heartbeat-s"))


def test_a_bad_secret_is_named_by_its_variable_and_never_shown() -> None:
    with pytest.raises(SettingsError, match="BATON_SECRET: has 7 characters") as caught:
        load("--model", "m", BATON_SECRET="hunter2")
    assert "hunter2" not in str(caught.value)


def test_a_secret_comes_from_environment_or_file(tmp_path: Path) -> None:
    assert load("--model", "m", BATON_SECRET="correct horse").secret.get_secret_value() == "correct horse"
    path = config(tmp_path, 'secret = "battery staple"\n')
    assert load("--model", "m", "--config", path).secret.get_secret_value() == "battery staple"


@pytest.mark.parametrize(
    ("text", "said"), [("model = ", "settings.toml"), ('modle = "m"', "modle"), ('model = "m"\ngrpc_port = 99999', "--grpc-port")]
)
def test_a_bad_file_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load("--config", config(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="absent.toml"):
        load("--config", str(tmp_path / "absent.toml"))


def test_help_tells_each_setting_its_default_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load("--help")
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "An example service; 100 % of its settings." in text
    assert "port; 0 takes a free one (50 % do) (default: 0) [BATON_GRPC_PORT]" in text
    assert "cores (default: ()) [BATON_CPUS]" in text
    assert "{ucx,tcp}" in text
    assert "BATON_SECRET: shared secret" in text
    assert "secret of default" not in text
    assert "--secret" not in text


def test_main_gets_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        settings_or_exit(Example, ["--bogus"], {}, prog="example")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("example: unrecognized arguments: --bogus")


class Secrets(BaseModel):
    """Secrets in less simple types."""

    api_key: SecretStr | None = Field(default=None, description="a key")
    old_keys: tuple[SecretStr, ...] = Field(default=(), description="more keys")


def test_an_optional_or_repeated_secret_is_no_flag_either() -> None:
    for flag in ("--api-key", "--old-keys"):
        with pytest.raises(SettingsError, match="unrecognized"):
            load_settings(Secrets, [flag, "x"], {})
    settings = load_settings(Secrets, [], {"BATON_API_KEY": "hunter2"})
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "hunter2"
    with pytest.raises(SettingsError, match="BATON_OLD_KEYS") as caught:
        load_settings(Secrets, [], {"BATON_OLD_KEYS": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("service", [RouterSettings, PrefillSettings, DecodeSettings])
def test_no_service_takes_its_secret_on_the_command_line(service: type[BaseModel]) -> None:
    with pytest.raises(SettingsError, match="--cluster-secret"):
        load_settings(service, ["--cluster-secret", "x" * 32], {})
    with pytest.raises(SettingsError, match="BATON_CLUSTER_SECRET: has 7 characters") as caught:
        load_settings(service, ["--model", "m", "--redis-url", "memory://"], {"BATON_CLUSTER_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)
