"""The markers of a chat template: tokens such as `<|im_start|>` that separate messages and end turns.

The model was trained with each marker as one token. If the vocabulary lacks a marker, the tokenizer encodes it as several tokens of
ordinary text, so the prompt looks right but is wrong. `require_single_tokens` rejects such a tokenizer.
"""

from __future__ import annotations

import re

import msgspec

from turngate.errors import BadRequest, ConfigError
from turngate.render.call_syntax import Syntax
from turngate.render.template import Template
from turngate.render.tokenizer import Tokenizer
from turngate.render.traits import LONG_CALL_ID, PROBE_TOOL, SENTINEL
from turngate.types import Message, ToolCall

_MARKER = re.compile(r"<[|｜][^\s<>|｜]{1,60}[|｜]>")
_ANY_MARKER = re.compile(r"<[^\s<>]{1,60}>|\[[^\s\[\]]{1,60}\]")

_REPLACE = "put a different chat_template.jinja into this folder, or choose a different --tokenizer"
_USER, _ANSWER = Message("user", "x"), Message("assistant", SENTINEL)
_CALL = Message("assistant", tool_calls=(ToolCall(LONG_CALL_ID, "probe_tool", '{"k": "' + SENTINEL + '"}'),))
_RESULT = Message("tool", "y", tool_call_id=LONG_CALL_ID, name="probe_tool")


class ClosingToken(msgspec.Struct, frozen=True):
    """A special token that ends an assistant turn in a template."""

    token: int
    is_own: bool  # belongs to the turn; if false, it starts the next message, and the model samples it to end its turn
    is_sampled: bool = True  # the model samples it; if false, only the template writes it, after past turns


def find_closing_tokens(template: Template, tokenizer: Tokenizer, syntax: Syntax) -> list[ClosingToken]:
    """Return the tokens that end an assistant turn: first those after an answer, then those after a tool call."""
    out: list[ClosingToken] = []
    own = _leading_token(_text_after_mark(template, _ANSWER), tokenizer)
    if own is not None:
        out.append(ClosingToken(own, True))
    for follower in (_USER, Message("system", "z")):
        past = _leading_token(_text_after_mark(template, _ANSWER, follower), tokenizer)
        if past is not None and past not in [closing.token for closing in out]:
            out.append(ClosingToken(past, own is not None, own is None and follower is _USER))
    if not template.traits.native_tools:
        return out
    alone, followed = _text_after_mark(template, _CALL), _text_after_mark(template, _CALL, _RESULT)
    own = _trailing_token(alone, tokenizer, syntax)
    past = _leading_token(followed[len(alone) :], tokenizer) if followed.startswith(alone) else None
    if own is not None:
        return [*out, ClosingToken(own, True)]
    return out if past is None else [*out, ClosingToken(past, False)]


def _text_after_mark(template: Template, *messages: Message) -> str:
    """Render a user message followed by `messages`. Return the text after the last `SENTINEL`, or "" if the template rejects them."""
    tools = [PROBE_TOOL] if template.traits.native_tools else []
    try:
        return template.text([_USER, *messages], tools, generate=False, kwargs={}).rpartition(SENTINEL)[2]
    except BadRequest:
        return ""


def _leading_token(text: str, tokenizer: Tokenizer) -> int | None:
    text = text.lstrip()
    found = [t for t, i in tokenizer.added.items() if t and tokenizer.is_special(i) and text.startswith(t)]
    return tokenizer.added[max(found, key=len)] if found else None


def _trailing_token(text: str, tokenizer: Tokenizer, syntax: Syntax) -> int | None:
    text = text.rstrip()
    found = [t for t, i in tokenizer.added.items() if t and tokenizer.is_special(i) and text.endswith(t)]
    token = max(found, key=len, default="")
    return tokenizer.added[token] if token and token not in syntax.markers() else None


def require_single_tokens(template: Template, tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` if the template cannot render a simple conversation, or if a marker should be a single token but is not."""
    try:
        text = template.text([_USER, _ANSWER, _USER], generate=True, kwargs={})
    except BadRequest as error:
        raise ConfigError(
            f"tokenizer {tokenizer.folder}: the chat template rejects a conversation of two questions and an answer "
            f"({error.message.partition(': ')[2]}); {_REPLACE}",
            param="tokenizer",
        ) from None
    if SENTINEL not in text:
        raise ConfigError(
            f"tokenizer {tokenizer.folder}: the chat template leaves out the assistant's answer; {_REPLACE}",
            param="tokenizer",
        )
    joined = "\n".join([text, *_write_features(template)])
    shaped = set(_MARKER.findall(joined))
    closing = _ANY_MARKER.match(text.partition(SENTINEL)[2].lstrip())
    needed = {token for token in tokenizer.declared if token in joined} | ({closing[0]} if closing else set())
    # If no marker of this shape is a token, the template writes its role markers as plain text on purpose, as Zephyr's template does.
    if shaped & tokenizer.added.keys():
        needed |= shaped
    wrong = {marker for marker in needed if len(tokenizer.encode(marker)) != 1}
    if wrong:
        marker = min(wrong)
        raise ConfigError(
            f"tokenizer {tokenizer.folder}: the chat template writes {', '.join(map(repr, sorted(wrong)))}, which the vocabulary lacks, so "
            f"the tokenizer encodes {marker!r} as {len(tokenizer.encode(marker))} tokens of plain text; add each missing token to "
            "added_tokens in tokenizer.json, with the id that the model was trained with, or put this model's own chat template into the "
            "folder, as chat_template.jinja",
            param="tokenizer",
        )


def _write_features(template: Template) -> list[str]:
    """Render a conversation with a system prompt, and one with a tool call and its result. Skip those that the template rejects."""
    texts = []
    for messages in ([Message("system", "z"), _USER], [_USER, _CALL, _RESULT]):
        try:
            texts.append(template.text(messages, [PROBE_TOOL], generate=True, kwargs={}))
        except BadRequest:
            continue
    return texts
