"""The checksum of a stored node, by which a damaged trace is recognized."""

from __future__ import annotations

import zlib

UNDELIVERED = 0x5EED  # XORed into the checksum of an undelivered turn, so that the checksum covers this flag too


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
    """Return the checksum of a delivered node. `session` is the session's key."""
    place = f"{session}/{node}/{parent}/{kind}".encode()
    return zlib.crc32(b"".join((place, ids or b"\0", logprobs or b"\0", info or b"\0", messages or b"\0")))
