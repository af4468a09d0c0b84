"""Hypothesis strategies for JSON: any value, values of a JSON Schema, damaged copies of a valid document, and damaged bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Json = Any
LONG = 60_000  # characters of a long text; a model call with it stays far below the limit of a body
_NAMES = st.sampled_from(["", "id", "type", "role", "content", "name", "x" * 200, "é", "a.b", "$ref", "__class__"])
_TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", " ", "\0", "\n", "null", "NaN", "-1", "../../etc/passwd", "%00", "{version}", "𝕏" * 3, "\u202e", "a" * 300]
    ),
    st.sampled_from(['{"a": 1}', "[" * 300, "<tool_call>", "data: x\n\n", "'; --", "file:///etc/passwd", "http://["]),
)
_NUMBERS = st.one_of(
    st.integers(-3, 130),
    st.sampled_from([-(2**63) - 1, -(2**31), 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63, 2**64, 10**30]),
    st.sampled_from([0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 1e300 * 10]),
    st.floats(allow_nan=False, allow_infinity=False),
)
SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)

_DAMAGES = ("replace", "replace", "remove", "rename", "repeat", "wrap", "inflate")


def of_schema(schema: Json, components: Json) -> st.SearchStrategy[Json]:
    """Return values that a JSON Schema accepts, for the part of JSON Schema that msgspec writes."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: of_schema(components[name], components))
    if "anyOf" in schema:
        return st.one_of([of_schema(one, components) for one in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            return _object(schema, components)
        case "array":
            if "prefixItems" in schema:
                return st.tuples(*(of_schema(one, components) for one in schema["prefixItems"])).map(list)
            items = of_schema(schema.get("items") or {}, components)
            return st.lists(items, min_size=schema.get("minItems", 0), max_size=max(2, schema.get("minItems", 0)))
        case "string":
            texts = _TEXTS | st.sampled_from(["a", "main", "group-1", "policy"])
            return texts.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case "integer":
            low, high = schema.get("minimum", -1), schema.get("maximum", schema.get("exclusiveMaximum", 2**31) - 1)
            return st.integers(low, min(high, low + 10)) | st.sampled_from([low, high])
        case "number":
            return st.floats(
                schema.get("minimum", 0), schema.get("maximum", 1e9), exclude_min="exclusiveMinimum" in schema
            )
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case _:
            return VALUES


def _object(schema: Json, components: Json) -> st.SearchStrategy[Json]:
    required = set(schema.get("required", ()))
    fields = {name: of_schema(one, components) for name, one in schema.get("properties", {}).items()}
    if not fields:
        more = schema.get("additionalProperties")
        values = of_schema(more, components) if isinstance(more, dict) else VALUES
        return st.dictionaries(st.text(max_size=5), values, max_size=2)
    return st.fixed_dictionaries(
        {name: one for name, one in fields.items() if name in required},
        optional={name: one for name, one in fields.items() if name not in required},
    )


@st.composite
def damaged(draw: Callable[..., Any], documents: st.SearchStrategy[Json], *, most: int = 3) -> Json:
    """Return a copy of a document in which some values are replaced, removed, renamed, repeated, wrapped or inflated."""
    document, kinds = copy.deepcopy(draw(documents)), _DAMAGES
    for _ in range(draw(st.integers(0, most))):
        places = list(_places(document))
        if not places:
            return draw(VALUES)
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(kinds))
        if kind == "inflate":  # once: the sizes would multiply, to lists of millions and texts of gigabytes
            kinds = kinds[:-1]
        _damage(draw, holder, key, kind)
    return document


def _places(value: Json) -> Any:
    """Yield every place in a document as its container and key."""
    pending = [value]
    while pending:
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, inner in items:
            yield holder, key
            pending.append(inner)


def _damage(draw: Callable[..., Any], holder: Json, key: Json, kind: str) -> None:
    match kind:
        case "replace":
            holder[key] = draw(VALUES)
        case "remove":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[draw(_NAMES)] = holder.pop(key)
        case "repeat" if isinstance(holder, list):
            holder.insert(key, holder[key])
        case "wrap":
            holder[key] = draw(st.sampled_from([[holder[key]], {"value": holder[key]}, {"type": holder[key]}]))
        case "inflate":
            value = holder[key]
            if isinstance(value, str):
                holder[key] = (value or "x") * max(1, LONG // max(1, len(value)))
            elif isinstance(value, list) and value:
                holder[key] = value * (500 // len(value) + 1)
            else:
                nested: Json = value
                for _ in range(draw(st.sampled_from([5, 190, 260, 600]))):
                    nested = [nested]
                holder[key] = nested
        case _:
            pass


@st.composite
def bodies(draw: Callable[..., Any], documents: st.SearchStrategy[Json]) -> bytes:
    """Return documents as the bytes of a body, sometimes damaged."""
    raw = encode(draw(documents))
    match draw(st.integers(0, 24)):  # Hypothesis prefers the ends, which change nothing
        case 10:
            return raw[: draw(st.integers(0, len(raw)))]
        case 11:
            at = draw(st.integers(0, len(raw)))
            return raw[:at] + draw(st.binary(min_size=1, max_size=4)) + raw[at:]
        case 12:
            return b"\xef\xbb\xbf" + raw
        case 13:
            return raw + draw(st.sampled_from([b" ", b"x", b"{}", b"\0"]))
        case 14:
            return raw.replace(b": ", b" :\t\n ")
        case 15:
            return raw[:-1] + b', "model": "twice"}' if raw.endswith(b"}") and len(raw) > 2 else raw
        case 16:
            return raw.replace(b'"', b'"\\ud83d', 2)  # a lone surrogate
        case 17:
            return draw(st.sampled_from([b"", b"null", b"[]", b'"x"', b"1e999", b"NaN", b"\xff", b"[" * 100_000]))
        case _:
            return raw


def encode(value: Json) -> bytes:
    """Encode a value, even one that is nested deeper than Python's encoder allows."""
    try:
        return json.dumps(value).encode()
    except RecursionError:
        depth = 0
        while isinstance(value, list | dict) and len(value) == 1 and depth < 10_000:
            value, depth = next(iter(value.values() if isinstance(value, dict) else value)), depth + 1
        return b"[" * depth + b"1" + b"]" * depth
