"""Render chat templates as `transformers` does, but without that package.

`Template` compiles and renders a template. If a template lacks a feature (`traits.py`), the conversation is rewritten before it is rendered
(`template_fallbacks.py`). The Jinja environment is the one that Hugging Face documents: a sandbox with `tojson`, `raise_exception` and
`strftime_now`. Tests compare the results with those of `transformers`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turngate.errors import BadRequest, ConfigError
from turngate.render.template_fallbacks import (
    join_adjacent_messages,
    join_users_to_results,
    move_late_system_to_user,
    move_system_after_answer_to_user,
    move_system_to_user,
    rewrite_tools_as_hermes,
    shorten_call_ids,
)
from turngate.render.traits import PROBE_TOOL, Traits, probe_traits
from turngate.types import Json, Message, Tool

# A template is third-party code. It may raise an error to reject a conversation, or fail on a conversation that it does not expect.
_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


class _GenerationTag(jinja2.ext.Extension):
    """The `{% generation %}` tag, with which some templates mark assistant text for training masks. It has no effect on rendering."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Json, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja sandbox that remembers which attributes of a type are safe.

    Jinja's own sandbox decides this again at every access, which takes an eighth of the rendering time.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._decisions: dict[tuple[type, str], bool] = {}  # only for attributes that exist

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        decision = self._decisions.get(key)
        if decision is None:
            decision = self._decisions[key] = super().is_safe_attribute(obj, attr, value)
        return decision


def _build_environment() -> ImmutableSandboxedEnvironment:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


class Template:
    """A compiled chat template. `without_tools` is the template for conversations without tools: a separate one, or this one."""

    def __init__(self, source: str, special_tokens: dict[str, str], *, source_without_tools: str | None = None) -> None:
        try:
            environment = _build_environment()
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template has a syntax error on line {error.lineno}: {error.message}", param="tokenizer"
            ) from None
        self.source = source
        self._special = special_tokens
        self._is_for_tools = source_without_tools is not None
        self.traits = probe_traits(self._probe)
        self.without_tools = self if source_without_tools is None else Template(source_without_tools, special_tokens)
        self.variables |= self.without_tools.variables

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool, kwargs: dict[str, Json]
    ) -> str:
        """Render the whole conversation as text. If `generate` is set, append the generation prompt.

        Raise `BadRequest` if the template rejects the conversation or fails.
        """
        if not tools and self.without_tools is not self:
            return self.without_tools.text(messages, generate=generate, kwargs=kwargs)
        try:
            return self._render(self.traits, messages, tools, generate, kwargs)
        except _TEMPLATE_ERRORS as error:
            raise BadRequest(
                f"the model's chat template cannot render this conversation: {error}", param="messages"
            ) from error

    def _probe(self, traits: Traits, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
        if self._is_for_tools and not tools:
            tools = [PROBE_TOOL]  # a template for tools may fail if there are none
        try:
            return self._write(
                traits, shorten_call_ids(messages) if traits.short_call_ids else messages, tools, True, {}
            )
        except _TEMPLATE_ERRORS:
            return None

    def _render(
        self,
        traits: Traits,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        generate: bool,
        kwargs: dict[str, Json],
    ) -> str:
        """Rewrite the conversation where the template lacks a feature, and render it."""
        if not traits.native_tools:
            messages, tools = rewrite_tools_as_hermes(messages, tools), ()
        if not traits.late_system:
            messages = move_late_system_to_user(messages)
        elif not traits.system_after_answer:
            messages = move_system_after_answer_to_user(messages)
        if not traits.system or (tools and not traits.system_with_results):
            messages = move_system_to_user(messages)
        if not traits.user_after_results:
            messages = join_users_to_results(messages)
        if not traits.adjacent_users:
            messages = join_adjacent_messages(messages)
        if traits.short_call_ids:
            messages = shorten_call_ids(messages)
        return self._write(traits, messages, tools, generate, kwargs)

    def _write(
        self,
        traits: Traits,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        generate: bool,
        kwargs: dict[str, Json],
    ) -> str:
        return self._template.render(
            messages=[_to_wire(message, traits) for message in messages],
            tools=[tool.wire for tool in tools] or None,
            documents=None,
            add_generation_prompt=generate,
            **{**self._special, **kwargs},
        )


def _to_wire(message: Message, traits: Traits) -> dict[str, Json]:
    """Encode a message as the dictionary that chat templates expect."""
    content: Json = [{"type": "text", "text": message.content}] if traits.content_parts else message.content
    wire: dict[str, Json] = {"role": message.role, "content": content}
    if message.name:
        wire["name"] = message.name
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": c.id,
                "type": "function",
                "function": {"name": c.name, "arguments": _encode_arguments(c.arguments, traits)},
            }
            for c in message.tool_calls
        ]
        if traits.null_content and not message.content:
            wire["content"] = None
    if message.role == "tool":
        wire["tool_call_id"] = message.tool_call_id
    return wire


def _encode_arguments(text: str, traits: Traits) -> Json:
    if traits.text_arguments:
        return text
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text  # the model wrote malformed JSON, which is rendered unchanged
