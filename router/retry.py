"""What follows when an attempt fails: try again and without whom, or tell the client. The error table's retry column as code.

Pure: one RetryState per request takes failures and answers. Only named kinds are retried, bounded in count, never on the worker that
failed; time is bounded by the request's deadline, and concurrency of retries by the orchestrator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.errors import BatonError, Retry
from router.events import LegRole
from router.placement import Exclusions, Placement, WorkerKey, worker_key

ATTEMPTS_MAX = 6
REFUSALS_MAX = 2
HANDOFF_FAILURES_BEFORE_LOCAL = 2


class AttemptFailed(Exception):
    """An attempt ended without finishing the request. `role` is the leg that reported it."""

    def __init__(self, error: BatonError, role: LegRole, worker: WorkerKey) -> None:
        super().__init__(f"{role.value} on {worker[0]}: {error.kind}: {error.message}")
        self.error = error
        self.role = role
        self.worker = worker


@dataclass(slots=True)
class RetryState:
    """What the failed attempts of one request taught so far."""

    num_failed: int = 0
    num_refusals: int = 0
    num_handoff_failures: int = 0
    num_corrupt: int = 0
    failed: set[WorkerKey] = field(default_factory=set)
    busy: set[WorkerKey] = field(default_factory=set)
    suspect: set[WorkerKey] = field(default_factory=set)

    def record(self, failure: AttemptFailed, placement: Placement, has_emitted: bool) -> bool:
        """Whether to try again. A stream that has begun is worth more tries than a request that can still get a clean status."""
        self.num_failed += 1
        if self.num_failed >= ATTEMPTS_MAX:
            return False
        retry = failure.error.rule.retry
        if retry is Retry.OTHER_WORKER and failure.error.kind == "Overloaded":
            self.num_refusals += 1
            self.busy.add(failure.worker)
            return has_emitted or self.num_refusals <= REFUSALS_MAX
        if retry is Retry.OTHER_WORKER:
            self.failed.add(failure.worker)
            return True
        if retry is Retry.NEW_HANDOFF:
            self.num_handoff_failures += 1
            self._suspect_pair(placement)
            return True
        if retry is Retry.RECOMPUTE_ONCE:
            self.num_corrupt += 1
            self.num_handoff_failures = HANDOFF_FAILURES_BEFORE_LOCAL  # recompute where the blocks will be used
            self._suspect_pair(placement)
            if placement.prefill is not None:
                self.failed.add(worker_key(placement.prefill))
            return self.num_corrupt <= 1
        return False

    def forget_busy(self) -> None:
        """After a pause a worker that had no room may have some."""
        self.busy.clear()

    def exclusions(self) -> Exclusions:
        return Exclusions(
            failed=frozenset(self.failed),
            busy=frozenset(self.busy),
            suspect=frozenset(self.suspect),
            must_be_local=self.num_handoff_failures >= HANDOFF_FAILURES_BEFORE_LOCAL,
        )

    def _suspect_pair(self, placement: Placement) -> None:
        for info in (placement.prefill, placement.decode):
            if info is not None:
                self.suspect.add(worker_key(info))
