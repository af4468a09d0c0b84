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

from turngate.trace.meaning import DIGEST, Reading, reasoning_digest
from turngate.types import NO_IDS, Capture, Finish, Ids, Logprobs, Message, type_of_ids

Cause = Literal[
    "retry", "resample", "branch", "edited", "compaction", "subagent", "side", "tools", "system", "template"
]


class ContextInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What is kept of a context node besides its ids."""

    preamble: bytes  # digest of tools and template arguments
    prefix: bytes  # digest of the raw messages up to its end
    parent_prefix: bytes  # digest of the raw messages up to its beginning, as the agent spelled them
    meanings: bytes  # one digest per message it adds
    roles: str  # one letter per message it adds: s, u, a, t; several in one raw message are joined by the last
    has_tools: bool
    cause: Cause | None = None


class SampledInfo(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True):
    """What is kept of a sampled node besides its ids and log-probabilities."""

    meaning: bytes
    reasoning: bytes
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
    engine: str = ""


class Context:
    """New messages and the generation prompt, as ids that were sent."""

    __slots__ = ("children", "count", "id", "ids", "info", "length", "parent")

    def __init__(self, node_id: int, parent: Sampled | None, ids: Ids, info: ContextInfo) -> None:
        self.id = node_id
        self.parent = parent
        self.ids = ids
        self.info = info
        self.children: list[Sampled] = []
        self.length: int = (parent.length if parent else 0) + len(ids)  # tokens from the root to here
        self.count: int = (parent.count if parent else 0) + len(
            info.meanings
        ) // DIGEST  # messages from the root to here


class Sampled:
    """What the model answered: one turn."""

    __slots__ = ("children", "count", "delivered", "id", "ids", "info", "length", "logprobs", "parent")

    def __init__(self, node_id: int, parent: Context, ids: Ids, logprobs: Logprobs | None, info: SampledInfo) -> None:
        self.id = node_id
        self.parent = parent
        self.ids = ids
        self.logprobs = logprobs
        self.info = info
        self.delivered = True
        self.children: list[Context] = []
        self.length: int = parent.length + len(ids)
        self.count: int = parent.count + 1


Node = Context | Sampled


class Located(msgspec.Struct, frozen=True):
    """The deepest point of the tree that a request extends."""

    node: Sampled | None  # None: the root
    start: int  # index of the first message that is new from there
    context: Context | None  # the request is, message for message, this known context
    reading: Reading


class Trace:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.roots: list[Context] = []
        self._next_id = 0
        self._known: dict[bytes, Node] = {}

    def locate(self, reading: Reading) -> Located:
        node, at = self._deepest_known(reading)
        while at < len(reading):
            if isinstance(node, Context):
                following = _reply(node, reading, at)
                if following is None:
                    break
                node, at = following, at + 1
            else:
                context = self._continuation(node, reading, at)
                if context is None:
                    break
                node, at = context, context.count
            self._known[reading.prefixes[at - 1]] = node
        if isinstance(node, Context):
            if at == len(reading):
                return Located(node.parent, node.count - len(node.info.meanings) // DIGEST, node, reading)
            # What follows this context is no answer of ours: its messages count as new, with whatever follows them.
            node = node.parent
        return Located(node, node.count if node else 0, None, reading)

    def _deepest_known(self, reading: Reading) -> tuple[Node | None, int]:
        for index in range(len(reading) - 1, -1, -1):
            node = self._known.get(reading.prefixes[index])
            if node is not None:
                return node, index + 1
        return None, 0

    def _continuation(self, node: Sampled | None, reading: Reading, at: int) -> Context | None:
        children = self.roots if node is None else node.children
        # The newest first: after a fork, the agent goes on from there.
        for context in reversed(children):
            size = len(context.info.meanings) // DIGEST
            if context.info.preamble != reading.preamble or not 0 < size <= len(reading) - at:
                continue
            if context.info.meanings == reading.meanings(at, at + size):
                return context
        return None

    def reserve(self) -> int:
        """An id for a node that is about to be stored and then added."""
        self._next_id += 1
        return self._next_id

    def add_context(self, context: Context) -> None:
        parent, info = context.parent, context.info
        (self.roots if parent is None else parent.children).append(context)
        self.nodes.append(context)
        self._known[info.prefix] = context
        if parent is not None and info.parent_prefix:
            self._known[info.parent_prefix] = parent
        self._next_id = max(self._next_id, context.id)

    def add_sampled(self, sampled: Sampled) -> None:
        sampled.parent.children.append(sampled)
        self.nodes.append(sampled)
        self._next_id = max(self._next_id, sampled.id)

    def same_context(self, parent: Sampled | None, ids: Ids, prefix: bytes) -> Context | None:
        """A context that another call of the same request added meanwhile."""
        for context in self.roots if parent is None else parent.children:
            if context.info.prefix == prefix and np.array_equal(context.ids, ids):
                return context
        return None

    def turns(self) -> Iterator[Sampled]:
        return (node for node in self.nodes if isinstance(node, Sampled))

    def tokens(self) -> int:
        return sum(len(node.ids) for node in self.nodes)


def path(node: Node | None) -> list[Node]:
    """From the root to `node`."""
    nodes: list[Node] = []
    while node is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def path_ids(node: Node | None) -> Ids:
    """The ids from the root to the end of `node`."""
    parts = [n.ids for n in path(node)]
    return np.concatenate(parts) if parts else NO_IDS


def prompt_ids(node: Sampled | None, added: Ids) -> Ids:
    return np.concatenate([*(n.ids for n in path(node)), added], dtype=type_of_ids)


def _reply(context: Context, reading: Reading, at: int) -> Sampled | None:
    """The answer to `context` that the message at `at` repeats."""
    message = reading.assistant(at) if context.children else None
    if message is None:
        return None
    same = [s for s in context.children if s.info.meaning == reading.meaning(at)]
    return _closest(same, message)


def _closest(turns: list[Sampled], message: Message) -> Sampled | None:
    """Answers of one meaning may differ in their reasoning, if the agent kept it; else the one the agent last got."""
    if message.reasoning:
        digest = reasoning_digest(message.reasoning)
        turns = [s for s in turns if s.info.reasoning == digest] or turns
    delivered = [s for s in turns if s.delivered]
    best = delivered or turns
    return best[-1] if best else None
