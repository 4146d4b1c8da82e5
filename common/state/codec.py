"""How the values of the state store are written: JSON objects, read strictly, versioned by their fields.

A record that cannot be read (another version's, or damaged) is skipped by the reader and counted as its loss: the store is soft.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypeVar, get_type_hints

from common.state.store import JournalEntry
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState

T = TypeVar("T")


_FIELD_TYPES: dict[type[Any], dict[str, type[Any]]] = {
    cls: {name: getattr(hint, "__supertype__", getattr(hint, "__origin__", hint)) for name, hint in get_type_hints(cls).items()}
    for cls in (WorkerInfo, WorkerLoad, BlockCensus, JournalEntry)
}
"""Plain types: `WorkerId` is a str here, `dict[str, int]` a dict."""


def _build(cls: type[T], fields: dict[str, Any]) -> T:
    """The value, each field of the type it is declared with. Raises TypeError naming the field that is not."""
    for name, wanted in _FIELD_TYPES[cls].items():
        if name not in fields:
            continue  # the constructor knows whether it has a default
        found = type(fields[name])
        if found is not wanted and not (wanted is float and found is int):
            raise TypeError(f"{cls.__name__}.{name} is {found.__name__}, not {wanted.__name__}")
    return cls(**fields)


def encode_worker(info: WorkerInfo) -> str:
    return json.dumps(asdict(info) | {"role": info.role.value, "state": info.state.value}, separators=(",", ":"))


def decode_worker(text: str | bytes) -> WorkerInfo:
    """Raises ValueError, TypeError or KeyError for anything that is not a worker record of this version."""
    fields: dict[str, Any] = json.loads(text)
    fields["role"] = Role(fields["role"])
    fields["state"] = WorkerState(fields["state"])
    fields["load"] = _build(WorkerLoad, fields["load"])
    return _build(WorkerInfo, fields)


def encode_census(census: BlockCensus) -> str:
    return json.dumps(asdict(census), separators=(",", ":"))


def decode_census(text: str | bytes) -> BlockCensus:
    census = _build(BlockCensus, json.loads(text))
    if not all(type(count) is int for count in census.held_by.values()):
        raise TypeError("BlockCensus.held_by has a count that is no int")
    return census


def encode_journal(entry: JournalEntry) -> str:
    return json.dumps(asdict(entry), separators=(",", ":"))


def decode_journal(text: str | bytes) -> JournalEntry:
    return _build(JournalEntry, json.loads(text))


UNREADABLE = (ValueError, TypeError, KeyError, RecursionError)
"""What the decoders raise."""
