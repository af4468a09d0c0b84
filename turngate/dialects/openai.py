"""Functions for model lists, error bodies, custom tools and lists of allowed tools, shared by the chat and responses dialects.

A custom tool takes free text. The model sees it as a function with a single string argument, `input`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypedDict

import msgspec
import orjson

from turngate.dialects.wire import function_tool
from turngate.errors import TurngateError
from turngate.types import Json, Tool

FORWARDED_HEADERS = ("openai-beta",)  # forwarded to the provider
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
}


class OpenAIError(TypedDict):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIErrorBody(TypedDict):
    error: OpenAIError


def error_body(
    error: TurngateError, *, message: str | None = None, param: str | None = None, code: str | None = None
) -> OpenAIErrorBody:
    """Build the JSON body of an error. `message`, `param` and `code`, if set, replace the error's own message, param and kind."""
    return {
        "error": {
            "message": message or error.message,
            "type": _TYPES.get(error.status, "server_error"),
            "param": param or error.param,
            "code": code or error.kind,
        }
    }


def encode_model_list(names: Sequence[str], created: int) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(name, created) for name in names]})


def encode_model(name: str, created: int) -> bytes:
    return orjson.dumps(_model(name, created))


def _model(name: str, created: int) -> dict[str, Json]:
    return {"id": name, "object": "model", "created": created, "owned_by": "turngate"}


def custom_tool(name: str, description: str | None, syntax: str = "", grammar: str = "", suffix: str = "") -> Tool:
    """Build the function that represents a custom tool in the prompt.

    `grammar` is the grammar that the tool's input must follow, if any, and `syntax` is the grammar's notation. `suffix` is appended to the
    description.
    """
    parts = [description] if description else []
    # Recorded prompts contain these texts. If they change, `turngate verify` reports differences in older sessions with custom tools.
    parts.append("The input is free text: give it, as it is, as the string `input`.")
    if grammar:
        parts.append(f"It has to follow this {syntax or 'formal'} grammar:\n{grammar.strip()}")
    return function_tool(name, "\n\n".join(parts) + suffix, _CUSTOM_INPUT_SCHEMA)


_CUSTOM_INPUT_SCHEMA: Json = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
    "additionalProperties": False,
}


def read_custom_input(arguments: str) -> str | None:
    """Return the input of a custom tool's call. Return None if `arguments` is not an object with a single field, the string `input`."""
    try:
        match orjson.loads(arguments):
            case {"input": str(text), **rest} if not rest:
                return text
    except orjson.JSONDecodeError:
        pass
    return None


def custom_input_to_arguments(text: str) -> str:
    return msgspec.json.encode({"input": text}).decode()


class _AllowedTools(msgspec.Struct):
    """The form in which a trace stores a list of tools of which only some are allowed."""

    allowed_tools: list[str]
    tools: msgspec.Raw


def encode_allowed_tools(tools: bytes, allowed: Collection[str] | None) -> bytes:
    """Encode tools for a trace. If `allowed` is None, return them unchanged. Otherwise add the names of the allowed tools."""
    if allowed is None:
        return tools
    return b'{"allowed_tools":%b,"tools":%b}' % (msgspec.json.encode(sorted(allowed)), tools)


def decode_allowed_tools(raw: bytes) -> tuple[bytes, list[str] | None]:
    """Decode the result of `encode_allowed_tools`: the tools, and the names of the allowed tools (None means all)."""
    if not raw.lstrip().startswith(b"{"):
        return raw, None
    stored = msgspec.json.decode(raw, type=_AllowedTools)
    return bytes(stored.tools), stored.allowed_tools
