"""Anthropic Messages values that agents send back: each is encoded for a reply and decoded from the next request.

They are call ids, arguments that are not a JSON object, and signatures of thinking.
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
_INVALID_JSON = "INVALID_JSON"  # the key that Anthropic recommends for arguments that are not a JSON object
_TEXT, _DIGEST = "tg1.p", "tg1.d"  # prefixes of signatures with the thinking itself (if hidden) or with a digest of it
_PACKED = "tg1.t"  # prefix of an older form that contains compressed thinking
_MAX_UNPACK_RATIO = 16  # a small request must not decompress into a large one
_MAX_DEPTH = 100  # deepest nesting of arguments that all clients can read


def call_id_to_wire(call: str) -> str:
    """Return a call's id in the form that Anthropic's clients expect. Other providers' ids are returned unchanged."""
    return "toolu_" + call.removeprefix("call_") if call.startswith("call_") else call


def call_id_from_wire(wire: str) -> str:
    """Return the recorded id of a call, given the id that the agent sent back."""
    ours = _OWN_CALL_ID.fullmatch(wire)
    return f"call_{ours[1]}" if ours else wire


def wrap_arguments(arguments: str) -> str:
    """Return arguments as a JSON object, which clients require. An object is returned verbatim, and other text is wrapped in one."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and set(value) != {_INVALID_JSON} and not _is_too_deep(value, arguments):
        return arguments or "{}"
    return orjson.dumps({_INVALID_JSON: arguments}).decode()


def _is_too_deep(value: Json, text: str) -> bool:
    """Return whether the value is nested too deeply for clients."""
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
    """Build a signature for thinking. It does not need to be secure, because thinking that an agent sends back is only context."""
    if hidden:
        return _TEXT + base64.urlsafe_b64encode(thinking.encode()).decode()
    return _DIGEST + base64.urlsafe_b64encode(blake2b(thinking.encode(), digest_size=24).digest()).decode()


def decode_signature(signature: str) -> str:
    """Return the hidden thinking that the signature contains, or an empty string."""
    if not signature.startswith((_TEXT, _PACKED)):
        return ""
    try:
        raw = base64.urlsafe_b64decode(signature[len(_TEXT) :])
        if signature.startswith(_TEXT):
            return raw.decode()
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(raw, _MAX_UNPACK_RATIO * len(raw) or 1).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""  # damaged, or not one of ours
    return text if unpacking.eof else ""
