"""Renewals: how each end of a link tells the other which handoffs it still cares for, so that their leases do not end.

It must not know handoff states; its caller says which are alive.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvtransfer.link import Link
from kvtransfer.messages import RENEWALS_MAX, Renew


def send_renewals(alive: Iterable[tuple[Link, tuple[str, int]]]) -> None:
    """Sends each link the keys (handoff id, epoch) that are alive on it, in as few messages as their bound allows."""
    keys_of: dict[Link, list[tuple[str, int]]] = {}
    for link, key in alive:
        keys_of.setdefault(link, []).append(key)
    for link, keys in keys_of.items():
        for start in range(0, len(keys), RENEWALS_MAX):
            link.send(Renew(tuple(keys[start : start + RENEWALS_MAX])))
