"""What both ends of a handoff share: common events and instructions, and how a transition table (state, event) → handler is followed.

It must not know sockets, slabs, threads or time: an event goes in, the next record and instructions for the shell come out.
Messages of the wire are events as they are; indexes count frames and blocks of one handoff. An event that the table does not
know is a fault: it is counted and changes nothing, and so is every message of another epoch. The ends are `sender_handoff`
and `receiver_handoff`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from kvtransfer.messages import Abort, Ack, Announce, Closing, Committed, Open, Refuse, Settled


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a handoff ended early. `kind` is of the error table."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class LocalAbort:
    """This worker gives the handoff up (the client left, the deadline passed, the worker drains)."""

    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeaseLapsed:
    """Nothing was heard of the handoff for its lease; in CLOSING: the peer did not settle within the quarantine."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    message: Open | Announce | Closing | Ack | Committed | Abort | Settled


@dataclass(frozen=True, slots=True)
class Forget:
    """The record is terminal and no memory is tied to it any more."""


class Fault(Enum):
    STALE_EPOCH = "stale_epoch"
    PROTOCOL_ERROR = "protocol_error"


class HandoffRecord(Protocol):
    """What a SenderHandoff and a ReceiverHandoff have in common; both are frozen."""

    @property
    def handoff_id(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def state(self) -> Enum: ...


Record = TypeVar("Record", bound=HandoffRecord)


@dataclass(frozen=True, slots=True)
class Step(Generic[Record]):
    """The record after the event. With a fault the record is the one before and there are no instructions."""

    record: Record
    instructions: tuple[Any, ...] = ()
    fault: Fault | None = None
    explanation: str = ""


Table = Mapping[tuple[Enum, type[Any]], Callable[[Any, Any], Step[Record]]]
"""(state, type of the event) → handler, which gets the record and the event."""

_WIRE = (Open, Announce, Closing, Ack, Committed, Refuse, Abort, Settled)


def advance(table: Table[Record], record: Record, event: Any) -> Step[Record]:
    """Follows the table for one event. A message is checked against the record's epoch first, and nothing unknown has an effect.

    Raises AssertionError for a message of another handoff: the shell routes by id.
    """
    if isinstance(event, _WIRE):
        if event.handoff_id != record.handoff_id:
            raise AssertionError(f"event of handoff {event.handoff_id} given to {record.handoff_id}")
        if event.epoch < record.epoch:
            return Step(record, fault=Fault.STALE_EPOCH, explanation=f"epoch {event.epoch}, the handoff is at {record.epoch}")
        if event.epoch > record.epoch:
            return protocol_error(record, f"epoch {event.epoch} is ahead of {record.epoch}")
    handler = table.get((record.state, type(event)))
    if handler is None:
        return protocol_error(record, f"{type(event).__name__} in {record.state.value}")
    return handler(record, event)


def protocol_error(record: Any, explanation: str) -> Step[Any]:
    return Step(record, fault=Fault.PROTOCOL_ERROR, explanation=explanation)


def unchanged(record: Any, event: Any) -> Step[Any]:
    """A crossing that is part of the protocol: nothing to do, nothing to count."""
    return Step(record)
