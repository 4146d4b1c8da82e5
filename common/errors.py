"""The one error tree and the one table that maps each kind to HTTP, gRPC and the retry rule.

Foreign exceptions are translated once, at the boundary, into one of these (with `from`). The message carries the
quantities and, for bad input, the name of the field. The kind is what crosses the wire; the message is for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Retry(Enum):
    """Who may try again. Only the router's orchestrator retries, within the deadline and its retry budget."""

    NEVER = "never"
    CLIENT = "client"
    OTHER_WORKER = "other_worker"
    NEW_HANDOFF = "new_handoff"
    RECOMPUTE_ONCE = "recompute_once"


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """How one kind of error is rendered. `openai_type` is the `error.type` of the HTTP body."""

    http_status: int
    grpc_code: str
    retry: Retry
    openai_type: str


class BatonError(Exception):
    """Base of all errors that a request can end with.

    `param` names the offending request field where there is one; `retry_after_s` is a hint for the client.
    """

    kind = "Internal"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def rule(self) -> ErrorRule:
        return ERROR_TABLE[self.kind]


class InvalidRequest(BatonError):
    kind = "InvalidRequest"


class Unauthenticated(BatonError):
    kind = "Unauthenticated"


class RateLimited(BatonError):
    kind = "RateLimited"


class ModelNotFound(BatonError):
    kind = "ModelNotFound"


class Overloaded(BatonError):
    kind = "Overloaded"


class ClientCancelled(BatonError):
    kind = "ClientCancelled"


class Draining(BatonError):
    kind = "Draining"


class WorkerUnavailable(BatonError):
    kind = "WorkerUnavailable"


class NoWorker(BatonError):
    kind = "NoWorker"


class StoreUnavailable(BatonError):
    """The state store did not answer in time. Never fails a stream: callers go on with their last view."""

    kind = "StoreUnavailable"


class HandoffFailed(BatonError):
    kind = "HandoffFailed"


class LeaseExpired(BatonError):
    kind = "LeaseExpired"


class StaleEpoch(BatonError):
    kind = "StaleEpoch"


class LayoutMismatch(BatonError):
    kind = "LayoutMismatch"


class KVCorrupt(BatonError):
    kind = "KVCorrupt"


class DeadlineExceeded(BatonError):
    kind = "DeadlineExceeded"


class Internal(BatonError):
    kind = "Internal"


ERROR_TABLE: dict[str, ErrorRule] = {
    "InvalidRequest": ErrorRule(400, "INVALID_ARGUMENT", Retry.NEVER, "invalid_request_error"),
    "Unauthenticated": ErrorRule(401, "UNAUTHENTICATED", Retry.NEVER, "authentication_error"),
    "RateLimited": ErrorRule(429, "RESOURCE_EXHAUSTED", Retry.CLIENT, "rate_limit_error"),
    "ModelNotFound": ErrorRule(404, "NOT_FOUND", Retry.NEVER, "invalid_request_error"),
    "Overloaded": ErrorRule(429, "RESOURCE_EXHAUSTED", Retry.OTHER_WORKER, "overloaded_error"),
    "ClientCancelled": ErrorRule(499, "CANCELLED", Retry.NEVER, "cancelled"),
    "Draining": ErrorRule(503, "UNAVAILABLE", Retry.OTHER_WORKER, "service_unavailable_error"),
    "WorkerUnavailable": ErrorRule(503, "UNAVAILABLE", Retry.OTHER_WORKER, "service_unavailable_error"),
    "NoWorker": ErrorRule(503, "UNAVAILABLE", Retry.OTHER_WORKER, "service_unavailable_error"),
    "StoreUnavailable": ErrorRule(503, "UNAVAILABLE", Retry.CLIENT, "service_unavailable_error"),
    "HandoffFailed": ErrorRule(503, "ABORTED", Retry.NEW_HANDOFF, "service_unavailable_error"),
    "LeaseExpired": ErrorRule(503, "ABORTED", Retry.NEW_HANDOFF, "service_unavailable_error"),
    "StaleEpoch": ErrorRule(500, "FAILED_PRECONDITION", Retry.NEVER, "server_error"),
    "LayoutMismatch": ErrorRule(500, "FAILED_PRECONDITION", Retry.NEVER, "server_error"),
    "KVCorrupt": ErrorRule(503, "DATA_LOSS", Retry.RECOMPUTE_ONCE, "service_unavailable_error"),
    "DeadlineExceeded": ErrorRule(504, "DEADLINE_EXCEEDED", Retry.NEVER, "timeout_error"),
    "Internal": ErrorRule(500, "INTERNAL", Retry.NEVER, "server_error"),
}

_CLASSES: dict[str, type[BatonError]] = {cls.kind: cls for cls in BatonError.__subclasses__()}


def error_from_kind(kind: str, message: str, retry_after_s: float | None = None) -> BatonError:
    """Rebuilds an error that crossed the wire as (kind, message). An unknown kind becomes Internal and says so."""
    cls = _CLASSES.get(kind)
    if cls is None:
        return Internal(f"unknown error kind {kind!r}: {message}")
    return cls(message, retry_after_s=retry_after_s)
