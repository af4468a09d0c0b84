"""The process that owns a sandbox or runs a rollout. If it has ended, its sandbox and its session can be cleaned up.

A process is identified by its PID, start time, boot id and PID namespace. A machine is identified by its name and a digest of its
machine-id, because many machines are called "localhost". The owner is stored in the sandbox's folder (local, bubblewrap) or in labels
(other sandboxes). A runner sends its process to a gateway on the same machine, in the event for the first stage of a
rollout.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec

_UNKNOWN = "-"  # boot and namespace of a process that cannot read its own
_MAX_PID = 2**31


class Owner(msgspec.Struct, frozen=True):
    host: str
    boot: str
    namespace: str
    pid: int
    started: int  # in clock ticks since the machine booted

    def __str__(self) -> str:
        return f"{self.host} {self.boot} {self.namespace} {self.pid} {self.started}"

    @property
    def gone(self) -> bool:
        """Whether the process has certainly ended.

        False if the process belongs to another machine or container, where its state is unknown. After a reboot of this machine, True for
        all processes that it ran before.
        """
        here = current_owner()
        if self.host != here.host or (self.boot == _UNKNOWN) != (here.boot == _UNKNOWN):
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and _has_ended(self.pid, self.started)


def parse_owner(text: str) -> Owner | None:
    """Parse the string form of an owner. Return None if the text is malformed."""
    words = text.split()
    if len(words) != 5 or not all(re.fullmatch(r"[0-9]{1,18}", word) for word in words[3:]):
        return None
    pid = int(words[3])
    return Owner(words[0], words[1], words[2], pid, int(words[4])) if pid < _MAX_PID else None


def current_owner() -> Owner:
    host, boot, namespace = _machine()
    started = None
    with suppress(OSError):
        started = _start_time(os.getpid())
    return Owner(host, boot, namespace, os.getpid(), started or 0)


@cache
def _machine() -> tuple[str, str, str]:
    host = socket.gethostname() or "localhost"
    with suppress(OSError):
        machine_id = Path("/etc/machine-id").read_text().strip()
        host += f"/{hashlib.sha256(f'turngate {machine_id}'.encode()).hexdigest()[:12]}" if machine_id else ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux, so only docker works
        return host, _UNKNOWN, _UNKNOWN
    return host, boot, namespace


def _has_ended(pid: int, started: int) -> bool:
    """Return whether a process has certainly ended.

    With the mount option `hidepid`, /proc hides the processes of other users, so a process that is not in /proc may still be running.
    """
    try:
        return _start_time(pid) != started
    except (FileNotFoundError, ProcessLookupError):
        pass
    except OSError:  # /proc shows only that the process exists
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:  # it belongs to another user
        pass
    return False


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if it is a zombie. Raise `OSError` if /proc does not show it."""
    state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    return None if state in (b"Z", b"X") else int(rest[18])
