"""The trace of one session: a tree of context and sampled nodes that each store only the tokens they add.

    root ─► Context (system, user, generation prompt) ─► Sampled (turn 1) ─► Context (tool result, …) ─► Sampled (turn 2) ─► …

`Trace.locate` finds the deepest known point that a request extends. The stored ids are the truth: nothing here ever turns text into ids
or back. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages, argument_sizes, exact_digest, reasoning_digest
from turngate.types import (
    NO_IDS,
    CallSignals,
    Capture,
    Finish,
    History,
    Ids,
    Logprobs,
    Message,
    PromptIds,
    ids_from_json,
    ids_to_json,
)

_MAX_RECENT = 4  # requests that are remembered raw; others are matched by meaning
_MAX_TRIMMED = 1000  # characters that an agent may cut from a call's arguments, even if that is most of them

Cause = Literal[
    "retry", "resample", "branch", "edited", "compaction", "subagent", "side", "tools", "system", "template"
]


class ContextInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """The stored facts of a context node besides its ids."""

    preamble: bytes  # digest of tools and template arguments
    meanings: bytes  # one digest per message it adds
    roles: str  # one letter per message it adds: s, u, a, t; of several in one raw message, the last
    has_tools: bool
    cause: Cause | None = None
    dialect: str = "chat"  # of its recorded messages
    signals: CallSignals = CallSignals()  # of the call that added it


class SampledInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """The stored facts of a sampled node besides its ids and log-probabilities."""

    meaning: bytes
    reasoning: bytes
    exact: bytes
    finish: Finish
    version_start: int
    version_end: int
    started: float
    ended: float
    biases: tuple[str, ...] = ()  # why the sampled distribution differs from the policy's own
    sampling: bytes = b""  # the sampling parameters, as JSON
    reasoning_open: bool = False
    cause: Cause | None = None
    idempotency_key: str = ""
    capture: Capture = "tokens"
    fault: str = ""  # why this turn is incomplete: missing log-probabilities, a failed engine
    engine: str = ""  # the observed endpoint
    arguments: tuple[int, ...] = ()  # the length of each call's arguments
    lost: tuple[str, ...] = ()  # parameters of the call that the observed endpoint did not get
    verbatim: bytes = b""  # the turn in that endpoint's own format, which it wants back unchanged


class _TokenNode:
    """The ids of a node: an array while the node is new; once it is part of a prompt, the JSON that engines want.

    That JSON is encoded once and not again with every turn. It replaces the array, and takes a third more memory.
    """

    __slots__ = ("_array", "encoded", "size")

    def __init__(self, ids: Ids) -> None:
        self.size = len(ids)
        self._array: Ids | None = ids
        self.encoded = b""  # as JSON; empty until it is needed

    @property
    def ids(self) -> Ids:
        array = self._array
        return ids_from_json(self.encoded) if array is None else array

    @property
    def json(self) -> bytes:
        array = self._array
        if array is not None:  # threads may do this at the same time, with the same result
            self.encoded = ids_to_json(array)
            self._array = None
        return self.encoded


class Context(_TokenNode):
    """New messages and the generation prompt, as the ids that were sent."""

    __slots__ = ("added", "children", "count", "id", "info", "length", "parent", "root", "stored")

    def __init__(self, node_id: int, parent: Sampled | None, ids: Ids, info: ContextInfo) -> None:
        super().__init__(ids)
        self.id = node_id
        self.parent = parent
        self.root: Context = self if parent is None else parent.root
        self.info = info
        self.stored = True
        self.children: list[Sampled] = []
        self.length: int = (parent.length if parent else 0) + len(ids)  # tokens from the root to here
        self.added: int = len(info.meanings) // DIGEST_SIZE  # messages that it adds
        self.count: int = (parent.count if parent else 0) + self.added  # messages from the root to here


class Sampled(_TokenNode):
    """One turn: what the model sampled."""

    __slots__ = ("children", "count", "delivered", "id", "info", "length", "logprobs", "parent", "root")

    def __init__(self, node_id: int, parent: Context, ids: Ids, logprobs: Logprobs | None, info: SampledInfo) -> None:
        super().__init__(ids)
        self.id = node_id
        self.parent = parent
        self.root: Context = parent.root
        self.logprobs = logprobs
        self.info = info
        self.delivered = True
        self.children: list[Context] = []
        self.length: int = parent.length + len(ids)
        self.count: int = parent.count + 1


Node = Context | Sampled


class Location(msgspec.Struct, frozen=True):
    """The deepest point of the trace that a request extends."""

    node: Sampled | None  # None: the root
    start: int  # index of the first message after it
    context: Context | None  # a known context that the whole request repeats in meaning
    request: RequestMessages


class RecentRequest(msgspec.Struct, frozen=True):
    """A recorded request, raw: the next one mostly repeats it byte for byte."""

    context: Context
    preamble: bytes
    history_type: type[History]  # of its dialect: in another one the same bytes mean something else
    raws: list[bytes]
    opening: tuple[Message, ...] | None  # its first message, decoded: every turn needs the system prompt


class Trace:
    """The tree of one session."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Context] = []
        self._next_id = 0
        self._recent: list[RecentRequest] = []  # the newest last
        self._has_twins = False  # whether some siblings are alike, so that a request may match several ways

    def locate(self, request: RequestMessages) -> Location:
        """Find the deepest point that a request extends, by its bytes as far as they are known and then by meaning."""
        node, at = self._walk(*self._start_at_recent(request), request)
        if at < len(request) and any(request.assistant(i) is not None for i in range(at, len(request))):
            # It has answers that are not on this path. The agent may continue another branch with the same beginning.
            node, at = max((node, at), self._search(request), key=lambda found: found[1])
        if isinstance(node, Context):
            return Location(node.parent, node.count - node.added, node, request)
        return Location(node, at, None, request)

    def _start_at_recent(self, request: RequestMessages) -> tuple[Node | None, int]:
        """The fast path: the deepest point of a recent request that this one repeats byte for byte."""
        best: tuple[Node | None, int] = (None, 0)
        for recent in self._recent:
            if recent.preamble != request.preamble or recent.history_type is not type(request.history):
                continue
            if recent.opening is not None and request.raws[:1] == recent.raws[:1]:
                request.put(0, recent.opening)
            size = len(recent.raws)
            node: Node | None = recent.context
            # Cheap: messages that the dialect has matched with an earlier request are the same objects, so this compares pointers.
            if request.raws[:size] != recent.raws:
                # Agents edit the end of their history (a cache mark that moves); what lies before it still matches.
                same = next(n for n in range(size) if n >= len(request.raws) or request.raws[n] != recent.raws[n])
                while node is not None and node.count > same:
                    node = node.parent
            if node is not None and node.count >= best[1]:
                best = (node, node.count)
        if self._has_twins:
            # From the first twin on, meaning decides, as in a trace that was loaded from the store without raw requests.
            first = next((n for n in path_to(best[0]) if self._has_twin(n)), None)
            if first is not None:
                return (None, 0) if first.parent is None else (first.parent, first.parent.count)
        return best

    def remember_request(self, context: Context, request: RequestMessages) -> None:
        """Remember an answered request: the next one will begin like it."""
        before = context.parent.parent if context.parent is not None else None
        others = [recent for recent in self._recent if recent.context is not context and recent.context is not before]
        self._recent = others[1 - _MAX_RECENT :]
        self._recent.append(
            RecentRequest(context, request.preamble, type(request.history), request.raws, request.peek(0))
        )

    def _walk(self, node: Node | None, at: int, request: RequestMessages) -> tuple[Node | None, int]:
        """Walk on from `node` by meaning, along the likeliest branch, to a turn or to a context that ends the request."""
        while at < len(request):
            child = next(iter(self._matching_children(node, at, request)), None)
            if child is None:
                break
            node, at = child, child.count
        if isinstance(node, Context) and at < len(request):
            # The next message is no recorded answer: the messages of this context count as new, with all after them.
            return node.parent, node.count - node.added
        return node, at

    def _search(self, request: RequestMessages) -> tuple[Node | None, int]:
        """Find the deepest point that matches by meaning, along any branch."""
        best: tuple[Node | None, int] = (None, 0)
        waiting: list[tuple[Node | None, int]] = [(None, 0)]
        while waiting:
            node, at = waiting.pop()
            if at > best[1] and (isinstance(node, Sampled) or at == len(request)):
                best = (node, at)
            if at < len(request):
                waiting += [(n, n.count) for n in reversed(list(self._matching_children(node, at, request)))]
        return best

    def _matching_children(self, node: Node | None, at: int, request: RequestMessages) -> Iterator[Node]:
        """The children of `node` that match the next messages of the request, likeliest first."""
        if isinstance(node, Context):
            yield from _match_replies(node, request, at)
            return
        # The newest first: after a fork, the agent continues from there. Contexts without a message (a turn that was asked to
        # continue) match anywhere, so they are last.
        fitting = [
            c for c in reversed(self.roots if node is None else node.children) if c.info.preamble == request.preamble
        ]
        for context in sorted(fitting, key=lambda c: c.added == 0):
            if context.added <= len(request) - at and context.info.meanings == request.meanings(at, at + context.added):
                yield context

    def reserve_id(self) -> int:
        """Reserve the id of a node that is about to be stored and then added."""
        self._next_id += 1
        return self._next_id

    def add_context(self, context: Context) -> None:
        (self.roots if context.parent is None else context.parent.children).append(context)
        self._has_twins = self._has_twins or self._has_twin(context)
        self.nodes.append(context)
        self._next_id = max(self._next_id, context.id)

    def confirm_context(self, context: Context) -> None:
        """Mark a context as stored, and add it again if another call that shared it has failed and dropped it."""
        if not context.stored:
            context.stored = True
            if context not in self.nodes:
                self.add_context(context)

    def drop_context(self, context: Context) -> None:
        """Remove a context that could not be stored, unless another call uses it."""
        if not context.children and not context.stored and context in self.nodes:
            (self.roots if context.parent is None else context.parent.children).remove(context)
            self.nodes.remove(context)

    def add_sampled(self, sampled: Sampled) -> None:
        sampled.parent.children.append(sampled)
        self._has_twins = self._has_twins or self._has_twin(sampled)
        self.nodes.append(sampled)
        self._next_id = max(self._next_id, sampled.id)

    def _has_twin(self, node: Node) -> bool:
        """Whether a request that matches this node may match a sibling as well."""
        if isinstance(node, Sampled):
            answers = node.parent.children
            return len(answers) > 1 and any(
                other is not node and _is_same_answer(other.info, node.info) for other in answers
            )
        if node.added == 0:
            return True
        siblings = self.roots if node.parent is None else node.parent.children
        return len(siblings) > 1 and any(other is not node and _overlaps(other.info, node.info) for other in siblings)

    def find_same_context(
        self, parent: Sampled | None, ids: Ids, request: RequestMessages, start: int
    ) -> Context | None:
        """Find a context that another call with the same request has added meanwhile."""
        for context in self.roots if parent is None else parent.children:
            same = context.info.preamble == request.preamble and np.array_equal(context.ids, ids)
            if same and context.info.meanings == request.meanings(start, len(request)):
                return context
        return None

    def free(self) -> None:
        """Break the reference cycles between the nodes, so that they are freed without the garbage collector, which runs rarely.

        From a node that is still held, the way to the root stays intact.
        """
        for node in self.nodes:
            node.children.clear()
        for root in self.roots:
            del root.root  # a cycle: it is the root itself
        self.nodes, self.roots, self._recent = [], [], []

    def __del__(self) -> None:
        self.free()

    def turns(self) -> Iterator[Sampled]:
        return (node for node in self.nodes if isinstance(node, Sampled))

    def tokens(self) -> int:
        return sum(node.size for node in self.nodes)


def path_to(node: Node | None) -> list[Node]:
    """The nodes from the root to `node`."""
    nodes: list[Node] = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def path_ids(node: Node | None) -> Ids:
    """The ids from the root to the end of `node`."""
    parts = [n.ids for n in path_to(node)]
    return np.concatenate(parts) if parts else NO_IDS


def prompt_ids(node: Sampled | None, added: Ids) -> PromptIds:
    """The ids from the root through `node`, and then `added`.

    Joined anew for every turn, in a few microseconds. A kept prompt would need as much memory as all the nodes of a long session.
    """
    parts = [ids_to_json(added)]
    at: Node | None = node
    while at is not None:
        parts.append(at.encoded or at.json)  # a property call for each of a hundred nodes is measurable
        at = at.parent
    parts.reverse()
    return PromptIds(parts, len(added) + (node.length if node is not None else 0))


def _is_rewritten(message: Message, info: SampledInfo) -> bool:
    """Whether a message with the text and call ids of a turn is that turn with its arguments rewritten.

    Agents store arguments as their tools took them: with defaults filled in, 5 for "5", without a needless `cd` or trailing blanks. The
    call ids are ours, and what the model sampled stays the truth. An agent that cuts most of an argument, though, wants it out of the
    context: that is an edit.
    """
    sizes = argument_sizes(message)
    return (
        bool(sizes)
        and len(sizes) == len(info.arguments)
        and all(now * 2 >= was or was - now <= _MAX_TRIMMED for now, was in zip(sizes, info.arguments, strict=True))
    )


def _match_replies(context: Context, request: RequestMessages, at: int) -> list[Sampled]:
    """The answers to `context` that the message at `at` repeats, likeliest first.

    Answers with the same meaning may differ in call ids, exact text or reasoning, which decide as far as the agent kept them. Otherwise
    the answer that was followed by the next messages before wins, then the newest.
    """
    message = request.assistant(at) if context.children else None
    if message is None:
        return []
    digest, exact = reasoning_digest(message.reasoning), exact_digest(message)
    same = [
        s
        for s in context.children
        if s.info.meaning == request.meaning(at) or (s.info.exact == exact and _is_rewritten(message, s.info))
    ]

    def likelihood(turn: Sampled) -> tuple[bool, bool, bool, bool, bool, bool, int]:
        same_exact = turn.info.exact == exact
        same_meaning = turn.info.meaning == request.meaning(at)  # some endpoints give the same call ids again and again
        same_reasoning = turn.info.reasoning == digest
        return (
            same_exact and same_meaning,
            same_exact,
            same_reasoning and digest != b"",
            _continues_as_before(turn, request, at + 1),
            turn.delivered,
            same_reasoning,
            turn.id,
        )

    return sorted(same, key=likelihood, reverse=True) if len(same) > 1 else same


def _continues_as_before(turn: Sampled, request: RequestMessages, at: int) -> bool:
    """Whether the messages after this turn in the request have followed it before."""
    known = (c for c in turn.children if c.info.preamble == request.preamble and 0 < c.added <= len(request) - at)
    return any(context.info.meanings == request.meanings(at, at + context.added) for context in known)


def _is_same_answer(one: SampledInfo, other: SampledInfo) -> bool:
    return one.meaning == other.meaning or one.exact == other.exact


def _overlaps(one: ContextInfo, other: ContextInfo) -> bool:
    """Whether one begins with all the messages of the other."""
    size = min(len(one.meanings), len(other.meanings))
    return one.preamble == other.preamble and one.meanings[:size] == other.meanings[:size]
