"""Adapt the hand-written renderers of the `renderers` package (extra `families`) to our `Renderer` interface.

Such a renderer is used if `--family` names it, or if `--family` is `auto` and the package has one for the model's name. This module is
imported only if the package may have such a renderer, because importing the package takes a second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from renderers import ParsedResponse, ToolCallParseStatus, config_from_name, create_renderer, template_field_names
from renderers.base import MODEL_RENDERER_MAP

from turngate.errors import BadRequest, ConfigError
from turngate.render.call_syntax import GEMMA, HERMES, LFM, Syntax, detect_syntax
from turngate.render.parse import Parsed, Parser
from turngate.render.renderer import LastTurn, ReplyReader, find_reasoning_tokens, read_prompt_end
from turngate.render.template_fallbacks import add_to_system_prompt, declare_tools
from turngate.render.tokenizer import Tokenizer
from turngate.types import (
    ID_DTYPE,
    CallDelta,
    Constraint,
    Delta,
    Ids,
    Json,
    Message,
    ReasoningTokens,
    Tool,
    ToolCall,
)

_PROBE = ToolCall("call00001", "probe_tool", '{"k": "v"}')
_PROBE_TOOL = Tool(
    "probe_tool",
    {
        "type": "function",
        "function": {"name": "probe_tool", "description": "d", "parameters": {"type": "object", "properties": {}}},
    },
)


def family_of(model: str) -> str | None:
    """Return the family to which the `renderers` package assigns this exact model name, or None if it does not list the name."""
    found: str | None = MODEL_RENDERER_MAP.get(model)
    return found


class FamilyRenderer:
    """A renderer that wraps the `renderers` package's renderer for one family of models."""

    def __init__(self, tokenizer: Tokenizer, family: str) -> None:
        self.name = f"family:{family}"
        self.tokenizer = tokenizer
        self._family = family
        self._renderers: dict[bytes, Any] = {}
        plain = self._renderer_for({})
        self.stop_ids = tuple(plain.get_stop_token_ids())
        self._knows = template_field_names(plain.config)
        user = {"role": "user", "content": "x"}
        text = tokenizer.decode(plain.render_ids([user, _message_to_wire(Message("assistant", tool_calls=(_PROBE,)))]))
        found = detect_syntax(text)
        self.syntax = None if found in (LFM, GEMMA) else found  # None means that the package parses the calls
        self._declares = "probe_tool" in tokenizer.decode(plain.render_ids([user], tools=[_PROBE_TOOL.wire]))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json], *, generate: bool = True
    ) -> list[int]:
        if tools and not self._declares:
            messages = add_to_system_prompt(messages, declare_tools(tools, tail="\n</tools>"))
            tools = ()
        try:
            ids: list[int] = self._renderer_for(kwargs).render_ids(
                [_message_to_wire(m) for m in messages],
                tools=[t.wire for t in tools] or None,
                add_generation_prompt=generate,
            )
        except (ValueError, TypeError, KeyError) as error:
            raise BadRequest(
                f"the renderer {self.name} rejects this conversation: {error}", param="messages"
            ) from error
        return ids

    def bridge(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> list[int] | None:
        context, sampled = last.context.tolist(), last.sampled.tolist()
        wire_tools = [t.wire for t in tools] if tools and self._declares else None
        rendered = self._renderer_for(kwargs).bridge_to_next_turn(
            context, sampled, [_message_to_wire(m) for m in new], tools=wire_tools
        )
        if rendered is None:
            return None
        ids: list[int] = rendered.token_ids
        known = len(context) + len(sampled)
        # The package promises that the ids start with the context and the sampled ids. Check this anyway, because wrong ids must never get
        # into a trace.
        return ids[known:] if ids[:known] == context + sampled else None

    def explain_refusal(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> str:
        extends = self.bridge(last, new, tools, kwargs) is not None
        return "" if extends else f"the renderer {self.name} has no bridge for this transition"

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]) -> Ids:
        return np.array(self.render(messages, tools, kwargs), ID_DTYPE)

    def bridge_ids(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> Ids | None:
        ids = self.bridge(last, new, tools, kwargs)
        return None if ids is None else np.array(ids, ID_DTYPE)

    def knows(self, name: str) -> bool:
        return name in self._knows

    def reader(
        self, context: Ids, tools: Sequence[Tool], stop: Sequence[str], constraint: Constraint | None, one_call: bool
    ) -> ReplyReader:
        syntax = self.syntax or HERMES
        in_reasoning = read_prompt_end(self.tokenizer, context).endswith(syntax.reasoning_open)
        ours = self.syntax is not None or constraint is not None
        parser = Parser(
            syntax, in_reasoning=in_reasoning, tools=tools if ours else (), constraint=constraint, one_call=one_call
        )
        if ours:
            return ReplyReader(self.tokenizer, syntax, self.stop_ids, parser, stop)
        return _PackageReader(self, syntax, parser, context, tools, stop, one_call)

    def find_reasoning_tokens(self, context: Ids) -> ReasoningTokens | None:
        return find_reasoning_tokens(self.tokenizer, self.syntax or HERMES, context)

    def package_parse(self, ids: list[int], context: Ids, tools: Sequence[Tool]) -> ParsedResponse:
        parsed: ParsedResponse = self._renderer_for({}).parse_response(
            ids, tools=[t.wire for t in tools] or None, prompt_ids=context.tolist()
        )
        return parsed

    def _renderer_for(self, kwargs: dict[str, Json]) -> Any:
        key = orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS)
        if key not in self._renderers:
            if len(self._renderers) >= 64:
                self._renderers.pop(next(iter(self._renderers)))
            self._renderers[key] = self._create(kwargs)
        return self._renderers[key]

    def _create(self, kwargs: dict[str, Json]) -> Any:
        try:
            config = config_from_name(self._family)
        except ValueError:  # there is no such family
            config = None
        if config is None:
            choices = ", ".join(["auto", "template", *sorted(set(MODEL_RENDERER_MAP.values()))])
            raise ConfigError(f"family must be one of {choices}, not {self._family!r}", param="family")
        values = {"thinking_retention": "all", **kwargs}
        try:
            return create_renderer(self.tokenizer, type(config)(**values))
        except (ValueError, TypeError, KeyError, AssertionError) as error:  # of the package, or of pydantic
            if not kwargs:
                raise ConfigError(
                    f"family: the renderer {self.name} does not fit the model's tokenizer: {error}; choose another family, or 'template'",
                    param="family",
                ) from error
            raise BadRequest(
                f"the renderer {self.name} rejects the template arguments {', '.join(sorted(kwargs))}; change or remove them ({error})",
                param="chat_template_kwargs",
            ) from error


class _PackageReader(ReplyReader):
    """A reader for replies whose calls only the `renderers` package can parse.

    It streams the text before the first added token that neither marks reasoning nor ends the turn. It emits everything else when the reply
    ends.
    """

    def __init__(
        self,
        family: FamilyRenderer,
        syntax: Syntax,
        parser: Parser,
        context: Ids,
        tools: Sequence[Tool],
        stop: Sequence[str],
        one_call: bool,
    ) -> None:
        super().__init__(family.tokenizer, syntax, family.stop_ids, parser, stop)
        self._family, self._context, self._tools, self._one_call = family, context, tools, one_call
        thinking = {family.tokenizer.added.get(m) for m in (syntax.reasoning_open, syntax.reasoning_close)}
        self._markers = frozenset(family.tokenizer.added.values()) - thinking - frozenset(family.stop_ids)
        self._ids: list[int] = []
        self._held = False

    def feed(self, ids: Sequence[int]) -> list[Delta | CallDelta]:
        self._ids.extend(int(i) for i in ids)
        upto = 0 if self._held else next((n for n, i in enumerate(ids) if i in self._markers), None)
        events = super().feed(ids[:upto])
        if upto is not None:
            self._held = True
            self._stops.feed(self._decoder.feed(self._drop_hidden(ids[upto:])))  # only to find a stop string
        return events

    def finish(self) -> tuple[list[Delta | CallDelta], Parsed]:
        if not self._held:
            return super().finish()
        self._stops.feed(self._decoder.flush())
        events, shown = self._parser.finish()
        whole = self._family.package_parse(self._cut_at_stop(), self._context, self._tools)
        message = shown.message
        content, reasoning = (
            _missing_text(message.content, whole.content or ""),
            _missing_text(message.reasoning, whole.reasoning_content or ""),
        )
        events += [Delta("reasoning", reasoning)] if reasoning else []
        events += [Delta("content", content)] if content else []
        calls = [c for c in whole.tool_calls if c.status == ToolCallParseStatus.OK]
        tool_calls = tuple(
            ToolCall(f"call_{os.urandom(12).hex()}", c.name or "", _arguments_to_text(c.arguments))
            for c in calls[: 1 if self._one_call else None]
        )
        events += [CallDelta(n, call) for n, call in enumerate(tool_calls)]
        done = Message("assistant", message.content + content, message.reasoning + reasoning, tool_calls)
        return events, Parsed(done, reasoning_open=whole.reasoning_complete is False)

    def _cut_at_stop(self) -> list[int]:
        """Return the ids before the stop string that was found. If it starts in the middle of a token, encode the text before it again."""
        ids = list(self._ids)
        if not self.stopped_by:
            return ids
        before = self._decode(ids).partition(self.stopped_by)[0]
        # One pass finds the ids whose complete characters fit. The last few may end within a character.
        decoder, size, kept = self._family.tokenizer.decoder(), 0, list[int]()
        for one in ids:
            size += len(decoder.feed(self._drop_hidden([one])))
            if size > len(before):
                break
            kept.append(one)
        ids = kept
        while not before.startswith(text := self._decode(ids)):
            ids.pop()
        return ids + self._family.tokenizer.encode(before[len(text) :])

    def _decode(self, ids: Sequence[int]) -> str:
        decoder = self._family.tokenizer.decoder()
        return decoder.feed(self._drop_hidden(ids)) + decoder.flush()

    def _drop_hidden(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i not in self._hidden]


def _missing_text(shown: str, whole: str) -> str:
    """Return the part of `whole` after the text that was already shown. Return "" if `whole` does not start with the shown text."""
    return whole[len(shown) :] if whole.startswith(shown) else ""


def _arguments_to_text(arguments: Json) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _message_to_wire(message: Message) -> dict[str, Json]:
    wire: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.name:
        wire["name"] = message.name
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _parse_arguments(c.arguments)}}
            for c in message.tool_calls
        ]
    return wire


def _parse_arguments(text: str) -> Json:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text
