"""Do the stored ids say what the stored messages say? Each conversation is rendered anew with the model's chat template, whole.

Three things are asked. Of every context: are its ids the template's own words for the messages that it adds? Of every turn: do its ids,
read again, give the message that was recorded and delivered? And of every branch: would the template, asked for all of it at once, have
said the same, and where not, why? Only the last may differ without fault: sampled ids are kept as they were sampled.
"""

from __future__ import annotations

import datetime
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from turngate.errors import BadRequest, ConfigError
from turngate.render import Renderer, TemplateRenderer, Tokenizer
from turngate.render.certificate_cache import load_any_record
from turngate.render.parse import HERMES, Parsed
from turngate.types import Constraint, Ids, Json, Message, Tool, ToolCall
from turngate.verify.findings import CheckResults, TemplateDifference, VerifyCheck
from turngate.verify.messages import NodeMessages, order_results
from turngate.verify.store_reader import StoredContext, StoredSession, StoredTurn, path, path_ids

_MARK = "turngateVERIFYMARK"
_REFERENCE = b'"tool_reference"'  # Anthropic's, to a tool that was deferred
_AROUND = 8  # tokens that are shown on either side of a difference
_LONGEST_STOP = 80  # characters from the end in which a stop string is looked for


class Renderers:
    """Tokenizers that sessions were recorded with, each loaded once."""

    def __init__(self, *, tokenizer: Path | None = None, family: str = "", given: Renderer | None = None) -> None:
        """`tokenizer`, `family`: instead of what is recorded. Raises ConfigError where one is not what its name says."""
        self._tokenizer, self._family, self._given = tokenizer, "" if family == "auto" else family, given
        self._made: dict[tuple[str, str], Renderer] = {}
        if self._family:
            _require_family(self._family)
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"tokenizer: {tokenizer} is no tokenizer; give a folder that holds tokenizer.json", param="tokenizer"
            )

    def of(self, session: StoredSession) -> Renderer:
        """Raises ConfigError where there is none for it."""
        if self._given is not None:
            return self._matching(self._given, session)
        folder = self._tokenizer or Path(session.folder)
        if not session.folder and self._tokenizer is None:
            raise ConfigError("it is not recorded where its tokenizer was; give --tokenizer PATH", param="tokenizer")
        if not folder.is_dir():
            raise ConfigError(f"its tokenizer is no longer at {folder}; give --tokenizer PATH", param="tokenizer")
        family = self._family or session.renderer.removeprefix("family:") or _family_for_model(session.config.model)
        key = str(folder), family
        if key not in self._made:
            self._made[key] = _load_renderer(folder, family)
        return self._matching(self._made[key], session)

    def _matching(self, renderer: Renderer, session: StoredSession) -> Renderer:
        if renderer.tokenizer.digest != session.vocabulary:
            raise ConfigError(
                f"the tokenizer at {renderer.tokenizer.folder} is another than the one it was recorded with",
                param="tokenizer",
            )
        return renderer


def _require_family(family: str) -> None:
    """Raises ConfigError where nothing renders as `family`."""
    if family == "template":
        return
    if find_spec("renderers") is None:
        raise ConfigError(
            f"family: {family!r} would be one of the `renderers` package, which is not installed; template needs none",
            param="family",
        )
    from renderers import config_from_name
    from renderers.base import MODEL_RENDERER_MAP

    try:
        config_from_name(family)
    except ValueError:
        choices = ", ".join(["template", *sorted(set(MODEL_RENDERER_MAP.values()))])
        raise ConfigError(f"family: {family!r} is none of {choices}", param="family") from None


def _family_for_model(model: str) -> str:
    """The hand-written renderer that a gateway takes by itself for a model of this name."""
    if "/" not in model or find_spec("renderers") is None:
        return "template"
    from turngate.render.families import family_of

    return family_of(model) or "template"


def _load_renderer(folder: Path, family: str) -> Renderer:
    known = load_any_record(
        folder
    )  # of the vocabulary alone: what was found out about the template is not taken on trust
    tokenizer = Tokenizer(folder) if known is None else Tokenizer(folder, vocabulary=known.vocabulary, fast=known.fast)
    if family in ("template", "auto"):
        return TemplateRenderer(tokenizer)
    if find_spec("renderers") is None:
        raise ConfigError("it was rendered by the `renderers` package, which is not installed here", param="family")
    from turngate.render.families import FamilyRenderer

    return FamilyRenderer(tokenizer, family)


def check_rendering(
    session: StoredSession, messages: NodeMessages, renderers: Renderers, results: CheckResults
) -> Renderer | None:
    """The renderer that it was read with, if there is one."""
    with results.check("structure", "vocabulary", "the tokenizer that the ids are of is known") as vocabulary:
        exact = session.config.mode != "observe"
        known = not exact or bool(session.vocabulary and session.folder)
        vocabulary.expect(known, f"nothing is recorded of a tokenizer {session.vocabulary!r}")
    why = "" if exact else "an observed endpoint renders and reads by itself"
    renderer: Renderer | None = None
    if exact:
        try:
            renderer = renderers.of(session)
        except (ConfigError, BadRequest) as error:
            why = error.message
    reading = None if renderer is None else _RenderCheck(session, messages, renderer)
    with results.check(
        "render", "context", "the ids of every context are the chat template's own for the messages that it adds"
    ) as check:
        if reading is None:
            check.skip(why)
        else:
            reading.contexts(check, results)
    with results.check(
        "render", "parse", "the ids of every turn, read again, say what was recorded and delivered"
    ) as check:
        if reading is None:
            check.skip(why)
        else:
            reading.turns(check, results)
    if reading is not None:
        results.differences += reading.differences()
    return renderer


class _RenderCheck:
    def __init__(self, session: StoredSession, messages: NodeMessages, renderer: Renderer) -> None:
        self._session, self._messages, self._renderer = session, messages, renderer
        self._tokenizer = renderer.tokenizer
        self._stops = frozenset(renderer.stop_ids)
        self._close = _reasoning_close(renderer)

    # ── contexts ────────────────────────────────────────────────────────────────────────────────────────────────

    def contexts(self, check: VerifyCheck, results: CheckResults) -> None:
        for context in self._session.contexts:
            if not self._messages.is_readable(context) or self._messages.tools(context) is None:
                continue  # told where those are read
            try:
                wrong = self._context(context)
            except BadRequest as error:
                results.note(
                    "context", f"the template refuses the conversation up to here: {error.message}", context.id
                )
                continue
            if wrong and any(_REFERENCE in node.row.messages for node in path(context)):
                # What a deferred tool reads like was known to the call; of tools, only those are stored that the prompt begins with.
                results.note(
                    "context", f"it refers to tools that are not stored, so it cannot be told: {wrong}", context.id
                )
                continue
            check.expect(not wrong, wrong, node=context.id)

    def _context(self, context: StoredContext) -> str:
        """What is wrong with its ids; empty if nothing."""
        if context.parent is None:
            return self._compared(context.ids, self._whole(context), context.length - len(context.ids))
        due = self._following(context, context.parent)
        if due is not None and np.array_equal(context.ids, due):
            return ""
        # Where a template cannot be extended, the gateway renders everything anew and keeps what fits, token for token.
        whole = self._whole(context)
        size = len(context.ids)
        anew = self._session.config.thinking == "drop" or due is None or not self._renderer.bridges
        if np.array_equal(path_ids(context), whole) or (
            anew and np.array_equal(context.ids, whole[len(whole) - size :])
        ):
            return ""
        return self._compared(context.ids, whole[len(whole) - size :] if due is None else due, context.length - size)

    def _whole(self, context: StoredContext) -> Ids:
        messages = order_results(self._messages.up_to(context))
        if isinstance(self._renderer, TemplateRenderer):
            return self._encoded(self._text(messages, context))
        tools, kwargs = self._messages.tools(context) or (), self._kwargs(context)
        return np.array(self._renderer.render(messages, tools, kwargs), np.int32)

    def _following(self, context: StoredContext, turn: StoredTurn) -> Ids | None:
        """What the template writes between the turn and the next one, found behind a mark in place of the turn's last words."""
        before, new = self._messages.up_to(turn.parent), self._messages.of(context)
        if any(message.role == "assistant" for message in new):
            return None  # words that the agent put into the model's mouth: nothing was extended
        ordered = order_results([*before, self._messages.reply(turn), *new])
        at = len(before)
        text = self._text([*ordered[:at], _mark_end(ordered[at]), *ordered[at + 1 :]], context)
        start = text.rfind(_MARK)
        ends = [
            (found, i) for i in self._renderer.stop_ids if (found := text.find(self._tokenizer.decode(i), start)) >= 0
        ]
        if start < 0 or not ends:
            return None
        end, stop = min(ends)
        after = self._encoded(text[end + len(self._tokenizer.decode(stop)) :])
        if len(turn.ids) and int(turn.ids[-1]) in self._stops:
            return after
        # The turn was cut short: what closes it was not sampled, so it belongs to the context.
        closed = turn.info.reasoning_open and _starts_with(context.ids, self._close)
        return np.array([*(self._close if closed or self._derives(turn) else []), stop, *after], np.int32)

    def _derives(self, turn: StoredTurn) -> bool:
        """Our own renderer always closes thinking that was cut short; a hand-written one may know better."""
        return turn.info.reasoning_open and isinstance(self._renderer, TemplateRenderer)

    def _text(self, messages: list[Message], context: StoredContext) -> str:
        tools, kwargs = self._messages.tools(context) or (), self._kwargs(context)
        if not isinstance(self._renderer, TemplateRenderer):
            return self._tokenizer.decode(self._renderer.render(messages, tools, kwargs))
        when = min((turn.info.started for turn in context.root.children), default=self._session.opened)
        then = datetime.datetime.fromtimestamp(when)
        # A template may tell the date, and that was the one of that day.
        return self._renderer.text(messages, tools, {"strftime_now": then.strftime, **kwargs})

    def _kwargs(self, context: StoredContext) -> dict[str, Json]:
        preamble = self._messages.preamble(context)
        return msgspec.json.decode(preamble.kwargs, type=dict[str, Json]) if preamble is not None else {}

    def _encoded(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text), np.int32)

    def _compared(self, stored: Ids, due: Ids, start: int) -> str:
        if np.array_equal(stored, due):
            return ""
        at = _first_difference(stored, due)
        return (
            f"token {start + at}: sent {self._around(stored, at)!r}, where the template says {self._around(due, at)!r}"
        )

    def _around(self, ids: Ids, at: int) -> str:
        return self._tokenizer.decode(ids[max(0, at - _AROUND) : at + _AROUND].tolist())

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────

    def turns(self, check: VerifyCheck, results: CheckResults) -> None:
        for turn in self._session.turns:
            tools = self._messages.tools(turn.parent)
            if turn.id in self._messages.errors or tools is None:
                continue
            parsed, cut = self._parsed(turn, tools)
            wrong = self._told_apart(turn, parsed)
            if check.expect(not wrong, wrong, node=turn.id):
                self._ended(turn, cut, check, results)
            over = [int(i) for i in turn.ids if i >= self._tokenizer.vocab_size]
            if over:
                results.note(
                    "vocabulary",
                    f"id {over[0]} is past the end of the vocabulary: the model has more rows than words",
                    turn.id,
                )

    def _parsed(self, turn: StoredTurn, tools: tuple[Tool, ...]) -> tuple[Parsed, str]:
        """What the ids come to, and what ended them besides the model: nothing, `one call` or `stop string`."""
        message = self._messages.reply(turn)
        kind = next((b.removeprefix("constrained: ") for b in turn.info.biases if b.startswith("constrained: ")), "")
        name = message.tool_calls[0].name if message.tool_calls else ""
        try:
            constraint = msgspec.convert({"kind": kind, "tool": name}, Constraint) if kind else None
        except msgspec.ValidationError:
            constraint = None  # no shape that there is: told where biases are looked at

        def read(stop: tuple[str, ...] = (), *, one_call: bool = False) -> tuple[Parsed, bool]:
            reader = self._renderer.reader(turn.parent.ids, tools, stop, constraint, one_call)
            reader.feed(turn.ids.tolist())
            return reader.finish()[1], reader.satisfied

        plain, _ = read()
        ended = turn.info.finish not in ("stop", "tool_calls") or (len(turn.ids) and int(turn.ids[-1]) in self._stops)
        if ended and _matches(plain, message):
            return plain, ""
        # Calls that ask for one call only, or that name strings to stop at, are not stored as such: their marks are in the turn.
        one, satisfied = read(one_call=True)
        if satisfied and _matches(one, message):
            return one, "one call"
        text = self._tokenizer.decode(turn.ids.tolist())
        for size in range(1, min(len(text), _LONGEST_STOP) + 1):
            stopped, satisfied = read((text[-size:],))
            if satisfied and _matches(stopped, message):
                return stopped, "stop string"
        return plain, ""

    def _told_apart(self, turn: StoredTurn, parsed: Parsed) -> str:
        said, again = self._messages.reply(turn), parsed.message
        for what, was, now in (
            ("text", said.content, again.content),
            ("thinking", said.reasoning, again.reasoning),
            ("calls", _encode_calls(said), _encode_calls(again)),
        ):
            if was != now:
                return f"its {what} was recorded as {_shorten(was)}, and its ids say {_shorten(now)}"
        if parsed.reasoning_open != turn.info.reasoning_open and turn.info.finish != "abort":
            return (
                "it is marked to end inside thinking, and does not"
                if turn.info.reasoning_open
                else "it ends inside thinking"
            )
        return ""

    def _ended(self, turn: StoredTurn, cut: str, check: VerifyCheck, results: CheckResults) -> None:
        closed = bool(len(turn.ids)) and int(turn.ids[-1]) in self._stops
        constrained = any(bias.startswith("constrained: ") for bias in turn.info.biases)
        if turn.info.finish in ("stop", "tool_calls") and len(turn.ids) and not (closed or cut or constrained):
            results.note("finish", "the engine said that the model had ended, and its last id ends nothing", turn.id)
        if turn.info.finish == "length":
            limited = self._session.config.limits.sampled_tokens is not None  # that may be met with the very last id
            check.expect(not closed or limited, "it is marked as cut short, and its last id is a stop", node=turn.id)

    # ── branches ────────────────────────────────────────────────────────────────────────────────────────────────

    def differences(self) -> list[TemplateDifference]:
        found = []
        for leaf in self._session.leaves:
            context = leaf.parent
            if (
                context.parent is None
                or not self._messages.is_readable(context)
                or self._messages.tools(context) is None
            ):
                continue
            try:
                whole = self._whole(context)
            except BadRequest:
                continue  # told above
            sent = path_ids(context)
            if not np.array_equal(sent, whole):
                found.append(self._difference(leaf, sent, whole))
        return found

    def _difference(self, leaf: StoredTurn, sent: Ids, whole: Ids) -> TemplateDifference:
        at = _first_difference(sent, whole)
        nodes = path(leaf.parent)
        node, end = nodes[0], 0
        for node in nodes:
            end += len(node.ids)
            if at < end:
                break
        if isinstance(node, StoredContext) and node.parent is not None and at == end - len(node.ids):
            node = node.parent  # the template's version of the turn goes on where ours has ended
        why = self._why(node, whole) if isinstance(node, StoredTurn) else self._why_context(node, sent, whole)
        return TemplateDifference(leaf.id, node.id, at, why, self._around(sent, at), self._around(whole, at))

    def _why(self, turn: StoredTurn, whole: Ids) -> str:
        """Held against the template's own version of the turn, which begins at the same token."""
        message = self._messages.reply(turn)
        rest = whole[turn.parent.length :].tolist()
        end = next((n + 1 for n, i in enumerate(rest) if i in self._stops), len(rest))
        said, written = self._tokenizer.decode(turn.ids.tolist()), self._tokenizer.decode(rest[:end])
        if said == written:
            return "sampled ids that the tokenizer would write with others"
        if message.reasoning and _collapse_whitespace(message.reasoning) not in _collapse_whitespace(written):
            return "thinking kept, which the template drops"
        if _collapse_whitespace(said) == _collapse_whitespace(written):
            return "whitespace"
        if "\ufffd" in said:
            return "sampled bytes that are no text"
        if not len(turn.ids) or int(turn.ids[-1]) not in self._stops:
            return "a turn that was cut short"
        if any(int(i) in self._tokenizer.special_ids for i in turn.ids[:-1]) and not message.tool_calls:
            return "special tokens that the model sampled"
        if _strip_whitespace(said) == _strip_whitespace(written):
            return "JSON spelling of the model's calls" if message.tool_calls else "whitespace"
        if message.tool_calls and any(call.arguments not in written for call in message.tool_calls):
            return "JSON spelling of the model's calls"
        if message.reasoning or _collapse_whitespace(said).startswith(HERMES.reasoning_open):
            return "how the template writes thinking"
        return "how the template writes calls" if message.tool_calls else "words that the template writes otherwise"

    def _why_context(self, context: StoredContext, sent: Ids, whole: Ids) -> str:
        ours, theirs = self._tokenizer.decode(sent.tolist()), self._tokenizer.decode(whole.tolist())
        if ours == theirs:
            return "ids that the tokenizer would write with others"
        if _collapse_whitespace(ours) == _collapse_whitespace(theirs):
            return "whitespace"
        if any(message.role == "system" for message in self._messages.of(context)) and context.parent is not None:
            return "a late system message"
        if any(message.role == "tool" for message in self._messages.of(context)):
            return "how the template gathers results"
        return "what the template writes at the end of a prompt, and not in the middle of a conversation"


def _mark_end(message: Message) -> Message:
    """The turn, ending in a mark that can be found in the rendered text."""
    if not message.tool_calls:
        return Message("assistant", _MARK)
    *others, last = message.tool_calls
    calls = (*others, ToolCall(last.id, last.name, msgspec.json.encode({"mark": _MARK}).decode()))
    return Message("assistant", message.content, tool_calls=calls)


def _reasoning_close(renderer: Renderer) -> list[int]:
    """What is put after thinking that was cut short."""
    syntax = renderer.syntax if isinstance(renderer, TemplateRenderer) else HERMES
    return renderer.tokenizer.encode(syntax.reasoning_close)


def _starts_with(ids: Ids, with_: list[int]) -> bool:
    return bool(ids[: len(with_)].tolist() == with_)


def _matches(parsed: Parsed, message: Message) -> bool:
    again = parsed.message
    return (again.content, again.reasoning, _encode_calls(again)) == (
        message.content,
        message.reasoning,
        _encode_calls(message),
    )


def _encode_calls(message: Message) -> str:
    """Names and arguments as the model wrote them; the ids are made up."""
    return msgspec.json.encode([(call.name, call.arguments) for call in message.tool_calls]).decode()


def _first_difference(one: Ids, other: Ids) -> int:
    """Where two begin to differ."""
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def _strip_whitespace(text: str) -> str:
    return "".join(text.split())


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]} … {text[-60:]}")
