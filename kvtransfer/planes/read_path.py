"""By which way UCX will read from a peer: the kernel's cross-memory copy, RDMA, or reads emulated over TCP.

The emulated way is unsafe: the target answers reads with messages, and UCX 1.23 aborts the *target's* process when the
reader dies in the middle of such an answer (measured: one of seven kills of a reader). So the plane refuses it unless
UCX_TLS was set on purpose; the tcp plane covers the same ground, as fast. It must not know the UCX binding.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_CMA_NAMES = {"all", "cma", "sm", "shm"}
_RDMA_NAMES = {"all", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5"}


class ReadPath(Enum):
    CMA = "cma"
    RDMA = "rdma"
    EMULATED = "emulated over tcp"


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process lives, as far as reading its memory goes. `pid` counts inside of its pid namespace."""

    boot_id: bytes
    pid_namespace: int
    pid: int

    @staticmethod
    def own() -> ProcessPlace:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
        return ProcessPlace(bytes.fromhex(boot), os.stat("/proc/self/ns/pid").st_ino, os.getpid())


def predict_read_path(peer: ProcessPlace, address: int) -> tuple[ReadPath, str]:
    """The way UCX will take to read `address` of the peer's process, and why it is not a better one."""
    own = ProcessPlace.own()
    if not transport_allowed(_CMA_NAMES):
        why = f"UCX_TLS={os.environ['UCX_TLS']} leaves out cma"
    elif peer.boot_id != own.boot_id:
        why = "the peer runs on another host"
    elif peer.pid_namespace != own.pid_namespace:
        why = "the peer runs in another pid namespace"
    elif (error := _try_read(peer.pid, address)) != 0:
        why = f"reading the memory of process {peer.pid} is not permitted ({os.strerror(error)})"
    else:
        return ReadPath.CMA, ""
    devices = Path("/sys/class/infiniband")
    if transport_allowed(_RDMA_NAMES) and devices.is_dir() and any(devices.iterdir()):
        return ReadPath.RDMA, why
    return ReadPath.EMULATED, f"{why}, and there is no RDMA device"


def transport_allowed(names: set[str]) -> bool:
    """Whether UCX_TLS leaves any of these in. Its value is a list of names, or of exceptions after a `^`."""
    value = os.environ.get("UCX_TLS", "all").strip()
    listed = {name.strip() for name in value.lstrip("^").split(",")}
    return not (names - {"all"}) <= listed if value.startswith("^") else bool(names & listed)


class _Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _try_read(pid: int, address: int) -> int:
    """Reads one byte the way UCX would; returns 0 or the errno."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = ctypes.c_char()
    local = _Iovec(ctypes.addressof(target), 1)
    remote = _Iovec(address, 1)
    got = libc.process_vm_readv(ctypes.c_int(pid), ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
    return 0 if got == 1 else ctypes.get_errno()
