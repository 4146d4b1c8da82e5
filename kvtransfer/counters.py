"""What the fabric counts, and the small seam through which a worker wires the counts to its metrics.

It must not know Prometheus: a worker passes one callable that takes a name of this file and an amount.
Every drop, refusal and expiry of the fabric has a name here.
"""

from __future__ import annotations

from collections.abc import Callable

Count = Callable[[str, float], None]

STALE_EPOCH = "stale_epoch"
"""Messages of an older epoch, dropped."""
PROTOCOL_ERROR = "protocol_error"
"""Messages that the handoff tables do not know in the state they came in, and malformed or tampered ones."""
LATE_MESSAGE = "late_message"
"""Messages for a handoff that ended a short while ago; harmless crossings."""
CHECKSUM_FAILED = "checksum_failed"
LEASES_EXPIRED = "leases_expired"
"""Handoffs ended by silence. Zero on a healthy system."""
FRAMES_SENT = "frames_sent"
BYTES_SENT = "bytes_sent"
FRAMES_RECEIVED = "frames_received"
BYTES_RECEIVED = "bytes_received"
HANDOFFS_OFFERED = "handoffs_offered"
HANDOFFS_ACKNOWLEDGED = "handoffs_acknowledged"
HANDOFFS_ENDED_EARLY = "handoffs_ended_early"
HANDOFFS_COMMITTED = "handoffs_committed"
HANDOFFS_FAILED = "handoffs_failed"
LINKS_OPENED = "links_opened"
LINKS_LOST = "links_lost"
LINKS_REFUSED = "links_refused"
SLAB_WAITS = "slab_waits"
"""Bounded waits for a free slab that ran out and were started again."""
QUARANTINE_EXPIRED = "quarantine_expired"


def ignore_counts(name: str, amount: float) -> None:
    """For callers that do not count."""
