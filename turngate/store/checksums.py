"""Checksums of stored nodes, which reveal damage to a trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

# zlib's checksum, computed with the processor's own instructions if the extra `postgres` is installed.
crc32: Callable[[bytes], int]
try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

UNDELIVERED = 0x5EED  # XORed into the checksum of an undelivered turn, so that the checksum covers this flag too
_POLYNOMIAL = 0xEDB88320  # of CRC-32
_DIGITS = 8  # hexadecimal digits of a size
_Words = npt.NDArray[np.int64]


def join_fields(
    session: int,
    node: int,
    parent: int | None,
    kind: str,
    ids: bytes,
    logprobs: bytes | None,
    info: bytes,
    messages: bytes,
) -> bytes:
    """Join the fields that a node's checksum covers. The first one is `session`, the session's key."""
    place = f"{session}/{node}/{parent}/{kind}".encode()
    return b"".join((place, ids or b"\0", logprobs or b"\0", info or b"\0", messages or b"\0"))


def node_checksum(
    session: int,
    node: int,
    parent: int | None,
    kind: str,
    ids: bytes,
    logprobs: bytes | None,
    info: bytes,
    messages: bytes,
) -> int:
    """Return the checksum of a context or a delivered turn. The checksum of an undelivered turn is this value ^ `UNDELIVERED`."""
    return crc32(join_fields(session, node, parent, kind, ids, logprobs, info, messages))


# ── new keys ────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# A CRC is linear: crc(a + c) ^ crc(b + c) depends only on crc(a) ^ crc(b) and the size of c. So if a session gets a new key, the new
# checksums can be computed from the old ones without reading the nodes again.


def key_difference(old: int, new: int) -> int:
    """Return the XOR of the checksums of two session keys, for `rekey_checksums`."""
    return crc32(str(old).encode()) ^ crc32(str(new).encode())


def rekey_checksums(checksums: Sequence[int], sizes: Sequence[int], differences: Sequence[int]) -> list[int]:
    """Compute the checksums of nodes under their sessions' new keys, from their old checksums.

    A node's checksummed data starts with its session's key. For each node, `sizes` contains the number of bytes that follow the key, and
    `differences` contains the `key_difference` of the session's old and new keys.
    """
    changes, left = np.array(differences, np.int64), np.array(sizes, np.int64)
    for digit in range(_DIGITS):
        changes = _append_zeros(_zeros(digit), changes, left & 15)
        left >>= 4
        if not left.any():
            break
    changed: list[int] = (np.array(checksums, np.int64) ^ changes).tolist()
    return changed


def _append_zeros(tables: _Words, checksums: _Words, digits: _Words) -> _Words:
    """Return what each checksum would be if zero bytes were appended to its data.

    `digits[i]` selects the table for `checksums[i]`, and thus how many zero bytes are appended.
    """
    row = digits << 10
    result = tables.take(row + (checksums & 255))
    for byte in (1, 2, 3):
        result ^= tables.take(row + ((byte << 8) | ((checksums >> (8 * byte)) & 255)))
    return result


@cache
def _zeros(digit: int) -> _Words:
    """Return lookup tables that update a checksum as if n · 16^digit zero bytes were appended to its data, for n from 0 to 15.

    They are indexed by n, by the position of a byte in the checksum, and by the byte's value.
    """
    basis = np.arange(256) << np.arange(0, 32, 8)[:, None]
    none, one = np.zeros((4, 256), np.int64), np.ones((4, 256), np.int64)
    if digit:
        before = _zeros(digit - 1)
        once = _append_zeros(before, before[15], one)
    else:
        once = basis
        for _ in range(8):
            once = (once >> 1) ^ ((once & 1) * _POLYNOMIAL)
    tables = np.empty((16, 4, 256), np.int64)
    tables[0] = basis
    for n in range(1, 16):
        tables[n] = _append_zeros(once, tables[n - 1], none)
    return tables
