"""Build the prompt of a call: locate the call in the session's trace and, if possible, render only its new messages.

These are the `locate` and `render` steps of `turn.py`. They do no I/O. So that other calls need not wait, digests of many new messages are
computed in short slices, and many or long messages are rendered in a thread.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from itertools import groupby

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.gateway.loading import TimeSlicer
from turngate.render import LastTurn, Renderer
from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages, tools_digest
from turngate.trace.session import Session
from turngate.trace.tree import Cause, Context, ContextInfo, Location, Sampled, path_ids, prompt_ids
from turngate.types import NO_IDS, Call, Ids, Json, Message, PromptIds, Tool

_ROLE_LETTER = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
_MESSAGES_FIELD = {"responses": "input", "gemini": "contents"}  # `messages` in the other dialects
_MAX_TOOL_SETS = 64  # decoded tool sets that are cached, across all sessions
_MAX_TOOLS_SIZE = 256_000  # bytes; larger tool sets are not cached
_MAX_INLINE_SIZE = 64_000  # bytes of new messages and tools; larger prompts are rendered in a thread
_MAX_INLINE_MESSAGES = 256  # new messages; more are compared in slices and rendered in a thread


class Preamble(msgspec.Struct, frozen=True):
    """The tools and template arguments of a call, and a digest of their meaning."""

    digest: bytes
    tools: tuple[Tool, ...]
    raw_tools: bytes
    raw_kwargs: bytes
    kwargs: dict[str, object]  # `raw_kwargs`, decoded


class Prompt(msgspec.Struct, frozen=True):
    """The prompt of a call: its place in the trace and the ids that it adds."""

    location: Location
    parent: Sampled | None  # the turn whose ids the prompt extends
    context: Context | None  # the known context whose ids the prompt repeats
    added: Ids
    ids: Ids | PromptIds  # the whole prompt, as sent to the engine
    preamble: Preamble
    forced_cause: Cause | None = None  # why the trace forks here, if already known
    refusal: str = ""  # why the template does not allow extending the located turn

    @property
    def start(self) -> int:
        """Index of the first new message."""
        return 0 if self.parent is None else self.location.start

    @property
    def is_rerendered(self) -> bool:
        """Whether the prompt continues a recorded turn in meaning, although its ids do not extend the ids of that turn."""
        return self.parent is None and self.location.node is not None


class _ToolSet(msgspec.Struct):
    """Decoded tools, a preamble built from them, and that preamble's other inputs."""

    tools: tuple[Tool, ...]
    digest: bytes
    preamble: Preamble | None = None
    hints: dict[str, Json] | None = None  # compared by identity; shared by calls that differ only in their messages
    renderer: Renderer | None = None


class PromptBuilder:
    """Builds prompts. It caches decoded tools, since agents usually send the same tools with every call."""

    def __init__(self, slicer: TimeSlicer | None = None) -> None:
        self._slicer = slicer or TimeSlicer()
        # keyed by dialect, raw tools, and whether later tools replace earlier ones
        self._tool_sets: dict[tuple[str, bytes, bool], _ToolSet] = {}

    def locate(self, session: Session, call: Call, renderer: Renderer | None = None) -> tuple[Location, Preamble]:
        """Find the deepest known point of the trace that this call extends. Return it with the call's preamble."""
        preamble = self._build_preamble(session, call, renderer)
        with _reject_deep_nesting(call):
            return session.trace.locate(RequestMessages(call.history, preamble.digest)), preamble

    async def build(self, session: Session, call: Call, renderer: Renderer) -> Prompt:
        preamble = self._build_preamble(session, call, renderer)
        request = RequestMessages(call.history, preamble.digest)
        with _reject_deep_nesting(call):
            if len(request) > _MAX_INLINE_MESSAGES:
                await self._compute_meanings(session, request)
            location = session.trace.locate(request)
        new = call.history.raws[location.start :] if location.context is None else ()
        size = sum(map(len, new)) + (len(preamble.raw_tools) if location.node is None and new else 0)
        with _reject_deep_nesting(call):
            if len(new) > _MAX_INLINE_MESSAGES or size > _MAX_INLINE_SIZE:
                # Tokenizing this much here would delay other sessions. In a thread, the tokenizers release the interpreter lock.
                return await asyncio.to_thread(_render, session, location, preamble, renderer)
            return _render(session, location, preamble, renderer)

    async def _compute_meanings(self, session: Session, request: RequestMessages) -> None:
        """If many messages of `request` are new, compute the digests of their meaning in slices. `request` caches the digests."""
        start = session.trace.count_repeated(request)
        if len(request) - start > _MAX_INLINE_MESSAGES:
            await self._slicer.run(partial(_compute_slice, request, iter(range(start, len(request)))))

    def _build_preamble(self, session: Session, call: Call, renderer: Renderer | None) -> Preamble:
        raw = call.tools.raw if call.tools is not None else b"[]"
        tool_set = self._find_tool_set(call, raw)
        explicit = call.template_kwargs or session.config.template_kwargs
        same = tool_set.hints is call.template_hints and tool_set.renderer is renderer
        if tool_set.preamble is not None and same and not explicit:
            return tool_set.preamble
        # Hints from the wire format apply only if the template uses them. Explicit arguments always apply.
        implied = {k: v for k, v in call.template_hints.items() if renderer is not None and renderer.knows(k)}
        arguments = {**implied, **call.template_kwargs, **session.config.template_kwargs}
        kwargs = json.dumps(arguments, sort_keys=True).encode() if arguments else b"{}"
        digest = blake2b(tool_set.digest + kwargs, digest_size=DIGEST_SIZE).digest()
        preamble = Preamble(digest, tool_set.tools, raw, kwargs, json.loads(kwargs))
        if not explicit:
            tool_set.preamble, tool_set.hints, tool_set.renderer = preamble, call.template_hints, renderer
        return preamble

    def _find_tool_set(self, call: Call, raw: bytes) -> _ToolSet:
        key = call.dialect, raw, call.tools is not None and call.tools.replaceable
        tool_set = self._tool_sets.get(key)
        if tool_set is None:
            tools = call.tools.decode() if call.tools is not None else ()
            tool_set = _ToolSet(tools, tools_digest([tool.wire for tool in tools]))
            if len(raw) <= _MAX_TOOLS_SIZE:  # an agent must not be able to exhaust memory with its tools
                if len(self._tool_sets) >= _MAX_TOOL_SETS:
                    self._tool_sets.pop(next(iter(self._tool_sets)))
                self._tool_sets[key] = tool_set
        return tool_set


class _reject_deep_nesting:  # lowercase because it is used like a function
    """Context manager that raises `BadRequest` for messages that are nested too deeply to be processed."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        if kind is not None and issubclass(kind, RecursionError):
            field = _MESSAGES_FIELD.get(self._call.dialect, "messages")
            raise BadRequest(f"a value in {field} is nested too deeply; use fewer levels", param=field) from None


def _compute_slice(request: RequestMessages, indexes: Iterator[int], seconds: float) -> bool:
    """Compute the digests of the next messages, for about `seconds` of CPU time. Return whether all digests are computed."""
    end = time.thread_time() + seconds
    for index in indexes:
        request.meaning(index)
        if time.thread_time() > end:
            return False
    return True


def build_observed_prompt(location: Location, ids: Ids | None, preamble: Preamble) -> Prompt:
    """Build the prompt of a relayed call. It is placed in the trace by its ids if the endpoint returned them, otherwise by its meaning."""
    node, context = location.node, location.context
    if ids is None:
        return Prompt(location, node, context, context.ids if context is not None else NO_IDS, NO_IDS, preamble)
    if context is not None and np.array_equal(path_ids(context), ids):
        return Prompt(location, node, context, context.ids, ids, preamble)
    # The same meaning can have different ids, since the endpoint does its own rendering.
    if node is None:
        return Prompt(location, None, None, ids, ids, preamble)
    if len(ids) > node.length and np.array_equal(ids[: node.length], path_ids(node)):
        return Prompt(location, node, None, ids[node.length :], ids, preamble)
    return Prompt(location, None, None, ids, ids, preamble, "template")


def build_context_info(prompt: Prompt, cause: Cause | None, call: Call, quotes: tuple[int, ...]) -> ContextInfo:
    """Build the record of the messages that a prompt adds to the trace."""
    request, start = prompt.location.request, prompt.start
    return ContextInfo(
        preamble=prompt.preamble.digest,
        meanings=request.meanings(start, len(request)),
        roles="".join(_ROLE_LETTER[request.messages(i)[-1].role] for i in range(start, len(request))),
        has_tools=bool(prompt.preamble.tools),
        cause=cause,
        dialect=call.dialect,
        signals=call.signals,
        quotes=quotes,
        detail=prompt.refusal if cause == "template" else "",
    )


def _render(session: Session, location: Location, preamble: Preamble, renderer: Renderer) -> Prompt:
    node, context = location.node, location.context
    if context is not None:
        return Prompt(location, node, context, context.ids, prompt_ids(node, context.ids), preamble)
    for message in location.request.messages_from(location.start):
        if message.unsupported:
            raise BadRequest(message.unsupported, param=message.unsupported.partition(": ")[0])
    bridge = _render_bridge(session, location, preamble, renderer)
    if isinstance(bridge, np.ndarray):
        return Prompt(location, node, None, bridge, prompt_ids(node, bridge), preamble)
    parent, added = _render_all(renderer, location, preamble)
    refusal = "" if parent is not None or bridge is None else bridge
    return Prompt(location, parent, None, added, prompt_ids(parent, added), preamble, refusal=refusal)


def _render_bridge(session: Session, location: Location, preamble: Preamble, renderer: Renderer) -> Ids | str | None:
    """Render only the new messages, as ids that extend the located turn.

    Return None if there is no turn to extend, if the session forbids extending it, or if the new messages include a reply that the model
    did not sample. Return the reason, as text, if the template does not allow extending the turn.
    """
    node, request = location.node, location.request
    if node is None or session.config.thinking == "drop":
        return None
    new = request.messages_from(location.start)
    if any(message.role == "assistant" for message in new):
        return None  # the model did not sample this reply, so only the full template can render it
    message = request.assistant(location.start - 1)
    assert message is not None, "a located turn is an assistant message"
    system = next((m.content for m in request.messages(0) if m.role == "system"), "")
    last = LastTurn(node.parent.ids, node.ids, message, node.info.reasoning_open, system)
    ordered = order_tool_results([message, *new])[1:]
    bridge = renderer.bridge_ids(last, ordered, preamble.tools, preamble.kwargs)
    return renderer.explain_refusal(last, ordered, preamble.tools, preamble.kwargs) if bridge is None else bridge


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Sort the results of parallel tool calls into the order of the calls.

    Agents send results in the order in which they arrive. Most templates omit call ids, so the model can match results to calls only by
    their order.
    """
    ordered: list[Message] = []
    positions: dict[str, int] = {}
    for are_results, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        if are_results:
            # Results that belong to no call of this turn go last, in their original order.
            run.sort(key=lambda message: positions.get(message.tool_call_id, len(positions)))
        elif run[-1].role == "assistant":
            positions = {call.id: n for n, call in enumerate(run[-1].tool_calls)}
        else:
            positions = {}
        ordered += run
    return ordered


def _render_all(renderer: Renderer, location: Location, preamble: Preamble) -> tuple[Sampled | None, Ids]:
    """Render the whole request. If the ids begin with those of the located turn, return that turn and only the ids after it.

    Otherwise, return None and all ids.
    """
    ids = renderer.render_ids(order_tool_results(location.request.messages_from()), preamble.tools, preamble.kwargs)
    node = location.node
    if node is not None and len(ids) > node.length and np.array_equal(ids[: node.length], path_ids(node)):
        return node, ids[node.length :]
    return None, ids
