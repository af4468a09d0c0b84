"""Encoding and decoding of values that agents receive in an Anthropic Messages reply and send back in the next request.

The values are call ids, arguments that are not a JSON object, and signatures of thinking.
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
# Prefixes of signatures that contain hidden thinking, or a digest of thinking that the agent sees.
_TEXT, _DIGEST = "tg1.p", "tg1.d"
_PACKED = "tg1.t"  # prefix of signatures in an older format, which contain compressed thinking
_MAX_UNPACK_RATIO = 16  # limits how much memory a small request can use by decompression
_MAX_DEPTH = 100  # the deepest nesting of arguments that every client can read


def call_id_to_wire(call: str) -> str:
    """Return a call's id with the prefix that Anthropic's clients expect. An id that does not start with `call_` is returned unchanged."""
    return "toolu_" + call.removeprefix("call_") if call.startswith("call_") else call


def call_id_from_wire(wire: str) -> str:
    """Return the id under which a call was recorded, given the id that the agent sent back."""
    ours = _OWN_CALL_ID.fullmatch(wire)
    return f"call_{ours[1]}" if ours else wire


def wrap_arguments(arguments: str) -> str:
    """Return a call's arguments as a JSON object, which clients require.

    Empty arguments become `{}`. Arguments that are not an object, are nested very deeply, or look like wrapped arguments are wrapped, as
    text, in an object.
    """
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and set(value) != {_INVALID_JSON} and not _is_too_deep(value, arguments):
        return arguments or "{}"
    return orjson.dumps({_INVALID_JSON: arguments}).decode()


def _is_too_deep(value: Json, text: str) -> bool:
    """Return whether the value, decoded from `text`, is nested more than `_MAX_DEPTH` levels deep."""
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
    """Return a signature for thinking. If the thinking is hidden from the agent, the signature contains it.

    Signatures need not be secure: the thinking that an agent sends back only becomes part of its prompt.
    """
    if hidden:
        return _TEXT + base64.urlsafe_b64encode(thinking.encode()).decode()
    return _DIGEST + base64.urlsafe_b64encode(blake2b(thinking.encode(), digest_size=24).digest()).decode()


def decode_signature(signature: str) -> str:
    """Return the hidden thinking that a signature contains, or an empty string if it contains none."""
    if not signature.startswith((_TEXT, _PACKED)):
        return ""
    try:
        raw = base64.urlsafe_b64decode(signature[len(_TEXT) :])
        if signature.startswith(_TEXT):
            return raw.decode()
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(raw, _MAX_UNPACK_RATIO * len(raw) or 1).decode()
    except (binascii.Error, zlib.error, ValueError):
        return ""  # the signature is damaged, or a provider created it
    return text if unpacking.eof else ""
