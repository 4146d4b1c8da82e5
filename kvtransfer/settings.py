"""Every bound and deadline of the KV fabric in one frozen object, each with its unit and its reason.

It must not know how settings are read; the services build it once in `main` and pass it to the sender and the receiver.
All times are seconds; the timeout ladder heartbeat < suspect < transfer <= lease is checked when the object is made.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class FabricSettings:
    """The defaults are the ladder of the architecture; tests shrink them all by the same factor."""

    heartbeat_s: float = 0.5
    """Each end of a control link sends a heartbeat this often."""
    suspect_s: float = 1.5
    """A link on which nothing was heard for this long is dead: the peer hangs or the network is cut."""
    handshake_s: float = 2.0
    """A connection that has not authenticated by then is closed, so that strangers cannot hold places."""
    connect_s: float = 3.0
    """Bound of dialling, handshake and data-plane connect together."""
    transfer_s: float = 5.0
    """One frame's read may take this long; then the handoff fails and the slab goes to quarantine."""
    lease_s: float = 10.0
    """An opened handoff of which nothing was heard for this long is over. Renewed by every message and every third of it."""
    open_wait_s: float = 10.0
    """How long the sender keeps an offer that nobody opened, and an open (or refusal) that nobody offered yet."""
    quarantine_s: float = 5.0
    """How long memory that a peer or a transport may still touch is kept aside before the next, harder step."""
    tombstone_s: float = 30.0
    """How long an ended handoff is remembered, so that a late open is answered at once instead of waiting."""
    idle_link_s: float = 300.0
    """The receiver closes a link without handoffs after this long."""
    sweep_s: float = 0.25
    """Period of the sweeper that expires leases, pending opens and quarantines."""
    message_bytes_max: int = 256 * 1024
    """Largest control message after authentication (a data-plane description is at most 64 KiB)."""
    write_buffer_bytes_max: int = 4 * 1024 * 1024
    """A link whose peer does not read for so many bytes of control messages is closed."""
    links_max: int = 64
    handshakes_max: int = 32
    handoffs_max: int = 1024
    pending_opens_max: int = 1024
    tombstones_max: int = 4096
    frames_in_flight_max: int = 6
    """Frames of one handoff that each end has in slabs at once: the sender from gather to acknowledgement, the receiver from read
    to scatter. Enough for a gather, a read and a scatter to run beside each other with one frame waiting for each; few enough
    that one handoff can neither take all slabs nor queue much in front of another, and that the slabs stay in the cache."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) <= 0:
                raise ValueError(f"{item.name} must be positive, got {getattr(self, item.name)}")
        if not self.heartbeat_s < self.suspect_s < self.transfer_s <= self.lease_s:
            raise ValueError(
                "the timeout ladder needs heartbeat < suspect < transfer <= lease, got "
                f"{self.heartbeat_s} / {self.suspect_s} / {self.transfer_s} / {self.lease_s} s"
            )
