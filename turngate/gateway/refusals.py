"""Decide which failed model calls count as refused: those that could succeed only with a different request.

A refused call is answered with a 4xx status because of its content, such as a model that is not served, an unsupported field, invalid JSON,
a body that is too large, or anything that the engine rejects as invalid. These errors do not count as refusals:

    401, 403    the key does not grant access, so the call does not belong to the session
    409         the session has ended or has reached a limit, or its mode or tokenizer is not the gateway's
    426         the route has no WebSocket; agents fall back to HTTP
    429         too many calls at the same time, or a quota is used up; the same call may succeed later
    context     the prompt is too long; agents compact their history and try again
    previous    the response that a call continues is unknown; agents send the whole conversation instead
    thread      the Anthropic SDK asked the server to keep the conversation; the SDK then sends the whole conversation
    5xx         the engine, the store or the gateway failed

Requests for token counts and lists of models sample nothing, so they do not count either.

Some clients try a feature and, if it is refused, repeat the call without it. A refused call therefore no longer counts once a call with the
same conversation (system prompt, messages, and the response that it continues) is answered.
"""

from __future__ import annotations

import hashlib

import msgspec

from turngate.dialects.messages_reply import ThreadsUnsupported
from turngate.dialects.responses import PreviousResponseNotFound
from turngate.errors import ContextOverflow, TurngateError

_MESSAGE_FIELDS = ("messages", "input", "contents")
_CONTEXT_FIELDS = ("system", "instructions", "systemInstruction", "system_instruction", "previous_response_id")
MAX_CHARS = 500  # of a stored error message, which may quote the agent's request
_EXPECTED = (ContextOverflow, PreviousResponseNotFound, ThreadsUnsupported)
_OTHER_STATUSES = (401, 403, 409, 426, 429)


def digest_request(body: bytes) -> bytes | None:
    """Return a digest of the conversation in a request of any dialect, or None if the request has no messages or is not a JSON object."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not any(name in fields for name in _MESSAGE_FIELDS):
        return None
    digest = hashlib.sha256()
    for name in (*_MESSAGE_FIELDS, *_CONTEXT_FIELDS):
        value = bytes(fields.get(name, b"null"))
        digest.update(b"%d:" % len(value))  # so that the end of one field is not read as the start of the next
        digest.update(value)
    return digest.digest()


def is_refusal(error: TurngateError) -> bool:
    """Return whether this error means that a model call was refused because of its content."""
    return 400 <= error.status < 500 and error.status not in _OTHER_STATUSES and not isinstance(error, _EXPECTED)
