"""Identifiers of the system and how they are made.

Three ids are never mixed: the public *request id* (a client sees it), the internal *attempt* (request id + epoch: one
try at serving the request, the key both workers use), and the *handoff id* (the transfer key between one prefill and
one decode worker). A client can choose none of the last two. All ids are random, never derived from client input.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NewType

RequestId = NewType("RequestId", str)
HandoffId = NewType("HandoffId", str)
WorkerId = NewType("WorkerId", str)
RouterId = NewType("RouterId", str)
Incarnation = NewType("Incarnation", str)

ID_LENGTH_MAX = 96
"""No id on the wire is longer than this many characters; longer ones are refused by the receiver."""


@dataclass(frozen=True, slots=True, order=True)
class AttemptKey:
    """One try at serving a request. `epoch` grows with each attempt and fences everything the older ones left behind."""

    request_id: RequestId
    epoch: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.epoch}"


def new_request_id(prefix: str) -> RequestId:
    """A public id such as `chatcmpl-…` or `cmpl-…`, 96 random bits behind the prefix."""
    return RequestId(f"{prefix}-{secrets.token_hex(12)}")


def new_handoff_id() -> HandoffId:
    return HandoffId(f"ho-{secrets.token_hex(12)}")


def new_incarnation() -> Incarnation:
    """Names one life of a worker process; a restart under the same worker id gets another one."""
    return Incarnation(secrets.token_hex(8))


def new_router_id() -> RouterId:
    return RouterId(f"router-{secrets.token_hex(4)}")
