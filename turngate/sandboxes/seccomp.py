"""A filter of system calls for `bubblewrap`: what namespaces do not divide, and a few doors into the kernel that no agent needs.

The kernel's keyrings belong to a user, not to a namespace: without this, what the host's user keeps there (Kerberos tickets, keys
of disks) could be read inside. VSOCK sockets lead to the host past every network namespace, and AF_ALG sockets take keys from
keyrings. io_uring opens sockets past a filter. The refused call fails with EPERM, as in a Docker container; programs know that.

Assembled by hand (classic BPF, see seccomp(2)): libseccomp is not everywhere.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from typing import NamedTuple


class Architecture(NamedTuple):
    audit: int  # AUDIT_ARCH_…, what the kernel calls it
    calls: tuple[int, ...]  # refused, whatever their arguments
    socket: int
    most: int  # a higher number is another way to call (x32) with numbers of its own


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
    """The filter for this kind of machine; None where we do not know its numbers."""
    known = ARCHITECTURES.get(machine or platform.machine())
    if known is None:
        return None
    # Each line: operation, value, and where to go when it holds and when it does not ("": the next line).
    lines: list[tuple[int, int, str, str]] = [
        (LOAD, AUDIT, "", ""),
        (EQUAL, known.audit, "", "refuse"),  # a 32-bit program has other numbers
        (LOAD, NUMBER, "", ""),
        (GREATER, known.most, "refuse", ""),
        *((EQUAL, call, "refuse", "") for call in known.calls),
        (EQUAL, known.socket, "", "allow"),
        (LOAD, FIRST_ARGUMENT, "", ""),
        *((EQUAL, family, "refuse", "") for family in FAMILIES),
        (RETURN, ALLOW, "", ""),
        (RETURN, REFUSE, "", ""),
    ]
    places = {"allow": len(lines) - 2, "refuse": len(lines) - 1}
    packed = b""
    for here, (operation, value, then, otherwise) in enumerate(lines):
        jumps = (places[word] - here - 1 if word else 0 for word in (then, otherwise))
        packed += struct.pack("=HBBI", operation, *jumps, value)
    return packed


def open_filter(filter_: bytes) -> int:
    """A descriptor to read the filter from; the caller closes it."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, filter_)  # smaller than any pipe
    finally:
        os.close(write_end)
    return read_end
