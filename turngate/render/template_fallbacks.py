"""Rewrite conversations for templates that do not support tools or system messages, or that restrict role order or call ids.

If a template does not support tools, they are declared in the system prompt, and calls and results are written in the Hermes form. Qwen
and Hermes models are trained on this form, and `parse.py` parses it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import orjson

from turngate.types import Message, Tool

_HEAD = (
    "# Tools\n\nYou may call one or more functions. Their signatures are given within <tools></tools> tags:\n<tools>\n"
)
_TAIL = (
    "\n</tools>\n\nTo call a function, answer with a JSON object that has its name and arguments, within <tool_call></tool_call> tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

_SHORT_ID_SIZE = 9
_SHORT_ID_LETTERS = string.ascii_letters + string.digits


def declare_tools(tools: Sequence[Tool], tail: str = _TAIL) -> str:
    """Return the part of the system prompt that declares the tools. `tail` follows the list of tools."""
    return _HEAD + "\n".join(json.dumps(tool.wire, ensure_ascii=False) for tool in tools) + tail


def rewrite_tools_as_hermes(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Rewrite tools, calls and results as text in system, user and assistant messages, for templates that do not support tools."""
    out = [_write_calls(message) for message in _merge_results(messages)]
    return add_to_system_prompt(out, declare_tools(tools)) if tools else out


def add_to_system_prompt(messages: Sequence[Message], declaration: str) -> list[Message]:
    """Append `declaration` to the system prompt, or add it as the system prompt if there is none."""
    if messages and messages[0].role == "system":
        text = f"{messages[0].content}\n\n{declaration}" if messages[0].content else declaration
        return [Message("system", text), *messages[1:]]
    return [Message("system", declaration), *messages]


def move_system_to_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Merge the system message into the user message directly after it, or else turn the system message into a user message.

    This is for templates that do not support system messages, or that leave them out if there are tool results.
    """
    match messages:
        case [Message(role="system") as system, Message(role="user") as user, *rest]:
            return [Message("user", f"{system.content}\n\n{user.content}"), *rest]
        case [Message(role="system") as system, *rest]:
            return [Message("user", system.content), *rest]
        case _:
            return messages


def move_late_system_to_user(messages: Sequence[Message]) -> list[Message]:
    """Merge each system message that does not start the conversation into the message before it, or turn it into a user message.

    It is merged if the previous message is a system or user message. This is for templates that leave out or move a system message in the
    middle of a conversation.
    """
    out: list[Message] = []
    for message in messages:
        before = out[-1] if out else None
        if message.role != "system" or before is None:
            out.append(message)
        elif before.role in ("system", "user"):
            out[-1] = msgspec.structs.replace(before, content=f"{before.content}\n\n{message.content}")
        else:
            out.append(Message("user", message.content))
    return out


def move_system_after_answer_to_user(messages: Sequence[Message]) -> list[Message]:
    """Turn system messages that directly follow an answer into user messages, for templates that do not render them in this position."""
    out: list[Message] = []
    for message in messages:
        moves = message.role == "system" and bool(out) and out[-1].role == "assistant"
        out.append(Message("user", message.content) if moves else message)
    return out


def join_adjacent_messages(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive user messages, and consecutive assistant messages without calls, for templates in which roles must alternate."""
    out: list[Message] = []
    for message in messages:
        joins = bool(out) and out[-1].role == message.role and message.role in ("user", "assistant")
        if joins and not message.tool_calls and not out[-1].tool_calls:
            message = _append_text(out.pop(), message.content)
        out.append(message)
    return out


def join_users_to_results(messages: Sequence[Message]) -> list[Message]:
    """Append each user message that follows a tool result to that result, for templates that do not render a user message there."""
    out: list[Message] = []
    for message in messages:
        if message.role == "user" and out and out[-1].role == "tool":
            message = _append_text(out.pop(), message.content)
        out.append(message)
    return out


def _append_text(message: Message, text: str) -> Message:
    return msgspec.structs.replace(message, content=f"{message.content}\n\n{text}" if message.content else text)


def shorten_call_ids(messages: Sequence[Message]) -> list[Message]:
    """Replace call ids with derived ids of nine letters and digits, for templates that accept no others. Ids of that form are kept."""
    return [
        msgspec.structs.replace(
            message,
            tool_calls=tuple(msgspec.structs.replace(call, id=_shorten(call.id)) for call in message.tool_calls),
            tool_call_id=_shorten(message.tool_call_id) if message.role == "tool" else message.tool_call_id,
        )
        if message.tool_calls or message.role == "tool"
        else message
        for message in messages
    ]


def _shorten(call_id: str) -> str:
    if len(call_id) == _SHORT_ID_SIZE and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(blake2b(call_id.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    digits = []
    for _ in range(_SHORT_ID_SIZE):
        number, digit = divmod(number, len(_SHORT_ID_LETTERS))
        digits.append(_SHORT_ID_LETTERS[digit])
    return "".join(digits)


def _merge_results(messages: Sequence[Message]) -> list[Message]:
    """Replace each sequence of consecutive tool results with one user message."""
    out: list[Message] = []
    run: list[str] = []
    for message in messages:
        if message.role == "tool":
            run.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if run:
            out.append(Message("user", "\n".join(run)))
            run = []
        out.append(message)
    if run:
        out.append(Message("user", "\n".join(run)))
    return out


def _write_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {_arguments(c.arguments)}}}\n</tool_call>'
        for c in message.tool_calls
    ]
    text = "\n".join([message.content, *calls]) if message.content else "\n".join(calls)
    return Message("assistant", text, reasoning=message.reasoning)


def _arguments(text: str) -> str:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.dumps(text)
    return text
