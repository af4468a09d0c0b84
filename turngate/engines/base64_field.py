"""Extract one long base64 string from a JSON reply as it arrives.

The string may be a hundred megabytes long. Parsing the reply as a whole would block the event loop for a second. A thread would not help,
because JSON and base64 decoders hold the interpreter lock. Decoding the data as it arrives blocks the loop for only about a millisecond
at a time.
"""

from __future__ import annotations

import asyncio
import binascii

from turngate.errors import EngineError

_STEP_BYTES = 2**18


class Base64Field:
    """A long base64 field of a JSON reply. `feed` removes the field's content from the reply, and `take` returns the decoded content."""

    def __init__(self, name: str, engine: str, max_bytes: int) -> None:
        self.size = 0  # of the decoded content, in bytes
        # A single growing array would be moved from time to time, which blocks the event loop for up to 10 ms.
        self._parts: list[bytes] = []
        self._name, self._engine, self._max_bytes = name, engine, max_bytes
        # These bytes cannot occur inside a JSON string, because quotation marks are escaped there.
        self._mark = f'"{name}":'.encode()
        self._held = b""  # the end of the last read, if it may be the beginning of the mark
        self._is_inside = False
        self._rest = b""  # characters of an incomplete group of four

    async def feed_slowly(self, read: bytes) -> bytes:
        """Call `feed` for one piece of `read` at a time, and let other tasks run in between, because one read may contain megabytes."""
        parts = [self.feed(read[:_STEP_BYTES])]
        for start in range(_STEP_BYTES, len(read), _STEP_BYTES):
            await asyncio.sleep(0)
            parts.append(self.feed(read[start : start + _STEP_BYTES]))
        return b"".join(parts)

    def feed(self, read: bytes) -> bytes:
        """Return `read`, the next part of the reply, without the field's content. In the result, the field is an empty string or null.

        If the end of `read` may be the beginning of the field, the next call returns it.
        """
        data = self._held + read if self._held else read
        self._held = b""
        kept, at = [], 0
        while at < len(data):
            if self._is_inside:
                end = data.find(b'"', at)
                self._decode(data[at : end if end >= 0 else len(data)], is_last=end >= 0)
                if end < 0:
                    break
                self._is_inside = False
                at = end
            start, content = self._find_content(data, at)
            kept.append(data[at:start])
            if content is None:
                self._held = data[start:]
                break
            at = content
        return b"".join(kept)

    def take(self) -> bytes:
        """Return the decoded content, and remove it from this object.

        If the content is large, call this in a thread: joining the parts releases the interpreter lock.
        """
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._clear()
        return data

    def _clear(self) -> None:
        self._parts, self.size, self._rest = [], 0, b""

    def _find_content(self, data: bytes, at: int) -> tuple[int, int | None]:
        """Look for the field in `data`, from index `at` on. Return the end index of the data to keep, and the index at which to continue.

        The second index is None if more data is needed.
        """
        found = data.find(self._mark, at)
        if found < 0:
            sizes = range(min(len(self._mark) - 1, len(data) - at), 0, -1)
            return len(data) - next((size for size in sizes if data.endswith(self._mark[:size])), 0), None
        quote = found + len(self._mark)
        while data[quote : quote + 1] == b" ":
            quote += 1
        if quote == len(data):
            return found, None
        if data[quote : quote + 1] == b'"':
            self._clear()
            self._is_inside = True
            return quote + 1, quote + 1
        return quote, quote  # null, for example

    def _decode(self, characters: bytes, *, is_last: bool) -> None:
        characters = self._rest + characters
        size = len(characters) if is_last else len(characters) // 4 * 4
        self._rest = characters[size:]
        try:
            part = binascii.a2b_base64(characters[:size], strict_mode=True)
        except binascii.Error as error:
            raise EngineError(f"{self._engine} sent {self._name} that cannot be decoded: {error}") from None
        self._parts.append(part)
        self.size += len(part)
        if self.size > self._max_bytes:
            raise EngineError(f"{self._engine} sent more than {self._max_bytes} bytes of {self._name}")
