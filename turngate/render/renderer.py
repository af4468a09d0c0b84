"""The `Renderer` interface, and `TemplateRenderer`, which implements it for any chat template.

A renderer turns a conversation into prompt ids, and sampled ids into reply events. It also builds bridges, which are the ids between one
turn and the next. `TemplateRenderer` derives the bridges from the template. A transition has no bridge if a render of the
whole conversation would contain other text between the two turns. `families.py` adapts hand-written renderers to the interface.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import msgspec
import numpy as np

from turngate.common.validation import explain_error
from turngate.errors import BadRequest, ConfigError
from turngate.render.call_syntax import HERMES, Syntax, detect_syntax
from turngate.render.markers import find_closing_tokens, require_single_tokens
from turngate.render.parse import Parsed, Parser, StopStrings
from turngate.render.template import Template
from turngate.render.tokenizer import Tokenizer
from turngate.render.traits import LONG_CALL_ID, PROBE_TOOL, SENTINEL
from turngate.render.transition import Transition, build_stand_in, find_difference
from turngate.render.vocabulary import read_json
from turngate.types import (
    ID_DTYPE,
    CallDelta,
    Constraint,
    Delta,
    Ids,
    Json,
    Message,
    ReasoningTokens,
    TokenId,
    Tool,
    ToolCall,
)

TEMPLATE_RENDERER = "template"  # name of the renderer that is derived from the chat template
_MAX_FORMS = 256
_MAX_FORM_MESSAGES = 64  # to find a form, the new messages are rendered about twenty times
# Texts that a template may trim, unwrap, parse or otherwise change.
_TRICKY_TEXTS = (
    "",
    "  x\n\n",
    "\n\n  x",
    '{"a": [1, true]}',
    "[1, 2]",
    "<think>\nx\n</think>\n\ny",
    "<tool_response>\nx\n</tool_response>",
    "{{ x }} {% y %} <b> & 'q' \"q\" \\n é👍",
    "Error: x",
    "x /no_think",
    "x /think",
    "a long text, of which a template may keep a part only. " * 500,
)


class LastTurn(msgspec.Struct, frozen=True):
    """The sampled turn that a bridge follows."""

    context: Ids  # the ids just before the turn, which end with the generation prompt
    sampled: Ids
    message: Message  # the turn as the agent sent it back
    reasoning_open: bool = False  # whether sampling ended inside reasoning
    system: str = ""  # the conversation's system prompt, which some templates inspect at every turn


class Renderer(Protocol):
    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json], *, generate: bool = True
    ) -> list[int]:
        """Render the whole conversation. If `generate` is set, append the generation prompt for the next turn."""

    def knows(self, name: str) -> bool:
        """Return whether the renderer accepts a template argument with this name."""

    def bridge(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> list[int] | None:
        """Return the ids between the last sampled id and the next turn.

        Return None if this transition has no bridge. The whole conversation must then be rendered.
        """

    def explain_refusal(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> str:
        """Return why this transition has no bridge, or "" if it has one."""

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]) -> Ids:
        """Return the result of `render` as an array."""

    def bridge_ids(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> Ids | None:
        """Return the result of `bridge` as an array."""

    def reader(
        self, context: Ids, tools: Sequence[Tool], stop: Sequence[str], constraint: Constraint | None, one_call: bool
    ) -> ReplyReader: ...

    def find_reasoning_tokens(self, context: Ids) -> ReasoningTokens | None:
        """Return the tokens that open and close reasoning at the start of a reply to this context.

        Return None if the reply cannot start with reasoning, or if the markers are not added tokens of the vocabulary.
        """


class ReplyReader:
    """An incremental reader that turns sampled ids into reply events.

    It drops stop tokens, and special tokens that are not markers. It decodes the other ids, cuts the text at the first stop string, and
    parses it.
    """

    def __init__(
        self, tokenizer: Tokenizer, syntax: Syntax, stop_ids: tuple[int, ...], parser: Parser, stop: Sequence[str]
    ) -> None:
        self._hidden = _find_hidden_ids(tokenizer, syntax, stop_ids)
        self._decoder = tokenizer.decoder()
        self._parser = parser
        self._stops = StopStrings(stop)
        # Whether `satisfied` can become true in the middle of what the engine samples.
        self.may_stop_early = bool(stop) or parser.one_call

    @property
    def satisfied(self) -> bool:
        """Whether sampling can stop: a stop string was found, or the only allowed call is complete."""
        return self._stops.hit or self._parser.satisfied

    @property
    def stopped_by(self) -> str:
        """The stop string that was found, or an empty string."""
        return self._stops.met

    def feed(self, ids: Sequence[int]) -> list[Delta | CallDelta]:
        hidden = self._hidden
        text = self._decoder.feed([i for i in ids if i not in hidden])
        return self._parser.feed(self._stops.feed(text)) if text else []

    def finish(self) -> tuple[list[Delta | CallDelta], Parsed]:
        tail = self._stops.feed(self._decoder.flush()) + self._stops.flush()
        events = self._parser.feed(tail) if tail else []
        more, parsed = self._parser.finish()
        return events + more, parsed


def read_prompt_end(tokenizer: Tokenizer, context: Ids) -> str:
    """Return the text of a prompt's last eight tokens, which shows whether the prompt opens or closes reasoning."""
    return tokenizer.decode(context[-8:].tolist()).rstrip()


def find_reasoning_tokens(tokenizer: Tokenizer, syntax: Syntax, context: Ids) -> ReasoningTokens | None:
    opening, closing = tokenizer.added.get(syntax.reasoning_open), tokenizer.added.get(syntax.reasoning_close)
    end = read_prompt_end(tokenizer, context)
    if opening is None or closing is None or end.endswith(syntax.reasoning_close):
        return None
    return ReasoningTokens(opening, closing, end.endswith(syntax.reasoning_open))


@lru_cache(maxsize=4)  # this is called for every turn, and a gateway has only one renderer
def _find_hidden_ids(tokenizer: Tokenizer, syntax: Syntax, stop_ids: tuple[int, ...]) -> frozenset[int]:
    """Return the ids that are dropped from replies: stop tokens, and special tokens that are not markers of the syntax."""
    markers = {tokenizer.added.get(marker) for marker in syntax.markers()}
    return (tokenizer.special_ids - markers) | frozenset(stop_ids)


class BridgeForm(msgspec.Struct, frozen=True):
    """The text that a template writes around the contents of new messages: one part before each of them, and one after the last."""

    close: int
    parts: tuple[str, ...]

    def fill(self, contents: Sequence[str]) -> str:
        return "".join(part for pair in zip(self.parts, contents, strict=False) for part in pair) + self.parts[-1]


# Created only once, because creating an encoder takes longer than encoding.
_encode_sorted = json.JSONEncoder(sort_keys=True).encode
# The shape of a transition: number of calls, whether there is text besides them, roles and names of the new messages, whether there are
# tools, template arguments.
_Shape = tuple[int, bool, tuple[tuple[str, str], ...], bool, str]
_NOT_WRITTEN = "the chat template does not write these messages after a turn"
_NOT_SEARCHED = BridgeForm(0, ())  # no form has been searched for yet; None means that no form exists


class TemplateRenderer:
    """A renderer for any chat template. It derives each bridge from the text that the template writes after an assistant turn."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"{tokenizer.folder} has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json); "
                "add one, or choose a different --tokenizer",
                param="tokenizer",
            )
        self.name = TEMPLATE_RENDERER
        self.tokenizer = tokenizer
        self.template, self.unused_template = _compile_template(tokenizer, tokenizer.chat_template)
        require_single_tokens(self.template, tokenizer)
        self.syntax = self._find_syntax()
        templates = dict.fromkeys((self.template, self.template.without_tools))
        closes = [c for template in templates for c in find_closing_tokens(template, tokenizer, self.syntax)]
        stops = [c.token for c in closes if c.is_sampled] + _read_generation_stops(tokenizer) + _eos_of(tokenizer)
        self.stop_ids = tuple(dict.fromkeys(stops))
        if not self.stop_ids:
            raise ConfigError(
                f"tokenizer {tokenizer.folder} does not define the end of an assistant turn: the chat template writes no special "
                "token after the turn, generation_config.json sets no eos_token_id, and tokenizer_config.json sets no eos_token that is in "
                "the vocabulary; set eos_token in tokenizer_config.json",
                param="tokenizer",
            )
        self.closing_ids = tuple(dict.fromkeys([*(c.token for c in closes), *self.stop_ids]))
        self._closing_texts = {i: tokenizer.decode(i) for i in self.closing_ids}
        # Tokens that end a turn because the next message starts with them, as in GLM's templates.
        self._openers = frozenset(c.token for c in closes if not c.is_own)
        self._forms: dict[tuple[*_Shape, str], BridgeForm | str | None] = {}
        self._refusals: dict[tuple[*_Shape, bool], str] = {}
        self.uncertified: dict[Transition, str] = {}  # transitions that failed certification, and why
        # The same for the template for tools, if the model has a separate one.
        self.uncertified_with_tools: dict[Transition, str] | None = None

    def text(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json], *, generate: bool = True
    ) -> str:
        return self.template.text(messages, tools, generate=generate, kwargs=kwargs)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json], *, generate: bool = True
    ) -> list[int]:
        return self.tokenizer.encode(self.text(messages, tools, kwargs, generate=generate), remember=True)

    def render_ids(self, messages: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]) -> Ids:
        # Cache the ids, because rollouts of one task start with the same system prompt, tools and question.
        return self.tokenizer.ids(self.text(messages, tools, kwargs), remember=True)

    def bridge(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> list[int] | None:
        ids = self.bridge_ids(last, new, tools, kwargs)
        return None if ids is None else ids.tolist()

    def bridge_ids(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> Ids | None:
        after = self._after_turn(last, new, tools, kwargs)
        if after is None or isinstance(after, str):
            return None
        close, text = after
        # A tokenizer may encode the start of a text differently, so include the closing token before it.
        ids = self.tokenizer.ids(self._closing_texts[close] + text)
        if self._is_closed(last, close):
            return ids[1:]
        uncertified = self._find_uncertified(tools)
        if uncertified and Transition.of(last.message, new, cut=True) in uncertified:
            return None
        # The turn was truncated, so the bridge includes the closing tokens, which were not sampled.
        if not last.reasoning_open:
            return ids
        return np.concatenate([np.array(self.tokenizer.encode(self.syntax.reasoning_close), ID_DTYPE), ids])

    def explain_refusal(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> str:
        after = self._after_turn(last, new, tools, kwargs)
        if isinstance(after, str):
            return after
        transition = Transition.of(last.message, new, cut=True)
        uncertified = self._find_uncertified(tools)
        if after is not None and not self._is_closed(last, after[0]) and transition in uncertified:
            return f"{transition.describe()}: {uncertified[transition]}"
        return "" if after is not None else _NOT_WRITTEN

    def _find_uncertified(self, tools: Sequence[Tool]) -> dict[Transition, str]:
        return self.uncertified if not tools or self.uncertified_with_tools is None else self.uncertified_with_tools

    def knows(self, name: str) -> bool:
        return name in self.template.variables

    def reader(
        self, context: Ids, tools: Sequence[Tool], stop: Sequence[str], constraint: Constraint | None, one_call: bool
    ) -> ReplyReader:
        in_reasoning = read_prompt_end(self.tokenizer, context).endswith(self.syntax.reasoning_open)
        one_call = one_call or not self.template.traits.parallel_calls
        parser = Parser(self.syntax, in_reasoning=in_reasoning, tools=tools, constraint=constraint, one_call=one_call)
        return ReplyReader(self.tokenizer, self.syntax, self.stop_ids, parser, stop)

    def find_reasoning_tokens(self, context: Ids) -> ReasoningTokens | None:
        return find_reasoning_tokens(self.tokenizer, self.syntax, context)

    def _is_closed(self, last: LastTurn, close: int) -> bool:
        """Return whether the sampled turn ends with `close`, the token with which the template ends it, or with an equivalent stop token.

        Another stop token is equivalent to `close` unless one of the two starts the next message.
        """
        final = int(last.sampled[-1]) if len(last.sampled) else -1
        return final == close or (final in self.stop_ids and not {final, close} & self._openers)

    def _after_turn(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> tuple[int, str] | str | None:
        """Return the closing token of the last turn, and the text that the template writes after it for the new messages.

        If this kind of transition has no bridge, return the reason. Return None if the template rejects the conversation, or does not write
        the turn, its closing token, or a new system message after it.
        """
        if len(new) > _MAX_FORM_MESSAGES:
            few = _thin_out(new)
            shape = self._describe_shape(last, few, tools, kwargs)
            why = self._find_refusal(last, few, tools, kwargs, (*shape, bool(last.system)))
            return why or self._render_after(last.message, last.system, new, tools, kwargs)
        key = *self._describe_shape(last, new, tools, kwargs), last.system
        form = self._forms.get(key, _NOT_SEARCHED)
        if form is _NOT_SEARCHED:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.pop(next(iter(self._forms)))
            why = self._find_refusal(last, new, tools, kwargs, (*key[:-1], bool(last.system)))
            form = self._forms[key] = why or self._find_form(last, new, tools, kwargs)
        if form is None:
            return self._render_after(last.message, last.system, new, tools, kwargs)
        if isinstance(form, str):
            return form
        return form.close, form.fill([m.content for m in new])

    def _describe_shape(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> _Shape:
        calls = last.message.tool_calls
        speakers = tuple([(m.role, m.name if m.role == "user" else "") for m in new])
        arguments = _encode_sorted(kwargs) if kwargs else ""
        return len(calls), bool(calls and last.message.content), speakers, bool(tools), arguments

    def _find_refusal(
        self,
        last: LastTurn,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: dict[str, Json],
        shape: tuple[*_Shape, bool],
    ) -> str:
        """Return why transitions of this shape have no bridge, or "" if no reason is found. Cache the result."""
        if shape not in self._refusals:
            if len(self._refusals) >= _MAX_FORMS:
                self._refusals.pop(next(iter(self._refusals)))
            transition = Transition.of(last.message, new, cut=False)
            why = self._find_uncertified(tools).get(transition) or self._compare_in_histories(last, new, tools, kwargs)
            self._refusals[shape] = why and f"{transition.describe()}: {why}"
        return self._refusals[shape]

    def _compare_in_histories(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> str:
        """Compare the bridge with renders of whole conversations that have different histories before the turn.

        Return the first difference, the reason why nothing could be compared, or "" if there is no difference.
        """
        system = "You are a careful engineer." if last.system else ""
        plain = [msgspec.structs.replace(m, content=f"turngateTEXT{n}END") for n, m in enumerate(new)]
        bridge = self._render_after(last.message, system, plain, tools, kwargs)
        if bridge is None:
            return _NOT_WRITTEN
        if any(message.content not in bridge[1] for message in plain):
            return "the template does not write all new messages after the turn"
        close = self._closing_texts[bridge[0]]

        def render(messages: Sequence[Message], generate: bool) -> str:
            shown = tools[:1] if self.template.traits.native_tools else ()
            return self.text(messages, shown, kwargs, generate=generate)

        closes = tuple(self._closing_texts.values())
        rejection = ""
        compared = False
        for history in _HISTORIES if tools else _HISTORIES[:2]:
            head = [Message("system", system), *history] if system else history
            try:
                found = find_difference(render, closes, [*head, last.message, *plain], close + bridge[1])
            except BadRequest as error:
                rejection = error.message
                continue  # the template rejects this turn after this history, but may accept it after another
            compared = True
            if found is not None:
                return found.describe()
        return (
            ""
            if compared
            else f"the template rejects every conversation that the bridge could be compared with: {rejection}"
        )

    def _find_form(
        self, last: LastTurn, new: Sequence[Message], tools: Sequence[Tool], kwargs: dict[str, Json]
    ) -> BridgeForm | None:
        """Find the text that the template writes around the contents of messages shaped like `new`.

        The result is tested with contents that templates are likely to change, and with different call ids and names. Return None if the
        text cannot be found or a test fails. Messages of this shape must then be rendered every time.
        """
        holes = [f"turngateHOLE{n}END" for n in range(len(new))]
        found = self._render_after(last.message, last.system, _replace_contents(new, holes, "a"), tools, kwargs)
        if found is None:
            return None
        parts = re.split("|".join(holes), found[1]) if holes else [found[1]]
        if re.findall(r"turngateHOLE\d+END", found[1]) != holes:
            return None
        form = BridgeForm(found[0], tuple(parts))
        for name, text in enumerate((*_TRICKY_TEXTS, *self._closing_texts.values(), *list(self.tokenizer.added)[:8])):
            contents = [text] * len(new)
            other = _rename_calls(last.message, f"t{name}")
            if self._render_after(other, last.system, _replace_contents(new, contents, f"t{name}"), tools, kwargs) != (
                found[0],
                form.fill(contents),
            ):
                return None
        return form

    def _render_after(
        self,
        message: Message,
        system: str,
        new: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: dict[str, Json],
    ) -> tuple[int, str] | None:
        """Render the new messages after a short replacement for the conversation.

        The replacement consists of the system message, if any, one question, and a turn of the same shape as `message`. Return the closing
        token of the turn, and the text after it. Return None if the template rejects the conversation, or does not write the turn, its
        closing token, or a new system message after it. Other new messages may be missing from the text.
        """
        # One tool is enough: what a template writes here may depend on whether there are tools, but not on which ones.
        stand_in = [Message("user", "x"), build_stand_in(message)]
        if system:
            stand_in.insert(0, Message("system", system))
        try:
            text = self.text([*stand_in, *new], tools[:1] if self.template.traits.native_tools else (), kwargs)
        except BadRequest:
            return None
        start = text.find(SENTINEL, text.find(system) + len(system) if system else 0)
        if start < 0:
            return None
        found = [(at, i) for i, close in self._closing_texts.items() if (at := text.find(close, start)) >= 0]
        if not found:
            return None
        at, which = min(found)
        after = text[at + len(self._closing_texts[which]) :]
        # Some templates move system messages to the start of the prompt, which has already been sent.
        if any(m.role == "system" and m.content.strip() not in after for m in new):
            return None
        return which, after

    def _find_syntax(self) -> Syntax:
        if not self.template.traits.native_tools:
            return HERMES
        return _find_call_syntax(self.template) or HERMES


def _find_call_syntax(template: Template) -> Syntax | None:
    call = ToolCall(LONG_CALL_ID, "probe_tool", '{"k": "v"}')
    # A template for tools may fail if there are none.
    tools = () if template.without_tools is template else [PROBE_TOOL]
    conversation = [Message("user", SENTINEL), Message("assistant", tool_calls=(call,))]
    text = template.text(conversation, tools, generate=False, kwargs={})
    return detect_syntax(text.rpartition(SENTINEL)[2])


def _compile_template(tokenizer: Tokenizer, default: str) -> tuple[Template, str]:
    """Compile the chat template and, if there is one, the separate template for tools.

    Return the template to use, and why the template for tools cannot be used ("" if it can, or if there is none).
    """
    source, without_tools = (default, None) if tokenizer.tool_template is None else (tokenizer.tool_template, default)
    try:
        template = Template(source, tokenizer.special_tokens, source_without_tools=without_tools)
    except ConfigError as error:
        fix = "correct it, or choose a different --tokenizer"
        raise ConfigError(f"tokenizer {tokenizer.folder}: {error.message}; {fix}", param="tokenizer") from None
    if without_tools is None:
        return template, ""
    if not template.traits.native_tools:
        why = "it does not accept tools, calls and results in the format of OpenAI's API"
    else:
        if _find_call_syntax(template) is not None:
            return template, ""
        why = "it writes calls in a form that Turngate cannot parse"
    unused = f"the chat template named tool_use cannot be used ({why}), so the template named default is used, even if there are tools"
    return template.without_tools, unused


def _thin_out(messages: Sequence[Message]) -> list[Message]:
    """Keep only the first two of several consecutive messages with the same role, which is enough to see how a template writes them."""
    return [m for n, m in enumerate(messages) if n < 2 or not m.role == messages[n - 1].role == messages[n - 2].role]


def _probe_history(*results: str) -> list[Message]:
    """Build a conversation: a question, and then a call and its result for each text in `results`."""
    history = [Message("user", "What does main.py do?")]
    for n, text in enumerate(results):
        call = ToolCall(f"{LONG_CALL_ID[:-1]}{n}", "read_file", '{"path": "main.py"}')
        history += [Message("assistant", tool_calls=(call,)), Message("tool", text, "", (), call.id, "read_file")]
    return history


# Histories before a turn, for comparing bridges with the template. Those with calls come last.
_HISTORIES = (
    _probe_history(),
    [*_probe_history(), Message("assistant", "It prints."), Message("user", "And util.py?")],
    _probe_history("print('x')", "1"),
    [*_probe_history("print('x')"), Message("assistant", "It prints."), Message("user", "And util.py?")],
)


def _eos_of(tokenizer: Tokenizer) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _rename_calls(message: Message, name: str) -> Message:
    calls = tuple(ToolCall(f"{name}{n:08}", name, "{}") for n, _ in enumerate(message.tool_calls))
    return Message("assistant", message.content, tool_calls=calls)


def _replace_contents(messages: Sequence[Message], contents: Sequence[str], name: str) -> list[Message]:
    return [
        Message(
            m.role,
            text,
            tool_call_id=f"{name}{n:08}" if m.role == "tool" else "",
            name=name if m.role == "tool" else "",
        )
        for n, (m, text) in enumerate(zip(messages, contents, strict=True))
    ]


class _GenerationConfig(msgspec.Struct):
    eos_token_id: TokenId | list[TokenId] | None = None


def _read_generation_stops(tokenizer: Tokenizer) -> list[int]:
    path = tokenizer.folder / "generation_config.json"
    try:
        stops = msgspec.convert(read_json(path, optional=True), _GenerationConfig).eos_token_id
    except msgspec.ValidationError as error:
        message, _ = explain_error(error, _GenerationConfig)
        raise ConfigError(f"tokenizer: {path} is not valid ({message})", param="tokenizer") from None
    return [stops] if isinstance(stops, int) else list(stops or [])
