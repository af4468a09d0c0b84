"""The declarations of host tools, and the check of calls against their JSON schemas.

An agent calls these tools through the gateway, and the host answers. A session declares them in `SessionConfig.tools`.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol

import msgspec

from turngate.errors import BadRequest
from turngate.trace.advantage import is_too_large
from turngate.types import Json

MAX_TOOLS = 64
MAX_CALLS = 1000  # per session
MAX_WAIT_S = 600.0
_MAX_MESSAGE = 300  # characters; a schema error quotes the arguments, which may be long

OK: Json = {"ok": True}
UNANSWERED: Json = {"ok": True, "answered": False}  # the host did not answer before the timeout


class HostTool(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One host tool. The agent sees the tool's replies, so they must not reveal anything about the grade."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9_]{0,63}\Z")]
    description: str
    schema: dict[str, Json]  # JSON schema of the arguments; its type is object
    reply: Json = None  # the reply if the host sends none; None means `OK`, or `UNANSWERED` after `wait_s`
    wait_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_WAIT_S)] | None = (
        None  # seconds that a call waits for the host to reply; None: `reply` is sent immediately
    )

    # The reward that a turn gets for each call, in addition to the rollout's reward, such as -0.1 for a hint. The agent never sees it.
    reward: float | None = None

    def immediate_reply(self) -> Json:
        return OK if self.reply is None else self.reply

    def default_reply(self) -> Json:
        """Return the reply to a call that the host did not answer within `wait_s`."""
        return UNANSWERED if self.reply is None else self.reply


class ArgumentChecker(Protocol):
    """A function that checks arguments against a schema and raises `BadRequest` if they are invalid."""

    def __call__(self, arguments: Json) -> None: ...


def check_tools(tools: tuple[HostTool, ...]) -> None:
    """Validate the host tools of a session. Raise `BadRequest`, with the name of the field, if a tool is invalid or there are too many."""
    if len(tools) > MAX_TOOLS:
        raise BadRequest(f"tools has {len(tools)} entries, but at most {MAX_TOOLS} are allowed", param="tools")
    names = [tool.name for tool in tools]
    for n, tool in enumerate(tools):
        if tool.name in names[:n]:
            raise BadRequest(
                f"tools[{n}].name: {tool.name!r} is already used; choose a different name", param=f"tools[{n}].name"
            )
        if tool.reward is not None and (not math.isfinite(tool.reward) or is_too_large(tool.reward)):
            raise BadRequest(
                f"tools[{n}].reward must be a finite number from -1e30 to 1e30, not {tool.reward}",
                param=f"tools[{n}].reward",
            )
        if tool.schema.get("type") != "object":
            raise BadRequest(
                f"tools[{n}].schema must be a JSON schema of type 'object' whose properties are the arguments",
                param=f"tools[{n}].schema",
            )
        _check_schema(tool.schema, f"tools[{n}].schema")


def _check_schema(schema: dict[str, Json], field: str) -> None:
    import jsonschema  # takes 50 ms, and few sessions have tools

    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        path = "".join(f".{part}" for part in error.absolute_path)
        raise BadRequest(f"{field}{path}: {error.message[:_MAX_MESSAGE]}", param=f"{field}{path}") from None


def build_checker(schema: dict[str, Json]) -> ArgumentChecker:
    """Build a function that checks arguments against a schema. The function raises `BadRequest` if they do not match the
    schema, with the name of the invalid argument if it is known.

    A `$ref` to another document is not followed, so arguments that depend on it are rejected.
    """
    import jsonschema
    from jsonschema.exceptions import best_match
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    empty: Registry[Json] = Registry()
    validator = jsonschema.Draft202012Validator(schema, registry=empty)

    def check(arguments: Json) -> None:
        try:
            error = best_match(validator.iter_errors(arguments))
        except Unresolvable as missing:
            reference = str(missing).partition(" does not exist within ")[0]  # the rest repeats the schema
            raise BadRequest(
                f"the tool's schema has a reference that cannot be resolved ({reference[:_MAX_MESSAGE]}); only references within the "
                "schema are followed"
            ) from None
        except RecursionError:
            raise BadRequest(
                "the arguments are nested too deeply, or the references in the tool's schema form an infinite loop; "
                "use fewer levels, or correct the schema"
            ) from None
        if error is None:
            return
        field = _argument_path(error.json_path, error.validator, error.message)
        raise BadRequest(f"{field or 'arguments'}: {error.message[:_MAX_MESSAGE]}", param=field or None)

    return check


def _argument_path(path: str, rule: object, message: str) -> str:
    """Return the path of an invalid argument, such as `a.b[0]`. The name of a missing argument is taken from the message."""
    inside = path.removeprefix("$").removeprefix(".")
    if rule == "required" and message.startswith("'"):
        missing = message[1:].partition("' is a required")[0]
        return f"{inside}.{missing}" if inside else missing
    return inside
