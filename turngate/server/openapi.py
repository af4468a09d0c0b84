"""The gateway's OpenAPI document, `GET /openapi.json`, which is built from the operations that the gateway serves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate import __version__
from turngate.dialects import DIALECTS, Chat, Dialect
from turngate.server.http import route
from turngate.server.operations import ApiRoute, JsonReply, Operation
from turngate.server.web.login import COOKIE
from turngate.store.projects import SCOPE_NAMES
from turngate.types import Json

_PARAMETER = re.compile(r"\{(\w+)(?::(\w+))?\}")
_dialects: dict[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
_DESCRIPTION = (
    "Turngate records every token of coding agents' model calls. Model calls need the secret of a session or, if the path names "
    "the session, the admin key or an API key; most other routes need the admin key or an API key with one of the listed scopes. "
    "Bodies of the native API are JSON unless another media type is listed. In msgpack, binary values are raw bytes, not text."
)


class OpenApiDocument:
    """The OpenAPI document of one gateway. It is built on the first request."""

    def __init__(self, calls: Sequence[Operation], routes: Sequence[Route]) -> None:
        self._calls = calls
        self._routes = [*routes, self.route()]

    def route(self) -> Route:
        return route("/openapi.json", "GET", self.read, None)

    async def read(self, request: Request) -> JsonReply[dict[str, Json]]:
        """Return the OpenAPI document."""
        return JsonReply(await asyncio.to_thread(lambda: self._content))

    @cached_property
    def _content(self) -> bytes:
        own = [one.operation for one in self._routes if isinstance(one, ApiRoute)]
        return msgspec.json.encode(build_document([*self._calls, *own]))


def build_document(operations: Sequence[Operation]) -> dict[str, Json]:
    """Build an OpenAPI 3.1 document for these operations."""
    schemas = _Schemas(operations)
    paths: dict[str, dict[str, Json]] = {}
    for operation in operations:
        entry = paths.setdefault(_PARAMETER.sub(r"{\1}", operation.path), {})
        entry.setdefault(operation.method.lower(), _describe(operation, schemas))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Turngate", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": schemas.components, "securitySchemes": _security_schemes()},
    }


class _Schemas:
    """The JSON Schemas of the operations' bodies, replies and errors."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        used = [kind for one in operations for kind in (one.body, one.reply, _error_type(one)) if kind is not None]
        kinds = {repr(kind): _replace_raw_defaults(kind) for kind in used}
        references, self.components = msgspec.json.schema_components(
            kinds.values(), ref_template="#/components/schemas/{name}"
        )
        self._references = dict(zip(kinds, references, strict=True))

    def find(self, kind: object) -> Json:
        """Return the schema of a type. If `kind` is None, the schema allows any JSON."""
        return {} if kind is None else self._references[repr(kind)]


def _replace_raw_defaults(kind: type) -> type:
    """Return a type with the same fields, but without raw JSON defaults, which a schema cannot represent."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return kind
    fields = msgspec.structs.fields(kind)
    if not any(isinstance(field.default, msgspec.Raw) for field in fields):
        return kind
    same: list[Any] = []
    for field in fields:
        if isinstance(field.default, msgspec.Raw):
            same.append((field.encode_name, Any, None))
        elif field.required:
            same.append((field.encode_name, field.type))
        else:
            same.append((field.encode_name, field.type, field.default))
    return msgspec.defstruct(kind.__name__, same, module=kind.__module__)


def _describe(operation: Operation, schemas: _Schemas) -> dict[str, Json]:
    words = re.findall(r"\w+", _PARAMETER.sub(r"\1", operation.path))
    described: dict[str, Json] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
        "description": (getattr(operation.query, "__doc__", None) or ""),
        "tags": [_find_tag(operation)],
        "parameters": _describe_parameters(operation),
        "responses": {
            str(operation.status): {
                "description": "The reply.",
                "content": {operation.reply_media: {"schema": schemas.find(operation.reply)}},
            },
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": schemas.find(_error_type(operation))}},
            },
        },
        "security": _describe_access(operation),
    }
    if operation.body is not None:
        content = {operation.body_media: {"schema": schemas.find(operation.body)}}
        described["requestBody"] = {"content": content, "required": _has_required_fields(operation.body)}
    return described


def _has_required_fields(kind: type) -> bool:
    """Return whether a body of this type has required fields. If not, a request may omit the body: an empty body is read as `{}`."""
    return issubclass(kind, msgspec.Struct) and any(field.required for field in msgspec.structs.fields(kind))


def _find_tag(operation: Operation) -> str:
    if operation.dialect:
        return operation.dialect
    first = operation.path.strip("/").partition("/")[0]
    return {"admin": "admin", "page": "page", "sessions": "openenv", "v1": "sessions"}.get(first, "public")


def _error_type(operation: Operation) -> type:
    return _dialects[operation.dialect or Chat.name].error_type


def _describe_parameters(operation: Operation) -> list[Json]:
    parameters: list[Json] = []
    for name, kind in _PARAMETER.findall(operation.path):
        schema: Json = {"type": "integer", "minimum": 0} if kind == "int" else {"type": "string", "minLength": 1}
        described = {"name": name, "in": "path", "required": True, "schema": schema}
        if kind == "path":
            described["description"] = "May contain slashes."
        parameters.append(described)
    parameters += [
        {"name": name, "in": "header", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in operation.headers
    ]
    if operation.query is not None:
        (schema,) = msgspec.json.schema(operation.query)["$defs"].values()
        required = schema.get("required", ())
        parameters += [
            {"name": name, "in": "query", "required": name in required, "schema": _without_null(field)}
            for name, field in schema["properties"].items()
        ]
    return parameters


def _without_null(schema: dict[str, Json]) -> dict[str, Json]:
    """Remove null from the schema of a query parameter, because a query parameter can be absent but not null."""
    if "anyOf" not in schema:
        return schema
    (other,) = (one for one in schema["anyOf"] if one != {"type": "null"})
    return dict(other)


def _describe_access(operation: Operation) -> list[Json]:
    """Return the security requirements, any one of which grants access to the operation."""
    header = _dialects[operation.dialect].key_header if operation.dialect else ""
    scopes = [name for name in SCOPE_NAMES if name in operation.scopes]
    keys: list[Json] = [{"adminKey": []}, *({"apiKey": [scope]} for scope in scopes)]
    match operation.access:
        case "public":
            return []
        case "key":
            return keys
        case "page":
            return [{"pageLogin": scopes}]
        case "any key":
            return [{"adminKey": []}, {"apiKey": []}, {"sessionSecret": []}]
        case "session":
            own: list[Json] = [{"sessionSecret": []}]
            own += [{f"{operation.dialect}Secret": []}] if header else []
            return [*own, *keys] if scopes else own


def _security_schemes() -> dict[str, Json]:
    bearer = {"type": "http", "scheme": "bearer"}
    return {
        "adminKey": {**bearer, "description": "The operator's key."},
        "apiKey": {
            **bearer,
            "description": "An API key of a project, with at least one of the listed scopes.",
        },
        "sessionSecret": {**bearer, "description": "The `api_key` of a session."},
        "pageLogin": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "Set by `POST /page/login`."},
        **{
            f"{dialect.name}Secret": {
                "type": "apiKey",
                "in": "header",
                "name": dialect.key_header,
                "description": "The `api_key` of a session.",
            }
            for dialect in DIALECTS
            if dialect.key_header
        },
    }
