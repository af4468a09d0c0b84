"""Find out which features a chat template supports, by rendering probe conversations with it.

`probe_traits` tries the features that agents' conversations need. `template_fallbacks.py` rewrites conversations for templates that
lack a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from turngate.types import Message, Tool, ToolCall

SENTINEL = "turngateSENTINEL"
LONG_CALL_ID = "call_0123456789abcdef01234567"  # in the form that the gateway uses in replies
PROBE_TOOL = Tool(
    "probe_tool",
    {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "d",
            "parameters": {"type": "object", "properties": {"k": {"type": "string"}}},
        },
    },
)


class Traits(msgspec.Struct, frozen=True):
    """Which features a template supports, and in which form it expects messages."""

    native_tools: bool  # declares tools, and renders calls and results; if false, the Hermes form is used
    text_arguments: bool = False  # requires call arguments as JSON text instead of objects
    null_content: bool = False  # renders calls only if content is null
    system: bool = True  # accepts a system message
    late_system: bool = True  # renders a system message in the middle of a conversation at its position
    system_after_answer: bool = True  # renders a system message directly after an answer
    content_parts: bool = False  # accepts content only as a list of parts
    short_call_ids: bool = False  # accepts only call ids that consist of nine letters and digits
    parallel_calls: bool = True  # renders several calls in one turn
    adjacent_users: bool = True  # renders several user messages in a row
    user_after_results: bool = True  # renders a user message after tool results
    system_with_results: bool = True  # renders the system prompt even if there are tool results


# A function that renders messages and tools for a template with the given traits. It returns None if the template rejects them.
ProbeRender = Callable[[Traits, Sequence[Message], Sequence[Tool]], str | None]


def probe_traits(render: ProbeRender) -> Traits:
    """Return the traits of a template. `render` renders conversations with the template."""
    user, answer, late = Message("user", "x"), Message("assistant", "y"), Message("system", SENTINEL)
    plain = Traits(native_tools=False)
    if not _shows(render, plain, [Message("user", SENTINEL)], SENTINEL):
        plain = msgspec.structs.replace(plain, content_parts=True)
    last = Message("user", "lastSENTINEL")
    plain = msgspec.structs.replace(
        plain,
        system=_shows(render, plain, [late, user], SENTINEL),
        late_system=_shows(render, plain, [user, answer, last, late], "lastSENTINEL", SENTINEL),
        system_after_answer=_shows(render, plain, [user, answer, late], SENTINEL),
        adjacent_users=_shows(
            render, plain, [user, answer, Message("user", "firstSENTINEL"), last], "firstSENTINEL", "lastSENTINEL"
        ),
    )
    for short in (False, True):
        for text_arguments in (False, True):
            for null_content in (False, True):
                native = msgspec.structs.replace(
                    plain,
                    native_tools=True,
                    text_arguments=text_arguments,
                    null_content=null_content,
                    short_call_ids=short,
                )
                if _shows_tools(render, native):
                    return _probe_calls(render, native)
    return plain


def _shows_tools(render: ProbeRender, traits: Traits) -> bool:
    user = Message("user", "x")
    history = [user, _call(1), _result(1, "resultSENTINEL")]
    return (
        _shows(render, traits, [user], "probe_tool", tools=[PROBE_TOOL])
        and _shows(render, traits, history, SENTINEL, tools=[PROBE_TOOL])
        and _shows(render, traits, history, "resultSENTINEL", tools=[PROBE_TOOL])
    )


def _probe_calls(render: ProbeRender, native: Traits) -> Traits:
    user = Message("user", "x")
    parallel = [user, _call(2), _result(1, "firstSENTINEL"), _result(2, "lastSENTINEL")]
    followed = [user, _call(1), _result(1, "firstSENTINEL"), Message("user", "lastSENTINEL")]
    instructed = [Message("system", "systemSENTINEL"), *followed[:-1]]
    return msgspec.structs.replace(
        native,
        system_with_results=not native.system
        or _shows(render, native, instructed, "systemSENTINEL", tools=[PROBE_TOOL]),
        parallel_calls=_shows(render, native, parallel, "firstSENTINEL", "lastSENTINEL", tools=[PROBE_TOOL])
        and _shows(render, native, parallel, f"{SENTINEL}1", f"{SENTINEL}2", tools=[PROBE_TOOL]),
        user_after_results=_shows(render, native, followed, "firstSENTINEL", "lastSENTINEL", tools=[PROBE_TOOL]),
    )


def _shows(
    render: ProbeRender, traits: Traits, messages: Sequence[Message], *needles: str, tools: Sequence[Tool] = ()
) -> bool:
    """Return whether the template accepts the conversation and writes all `needles` in the given order."""
    text = render(traits, messages, tools)
    if text is None:
        return False
    at = [text.find(needle) for needle in needles]
    return -1 not in at and at == sorted(at)


def _call(count: int) -> Message:
    calls = [ToolCall(_call_id(n), "probe_tool", f'{{"k": "{SENTINEL}{n}"}}') for n in range(1, count + 1)]
    return Message("assistant", tool_calls=tuple(calls))


def _result(n: int, text: str) -> Message:
    return Message("tool", text, tool_call_id=_call_id(n), name="probe_tool")


def _call_id(n: int) -> str:
    return LONG_CALL_ID[:-1] + str(n)
