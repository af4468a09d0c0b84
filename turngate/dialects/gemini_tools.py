"""Decoding of Gemini function declarations, and conversion of Gemini's schema format to JSON Schema."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from turngate.dialects.gemini_history import read_field, read_fields, read_items, read_json, to_camel
from turngate.dialects.wire import field_error, function_tool, require_shallow
from turngate.types import Json, Tool

# Integer fields of a schema. They may arrive as strings, because protocol buffers write 64-bit integers as strings in JSON.
_INTEGER_FIELDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_SCHEMA_LISTS = ("anyOf", "prefixItems")
_MAX_DEPTH = 64


class GeminiTools:
    """The tools of one request. If `allowed` is not empty, only the functions that it names are kept."""

    replaceable = False

    def __init__(self, raw: bytes, allowed: Collection[str] = ()) -> None:
        self.raw = raw
        if allowed:
            kept = [declaration for _, name, declaration in _read_declarations(raw) if name in allowed]
            self.raw = b'[{"functionDeclarations":[' + b",".join(kept) + b"]}]"

    def decode(self) -> tuple[Tool, ...]:
        tools: dict[str, Tool] = {}
        for where, name, raw in _read_declarations(self.raw):
            if name in tools:
                raise field_error(f"{where}.name", f"must be unique; {name!r} is declared more than once")
            tools[name] = _decode_tool(name, read_fields(raw, where), where)
        return tuple(tools.values())


def _read_declarations(raw: bytes) -> Iterator[tuple[str, str, bytes]]:
    """Yield the position, function name and raw JSON of each declaration."""
    for n, tool in enumerate(read_items(raw, "tools")):
        for kind, declared in read_fields(tool, f"tools[{n}]").items():
            if kind != "functionDeclarations":
                raise field_error(
                    f"tools[{n}].{kind}",
                    "is not supported, because the gateway does not run built-in tools; declare your own function instead",
                )
            for m, declaration in enumerate(read_items(declared, f"tools[{n}].{kind}")):
                where = f"tools[{n}].{kind}[{m}]"
                name = read_field(read_fields(declaration, where), "name", str, "", where)
                if not name:
                    raise field_error(f"{where}.name", "is missing or empty")
                yield where, name, bytes(declaration)


def _decode_tool(name: str, declaration: dict[str, msgspec.Raw], where: str) -> Tool:
    description = read_field(declaration, "description", str, "", where)
    tool = function_tool(name, description or None, _decode_schema(declaration, "parameters", where))
    returns = _decode_schema(declaration, "response", where)
    if returns is not None:
        tool.wire["function"]["return"] = returns  # chat templates expect this field name
    return tool


def _decode_schema(declaration: dict[str, msgspec.Raw], name: str, where: str) -> Json:
    """Return the schema that a declaration contains for `name` (`parameters` or `response`) as JSON Schema, or None if it has none.

    The field `<name>JsonSchema` already contains JSON Schema. The field `<name>` contains a Gemini schema, which is converted.
    """
    if f"{name}JsonSchema" in declaration:
        place = f"{where}.{name}JsonSchema"
        return require_shallow(read_json(declaration[f"{name}JsonSchema"], place), place)
    if name not in declaration:
        return None
    return to_json_schema(read_json(declaration[name], f"{where}.{name}"), f"{where}.{name}")


def to_json_schema(schema: Json, where: str, depth: int = 0) -> Json:
    """Convert a Gemini schema to JSON Schema. For example, types become lower case, and `nullable` adds the type `null`."""
    if depth > _MAX_DEPTH:
        raise field_error(where, f"is nested more than {_MAX_DEPTH} levels deep; use fewer levels")
    if not isinstance(schema, dict):
        return schema  # a JSON schema can be true or false
    fields = {to_camel(name): part for name, part in schema.items() if part is not None}
    plain: dict[str, Json] = {}
    for name, part in fields.items():
        match name, part:
            case "type", str():
                if part != "TYPE_UNSPECIFIED":
                    plain["type"] = part.lower()
            case "properties", dict():
                order = fields.get("propertyOrdering")
                names = [p for p in order if p in part] if isinstance(order, list) else []
                plain["properties"] = {
                    p: to_json_schema(part[p], f"{where}.properties.{p}", depth + 1)
                    for p in dict.fromkeys([*names, *part])
                }
            case (("items" | "additionalProperties"), dict()):
                plain[name] = to_json_schema(part, f"{where}.{name}", depth + 1)
            case _, list() if name in _SCHEMA_LISTS:
                plain[name] = [to_json_schema(p, f"{where}.{name}[{n}]", depth + 1) for n, p in enumerate(part)]
            case (("defs" | "$defs"), dict()):
                plain["$defs"] = {p: to_json_schema(d, f"{where}.$defs.{p}", depth + 1) for p, d in part.items()}
            case _, str() if name in _INTEGER_FIELDS and part.isdecimal():
                plain[name] = int(part)
            case (("nullable" | "propertyOrdering"), _):
                pass
            case "format", "enum":
                pass  # redundant: the schema has an `enum`
            case _:
                plain["$ref" if name == "ref" else name] = part
    return _allow_null(plain) if fields.get("nullable") is True else plain


def _allow_null(schema: dict[str, Json]) -> dict[str, Json]:
    if isinstance(schema.get("type"), str):
        wider = {**schema, "type": [schema["type"], "null"]}
        return {**wider, "enum": [*schema["enum"], None]} if isinstance(schema.get("enum"), list) else wider
    if isinstance(schema.get("anyOf"), list):
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema
