"""Reads one frozen settings object from flags, environment and an optional TOML file, in this order of precedence.

The settings class is a pydantic model; each field's description is its `--help`. Text comes in here and nowhere else: objects further
in get the values they need, never the whole settings.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

T = TypeVar("T", bound=BaseModel)


class SettingsError(Exception):
    """One line for the person who started the process, naming the flag."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message} (see --help)")


def load_settings(
    cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prefix: str = "BATON_", prog: str | None = None
) -> T:
    """The settings of one process. Raises SettingsError for an unknown flag or a bad value; exits with 0 for --help.

    Secrets (SecretStr fields) are taken from the environment or the file only: a flag would show them in the process list.
    """
    parser = _Parser(
        prog=prog,
        description=(cls.__doc__ or "").strip().partition("\n")[0],
        epilog=_secrets_help(cls, prefix),
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help="TOML file with further settings; flags and environment win over it")
    for name, field in cls.model_fields.items():
        if not _is_secret(field):
            parser.add_argument(
                _flag(name),
                dest=name,
                help=_help(name, field, prefix),
                choices=_choices(field),
                default=None,
                metavar=_metavar(field),
            )
    given = {key: value for key, value in vars(parser.parse_args(argv)).items() if value is not None}
    values: dict[str, Any] = _from_file(given.pop("config", None), cls)
    values |= {name: env[prefix + name.upper()] for name in cls.model_fields if prefix + name.upper() in env}
    values |= given
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise SettingsError(_explain(error, cls, prefix)) from error


def settings_or_exit(cls: type[T], argv: Sequence[str], env: Mapping[str, str], *, prog: str) -> T:
    """`load_settings` for a `main`: an error is one line on stderr and exit status 2."""
    try:
        return load_settings(cls, argv, env, prog=prog)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)  # noqa: T201 - before logging exists, for the person at the terminal
        raise SystemExit(2) from error


def _from_file(path: Path | None, cls: type[BaseModel]) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path}: {error}") from error
    if unknown := sorted(set(values) - set(cls.model_fields)):
        raise SettingsError(f"--config {path}: unknown settings {', '.join(unknown)}")
    return values


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_secret(field: FieldInfo) -> bool:
    return _mentions_secret(field.annotation)


def _mentions_secret(annotation: object) -> bool:
    return annotation is SecretStr or any(_mentions_secret(part) for part in get_args(annotation))


def _choices(field: FieldInfo) -> list[str] | None:
    if get_origin(field.annotation) is Literal:
        return [str(value) for value in get_args(field.annotation)]
    return None


def _metavar(field: FieldInfo) -> str | None:
    if _choices(field):
        return None
    annotation = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    return getattr(annotation, "__name__", "value").upper()


def _help(name: str, field: FieldInfo, prefix: str) -> str:
    text = field.description or ""
    if not field.is_required():
        default = field.get_default(call_default_factory=True, validated_data={})
        text += f" (default: {str(default) if isinstance(default, Path) else default!r})"
    return f"{text} [{prefix}{name.upper()}]".replace("%", "%%")  # argparse formats help texts with %


def _secrets_help(cls: type[BaseModel], prefix: str) -> str:
    lines = [
        f"{prefix}{name.upper()}: {field.description or 'a secret'}"
        for name, field in cls.model_fields.items()
        if _is_secret(field)
    ]
    return "Only from the environment or the file: " + "; ".join(lines) if lines else ""


def _explain(error: ValidationError, cls: type[BaseModel], prefix: str) -> str:
    parts = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        field = cls.model_fields.get(name)
        where = f"{prefix}{name.upper()}" if field is not None and _is_secret(field) else _flag(name) if name else "settings"
        what = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            what = "is required"
        elif field is not None and not _is_secret(field) and name:
            what += f", got {item['input']!r}"
        parts.append(f"{where}: {what[0].lower() + what[1:]}")
    return "; ".join(parts)
