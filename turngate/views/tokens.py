"""The text of single tokens. In a byte vocabulary one character may take several tokens, none of which has a text of its own."""

from __future__ import annotations

import msgspec

from turngate.render import Tokenizer
from turngate.trace.tree import Node
from turngate.types import Ids, Json


class TokenTexts(msgspec.Struct, frozen=True):
    """The text of each token of a node; None for a token that is only part of a character."""

    text: list[str | None]
    runs: list[
        tuple[int, int, str | None]
    ]  # first, past the last, and their text together; None: they never become a character

    def end(self, place: int) -> int:
        """The first position from `place` on that is not inside a character."""
        for first, past, _ in self.runs:
            if first < place < past:
                return past
        return place


class TokenDecoder:
    """Decodes the tokens of nodes and keeps the result. `tokenizer`: None where it is not on this machine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, TokenTexts] = {}  # by node

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    def decode(self, node: Node) -> TokenTexts | None:
        if self._tokenizer is None:
            return None
        if node.id not in self._texts:
            self._texts[node.id] = decode_tokens(self._tokenizer, node.ids)
        return self._texts[node.id]

    def to_json(self, ids: Ids, pieces: TokenTexts | None, start: int, end: int) -> dict[str, Json]:
        if pieces is None or self._tokenizer is None:
            return {"text": None, "bytes": {}, "runs": [], "special": []}
        text = pieces.text[start:end]
        table = self._tokenizer.vocabulary.table
        special = self._tokenizer.special_ids
        hexed = {}
        if table is not None:
            hexed = {
                str(n): self._tokenizer.bytes_of(int(ids[n])).hex() for n, piece in enumerate(text) if piece is None
            }
        return {
            "text": text,
            "bytes": hexed,
            "runs": [(a - start, b - start, text) for a, b, text in pieces.runs if start <= a and b <= end],
            "special": [n for n, token in enumerate(ids.tolist()) if token in special],
        }


def decode_tokens(tokenizer: Tokenizer, ids: Ids) -> TokenTexts:
    """Decode each token on its own. A token that is only part of a character has no text; the run that makes up the character has it."""
    if tokenizer.vocabulary.table is None:
        return _decode_streaming(tokenizer, ids)
    text: list[str | None] = []
    runs: list[tuple[int, int, str | None]] = []
    known: dict[int, str | None] = {}
    held, begun = b"", 0  # bytes of an incomplete character, and where it began
    for place, token in enumerate(ids.tolist()):
        if not held:
            if token not in known:
                known[token] = _decode_whole(tokenizer.bytes_of(token))
            piece = known[token]
            text.append(piece)
            if piece is None:
                begun = place
                held = _incomplete_prefix(tokenizer.bytes_of(token))
                if not held:
                    runs.append((place, place + 1, None))
            continue
        more = held + tokenizer.bytes_of(token)
        together = _decode_whole(more) if len(more) > len(held) else None
        if together is not None:
            text.append(None)
            runs.append((begun, place + 1, together))
            held = b""
        elif len(more) > len(held) and _incomplete_prefix(more):
            text.append(None)
            held = more
        else:  # it never becomes a character; this token may begin another one
            runs.append((begun, place, None))
            piece = _decode_whole(tokenizer.bytes_of(token))
            text.append(piece)
            held = b"" if piece is not None else _incomplete_prefix(tokenizer.bytes_of(token))
            begun = place
            if piece is None and not held:
                runs.append((place, place + 1, None))
    if held:
        runs.append((begun, len(text), None))
    return TokenTexts(text, runs)


def _decode_whole(spelled: bytes) -> str | None:
    """None for incomplete characters, and for an id outside the vocabulary, which has no bytes."""
    try:
        return spelled.decode() or None
    except UnicodeDecodeError:
        return None


def _incomplete_prefix(spelled: bytes) -> bytes:
    """Return the bytes if more bytes can complete them to a character, else nothing."""
    try:
        spelled.decode()
    except UnicodeDecodeError as error:
        return spelled if error.reason == "unexpected end of data" else b""
    return b""


def _decode_streaming(tokenizer: Tokenizer, ids: Ids) -> TokenTexts:
    """Decode with the tokenizer's own streaming decoder, for vocabularies that are not of bytes."""
    decoder = tokenizer.decoder()
    text: list[str | None] = []
    runs: list[tuple[int, int, str | None]] = []
    begun: int | None = None
    for place, token in enumerate(ids.tolist()):
        piece = decoder.feed([token])
        if not piece:
            begun = place if begun is None else begun
            text.append(None)
        elif begun is not None:
            text.append(None)
            runs.append((begun, place + 1, piece))
            begun = None
        else:
            text.append(piece)
    if begun is not None:
        runs.append((begun, len(text), None))
    return TokenTexts(text, runs)
