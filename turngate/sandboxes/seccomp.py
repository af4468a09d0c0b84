"""A system call filter for `bubblewrap`: it closes what namespaces do not separate, and kernel interfaces that no agent needs.

The kernel's keyrings belong to a user, not to a namespace: without the filter, the host user's keys (Kerberos tickets, disk keys) could
be read inside. VSOCK sockets reach the host past every network namespace, and AF_ALG sockets take keys from keyrings. io_uring opens
sockets past a filter. A refused call fails with EPERM, as in a Docker container, which programs can handle.

Assembled by hand (classic BPF, see seccomp(2)), because libseccomp is not installed everywhere.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from typing import NamedTuple


class Architecture(NamedTuple):
    audit: int  # AUDIT_ARCH_…, the kernel's name for it
    calls: tuple[int, ...]  # refused with any arguments
    socket: int
    most: int  # higher numbers belong to another calling convention (x32)


# add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd; io_uring_setup, _enter, _register
IO_URING = (425, 426, 427)
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, (248, 249, 250, 321, 298, 323, *IO_URING), 41, 0x3FFFFFFF),
    "aarch64": Architecture(0xC00000B7, (217, 218, 219, 280, 241, 282, *IO_URING), 198, 0x3FFFFFFF),
}
FAMILIES = (38, 40)  # AF_ALG, AF_VSOCK
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x25, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBER, AUDIT, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; of the argument, the half that holds an int


def build_filter(machine: str = "") -> bytes | None:
    """Build the filter for a machine type. Return None if its system call numbers are not architecture."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    # Each line: operation, value, and the jumps if it is true and if it is false ("": the next line).
    lines: list[tuple[int, int, str, str]] = [
        (LOAD, AUDIT, "", ""),
        (EQUAL, architecture.audit, "", "refuse"),  # a 32-bit program has other numbers
        (LOAD, NUMBER, "", ""),
        (GREATER, architecture.most, "refuse", ""),
        *((EQUAL, call, "refuse", "") for call in architecture.calls),
        (EQUAL, architecture.socket, "", "allow"),
        (LOAD, FIRST_ARGUMENT, "", ""),
        *((EQUAL, family, "refuse", "") for family in FAMILIES),
        (RETURN, ALLOW, "", ""),
        (RETURN, REFUSE, "", ""),
    ]
    labels = {"allow": len(lines) - 2, "refuse": len(lines) - 1}
    packed = b""
    for here, (operation, value, then, otherwise) in enumerate(lines):
        jumps = (labels[word] - here - 1 if word else 0 for word in (then, otherwise))
        packed += struct.pack("=HBBI", operation, *jumps, value)
    return packed


def open_filter(filter_: bytes) -> int:
    """Return a descriptor to read the filter from. The caller closes it."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, filter_)  # smaller than any pipe's buffer
    finally:
        os.close(write_end)
    return read_end
