"""A system call filter for `bubblewrap`. It blocks system calls that namespaces do not isolate or that agents do not need.

The kernel's keyrings belong to a user, not to a namespace. Without the filter, a sandbox could read the host user's keys, such as Kerberos
tickets and disk keys. VSOCK sockets reach the host from any network namespace, and AF_ALG sockets accept keys from keyrings. io_uring could
open sockets without passing the filter. A blocked call fails with EPERM, as in a Docker container, so programs can handle it.

The filter is assembled by hand (classic BPF, see seccomp(2)), because libseccomp is not installed everywhere.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from typing import NamedTuple


class Architecture(NamedTuple):
    audit: int  # the kernel's AUDIT_ARCH_… constant
    calls: tuple[int, ...]  # numbers of the calls that are blocked whatever their arguments
    socket: int
    most: int  # highest call number; higher ones belong to a different calling convention (x32)


IO_URING = (425, 426, 427)  # io_uring_setup, _enter, _register
# The blocked calls are add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd and those of io_uring.
ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, (248, 249, 250, 321, 298, 323, *IO_URING), 41, 0x3FFFFFFF),
    "aarch64": Architecture(0xC00000B7, (217, 218, 219, 280, 241, 282, *IO_URING), 198, 0x3FFFFFFF),
}
FAMILIES = (38, 40)  # AF_ALG, AF_VSOCK
LOAD, EQUAL, GREATER, RETURN = 0x20, 0x15, 0x25, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
NUMBER, AUDIT, FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data; an int is the lower half of an argument


def build_filter(machine: str = "") -> bytes | None:
    """Build the filter for a machine type, by default this machine's. Return None if its system call numbers are unknown."""
    architecture = ARCHITECTURES.get(machine or platform.machine())
    if architecture is None:
        return None
    # Each line has an operation, a value, and the labels to jump to if the comparison is true or false ("" means the next line).
    lines: list[tuple[int, int, str, str]] = [
        (LOAD, AUDIT, "", ""),
        (EQUAL, architecture.audit, "", "refuse"),  # 32-bit programs use different numbers
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
    """Return a descriptor from which the filter can be read. The caller must close it."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, filter_)  # smaller than any pipe's buffer
    finally:
        os.close(write_end)
    return read_end
