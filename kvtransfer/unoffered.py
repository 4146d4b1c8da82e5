"""What the sending end keeps of handoffs that its engine does not offer now: words that came too early, and how ended ones ended.

It must not know blocks, slabs or leases. A receiver may speak of an attempt before the engine offers it: that word waits for the
offer. An attempt that is over is remembered for a while, so that a late open is answered at once. Both are bounded in number
and age (seconds).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from common.clock import Clock
from kvtransfer.counters import LATE_MESSAGE, LEASES_EXPIRED, PROTOCOL_ERROR, STALE_EPOCH, Count
from kvtransfer.handoff import Failure
from kvtransfer.link import Link
from kvtransfer.messages import Abort, Ack, Committed, Open, Refuse, Settled, short_reason
from kvtransfer.remembered import Remembered
from kvtransfer.settings import FabricSettings


@dataclass(frozen=True, slots=True)
class EarlyWord:
    """What a receiver said of a handoff that the engine has not offered yet."""

    link: Link
    message: Open | Refuse | Abort


class UnofferedHandoffs:
    def __init__(self, settings: FabricSettings, clock: Clock, count: Count) -> None:
        self._settings = settings
        self._clock = clock
        self._count = count
        self._early: Remembered[str, EarlyWord] = Remembered(settings.pending_opens_max, settings.open_wait_s)
        self._ended: Remembered[str, tuple[int, Failure]] = Remembered(settings.tombstones_max, settings.tombstone_s)

    @property
    def num_early(self) -> int:
        return len(self._early)

    def early_ids(self) -> list[str]:
        """The handoffs whose early word waits for an offer."""
        return [handoff_id for handoff_id, _ in self._early.items()]

    def take_early(self, handoff_id: str) -> EarlyWord | None:
        """The early word, which the caller now answers for."""
        return self._early.pop(handoff_id)

    def keep_early(self, handoff_id: str, early: EarlyWord) -> None:
        self._early.put(handoff_id, early, self._clock.monotonic())

    def ended(self, handoff_id: str) -> tuple[int, Failure] | None:
        """The highest epoch that ended, and what a receiver that still asks for it is told."""
        return self._ended.get(handoff_id)

    def knows(self, handoff_id: str) -> bool:
        return self._early.get(handoff_id) is not None or self._ended.get(handoff_id) is not None

    def bury(self, handoff_id: str, epoch: int, failure: Failure) -> None:
        """The attempt has ended; nothing older can be asked for any more."""
        known = self._ended.get(handoff_id)
        if known is None or known[0] <= epoch:
            self._ended.put(handoff_id, (epoch, failure), self._clock.monotonic())

    def abort(self, handoff_id: str, failure: Failure, epoch: int | None) -> bool:
        """Gives up an attempt that was not offered. False if no receiver has spoken of it; with `epoch` it is remembered then."""
        early = self._early.get(handoff_id)
        if epoch is not None:
            self.bury(handoff_id, epoch, failure)
        if early is None or (epoch is not None and early.message.epoch > epoch):
            return False
        self._early.pop(handoff_id)
        self.bury(handoff_id, early.message.epoch, failure)
        if isinstance(early.message, Open):
            early.link.send(Abort(handoff_id, early.message.epoch, failure.kind, short_reason(failure.reason)))
        return True

    def heard(self, link: Link, message: Open | Ack | Committed | Refuse | Abort | Settled, *, is_draining: bool) -> None:
        """A message of a handoff that is not offered: kept for the offer, answered, or dropped and counted."""
        ended = self._ended.get(message.handoff_id)
        early = self._early.get(message.handoff_id)
        if ended is not None and message.epoch <= ended[0]:
            self._count(STALE_EPOCH if message.epoch < ended[0] else LATE_MESSAGE, 1)
            if isinstance(message, Open):
                link.send(Abort(message.handoff_id, message.epoch, ended[1].kind, short_reason(ended[1].reason)))
        elif early is not None and message.epoch < early.message.epoch:
            self._count(STALE_EPOCH, 1)
        elif isinstance(message, Open | Refuse | Abort):
            is_same_attempt = early is not None and message.epoch == early.message.epoch
            if early is not None and is_same_attempt and (early.link is not link or isinstance(message, Open)):
                self._count(PROTOCOL_ERROR, 1)
            elif isinstance(message, Open) and (is_draining or (early is None and self._early.is_full)):
                kind = "Draining" if is_draining else "Overloaded"
                link.send(Abort(message.handoff_id, message.epoch, kind, f"{len(self._early)} opens wait for their offer"))
            else:
                self.keep_early(message.handoff_id, EarlyWord(link, message))
        else:
            self._count(LATE_MESSAGE if early is not None else PROTOCOL_ERROR, 1)

    def link_lost(self, link: Link, reason: str) -> None:
        for handoff_id, early in self._early.items():
            if early.link is link:
                self._early.pop(handoff_id)
                failure = Failure("HandoffFailed", f"the receiver was lost before the offer: {reason}")
                self.bury(handoff_id, early.message.epoch, failure)

    def expire(self, now: float) -> None:
        """Forgets what is too old. A receiver whose open waited in vain is told."""
        for handoff_id, early in self._early.expired(now):
            failure = Failure("HandoffFailed", f"no prefill was started within {self._settings.open_wait_s:g} s of the open")
            self.bury(handoff_id, early.message.epoch, failure)
            if isinstance(early.message, Open):
                self._count(LEASES_EXPIRED, 1)
                early.link.send(Abort(handoff_id, early.message.epoch, failure.kind, failure.reason))
        self._ended.expired(now)

    def alive(self) -> Iterator[tuple[Link, tuple[str, int]]]:
        """The opens that wait for their offer: their receivers hold leases on them."""
        for handoff_id, early in self._early.items():
            if isinstance(early.message, Open):
                yield early.link, (handoff_id, early.message.epoch)
