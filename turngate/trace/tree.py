"""The trace of one session: a tree of context and sampled nodes that each store only the tokens they add.

    root ─► Context (system, user, generation prompt) ─► Sampled (turn 1) ─► Context (tool result, …) ─► Sampled (turn 2) ─► …

`Trace.locate` finds the deepest point that a request extends. The stored ids are the source of truth: this module never converts text to
ids or back. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages, argument_sizes, exact_digest, reasoning_digest
from turngate.types import (
    NO_IDS,
    NO_SIGNALS,
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

_MAX_RECENT = 4  # requests whose raw bytes are kept; others are matched by meaning
_TOKEN_BYTES = 6  # memory of an id, as JSON, and of its log-probability
_NODE_BYTES = 1000  # memory of a node, apart from its tokens
_MAX_TRIMMED = 1000  # characters an agent may always cut from a call's arguments, even if that is most of them

Cause = Literal[
    "retry",
    "resample",
    "branch",
    "edited",
    "compaction",
    "handoff",
    "subagent",
    "side",
    "new",
    "tools",
    "system",
    "template",
]


class ContextInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """The recorded data of a context node, except its ids."""

    preamble: bytes  # digest of tools and template arguments
    meanings: bytes  # one digest per message it adds
    roles: str  # one letter per message it adds: s, u, a, t; if one raw message has several roles, the last
    has_tools: bool
    cause: Cause | None = None
    dialect: str = "chat"  # the dialect of its recorded messages
    signals: CallSignals = NO_SIGNALS  # of the call that added it
    quotes: tuple[int, ...] | None = None  # turns of other conversations that its messages quote; None: not recorded
    detail: str = ""  # why the template does not extend the earlier ids, if the cause is `template`


class SideRange(msgspec.Struct, frozen=True, array_like=True):
    """A range of tokens for which a turn stores side data (`side_data.py`), with the type and shape of each token's value."""

    name: str
    first: int  # the first token, counted from the start of the reply; negative: in its prompt
    count: int
    dtype: str
    shape: tuple[int, ...]


class SampledInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """The recorded data of a sampled node, except its ids and log-probabilities."""

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
    fault: str = ""  # why this turn is incomplete, such as missing log-probabilities or a failed engine
    engine: str = ""  # the observed endpoint
    arguments: tuple[int, ...] = ()  # the length of each call's arguments
    lost: tuple[str, ...] = ()  # parameters of the call that were not sent to the observed endpoint
    verbatim: bytes = b""  # the turn in that endpoint's own format, which must be sent back unchanged
    excerpts: tuple[str, ...] = ()  # pieces of its text or arguments, by which a later quotation is found
    text_size: int = -1  # characters of its text, without reasoning; -1: not recorded
    cached: int = -1  # prompt tokens that the engine had in its cache; -1: not reported
    version_runs: tuple[
        tuple[int, int], ...
    ] = ()  # (policy version, tokens) of all its tokens, if the engine reported them
    side: tuple[SideRange, ...] = ()  # its side data, which is stored separately


class _TokenNode:
    """A node's ids. They are kept as an array until the node becomes part of a prompt, then as the JSON that engines expect.

    The ids are thus not encoded again on every turn. The JSON replaces the array and takes about a third more memory.
    """

    __slots__ = ("_array", "encoded", "size")

    def __init__(self, ids: Ids) -> None:
        self.size = len(ids)
        self._array: Ids | None = ids
        self.encoded = b""  # as JSON; empty until needed

    @property
    def ids(self) -> Ids:
        array = self._array
        return ids_from_json(self.encoded) if array is None else array

    @property
    def json(self) -> bytes:
        array = self._array
        if array is not None:  # several threads may do this at the same time, with the same result
            self.encoded = ids_to_json(array)
            self._array = None
        return self.encoded


class Context(_TokenNode):
    """A context node: new messages and the generation prompt, as the ids that were sent to the engine."""

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
        self.added: int = len(info.meanings) // DIGEST_SIZE  # messages it adds
        self.count: int = (parent.count if parent else 0) + self.added  # messages from the root to here


class Sampled(_TokenNode):
    """A sampled node, which is one turn: the ids that the model sampled."""

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

    node: Sampled | None  # the turn to extend; None means the request starts a new root
    start: int  # index of the first message after `node`
    context: Context | None  # a known context that means the same as the whole request
    request: RequestMessages


class RecentRequest(msgspec.Struct, frozen=True):
    """The raw bytes of a recorded request. The next request usually begins with the same bytes."""

    context: Context
    preamble: bytes
    history_type: type[History]  # identifies the dialect of the bytes
    raws: list[bytes]
    opening: tuple[Message, ...] | None  # the first message, kept decoded because every turn needs the system prompt
    size: int  # total size of `raws` in bytes


class RefusedCalls(msgspec.Struct, frozen=True):
    """A summary of the refused model calls that the agent did not repeat successfully."""

    count: int
    status: int  # HTTP status of the first one
    message: str  # error message of the first one


class Trace:
    """The tree of one session. Refused calls are not in it; `refused` summarizes those that the agent did not repeat successfully."""

    def __init__(self) -> None:
        self.refused: RefusedCalls | None = None
        self.nodes: list[Node] = []
        self.roots: list[Context] = []
        self._next_id = 0
        self._tokens = 0
        self._recent: list[RecentRequest] = []  # newest last
        self._has_twins = False  # whether a request may match more than one of several siblings

    def locate(self, request: RequestMessages) -> Location:
        """Find the deepest point that a request extends. Messages are compared by their bytes first, then by their meaning."""
        node, at = self._walk(*self._start_at_recent(request), request)
        if at < len(request) and any(request.assistant(i) is not None for i in range(at, len(request))):
            # The remaining messages contain answers, so the agent may be continuing a different branch with the same beginning.
            node, at = max((node, at), self._search(request), key=lambda match: match[1])
        if isinstance(node, Context):
            return Location(node.parent, node.count - node.added, node, request)
        return Location(node, at, None, request)

    def count_repeated(self, request: RequestMessages) -> int:
        """Count the messages at the start of a request that `locate` matches with a recent request byte for byte.

        `locate` usually compares only the remaining messages by meaning.
        """
        return self._start_at_recent(request)[1]

    def _start_at_recent(self, request: RequestMessages) -> tuple[Node | None, int]:
        """Return the deepest node up to which the request repeats a recent one byte for byte, and the number of messages up to there.

        This is the fast path of `locate`. The match ends before the first node that has a twin (see `_has_twin`), because bytes alone
        must not choose between twins.
        """
        best: tuple[Node | None, int] = (None, 0)
        for recent in self._recent:
            if recent.preamble != request.preamble or recent.history_type is not type(request.history):
                continue
            if recent.opening is not None and request.raws[:1] == recent.raws[:1]:
                request.put(0, recent.opening)
            size = len(recent.raws)
            node: Node | None = recent.context
            # This is cheap: the dialect reuses the bytes objects of messages that it has seen before, so only pointers are compared.
            if request.raws[:size] != recent.raws:
                # Agents edit the end of their history, for example to move a cache mark. Everything before it still matches.
                same = next(n for n in range(size) if n >= len(request.raws) or request.raws[n] != recent.raws[n])
                while node is not None and node.count > same:
                    node = node.parent
            if node is not None and node.count >= best[1]:
                best = (node, node.count)
        if self._has_twins:
            # From the first twin on, match by meaning, as in a trace loaded from the store, which has no raw requests.
            first = next((n for n in path_to(best[0]) if self._has_twin(n)), None)
            if first is not None:
                return (None, 0) if first.parent is None else (first.parent, first.parent.count)
        return best

    def remember_request(self, context: Context, request: RequestMessages) -> None:
        """Keep the bytes of an answered request, because the next request will probably begin with them."""
        before = context.parent.parent if context.parent is not None else None
        others = [recent for recent in self._recent if recent.context is not context and recent.context is not before]
        self._recent = others[1 - _MAX_RECENT :]
        size = sum(map(len, request.raws))
        self._recent.append(
            RecentRequest(context, request.preamble, type(request.history), request.raws, request.peek(0), size)
        )

    def _walk(self, node: Node | None, at: int, request: RequestMessages) -> tuple[Node | None, int]:
        """Match the request by meaning, downwards from `node`. Return the last matching node and the number of messages up to there.

        The match ends at a turn, or at a context that contains the request's last message.
        """
        while at < len(request):
            child = next(iter(self._matching_children(node, at, request)), None)
            if child is None:
                break
            node, at = child, child.count
        if isinstance(node, Context) and at < len(request):
            # The next message is not a recorded answer, so the messages of this context and all later ones are new.
            return node.parent, node.count - node.added
        return node, at

    def _search(self, request: RequestMessages) -> tuple[Node | None, int]:
        """Find the deepest node on any branch that matches the request by meaning. Return it with the number of messages up to there."""
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
        """Yield the children of `node` that match the messages of the request from index `at` on, likeliest first."""
        if isinstance(node, Context):
            yield from _match_replies(node, request, at)
            return
        # Newest first, because an agent usually continues from its last fork. A context without messages only asks a turn to continue.
        # It would match any request, so it comes last.
        fitting = [
            c for c in reversed(self.roots if node is None else node.children) if c.info.preamble == request.preamble
        ]
        for context in sorted(fitting, key=lambda c: c.added == 0):
            if context.added <= len(request) - at and context.info.meanings == request.meanings(at, at + context.added):
                yield context

    def reserve_id(self) -> int:
        """Reserve an id for a node that will be stored and then added to the trace."""
        self._next_id += 1
        return self._next_id

    def add_context(self, context: Context) -> None:
        (self.roots if context.parent is None else context.parent.children).append(context)
        self._has_twins = self._has_twins or self._has_twin(context)
        self.nodes.append(context)
        self._tokens += context.size
        self._next_id = max(self._next_id, context.id)

    def confirm_context(self, context: Context) -> None:
        """Mark a context as stored. If a failed call that shared the context has dropped it, add it again."""
        if not context.stored:
            context.stored = True
            if context not in self.nodes:
                self.add_context(context)

    def drop_context(self, context: Context) -> None:
        """Remove a context after its call failed, unless the context has been stored or has an answer."""
        if not context.children and not context.stored and context in self.nodes:
            (self.roots if context.parent is None else context.parent.children).remove(context)
            self.nodes.remove(context)
            self._tokens -= context.size

    def add_sampled(self, sampled: Sampled) -> None:
        sampled.parent.children.append(sampled)
        self._has_twins = self._has_twins or self._has_twin(sampled)
        self.nodes.append(sampled)
        self._tokens += sampled.size
        self._next_id = max(self._next_id, sampled.id)

    def _has_twin(self, node: Node) -> bool:
        """Return whether a request that matches this node could also match one of its siblings."""
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
        """Return the context that follows `parent` and has these ids and messages, or None. If `parent` is None, search the roots.

        A concurrent call may have added the context.
        """
        for context in self.roots if parent is None else parent.children:
            same = context.info.preamble == request.preamble and np.array_equal(context.ids, ids)
            if same and context.info.meanings == request.meanings(start, len(request)):
                return context
        return None

    def free(self) -> None:
        """Break the reference cycles between nodes, so that they are freed without waiting for the garbage collector.

        A node that is still referenced elsewhere keeps its path to the root.
        """
        for node in self.nodes:
            node.children.clear()
        for root in self.roots:
            del root.root  # a root refers to itself, which is a cycle
        self.nodes, self.roots, self._recent, self._tokens = [], [], [], 0

    def __del__(self) -> None:
        self.free()

    def turns(self) -> Iterator[Sampled]:
        return (node for node in self.nodes if isinstance(node, Sampled))

    def tokens(self) -> int:
        return self._tokens

    def estimate_bytes(self) -> int:
        """Estimate the memory that the trace takes, including the recent requests that it keeps."""
        requests = sum(recent.size for recent in self._recent)
        return requests + self._tokens * _TOKEN_BYTES + len(self.nodes) * _NODE_BYTES


def path_to(node: Node | None) -> list[Node]:
    """Return the nodes from the root to `node`."""
    nodes: list[Node] = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def path_ids(node: Node | None) -> Ids:
    """Return the ids from the root to the end of `node`."""
    parts = [n.ids for n in path_to(node)]
    return np.concatenate(parts) if parts else NO_IDS


def prompt_ids(node: Sampled | None, added: Ids) -> PromptIds:
    """Return the ids from the root to the end of `node`, followed by `added`.

    The ids are joined again on every turn, which takes a few microseconds. Caching the joined prompt would take as much memory as all nodes
    of a long session.
    """
    parts = [ids_to_json(added)]
    at: Node | None = node
    while at is not None:
        parts.append(at.encoded or at.json)  # `encoded` first: the property is measurably slower
        at = at.parent
    parts.reverse()
    return PromptIds(parts, len(added) + (node.length if node is not None else 0))


def _is_rewritten(message: Message, info: SampledInfo) -> bool:
    """Return whether a message repeats a turn with rewritten arguments. The message must have the turn's text and call ids.

    Agents keep arguments as their tools received them: with defaults added, "5" converted to 5, or a needless `cd` or blanks removed.
    Call ids are normally unique, so equal call ids mean the same turn, and the sampled token ids stay the source of truth. If an agent cuts
    most of a call's long arguments, however, it intends to remove that text from the context. That is an edit.
    """
    sizes = argument_sizes(message)
    return (
        bool(sizes)
        and len(sizes) == len(info.arguments)
        and all(now * 2 >= was or was - now <= _MAX_TRIMMED for now, was in zip(sizes, info.arguments, strict=True))
    )


def _match_replies(context: Context, request: RequestMessages, at: int) -> list[Sampled]:
    """Return the answers to `context` that the message at index `at` repeats, likeliest first.

    Answers with the same meaning may differ in call ids, exact text or reasoning. If the agent kept these, they decide. Otherwise, an
    answer that has already been followed by the request's next messages is preferred, then a delivered one, then one without reasoning, and
    then the newest.
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
        same_meaning = turn.info.meaning == request.meaning(at)  # some endpoints reuse call ids
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
    """Return whether the request's messages from index `at` on repeat a recorded continuation of this turn."""
    known = (c for c in turn.children if c.info.preamble == request.preamble and 0 < c.added <= len(request) - at)
    return any(context.info.meanings == request.meanings(at, at + context.added) for context in known)


def _is_same_answer(one: SampledInfo, other: SampledInfo) -> bool:
    return one.meaning == other.meaning or one.exact == other.exact


def _overlaps(one: ContextInfo, other: ContextInfo) -> bool:
    """Return whether two contexts have the same preamble and one begins with all messages of the other."""
    size = min(len(one.meanings), len(other.meanings))
    return one.preamble == other.preamble and one.meanings[:size] == other.meanings[:size]
