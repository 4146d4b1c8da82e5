"""`baton down`: stops a running `baton up` from elsewhere and waits until it is gone.

The lock of the instance decides what runs. SIGTERM asks for the ordered shutdown; when that takes longer than the timeout
SIGKILL follows, and the kernel then ends the children, which were started to die with their parent.
"""

from __future__ import annotations

import argparse
import os
import select
import signal

from rich.console import Console

from baton.instance import Instance, InstanceError

KILL_WAIT_S = 10.0


def wait_for_end(pid_fd: int, timeout_s: float) -> bool:
    """Whether the process behind a pidfd ended within `timeout_s` seconds. The kernel wakes us; nothing is polled."""
    readable, _, _ = select.select([pid_fd], [], [], timeout_s)
    return bool(readable)


def stop_instance(instance: Instance, timeout_s: float) -> str:
    """Stops it and says how. Raises InstanceError when it cannot be stopped."""
    if not instance.is_running():
        return f"instance {instance.name!r} does not run"
    description = instance.read()
    if description is None:
        raise InstanceError(f"instance {instance.name!r} is just starting and has not said who it is: try again in a moment")
    try:
        pid_fd = os.pidfd_open(description.pid)
    except ProcessLookupError:
        return f"instance {instance.name!r} has just ended"
    try:
        if not instance.is_running():  # ended between the two looks: the pid may belong to another process by now
            return f"instance {instance.name!r} has just ended"
        signal.pidfd_send_signal(pid_fd, signal.SIGTERM)
        if wait_for_end(pid_fd, timeout_s):
            return f"stopped {instance.name!r} (pid {description.pid})"
        signal.pidfd_send_signal(pid_fd, signal.SIGKILL)
        if wait_for_end(pid_fd, KILL_WAIT_S):
            return f"killed {instance.name!r} (pid {description.pid}): it had not stopped within {timeout_s:.0f} s"
        raise InstanceError(f"pid {description.pid} does not end, not even killed")
    except PermissionError as error:
        raise InstanceError(f"pid {description.pid} belongs to another user") from error
    finally:
        os.close(pid_fd)


def run(arguments: argparse.Namespace) -> int:
    """Exit code 0 when nothing of the instance runs any more."""
    try:
        message = stop_instance(Instance(arguments.instance), arguments.timeout)
    except InstanceError as error:
        Console(stderr=True).print(f"baton down: {error}", style="red", markup=False)
        return 1
    Console().print(message, markup=False, highlight=False)
    return 0
