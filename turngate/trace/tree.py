"""The trace of one session: a tree of context and sampled nodes that each store only the tokens they add.

    root ─► Context (system, user, generation prompt) ─► Sampled (turn 1) ─► Context (tool result, …) ─► Sampled (turn 2) ─► …

`locate` finds the deepest known point that a request extends; `commit` adds a turn. The stored ids are the truth: nothing here
ever turns text into ids or back. No I/O; `turn.py` is the only writer.
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

_MAX_RECENT = 4  # lines of work that are remembered raw; others are found by meaning
_MAX_TRIMMED = 1000  # characters that an agent may leave out of a call's arguments, however short they are

Cause = Literal[
    "retry", "resample", "branch", "edited", "compaction", "subagent", "side", "tools", "system", "template"
]


class ContextInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What is kept of a context node besides its ids."""

    preamble: bytes  # digest of tools and template arguments
    meanings: bytes  # one digest per message it adds
    roles: str  # one letter per message it adds: s, u, a, t; several in one raw message are joined by the last
    has_tools: bool
    cause: Cause | None = None
    dialect: str = "chat"  # in which its messages were recorded
    signals: CallSignals = CallSignals()  # what the agent's program said about the call that added it


class SampledInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What is kept of a sampled node besides its ids and log-probabilities."""

    meaning: bytes
    reasoning: bytes
    exact: bytes
    finish: Finish
    version_start: int
    version_end: int
    started: float
    ended: float
    biases: tuple[str, ...] = ()  # what made the sampled distribution differ from the policy's own
    sampling: bytes = b""  # JSON of what was used
    reasoning_open: bool = False
    cause: Cause | None = None
    idempotency_key: str = ""
    capture: Capture = "tokens"
    fault: str = ""  # why this turn is not whole: missing log-probabilities, an engine that failed
    engine: str = ""  # the endpoint that was observed
    arguments: tuple[int, ...] = ()  # of each call, how long its arguments are
    lost: tuple[str, ...] = ()  # what the agent asked for and the observed endpoint was not told
    verbatim: bytes = b""  # the turn in that endpoint's own words, which it wants back as they are


class _TokenNode:
    """A node's ids: an array while the node is new; from when it is part of a prompt, the JSON that engines want of them, so that it is
    written once and not again with every turn. That takes a third more memory than the array, which is given up for it."""

    __slots__ = ("_array", "encoded", "size")

    def __init__(self, ids: Ids) -> None:
        self.size = len(ids)
        self._array: Ids | None = ids
        self.encoded = b""  # as JSON; empty until that is asked for

    @property
    def ids(self) -> Ids:
        array = self._array
        return ids_from_json(self.encoded) if array is None else array

    @property
    def json(self) -> bytes:
        array = self._array
        if array is not None:  # threads may do this at the same time: what they find is the same
            self.encoded = ids_to_json(array)
            self._array = None
        return self.encoded


class Context(_TokenNode):
    """New messages and the generation prompt, as ids that were sent."""

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
        self.added: int = len(info.meanings) // DIGEST_SIZE  # messages it stands for
        self.count: int = (parent.count if parent else 0) + self.added  # messages from the root to here


class Sampled(_TokenNode):
    """What the model answered: one turn."""

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
    """The deepest point of the tree that a request extends."""

    node: Sampled | None  # None: the root
    start: int  # index of the first message that is new from there
    context: Context | None  # the request is, message for message, this known context
    request: RequestMessages


class RecentRequest(msgspec.Struct, frozen=True):
    """A request as it came last: the fast path for the next one, which mostly repeats it byte for byte."""

    context: Context
    preamble: bytes
    form: type[History]  # of its dialect: in another one the same bytes say something else
    raws: list[bytes]
    opening: tuple[Message, ...] | None  # its first one, read: every turn asks what the system prompt is


class Trace:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Context] = []
        self._next_id = 0
        self._recent: list[RecentRequest] = []  # the newest last
        self._has_twins = False  # whether some nodes are alike, so that a request may fit several ways

    def locate(self, request: RequestMessages) -> Location:
        node, at = self._walk(*self._start_at_recent(request), request)
        if at < len(request) and any(request.assistant(i) is not None for i in range(at, len(request))):
            # Answers that are not on this path. The agent may have gone on from another branch that shares its beginning.
            node, at = max((node, at), self._search(request), key=lambda found: found[1])
        if isinstance(node, Context):
            return Location(node.parent, node.count - node.added, node, request)
        return Location(node, at, None, request)

    def _start_at_recent(self, request: RequestMessages) -> tuple[Node | None, int]:
        """The fast path: as far along an earlier request as this one repeats it byte for byte."""
        best: tuple[Node | None, int] = (None, 0)
        for tip in self._recent:
            if tip.preamble != request.preamble or tip.form is not type(request.history):
                continue
            if tip.opening is not None and request.raws[:1] == tip.raws[:1]:
                request.put(0, tip.opening)
            size = len(tip.raws)
            node: Node | None = tip.context
            if request.raws[:size] != tip.raws:
                # Agents touch up the end of their history (a cache mark that moves); what lies before it is still known.
                same = next(n for n in range(size) if n >= len(request.raws) or request.raws[n] != tip.raws[n])
                while node is not None and node.count > same:
                    node = node.parent
            if node is not None and node.count >= best[1]:
                best = (node, node.count)
        if self._has_twins:
            # From there on it is decided by meaning, as in a tree that was read from the store: it knows no earlier request's bytes.
            first = next((n for n in path_to(best[0]) if self._has_twin(n)), None)
            if first is not None:
                return (None, 0) if first.parent is None else (first.parent, first.parent.count)
        return best

    def remember_request(self, context: Context, request: RequestMessages) -> None:
        """This request was answered: the next one will begin like it."""
        before = context.parent.parent if context.parent is not None else None
        self._recent = [tip for tip in self._recent if tip.context is not context and tip.context is not before][
            1 - _MAX_RECENT :
        ]
        self._recent.append(
            RecentRequest(context, request.preamble, type(request.history), request.raws, request.peek(0))
        )

    def _walk(self, node: Node | None, at: int, request: RequestMessages) -> tuple[Node | None, int]:
        """On from `node` by meaning, along the likeliest branch. Ends at a turn, or at a context that is the whole request."""
        while at < len(request):
            following = next(iter(self._matching_children(node, at, request)), None)
            if following is None:
                break
            node, at = following, following.count
        if isinstance(node, Context) and at < len(request):
            # What follows this context is no answer of ours: its messages count as new, with whatever follows them.
            return node.parent, node.count - node.added
        return node, at

    def _search(self, request: RequestMessages) -> tuple[Node | None, int]:
        """The deepest point that can be reached from the root by meaning, along any branch."""
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
        """The children of `node` that say what the request says next, likeliest first."""
        if isinstance(node, Context):
            yield from _match_replies(node, request, at)
            return
        # The newest first: after a fork, the agent goes on from there. Contexts without a message (a turn that was asked to go
        # on) fit anywhere, so they come last.
        fitting = [
            c for c in reversed(self.roots if node is None else node.children) if c.info.preamble == request.preamble
        ]
        for context in sorted(fitting, key=lambda c: c.added == 0):
            if context.added <= len(request) - at and context.info.meanings == request.meanings(at, at + context.added):
                yield context

    def reserve_id(self) -> int:
        """An id for a node that is about to be stored and then added."""
        self._next_id += 1
        return self._next_id

    def add_context(self, context: Context) -> None:
        (self.roots if context.parent is None else context.parent.children).append(context)
        self._has_twins = self._has_twins or self._has_twin(context)
        self.nodes.append(context)
        self._next_id = max(self._next_id, context.id)

    def confirm_context(self, context: Context) -> None:
        """It is stored, though another call that shared it may have failed and dropped it meanwhile."""
        if not context.stored:
            context.stored = True
            if context not in self.nodes:
                self.add_context(context)

    def drop_context(self, context: Context) -> None:
        """It could not be stored, and nothing hangs on it."""
        if not context.children and not context.stored and context in self.nodes:
            (self.roots if context.parent is None else context.parent.children).remove(context)
            self.nodes.remove(context)

    def add_sampled(self, sampled: Sampled) -> None:
        sampled.parent.children.append(sampled)
        self._has_twins = self._has_twins or self._has_twin(sampled)
        self.nodes.append(sampled)
        self._next_id = max(self._next_id, sampled.id)

    def _has_twin(self, node: Node) -> bool:
        """Whether a request that fits this node may fit one beside it as well."""
        if isinstance(node, Sampled):
            beside = node.parent.children
            return len(beside) > 1 and any(
                other is not node and _same_answer(other.info, node.info) for other in beside
            )
        if node.added == 0:
            return True
        siblings = self.roots if node.parent is None else node.parent.children
        return len(siblings) > 1 and any(other is not node and _overlap(other.info, node.info) for other in siblings)

    def find_same_context(
        self, parent: Sampled | None, ids: Ids, request: RequestMessages, start: int
    ) -> Context | None:
        """A context that another call of the same request added meanwhile."""
        for context in self.roots if parent is None else parent.children:
            same = context.info.preamble == request.preamble and np.array_equal(context.ids, ids)
            if same and context.info.meanings == request.meanings(start, len(request)):
                return context
        return None

    def cut(self) -> None:
        """Nobody needs it any more. Its nodes hold each other: left alone, they would stay until the collector looks at everything, which
        a gateway has it do hardly ever. Whoever still holds a node finds its way to the root."""
        for node in self.nodes:
            node.children.clear()
        for root in self.roots:
            del root.root  # which is itself
        self.nodes, self.roots, self._recent = [], [], []

    def __del__(self) -> None:
        self.cut()  # one that was read for a look, say

    def turns(self) -> Iterator[Sampled]:
        return (node for node in self.nodes if isinstance(node, Sampled))

    def tokens(self) -> int:
        return sum(node.size for node in self.nodes)


def path_to(node: Node | None) -> list[Node]:
    """From the root to `node`."""
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
    """The ids from the root through `node`, and then `added`. Put together for every turn, and kept by none: that takes a few
    microseconds, and the last prompt of a long session would be as large as all its nodes."""
    parts = [ids_to_json(added)]
    at: Node | None = node
    while at is not None:
        parts.append(at.encoded or at.json)  # a hundred nodes: a call for each would be felt
        at = at.parent
    parts.reverse()
    return PromptIds(parts, len(added) + (node.length if node is not None else 0))


def _is_rewritten(message: Message, info: SampledInfo) -> bool:
    """Whether a message with the words and call ids of a turn is that turn, though its arguments read differently.

    Agents write arguments down as their tools took them: defaults filled in, "5" made 5, a needless `cd` or blanks at the end of
    lines left out. The ids were ours to give, and what the model sampled stays the truth. An agent that cuts most of an argument
    away, though, wants it out of the context: that is an edit.
    """
    sizes = argument_sizes(message)
    return (
        bool(sizes)
        and len(sizes) == len(info.arguments)
        and all(now * 2 >= was or was - now <= _MAX_TRIMMED for now, was in zip(sizes, info.arguments, strict=True))
    )


def _match_replies(context: Context, request: RequestMessages, at: int) -> list[Sampled]:
    """The answers to `context` that the message at `at` repeats, likeliest first.

    Answers of one meaning may differ in their call ids, their very words or their reasoning, which decide as far as the agent kept
    them; else it is the one that was followed by what follows here, else the one it last got.
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
        named = turn.info.exact == exact
        said = turn.info.meaning == request.meaning(at)  # some endpoints give the same ids again and again
        thought = turn.info.reasoning == digest
        follows = _continues_as_before(turn, request, at + 1)
        return (named and said, named, thought and digest != b"", follows, turn.delivered, thought, turn.id)

    return sorted(same, key=likelihood, reverse=True) if len(same) > 1 else same


def _continues_as_before(turn: Sampled, request: RequestMessages, at: int) -> bool:
    """Whether what the request says after this turn was said after it before."""
    known = (c for c in turn.children if c.info.preamble == request.preamble and 0 < c.added <= len(request) - at)
    return any(context.info.meanings == request.meanings(at, at + context.added) for context in known)


def _same_answer(one: SampledInfo, other: SampledInfo) -> bool:
    return one.meaning == other.meaning or one.exact == other.exact


def _overlap(one: ContextInfo, other: ContextInfo) -> bool:
    """Whether one begins like the whole of the other."""
    size = min(len(one.meanings), len(other.meanings))
    return one.preamble == other.preamble and one.meanings[:size] == other.meanings[:size]
