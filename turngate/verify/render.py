"""Check the stored ids against the stored messages by rendering whole conversations again with the model's chat template.

There are three questions. For every context: are its ids what the template renders for its messages? For every turn: do its ids parse to
the message that was recorded and delivered? For every branch: would the template render the whole branch to the ids that were sent, and if
not, why not? A difference of this last kind is not an error, because sampled ids are kept unchanged.
"""

from __future__ import annotations

import datetime
import json
from importlib.util import find_spec
from pathlib import Path

import msgspec
import numpy as np

from turngate.errors import BadRequest, ConfigError
from turngate.render import Renderer, TemplateRenderer, Tokenizer
from turngate.render.call_syntax import HERMES
from turngate.render.certificate_cache import load_any_record
from turngate.render.parse import Parsed
from turngate.types import Constraint, Ids, Json, Message, Tool, ToolCall
from turngate.verify.findings import CheckResults, TemplateDifference, VerifyCheck
from turngate.verify.messages import NodeMessages, order_results
from turngate.verify.store_reader import StoredContext, StoredSession, StoredTurn, path, path_ids

_MARK = "turngateVERIFYMARK"
_REFERENCE = b'"tool_reference"'  # Anthropic's reference to a deferred tool
_AROUND = 8  # tokens shown on either side of a difference
_LONGEST_STOP = 80  # characters at the end of a turn that are searched for a stop string


class Renderers:
    """Loads the renderers that sessions were recorded with, each of them once."""

    def __init__(self, *, tokenizer: Path | None = None, family: str = "", given: Renderer | None = None) -> None:
        """Use `tokenizer` and `family`, if set, instead of the recorded ones. If `given` is set, use this renderer for all sessions.

        Raise `ConfigError` if `tokenizer` or `family` is invalid.
        """
        self._tokenizer, self._family, self._given = tokenizer, "" if family == "auto" else family, given
        self._loaded: dict[tuple[str, str], Renderer] = {}
        if self._family:
            _require_family(self._family)
        if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
            raise ConfigError(
                f"tokenizer: {tokenizer} is not a tokenizer folder; choose a folder that contains tokenizer.json",
                param="tokenizer",
            )

    def load(self, session: StoredSession) -> Renderer:
        """Return the renderer of a session. Raise `ConfigError` if it cannot be loaded, or if its tokenizer is not the recorded one."""
        if self._given is not None:
            return self._require_match(self._given, session)
        folder = self._tokenizer or Path(session.folder)
        if not session.folder and self._tokenizer is None:
            raise ConfigError(
                "the path of the session's tokenizer is not recorded; pass --tokenizer PATH", param="tokenizer"
            )
        if not folder.is_dir():
            raise ConfigError(
                f"the session's tokenizer folder, {folder}, does not exist on this machine; pass --tokenizer PATH",
                param="tokenizer",
            )
        family = self._family or session.renderer.removeprefix("family:") or _family_for_model(session.config.model)
        key = str(folder), family
        if key not in self._loaded:
            self._loaded[key] = _load_renderer(folder, family)
        return self._require_match(self._loaded[key], session)

    def _require_match(self, renderer: Renderer, session: StoredSession) -> Renderer:
        if renderer.tokenizer.digest != session.vocabulary:
            raise ConfigError(
                f"the tokenizer at {renderer.tokenizer.folder} is not the one that the session was recorded with; pass the right one "
                "with --tokenizer PATH",
                param="tokenizer",
            )
        return renderer


def _require_family(family: str) -> None:
    """Raise `ConfigError` if no renderer is available for `family`."""
    if family == "template":
        return
    if find_spec("renderers") is None:
        raise ConfigError(
            f"family {family!r} needs the `renderers` package, which is not installed; run `pip install 'turngate[families]'`",
            param="family",
        )
    from renderers import config_from_name
    from renderers.base import MODEL_RENDERER_MAP

    try:
        config_from_name(family)
    except ValueError:
        choices = ", ".join(["template", *sorted(set(MODEL_RENDERER_MAP.values()))])
        raise ConfigError(f"family must be one of {choices}, not {family!r}", param="family") from None


def _family_for_model(model: str) -> str:
    """Return the renderer family that a gateway would choose for this model name."""
    if "/" not in model or find_spec("renderers") is None:
        return "template"
    from turngate.render.families import family_of

    return family_of(model) or "template"


def _load_renderer(folder: Path, family: str) -> Renderer:
    record = load_any_record(folder)  # use only its vocabulary; do not trust its certificate
    tokenizer = (
        Tokenizer(folder) if record is None else Tokenizer(folder, vocabulary=record.vocabulary, fast=record.fast)
    )
    if family in ("template", "auto"):
        return TemplateRenderer(tokenizer)
    if find_spec("renderers") is None:
        raise ConfigError(
            "the session was rendered by the `renderers` package, which is not installed; run `pip install 'turngate[families]'`",
            param="family",
        )
    from turngate.render.families import FamilyRenderer

    return FamilyRenderer(tokenizer, family)


def check_rendering(
    session: StoredSession, messages: NodeMessages, renderers: Renderers, results: CheckResults
) -> Renderer | None:
    """Check that a tokenizer is recorded, and check contexts and turns by rendering and parsing them again.

    Return the renderer, or None if it cannot be loaded or the session was only observed.
    """
    with results.check("structure", "vocabulary", "the tokenizer of the ids is recorded") as vocabulary:
        exact = session.config.mode != "observe"
        known = not exact or bool(session.vocabulary and session.folder)
        vocabulary.expect(known, f"no tokenizer is recorded for the vocabulary {session.vocabulary!r}")
    why = "" if exact else "an observed endpoint does its own rendering and parsing"
    renderer: Renderer | None = None
    if exact:
        try:
            renderer = renderers.load(session)
        except (ConfigError, BadRequest) as error:
            why = error.message
    render_check = None if renderer is None else _RenderCheck(session, messages, renderer)
    with results.check(
        "render", "context", "the ids of every context are what the chat template renders for its messages"
    ) as check:
        if render_check is None:
            check.skip(why)
        else:
            render_check.check_contexts(check, results)
    with results.check("render", "parse", "the ids of every turn parse to what was recorded and delivered") as check:
        if render_check is None:
            check.skip(why)
        else:
            render_check.check_turns(check, results)
    if render_check is not None:
        results.differences += render_check.find_differences()
    return renderer


class _RenderCheck:
    def __init__(self, session: StoredSession, messages: NodeMessages, renderer: Renderer) -> None:
        self._session, self._messages, self._renderer = session, messages, renderer
        self._tokenizer = renderer.tokenizer
        self._stops = frozenset(renderer.stop_ids)
        self._close = _reasoning_close(renderer)
        self._closing_ids = renderer.closing_ids if isinstance(renderer, TemplateRenderer) else renderer.stop_ids
        self._openers = self._find_openers()

    # ── contexts ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_contexts(self, check: VerifyCheck, results: CheckResults) -> None:
        for context in self._session.contexts:
            if not self._messages.is_readable(context) or self._messages.tools(context) is None:
                continue  # reported by the checks of messages and tools
            try:
                wrong = self._check_context(context)
            except BadRequest as error:
                results.note(
                    "context", f"the template rejects the conversation up to here: {error.message}", context.id
                )
                continue
            if wrong and any(_REFERENCE in node.row.messages for node in path(context)):
                # The definition of a deferred tool was in the request, but only the tools at the start of the prompt are stored.
                results.note(
                    "context",
                    f"it refers to tools that are not stored, so this may not be an error: {wrong}",
                    context.id,
                )
                continue
            check.expect(not wrong, wrong, node=context.id)

    def _check_context(self, context: StoredContext) -> str:
        """Return a description of what is wrong with a context's ids, or "" if they are correct."""
        if context.parent is None:
            return self._compare(context.ids, self._render_whole(context), context.length - len(context.ids))
        due = self._render_following(context, context.parent)
        if due is not None and np.array_equal(context.ids, due):
            return ""
        # If a turn cannot be extended, the gateway renders the whole conversation again and keeps the common prefix.
        whole = self._render_whole(context)
        size = len(context.ids)
        rerendered = self._session.config.thinking == "drop" or due is None
        if np.array_equal(path_ids(context), whole) or (
            rerendered and np.array_equal(context.ids, whole[len(whole) - size :])
        ):
            return ""
        return self._compare(context.ids, whole[len(whole) - size :] if due is None else due, context.length - size)

    def _render_whole(self, context: StoredContext) -> Ids:
        messages = order_results(self._messages.up_to(context))
        if isinstance(self._renderer, TemplateRenderer):
            return self._encode(self._render_text(messages, context))
        tools, kwargs = self._messages.tools(context) or (), self._kwargs(context)
        return np.array(self._renderer.render(messages, tools, kwargs), np.int32)

    def _render_following(self, context: StoredContext, turn: StoredTurn) -> Ids | None:
        """Render the ids that the template writes after a turn, up to the next turn.

        A mark replaces the end of the turn, so that the end can be found in the rendered text. Return None if the turn was not extended, or
        if its end cannot be found.
        """
        before, new = self._messages.up_to(turn.parent), self._messages.of(context)
        if any(message.role == "assistant" for message in new):
            return None  # the agent wrote assistant messages itself, so the turn was not extended
        ordered = order_results([*before, self._messages.reply(turn), *new])
        at = len(before)
        marked = [*ordered[:at], _mark_end(ordered[at])]
        end = self._find_end(self._render_text([*marked, *ordered[at + 1 :]], context))
        if end is None:
            return None
        # Some tokenizers encode the start of a text differently from its middle, so start with the closing token.
        following = self._encode(end)
        stop, final = int(following[0]), int(turn.ids[-1]) if len(turn.ids) else -1
        if final == stop or (final in self._stops and not {final, stop} & self._openers):
            return following[1:]
        # The turn was truncated: its closing tokens were not sampled, so they belong to the context.
        closed = turn.info.reasoning_open and _starts_with(context.ids, self._close)
        return np.array([*(self._close if closed or self._closes_thinking(turn) else []), *following], np.int32)

    def _find_end(self, text: str) -> str | None:
        """Return the rendered text from the token that closes the marked turn onwards, or None if no such token follows the mark."""
        start = text.rfind(_MARK)
        ends = [end for i in self._closing_ids if (end := text.find(self._tokenizer.decode(i), start)) >= 0]
        return text[min(ends) :] if start >= 0 and ends else None

    def _find_openers(self) -> frozenset[int]:
        """Return the ids of tokens that start the next message and thereby close a turn."""
        if not isinstance(self._renderer, TemplateRenderer):
            return frozenset()
        user, call = Message("user", "x"), ToolCall("call_1", "f", "{}")
        answered = _mark_end(Message("assistant")), _mark_end(Message("assistant", tool_calls=(call,)))
        openers = set()
        for turn, new in (
            (answered[0], user),
            (answered[0], Message("system", "y")),
            (answered[1], Message("tool", "z", tool_call_id="call_1", name="f")),
        ):
            try:
                alone = self._find_end(self._renderer.text([user, turn], (), {}, generate=False))
                followed = self._find_end(self._renderer.text([user, turn, new], (), {}, generate=False))
            except BadRequest:
                continue  # the template rejects such a turn, so none is recorded
            if alone is None and followed is not None:
                openers.add(int(self._encode(followed)[0]))
        return frozenset(openers)

    def _closes_thinking(self, turn: StoredTurn) -> bool:
        """Return whether the renderer must have closed this turn's truncated thinking. A `FamilyRenderer` may leave it open."""
        return turn.info.reasoning_open and isinstance(self._renderer, TemplateRenderer)

    def _render_text(self, messages: list[Message], context: StoredContext) -> str:
        tools, kwargs = self._messages.tools(context) or (), self._kwargs(context)
        if not isinstance(self._renderer, TemplateRenderer):
            return self._tokenizer.decode(self._renderer.render(messages, tools, kwargs))
        started = min((turn.info.started for turn in context.root.children), default=self._session.opened)
        # A template may print the date, so use the date of the recording.
        then = _to_date(started) or _to_date(self._session.opened) or datetime.datetime.now()
        return self._renderer.text(messages, tools, {"strftime_now": then.strftime, **kwargs})

    def _kwargs(self, context: StoredContext) -> dict[str, Json]:
        preamble = self._messages.preamble(context)
        return msgspec.json.decode(preamble.kwargs, type=dict[str, Json]) if preamble is not None else {}

    def _encode(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text), np.int32)

    def _compare(self, stored: Ids, due: Ids, start: int) -> str:
        if np.array_equal(stored, due):
            return ""
        at = _first_difference(stored, due)
        return (
            f"token {start + at}: sent {self._around(stored, at)!r}, but the template writes {self._around(due, at)!r}"
        )

    def _around(self, ids: Ids, at: int) -> str:
        return self._tokenizer.decode(ids[max(0, at - _AROUND) : at + _AROUND].tolist())

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────

    def check_turns(self, check: VerifyCheck, results: CheckResults) -> None:
        for turn in self._session.turns:
            tools = self._messages.tools(turn.parent)
            if turn.id in self._messages.errors or tools is None:
                continue
            parsed, cut = self._parse(turn, tools)
            wrong = self._compare_message(turn, parsed)
            if wrong and _has_calls_as_text(self._messages.reply(turn), parsed.message):
                what = (
                    "a recorded tool call has arguments that are not a JSON object; this version of Turngate would record the "
                    "call as text"
                )
                results.note("calls", what, turn.id)
                continue
            if check.expect(not wrong, wrong, node=turn.id):
                self._check_finish(turn, cut, check, results)
            over = [int(i) for i in turn.ids if i >= self._tokenizer.vocab_size]
            if over:
                results.note(
                    "vocabulary",
                    f"id {over[0]} is outside the vocabulary; the model's embedding may have unused rows",
                    turn.id,
                )

    def _parse(self, turn: StoredTurn, tools: tuple[Tool, ...]) -> tuple[Parsed, str]:
        """Parse a turn's ids. Also return what ended the turn early: `one call`, `stop string` or ""."""
        message = self._messages.reply(turn)
        shape = next((b.removeprefix("constrained: ") for b in turn.info.biases if b.startswith("constrained: ")), "")
        kind = shape.removesuffix(" after reasoning")
        name = message.tool_calls[0].name if message.tool_calls else ""
        try:
            fields = {"kind": kind, "tool": name, "after_reasoning": kind != shape}
            constraint = msgspec.convert(fields, Constraint) if kind else None
        except msgspec.ValidationError:
            constraint = None  # an unknown shape, which the sampling check reports

        def read(stop: tuple[str, ...] = (), *, one_call: bool = False) -> tuple[Parsed, bool]:
            reader = self._renderer.reader(turn.parent.ids, tools, stop, constraint, one_call)
            reader.feed(turn.ids.tolist())
            return reader.finish()[1], reader.satisfied

        plain, _ = read()
        ended = turn.info.finish not in ("stop", "tool_calls") or (len(turn.ids) and int(turn.ids[-1]) in self._stops)
        if ended and _matches(plain, message):
            return plain, ""
        # The store does not record whether a request allowed only one tool call or had stop strings, so infer it from the turn.
        one, satisfied = read(one_call=True)
        if satisfied and _matches(one, message):
            return one, "one call"
        text = self._tokenizer.decode(turn.ids.tolist())
        for size in range(1, min(len(text), _LONGEST_STOP) + 1):
            stopped, satisfied = read((text[-size:],))
            if satisfied and _matches(stopped, message):
                return stopped, "stop string"
        return plain, ""

    def _compare_message(self, turn: StoredTurn, parsed: Parsed) -> str:
        recorded, again = self._messages.reply(turn), parsed.message
        for what, was, now in (
            ("text", recorded.content, again.content),
            ("thinking", recorded.reasoning, again.reasoning),
            ("calls", _encode_calls(recorded), _encode_calls(again)),
        ):
            if was != now:
                return f"its ids parse to the {what} {_shorten(now)}, but {_shorten(was)} is recorded"
        if parsed.reasoning_open != turn.info.reasoning_open and turn.info.finish != "abort":
            return (
                "it does not end inside thinking, but is marked as if it did"
                if turn.info.reasoning_open
                else "it ends inside thinking, but is not marked as such"
            )
        return ""

    def _check_finish(self, turn: StoredTurn, cut: str, check: VerifyCheck, results: CheckResults) -> None:
        closed = bool(len(turn.ids)) and int(turn.ids[-1]) in self._stops
        constrained = any(bias.startswith("constrained: ") for bias in turn.info.biases)
        if turn.info.finish in ("stop", "tool_calls") and len(turn.ids) and not (closed or cut or constrained):
            results.note("finish", "the engine reported a stop, but the last id is not a stop token", turn.id)
        if turn.info.finish == "length":
            # The limit may have been reached exactly with the last id.
            limited = self._session.config.limits.sampled_tokens is not None
            check.expect(
                not closed or limited, "it is marked as truncated, but its last id is a stop token", node=turn.id
            )

    # ── branches ────────────────────────────────────────────────────────────────────────────────────────────────

    def find_differences(self) -> list[TemplateDifference]:
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
                whole = self._render_whole(context)
            except BadRequest:
                continue  # reported above
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
            node = node.parent  # the template's version of the turn is longer than the sampled one
        why = (
            self._explain_turn(node, whole)
            if isinstance(node, StoredTurn)
            else self._explain_context(node, sent, whole)
        )
        return TemplateDifference(leaf.id, node.id, at, why, self._around(sent, at), self._around(whole, at))

    def _explain_turn(self, turn: StoredTurn, whole: Ids) -> str:
        """Explain a difference by comparing the sampled turn with the template's version of it. Both start at the same token."""
        message = self._messages.reply(turn)
        rest = whole[turn.parent.length :].tolist()
        end = next((n + 1 for n, i in enumerate(rest) if i in self._stops), len(rest))
        sampled, written = self._tokenizer.decode(turn.ids.tolist()), self._tokenizer.decode(rest[:end])
        if sampled == written:
            return "sampled ids whose text the tokenizer would encode differently"
        if message.reasoning and _collapse_whitespace(message.reasoning) not in _collapse_whitespace(written):
            return "thinking that the template drops was kept"
        if _collapse_whitespace(sampled) == _collapse_whitespace(written):
            return "whitespace"
        if "\ufffd" in sampled:
            return "sampled bytes that are not text"
        if not len(turn.ids) or int(turn.ids[-1]) not in self._stops:
            return "a truncated turn"
        if any(int(i) in self._tokenizer.special_ids for i in turn.ids[:-1]) and not message.tool_calls:
            return "special tokens that the model sampled"
        if _strip_whitespace(sampled) == _strip_whitespace(written):
            return "JSON spelling of the model's calls" if message.tool_calls else "whitespace"
        if message.tool_calls and any(call.arguments not in written for call in message.tool_calls):
            return "JSON spelling of the model's calls"
        if message.reasoning or _collapse_whitespace(sampled).startswith(HERMES.reasoning_open):
            return "how the template writes thinking"
        return "how the template writes calls" if message.tool_calls else "text that the template writes differently"

    def _explain_context(self, context: StoredContext, sent: Ids, whole: Ids) -> str:
        ours, theirs = self._tokenizer.decode(sent.tolist()), self._tokenizer.decode(whole.tolist())
        if ours == theirs:
            return "ids whose text the tokenizer would encode differently"
        if _collapse_whitespace(ours) == _collapse_whitespace(theirs):
            return "whitespace"
        if any(message.role == "system" for message in self._messages.of(context)) and context.parent is not None:
            return "a late system message"
        if any(message.role == "tool" for message in self._messages.of(context)):
            return "how the template groups tool results"
        return "text that the template writes only at the end of a prompt"


def _to_date(seconds: float) -> datetime.datetime | None:
    """Return a recorded time as a date, or None if it is out of range. Other checks report such a time."""
    try:
        return datetime.datetime.fromtimestamp(seconds)
    except (ValueError, OverflowError, OSError):
        return None


def _mark_end(message: Message) -> Message:
    """Return a substitute for a turn's message that ends with a mark, so that the turn's end can be found in the rendered text."""
    if not message.tool_calls:
        return Message("assistant", _MARK)
    *others, last = message.tool_calls
    calls = (*others, ToolCall(last.id, last.name, msgspec.json.encode({"mark": _MARK}).decode()))
    return Message("assistant", message.content, tool_calls=calls)


def _reasoning_close(renderer: Renderer) -> list[int]:
    """Return the ids that close truncated thinking."""
    syntax = renderer.syntax if isinstance(renderer, TemplateRenderer) else HERMES
    return renderer.tokenizer.encode(syntax.reasoning_close)


def _starts_with(ids: Ids, prefix: list[int]) -> bool:
    return bool(ids[: len(prefix)].tolist() == prefix)


def _has_calls_as_text(recorded: Message, again: Message) -> bool:
    """Return whether a turn was recorded with calls that this version of Turngate parses as text.

    The arguments of such calls are not JSON objects. An earlier version recorded them as calls.
    """
    calls = [call for call in recorded.tool_calls if not _is_object(call.arguments)]
    return bool(calls) and all(call.name in again.content and call.arguments in again.content for call in calls)


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        return False


def _matches(parsed: Parsed, message: Message) -> bool:
    again = parsed.message
    return (again.content, again.reasoning, _encode_calls(again)) == (
        message.content,
        message.reasoning,
        _encode_calls(message),
    )


def _encode_calls(message: Message) -> str:
    """Encode the names and arguments of tool calls. Call ids are omitted, because they do not come from the model."""
    return msgspec.json.encode([(call.name, call.arguments) for call in message.tool_calls]).decode()


def _first_difference(one: Ids, other: Ids) -> int:
    """Return the index at which two sequences first differ, or the length of the shorter one."""
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size


def _collapse_whitespace(text: str) -> str:
    return " ".join(text.split())


def _strip_whitespace(text: str) -> str:
    return "".join(text.split())


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 120 else f"{text[:60]} … {text[-60:]}")
