"""Opens a data plane by its scheme, and says which schemes this machine can use and why not the others.

The UCX binding is imported only when that plane starts, so that a worker on another plane neither needs nor loads it.
"""

from __future__ import annotations

from common.errors import InvalidRequest
from kvtransfer.data_plane import DataPlane
from kvtransfer.planes.inproc import InprocPlane
from kvtransfer.planes.tcp import TcpPlane
from kvtransfer.planes.ucx import UcxPlane, ucx_unavailable

SCHEMES = ("ucx", "tcp", "inproc")


def open_plane(scheme: str, *, name: str, secret: bytes, host: str = "127.0.0.1") -> DataPlane:
    """Makes the plane, which `start` then brings to life. `name` is the worker with its incarnation, unique in the
    cluster; `secret` is the cluster secret; `host` is the address of this machine that peers can reach (only the tcp
    plane uses it). Raises InvalidRequest for an unknown scheme."""
    if scheme == "ucx":
        return UcxPlane(name, secret)
    if scheme == "tcp":
        return TcpPlane(name, secret, host)
    if scheme == "inproc":
        return InprocPlane(name, secret)
    raise InvalidRequest(f"unknown data plane {scheme!r}; known are {', '.join(SCHEMES)}", param="transport")


def available_planes() -> dict[str, str | None]:
    """Scheme to None when it works here, else to the reason why not."""
    return {"ucx": ucx_unavailable(), "tcp": None, "inproc": None}
