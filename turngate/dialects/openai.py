"""Model lists and error bodies, shared by OpenAI's two dialects."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from turngate.errors import TurngateError
from turngate.types import Json

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


def error_body(
    error: TurngateError, *, message: str | None = None, param: str | None = None, code: str | None = None
) -> Json:
    """Build the body of an error. `message`, `param` and `code` override the error's own values."""
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
