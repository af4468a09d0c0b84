"""Read the body of a request up to a limit, and decompress it."""

from __future__ import annotations

import asyncio
import zlib

from turngate.errors import BadRequest, TooLarge
from turngate.server.asgi import ClientDisconnect, Receive

_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's `wbits`, which also select the expected header


async def read_content(receive: Receive, headers: dict[str, str], limit: int) -> bytes:
    """Read a body and decompress it. Neither its compressed nor its decompressed size may exceed the limit."""
    body = await read_body(receive, headers, limit)
    coding = headers.get("content-encoding", "").strip().lower()
    if coding in ("", "identity"):
        return body
    if coding not in _WINDOW_BITS:
        raise BadRequest(
            f"content-encoding {coding[:100]!r} is not supported; send the body uncompressed, or compress it with gzip or deflate",
            param="content-encoding",
        )
    return await asyncio.to_thread(_decompress, body, coding, limit)


def _decompress(body: bytes, coding: str, limit: int) -> bytes:
    decompressor = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        content = decompressor.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequest(f"the body is not valid {coding}: {error}", param="content-encoding") from None
    if len(content) > limit:
        raise TooLarge(f"the decompressed body is larger than the limit of {limit} bytes (setting max_body_mb)")
    if not decompressor.eof or decompressor.unused_data:
        problem = "it has extra data at its end" if decompressor.eof else "it is incomplete"
        raise BadRequest(f"the body is not valid {coding}: {problem}", param="content-encoding")
    return content


async def read_body(receive: Receive, headers: dict[str, str], limit: int) -> bytes:
    """Read a body as it was sent, without decompressing it."""
    declared = headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise TooLarge(f"the request body is larger than the limit of {limit} bytes (setting max_body_mb)")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise TooLarge(f"the request body is larger than the limit of {limit} bytes (setting max_body_mb)")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)
