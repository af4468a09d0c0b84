"""Anthropic Messages: values that a reply hands out and the next request brings back. Each is written and read here.

These are the ids of calls, arguments that are not a JSON object, and the signatures of thinking.
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from hashlib import blake2b

import orjson

from turngate.types import Json

_OWN_CALL_ID = re.compile(r"toolu_([0-9a-f]{24})")
_INVALID_JSON = "INVALID_JSON"  # Anthropic's own advice for sending what is not a JSON object as one
_TEXT, _DIGEST = "tg1.p", "tg1.d"  # signatures: the thinking itself if it is hidden, else a digest of it
_PACKED = "tg1.t"  # the thinking itself in an older, compressed form
_MAX_UNPACK_RATIO = 16  # a small request must not decompress into a large one
_MAX_DEPTH = 100  # nesting of arguments that all clients can read


def call_id_to_wire(call: str) -> str:
    """A call's id in the form that Anthropic's clients expect. Ids of other providers stay unchanged."""
    return "toolu_" + call.removeprefix("call_") if call.startswith("call_") else call


def call_id_from_wire(wire: str) -> str:
    """The call's own id again."""
    ours = _OWN_CALL_ID.fullmatch(wire)
    return f"call_{ours[1]}" if ours else wire


def wrap_arguments(arguments: str) -> str:
    """Arguments as a JSON object, which clients require, in the model's own spelling."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and set(value) != {_INVALID_JSON} and not _is_too_deep(value, arguments):
        return arguments or "{}"
    return orjson.dumps({_INVALID_JSON: arguments}).decode()


def _is_too_deep(value: Json, text: str) -> bool:
    """Whether it is nested too deeply for clients."""
    level = [value] if text.count("[") + text.count("{") > _MAX_DEPTH else []
    depth = 0
    while level and depth <= _MAX_DEPTH:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level, depth = [child for children in inner for child in children], depth + 1
    return depth > _MAX_DEPTH


def unwrap_arguments(arguments: str) -> str:
    if _INVALID_JSON not in arguments:
        return arguments
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get(_INVALID_JSON) if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else arguments


def encode_signature(thinking: str, *, hidden: bool) -> str:
    """Sign thinking. The signature proves nothing: whatever an agent sends back is only context."""
    if hidden:
        return _TEXT + base64.urlsafe_b64encode(thinking.encode()).decode()
    return _DIGEST + base64.urlsafe_b64encode(blake2b(thinking.encode(), digest_size=24).digest()).decode()


def decode_signature(signature: str) -> str:
    """The hidden thinking, if this signature holds it."""
    if not signature.startswith((_TEXT, _PACKED)):
        return ""
    try:
        raw = base64.urlsafe_b64decode(signature[len(_TEXT) :])
        if signature.startswith(_TEXT):
            return raw.decode()
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(raw, _MAX_UNPACK_RATIO * len(raw) or 1).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""  # another provider's, or damaged
    return text if unpacking.eof else ""
