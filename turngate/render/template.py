"""Chat templates, rendered as Hugging Face does, and the features that each template supports.

`Template` compiles and renders. `Traits` records the results of probing a template: whether it declares tools, renders calls and results,
and accepts arguments as objects or as text. `transformers` is not needed: the environment here is the documented one (sandboxed Jinja,
`tojson`, `raise_exception`, `strftime_now`), and tests compare it with `transformers`.
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
import msgspec
import orjson
from jinja2.sandbox import ImmutableSandboxedEnvironment

from turngate.errors import BadRequest, ConfigError
from turngate.render.template_fallbacks import move_late_system_to_user, move_system_to_user, rewrite_tools_as_hermes
from turngate.types import Json, Message, Tool, ToolCall

SENTINEL = "turngateSENTINEL"


class _GenerationTag(jinja2.ext.Extension):
    """The `{% generation %}` tag, which marks assistant text for training masks in some templates. Rendering ignores it."""

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


def _build_environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env


class Traits(msgspec.Struct, frozen=True):
    """The features of one template, found by rendering probes with it."""

    native_tools: bool  # declares tools and renders calls and results; otherwise the Hermes form is used
    text_arguments: bool  # accepts call arguments as JSON text rather than as objects
    null_content: bool  # renders calls only if content is null
    system: bool  # accepts a system message
    late_system: bool = True  # renders a later system message in its place


class Template:
    """One compiled chat template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
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
        self.traits = Traits(native_tools=True, text_arguments=False, null_content=False, system=True)
        self.traits = self._probe()

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, generate: bool, kwargs: dict[str, Json]
    ) -> str:
        """Render the whole conversation as text. With `generate`, append the generation prompt."""
        if not self.traits.native_tools:
            messages, tools = rewrite_tools_as_hermes(messages, tools), ()
        if not self.traits.late_system:
            messages = move_late_system_to_user(messages)
        if not self.traits.system:
            messages = move_system_to_user(messages)
        try:
            return self._render(messages, tools, generate, kwargs)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            # A template is third-party code. It may reject a conversation by raising, or fail on one it does not expect.
            raise BadRequest(
                f"the model's chat template rejects this conversation: {error}", param="messages"
            ) from error

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], generate: bool, kwargs: dict[str, Json]
    ) -> str:
        return self._template.render(
            messages=[self._wire(message) for message in messages],
            tools=[tool.wire for tool in tools] or None,
            documents=None,
            add_generation_prompt=generate,
            **{**self._special, **kwargs},
        )

    def _wire(self, message: Message) -> dict[str, Json]:
        """Encode a message as the dictionary that chat templates expect."""
        wire: dict[str, Json] = {"role": message.role, "content": message.content}
        if message.name:
            wire["name"] = message.name
        if message.reasoning:
            wire["reasoning_content"] = message.reasoning
        if message.tool_calls:
            wire["tool_calls"] = [
                {
                    "id": c.id,
                    "type": "function",
                    "function": {"name": c.name, "arguments": self._arguments(c.arguments)},
                }
                for c in message.tool_calls
            ]
            if self.traits.null_content and not message.content:
                wire["content"] = None
        if message.role == "tool":
            wire["tool_call_id"] = message.tool_call_id
        return wire

    def _arguments(self, text: str) -> Json:
        if self.traits.text_arguments:
            return text
        try:
            return orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            return text  # malformed JSON from the model is rendered unchanged

    def _probe(self) -> Traits:
        system = self._shows(SENTINEL, [Message("system", SENTINEL), Message("user", "x")])
        late_system = self._shows_late_system()
        for text_arguments in (False, True):
            for null_content in (False, True):
                self.traits = Traits(
                    native_tools=True,
                    text_arguments=text_arguments,
                    null_content=null_content,
                    system=system,
                    late_system=late_system,
                )
                if self._shows_tools():
                    return self.traits
        return Traits(
            native_tools=False, text_arguments=False, null_content=False, system=system, late_system=late_system
        )

    def _shows_late_system(self) -> bool:
        last, late = Message("user", "lastSENTINEL"), Message("system", SENTINEL)
        try:
            text = self._render([Message("user", "x"), Message("assistant", "y"), last, late], (), True, {})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
        return text.find(SENTINEL) > text.find(last.content)

    def _shows_tools(self) -> bool:
        tool = Tool(
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
        user, call = Message("user", "x"), ToolCall("call00001", "probe_tool", '{"k": "' + SENTINEL + '"}')
        history = [
            user,
            Message("assistant", tool_calls=(call,)),
            Message("tool", "resultSENTINEL", tool_call_id="call00001", name="probe_tool"),
        ]
        return (
            self._shows("probe_tool", [user], [tool])
            and self._shows(SENTINEL, history, [tool])
            and self._shows("resultSENTINEL", history, [tool])
        )

    def _shows(self, needle: str, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> bool:
        try:
            return needle in self._render(messages, tools, True, {})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return False
