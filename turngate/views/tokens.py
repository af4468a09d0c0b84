"""Decode tokens one by one.

If tokens are sequences of bytes, a character may span several tokens. None of these tokens has text by itself.
"""

from __future__ import annotations

import msgspec

from turngate.render import Tokenizer
from turngate.trace.tree import Node
from turngate.types import Ids, Json


class TokenTexts(msgspec.Struct, frozen=True):
    """The text of each token of a node, or None for a token that has no text by itself, such as part of a character."""

    text: list[str | None]
    runs: list[
        tuple[int, int, str | None]
    ]  # first token, end, and their combined text, or None if they do not form a character

    def end(self, place: int) -> int:
        """Return the first position at or after `place` that is not inside a character."""
        for first, end, _ in self.runs:
            if first < place < end:
                return end
        return place


class TokenDecoder:
    """Decodes the tokens of nodes, and caches the results. `tokenizer` is None if it is not available on this machine."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, TokenTexts] = {}  # by node id

    @property
    def is_available(self) -> bool:
        return self._tokenizer is not None

    def decode(self, node: Node) -> TokenTexts | None:
        if self._tokenizer is None:
            return None
        if node.id not in self._texts:
            self._texts[node.id] = decode_tokens(self._tokenizer, node.ids)
        return self._texts[node.id]

    def to_json(self, ids: Ids, texts: TokenTexts | None, start: int, end: int) -> dict[str, Json]:
        if texts is None or self._tokenizer is None:
            return {"text": None, "bytes": {}, "runs": [], "special": []}
        text = texts.text[start:end]
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
            "runs": [(a - start, b - start, text) for a, b, text in texts.runs if start <= a and b <= end],
            "special": [n for n, token in enumerate(ids.tolist()) if token in special],
        }


def decode_tokens(tokenizer: Tokenizer, ids: Ids) -> TokenTexts:
    """Return the text of each token.

    A token that is only part of a character has no text. The text belongs to the run of tokens that together form the character.
    """
    if tokenizer.vocabulary.table is None:
        return _decode_streaming(tokenizer, ids)
    text: list[str | None] = []
    runs: list[tuple[int, int, str | None]] = []
    known: dict[int, str | None] = {}
    held, begun = b"", 0  # bytes of an incomplete character, and its first token
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
        else:  # the run does not form a character; this token may start a new one
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
    """Decode bytes as UTF-8. Return None if they are not valid UTF-8, or if they are empty because the id is outside the vocabulary."""
    try:
        return spelled.decode() or None
    except UnicodeDecodeError:
        return None


def _incomplete_prefix(spelled: bytes) -> bytes:
    """Return the bytes if they end inside a character that more bytes could complete. Otherwise, return empty bytes."""
    try:
        spelled.decode()
    except UnicodeDecodeError as error:
        return spelled if error.reason == "unexpected end of data" else b""
    return b""


def _decode_streaming(tokenizer: Tokenizer, ids: Ids) -> TokenTexts:
    """Decode with the tokenizer's streaming decoder, for vocabularies whose tokens are not sequences of bytes."""
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
