"""How the values of the state store are written: JSON objects, read strictly, versioned by their fields.

A record that cannot be read (another version's, or damaged) is skipped by the reader and counted as its loss: the store is soft.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from common.ids import Incarnation, RequestId, WorkerId
from common.state.store import JournalEntry
from common.types import BlockCensus, Role, WorkerInfo, WorkerLoad, WorkerState


def encode_worker(info: WorkerInfo) -> str:
    return json.dumps(asdict(info) | {"role": info.role.value, "state": info.state.value}, separators=(",", ":"))


def decode_worker(text: str | bytes) -> WorkerInfo:
    """Raises ValueError, TypeError or KeyError for anything that is not a worker record of this version."""
    fields: dict[str, Any] = json.loads(text)
    fields["role"] = Role(fields["role"])
    fields["state"] = WorkerState(fields["state"])
    fields["load"] = WorkerLoad(**fields["load"])
    fields["worker_id"] = WorkerId(fields["worker_id"])
    fields["incarnation"] = Incarnation(fields["incarnation"])
    return WorkerInfo(**fields)


def encode_census(census: BlockCensus) -> str:
    return json.dumps(asdict(census), separators=(",", ":"))


def decode_census(text: str | bytes) -> BlockCensus:
    return BlockCensus(**json.loads(text))


def encode_journal(entry: JournalEntry) -> str:
    return json.dumps(asdict(entry), separators=(",", ":"))


def decode_journal(text: str | bytes) -> JournalEntry:
    fields: dict[str, Any] = json.loads(text)
    fields["request_id"] = RequestId(fields["request_id"])
    return JournalEntry(**fields)


UNREADABLE = (ValueError, TypeError, KeyError)
"""What the decoders raise."""
