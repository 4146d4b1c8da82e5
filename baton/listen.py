"""Which port the router gets and how people reach it. Checked before anything is started, so a taken port costs no start-up."""

from __future__ import annotations

import socket


class PortTaken(Exception):
    """A line for the user."""


def choose_port(host: str, port: int) -> int:
    """The port itself if it can be bound now, a free one for 0. Raises PortTaken.

    The port is free again when this returns; a process that takes it in between makes the router fail with the same message.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortTaken(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port (0 takes a free one)"
            ) from error
        return int(probe.getsockname()[1])


def reachable_url(host: str, port: int) -> str:
    """The address for someone on this machine: a listener on all addresses is reached on the loopback."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"
