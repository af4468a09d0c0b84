"""From a call to the ids that the engine gets: where it hangs in the session's tree, and what it adds there.

The `locate` and `render` steps of `turn.py`. Pure computation; the heavy part may run in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby

import msgspec
import numpy as np

from turngate.errors import BadRequest
from turngate.render import LastTurn, Renderer
from turngate.trace import fork_cause
from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages, tools_digest
from turngate.trace.session import Session
from turngate.trace.tree import Cause, ContextInfo, Location, Sampled, path_ids, prompt_ids
from turngate.types import NO_IDS, Call, Ids, Json, Message, PromptIds, Tool

_ROLE_LETTER = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}
_MESSAGES = {"responses": "input", "gemini": "contents"}  # what dialects call them, if not messages
_KNOWN_TOOLS = 64  # sets of tools kept decoded, for all sessions together
_LARGE_TOOLS = 256_000  # bytes of a set that is not kept
_SLOW = 64_000  # bytes of new messages and tools above which rendering leaves the event loop
_MANY = 256  # new messages above which it does, however short they are


class Preamble(msgspec.Struct, frozen=True):
    """What all prompts of one line of work begin with, and a digest of its meaning."""

    digest: bytes
    tools: tuple[Tool, ...]
    raw_tools: bytes
    raw_kwargs: bytes
    kwargs: dict[str, object]  # what that spells


class Prompt(msgspec.Struct, frozen=True):
    """A rendered call: where it hangs in the tree and what it adds there."""

    located: Location
    parent: Sampled | None
    added: Ids
    ids: Ids | PromptIds  # everything: what the engine gets
    preamble: Preamble
    cause: Cause | None

    @property
    def start(self) -> int:
        """Index of the first message that it adds."""
        return 0 if self.parent is None else self.located.start


class _Tools(msgspec.Struct):
    """A set of tools, decoded."""

    tools: tuple[Tool, ...]
    meaning: bytes
    # What the last call with them began with, and what followed from what: calls that share a frame share their hints.
    preamble: Preamble | None = None
    hints: dict[str, Json] | None = None
    renderer: Renderer | None = None


class PromptBuilder:
    """Renders calls. Keeps tools decoded, since agents send the same ones with every call."""

    def __init__(self) -> None:
        # by dialect, raw tools and whether later ones replace earlier ones
        self._tools: dict[tuple[str, bytes, bool], _Tools] = {}

    def locate(
        self, session: Session, call: Call, renderer: Renderer | None = None
    ) -> tuple[Location, Preamble, Cause | None]:
        """The deepest known point that this call extends, and why it forks there, if it does."""
        preamble = self._preamble(session, call, renderer)
        with _followed(call):
            located = session.trace.locate(RequestMessages(call.history, preamble.digest))
        cause = fork_cause.find_fork_cause(
            session.trace,
            located,
            has_tools=bool(preamble.tools),
            retried=call.retried,
            idempotency_key=call.idempotency_key,
            told=call.signals,
        )
        return located, preamble, cause

    async def render(self, session: Session, call: Call, renderer: Renderer) -> Prompt:
        located, preamble, cause = self.locate(session, call, renderer)
        new = call.history.raws[located.start :] if located.context is None else ()
        size = sum(map(len, new)) + (len(preamble.raw_tools) if located.node is None and new else 0)
        with _followed(call):
            if len(new) > _MANY or size > _SLOW:
                # Tokenising this much would be felt by other sessions; the tokenizers release the interpreter lock.
                return await asyncio.to_thread(_render, session, located, preamble, cause, renderer)
            return _render(session, located, preamble, cause, renderer)

    def _preamble(self, session: Session, call: Call, renderer: Renderer | None) -> Preamble:
        raw = call.tools.raw if call.tools is not None else b"[]"
        key = call.dialect, raw, bool(getattr(call.tools, "renewed", False))
        known = self._tools.get(key)
        if known is None:
            tools = call.tools.decode() if call.tools is not None else ()
            known = _Tools(tools, tools_digest([tool.wire for tool in tools]))
            if len(raw) <= _LARGE_TOOLS:  # an agent must not be able to fill our memory with its tools
                if len(self._tools) >= _KNOWN_TOOLS:
                    self._tools.pop(next(iter(self._tools)))
                self._tools[key] = known
        outright = call.template_kwargs or session.config.template_kwargs
        same = known.hints is call.template_hints and known.renderer is renderer
        if known.preamble is not None and same and not outright:
            return known.preamble
        # What the wire format implies counts only where the template knows it; what was said outright always does.
        implied = {k: v for k, v in call.template_hints.items() if renderer is not None and renderer.knows(k)}
        arguments = {**implied, **call.template_kwargs, **session.config.template_kwargs}
        kwargs = json.dumps(arguments, sort_keys=True).encode() if arguments else b"{}"
        digest = blake2b(known.meaning + kwargs, digest_size=DIGEST_SIZE).digest()
        preamble = Preamble(digest, known.tools, raw, kwargs, json.loads(kwargs))
        if not outright:
            known.preamble, known.hints, known.renderer = preamble, call.template_hints, renderer
        return preamble


class _followed:  # used like a function
    """What is nested so deep that nothing can follow it (a call's arguments, a result) is refused, and no fault of ours."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, _: object, __: object) -> None:
        if kind is not None and issubclass(kind, RecursionError):
            field = _MESSAGES.get(self._call.dialect, "messages")
            raise BadRequest(f"{field}: something in it is nested too deep", param=field) from None


def observed_prompt(located: Location, seen: Ids | None, preamble: Preamble, cause: Cause | None) -> Prompt:
    """Where a relayed call hangs: by its ids if the endpoint told them, by meaning alone if not."""
    node, context = located.node, located.context
    if seen is None:
        return Prompt(located, node, context.ids if context is not None else NO_IDS, NO_IDS, preamble, cause)
    if context is not None and np.array_equal(path_ids(context), seen):
        return Prompt(located, node, context.ids, seen, preamble, cause)
    # Equal in meaning is not equal in ids: the endpoint renders as it likes.
    apart = Location(node, located.start, None, located.reading)
    if node is None:
        return Prompt(apart, None, seen, seen, preamble, cause)
    if len(seen) > node.length and np.array_equal(seen[: node.length], path_ids(node)):
        return Prompt(apart, node, seen[node.length :], seen, preamble, cause)
    return Prompt(Location(None, 0, None, located.reading), None, seen, seen, preamble, "template")


def context_info(prompt: Prompt, cause: Cause | None, call: Call) -> ContextInfo:
    """What the tree keeps of the messages that a prompt adds."""
    reading, start = prompt.located.reading, prompt.start
    return ContextInfo(
        preamble=prompt.preamble.digest,
        meanings=reading.meanings(start, len(reading)),
        roles="".join(_ROLE_LETTER[reading.messages(i)[-1].role] for i in range(start, len(reading))),
        has_tools=bool(prompt.preamble.tools),
        cause=cause,
        dialect=call.dialect,
        signals=call.signals,
    )


def _render(session: Session, located: Location, preamble: Preamble, cause: Cause | None, renderer: Renderer) -> Prompt:
    if located.context is not None:
        added = located.context.ids
        return Prompt(located, located.node, added, prompt_ids(located.node, added), preamble, cause)
    for message in located.reading.all(located.start):
        if message.unsupported:
            raise BadRequest(message.unsupported, param=message.unsupported.partition(": ")[0])
    kwargs = preamble.kwargs
    bridged = _bridge(session, located, preamble.tools, kwargs, renderer)
    if bridged is not None:
        return Prompt(located, located.node, bridged, prompt_ids(located.node, bridged), preamble, cause)
    parent, added = _whole(renderer, located, preamble.tools, kwargs)
    if parent is None and located.node is not None and cause in (None, "branch"):
        cause = "template"
    return Prompt(located, parent, added, prompt_ids(parent, added), preamble, cause)


def _bridge(
    session: Session, located: Location, tools: tuple[Tool, ...], kwargs: dict[str, object], renderer: Renderer
) -> Ids | None:
    """The new messages alone, where they go on from a sampled turn and nothing forbids it."""
    node = located.node
    if node is None or not renderer.bridges or session.config.thinking == "drop":
        return None
    new = located.reading.all(located.start)
    if any(message.role == "assistant" for message in new):
        return None  # words that were put into the model's mouth: only the template can say how they read
    message = located.reading.assistant(located.start - 1)
    assert message is not None, "a located turn is an assistant's message"
    system = next((m.content for m in located.reading.messages(0) if m.role == "system"), "")
    last = LastTurn(node.parent.ids, node.ids, message, node.info.reasoning_open, system)
    return renderer.bridge_ids(last, order_tool_results([message, *new])[1:], tools, kwargs)


def order_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Results of calls that were made at once, in the order of the calls. Agents send them as they came; most templates show no
    ids, so that to the model their order is all that tells which is which."""
    ordered: list[Message] = []
    places: dict[str, int] = {}
    for answers, group in groupby(messages, lambda message: message.role == "tool"):
        run = list(group)
        if answers:
            # Those that answer no call of this turn stay at the end, as they came.
            run.sort(key=lambda message: places.get(message.tool_call_id, len(places)))
        elif run[-1].role == "assistant":
            places = {call.id: n for n, call in enumerate(run[-1].tool_calls)}
        else:
            places = {}
        ordered += run
    return ordered


def _whole(
    renderer: Renderer, located: Location, tools: tuple[Tool, ...], kwargs: dict[str, object]
) -> tuple[Sampled | None, Ids]:
    """Everything rendered anew. It still extends the located turn if that is a prefix of it, token for token."""
    ids = renderer.render_ids(order_tool_results(located.reading.all()), tools, kwargs)
    node = located.node
    if node is not None and len(ids) > node.length and np.array_equal(ids[: node.length], path_ids(node)):
        return node, ids[node.length :]
    return None, ids
