"""Who owns a sandbox, so that what a killed process left behind can be told from what another one is using.

A process is known by its number, the moment it started, and the kernel and process namespace that count so; a machine by its
name and its machine-id (a digest of it: the id itself is nobody's business), since many are called "localhost". Local and
bubblewrap write it into the sandbox's folder, docker into a label.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True):
    host: str
    boot: str
    namespace: str
    pid: int
    started: int  # in clock ticks since the machine started

    def __str__(self) -> str:
        return f"{self.host} {self.boot} {self.namespace} {self.pid} {self.started}"

    @property
    def gone(self) -> bool:
        """It surely lives no more. Of another machine, or another container's processes, nobody here can say so."""
        here = current_owner()
        if self.host != here.host:
            return False
        if self.boot != here.boot:
            return True
        return self.namespace == here.namespace and _start_time(self.pid) != self.started


def parse_owner(text: str) -> Owner | None:
    """None: that is not the name of an owner."""
    words = text.split()
    if len(words) != 5 or not (words[3].isdigit() and words[4].isdigit()):
        return None
    return Owner(words[0], words[1], words[2], int(words[3]), int(words[4]))


def current_owner() -> Owner:
    host, boot, namespace = _machine()
    return Owner(host, boot, namespace, os.getpid(), _start_time(os.getpid()) or 0)


@cache
def _machine() -> tuple[str, str, str]:
    host = socket.gethostname() or "localhost"
    with suppress(OSError):
        number = Path("/etc/machine-id").read_text().strip()
        host += f"/{hashlib.sha256(f'turngate {number}'.encode()).hexdigest()[:12]}" if number else ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: docker alone works there
        return host, "-", "-"
    return host, boot, namespace


def _start_time(pid: int) -> int | None:
    """When a process started; None when there is none, or it is but a zombie."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in (b"Z", b"X") else int(rest[18])
