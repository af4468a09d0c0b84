"""Decide each turn's role in its rollout from the trace, and name the evidence for the role.

main        the agent's own conversation
subagent    the conversation of a sub-agent, or of another agent that takes part in the work
side        titles, commit messages and probes
summary     a summary that replaces a conversation when it is shortened
unknown     a conversation whose purpose cannot be determined
superseded  sampled, but then retried, abandoned or not delivered
aborted     cut short, for example because the agent closed the connection

Evidence is considered in this order, and the first kind that decides the role wins. Signals and rules are considered together:

delivery    how the turn ended: it was cut short, lost or replaced
signal      what the agent states in headers or fields: a role, a thread, a parent thread
rule        what the agent's description declares about system prompts, messages, tools or model names
structure   which conversations continue or quote each other, and how long the answers are
none        nothing decided, so the role is `unknown`

The rules also read the roles that the agent states in headers or fields. The first rule that matches is used, so a rule about a system
prompt can take precedence over a rule about a header.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

from turngate.trace.fork_cause import find_summary
from turngate.trace.message_equality import DIGEST_SIZE
from turngate.trace.tree import Context, Sampled, Trace
from turngate.types import CallSignals

TurnRole = Literal["main", "subagent", "side", "summary", "unknown", "superseded", "aborted"]
ROLES: tuple[TurnRole, ...] = ("main", "subagent", "side", "summary", "unknown", "superseded", "aborted")
Evidence = Literal["delivery", "signal", "rule", "structure", "none"]

OWN_ROLES: tuple[TurnRole, ...] = ("main", "subagent", "unknown")  # the agent's work, trained by default

_MAX_LABEL = 120  # characters of a title, a commit message or a verdict
_LABEL_RATIO = 4  # a main conversation with this many times the text of a short answer is clearly not the same one
_REVISIONS = (
    "compaction",
    "system",
    "tools",
    "template",
    "edited",
)  # causes of a conversation that continues an earlier one
_SAME = 7  # the highest similarity of two conversations: the same start, question and thread


class RoleDecision(msgspec.Struct, frozen=True):
    """The role of a turn, the kind of evidence that decided it, and a description of that evidence."""

    role: TurnRole
    evidence: Evidence
    why: str

    def describe(self) -> str:
        return f"{self.evidence}: {self.why}"


_ABORTED = RoleDecision("aborted", "delivery", "it was cut short")
_SUPERSEDED = RoleDecision("superseded", "delivery", "another answer to the same request was used")
_UNDELIVERED = RoleDecision("superseded", "delivery", "it did not reach the agent")
_MAIN = RoleDecision("main", "structure", "the main conversation")
_MAIN_ALIKE = RoleDecision("main", "structure", "it has the system prompt of the main conversation")
_MAIN_TOOLS = RoleDecision(
    "main", "structure", "it has the tools of the main conversation, and neither has a system prompt"
)
_UNKNOWN = RoleDecision("unknown", "none", "no signal, rule or structure states its purpose")


def assign_roles(trace: Trace) -> dict[int, TurnRole]:
    """Return the role of each sampled node, by node id."""
    return {node: decision.role for node, decision in decide_roles(trace).items()}


def decide_roles(trace: Trace) -> dict[int, RoleDecision]:
    """Return the role of each sampled node with its evidence, by node id."""
    nodes = _Nodes(trace)
    by_root = {root.id: _MAIN for root in trace.roots}
    summaries: dict[int, RoleDecision] = {}
    if len(trace.roots) > 1:
        structure = _Structure(trace, nodes)
        by_root, summaries = structure.by_root, structure.summaries
    superseded = _find_superseded(nodes.crowded) if nodes.crowded else ()
    decided: dict[int, RoleDecision] = {}
    for turn in nodes.turns:
        if turn.info.finish == "abort":
            decision = _ABORTED
        elif turn.id in superseded:
            decision = _SUPERSEDED
        elif not turn.delivered and not turn.children:
            decision = _UNDELIVERED
        else:
            signals = turn.parent.info.signals
            stated = _decide_by_signals(turn) if signals.thread or signals.role or signals.parent else None
            decision = stated or summaries.get(turn.id) or by_root[turn.root.id]
        decided[turn.id] = decision
    return decided


class _Nodes:
    """The turns of a trace, and the contexts that matter for roles, collected in one pass.

    The pass must be fast, because roles are computed often.
    """

    def __init__(self, trace: Trace) -> None:
        self.turns: list[Sampled] = []
        self.crowded: list[Context] = []  # contexts with several answers
        self.quoting: list[Context] = []  # contexts that quote other conversations
        for node in trace.nodes:
            if isinstance(node, Sampled):
                self.turns.append(node)
            else:
                if len(node.children) > 1:
                    self.crowded.append(node)
                if node.info.quotes:
                    self.quoting.append(node)


def _decide_by_signals(turn: Sampled) -> RoleDecision | None:
    """Return the role that the agent's signals or rules give a turn, or None.

    A sub-agent may continue its parent's history, so its turns may be in the tree of the parent's conversation.
    """
    signals = turn.parent.info.signals
    if (signals.role or signals.parent) and (decision := _read_role(signals)) is not None:
        return decision
    root_thread = turn.root.info.signals.thread
    is_other_thread = signals.thread != root_thread and signals.thread and root_thread
    return _on_thread(signals) if is_other_thread and turn.parent.info.has_tools else None


def _read_role(signals: CallSignals) -> RoleDecision | None:
    if signals.role:
        is_own = not signals.source or signals.source.startswith(("header:", "body:"))
        why = ": ".join(part for part in (signals.source, signals.why) if part)
        return RoleDecision(signals.role, "signal" if is_own else "rule", why or "stated by the agent")
    if signals.is_subagent:
        thread = f"thread {signals.thread}" if signals.thread else "an unnamed thread"
        return RoleDecision("subagent", "signal", f"{thread} of {signals.parent}")
    return None


def _on_thread(signals: CallSignals) -> RoleDecision:
    return RoleDecision("subagent", "signal", f"a thread of its own, {signals.thread}")


class _Structure:
    """The conversations of a trace, one per root. A *line* is a conversation together with the later ones that continue it."""

    def __init__(self, trace: Trace, nodes: _Nodes) -> None:
        self._trace = trace
        self._roots = sorted(trace.roots, key=lambda root: root.id)
        self.by_root: dict[int, RoleDecision] = {}
        self.summaries: dict[int, RoleDecision] = {}  # by turn id
        self._turns: dict[int, list[Sampled]] = {root.id: [] for root in trace.roots}
        for turn in nodes.turns:
            self._turns[turn.root.id].append(turn)
        self._quoted_by: dict[int, list[Context]] = {}  # contexts of other conversations, by the id of the quoted turn
        for context in nodes.quoting:
            for quoted in context.info.quotes or ():
                self._quoted_by.setdefault(quoted, []).append(context)
        self._by_id = {turn.id: turn for turn in nodes.turns if turn.id in self._quoted_by} if nodes.quoting else {}
        self._line: dict[int, Context] = {}  # the first root of each root's line
        self._sizes: dict[int, int] = {}  # number of turns of each line
        self._own: list[Context] = []  # roots that no signal marks as a side or sub-agent conversation
        for root in self._roots:
            self._add_root(root)
        self._main = self._find_main()
        for root in self._roots:
            if root.info.cause == "compaction" and root.info.quotes:
                self._find_summary_before(root, root.info.quotes)
        for root in sorted(self._roots, key=lambda root: self._line[root.id] is not root):
            self.by_root[root.id] = self._decide_root(root)

    # ── which conversation continues which ──────────────────────────────────────────────────────────────────────────

    def _add_root(self, root: Context) -> None:
        """Add a root to the line that it continues, or start a new line."""
        continued = self._find_continued(root)
        line = root if continued is None else self._line[continued.id]
        self._line[root.id] = line
        self._sizes[line.id] = self._sizes.get(line.id, 0) + len(self._turns[root.id])
        signals = root.info.signals
        if not (signals.role or signals.parent) or not (signals.is_aside or signals.is_subagent):
            self._own.append(root)

    def _find_continued(self, root: Context) -> Context | None:
        """Return the root of the earlier conversation that this one continues, or None."""
        cause = root.info.cause
        if cause == "handoff":
            found = self._find_repeated(root)
            return found if found is not None and not self._is_resumed(found, root) else None
        if cause not in _REVISIONS or (cause == "compaction" and not self._is_real_compaction(root)):
            return None
        best: tuple[int, Context | None] = (-1, None)
        for other in reversed(self._own):  # it is usually the newest one
            if cause == "tools" and root.info.has_tools and not other.info.has_tools:
                continue  # a title may begin like the conversation after it
            likeness = _compare(other, root, cause)
            if likeness > best[0]:
                best = (likeness, other)
            if likeness == _SAME:
                break
        return best[1]

    def _is_real_compaction(self, root: Context) -> bool:
        """Return whether anything besides a shorter request suggests a compaction.

        Older versions of Turngate could record the cause `compaction` for a conversation without tools and without such evidence.
        """
        if root.info.has_tools or root.info.quotes is not None or "a" in root.info.roles:
            return True
        thread, question = root.info.signals.thread, _first_question(root)
        return any(
            _first_question(other) == question or (thread and other.info.signals.thread == thread)
            for other in self._own
        )

    def _find_repeated(self, root: Context) -> Context | None:
        """Return the root of the newest turn whose answer is among the messages of this root, or None."""
        meanings = root.info.meanings
        digests = {meanings[at : at + DIGEST_SIZE] for at in range(0, len(meanings), DIGEST_SIZE)}
        turns = [turn for other in self._own for turn in self._turns[other.id] if turn.info.meaning in digests]
        return max(turns, key=lambda turn: turn.id).root if turns else None

    def _is_resumed(self, root: Context, after: Context) -> bool:
        """Return whether the line of `root` continues after the conversation of `after` has ended."""
        ended = max((turn.id for turn in self._turns[after.id]), default=after.id)
        line = self._line[root.id]
        return any(
            turn.id > ended
            for other in self._roots
            if self._line.get(other.id) is line
            for turn in self._turns[other.id]
        )

    # ── what each conversation is for ───────────────────────────────────────────────────────────────────────────────

    def _find_main(self) -> Context | None:
        """Return the first root of the main line, or None.

        Conversations that signals mark as side calls or sub-agents are ignored. The main line is the first one with tools. If no line has
        tools, the line with the most turns is the main one. If several lines have the most turns, one that is more than a single short
        answer (such as a title) is preferred, and then one whose answers no other line uses. If several short answers without a common
        system prompt remain, such as a title and an answer to the user, there is no main line, because their order proves nothing.
        """
        with_tools = next((root for root in self._own if root.info.has_tools), None)
        if with_tools is not None:
            return self._line[with_tools.id]
        ranks: dict[tuple[int, bool, bool], list[Context]] = {}
        for line in {self._line[root.id].id: self._line[root.id] for root in self._own}.values():
            rank = (self._sizes[line.id], not self._is_label(line), self._find_user(line) is None)
            ranks.setdefault(rank, []).append(line)
        if not ranks:
            return None
        first, *others = ranks[max(ranks)]
        if not others or not self._is_label(first):
            return first
        is_alike = first.info.roles.startswith("s") and all(_start_of(line) == _start_of(first) for line in others)
        return first if is_alike else None

    def _find_user(self, root: Context) -> Context | None:
        """Return the first context that quotes an answer of this conversation and belongs to another line, or None."""
        line = self._line[root.id]
        contexts = (context for turn in self._turns[root.id] for context in self._quoted_by.get(turn.id, ()))
        return next((context for context in contexts if self._line[context.root.id] is not line), None)

    def _is_label(self, root: Context) -> bool:
        """Return whether a conversation consists of one short answer without tool calls."""
        turns = self._turns[root.id]
        return len(turns) == 1 and 0 <= turns[0].info.text_size <= _MAX_LABEL and not turns[0].info.arguments

    def _find_summary_before(self, root: Context, quotes: tuple[int, ...]) -> None:
        """If this conversation begins with a summary, set the role of the turn that wrote it to `summary`."""
        quoted = [self._by_id[node] for node in quotes if node in self._by_id]
        summary = find_summary(self._trace, quoted, has_tools=root.info.has_tools)
        if summary is not None and summary.root is not root:
            turn = self._turns[root.id][0].id if self._turns[root.id] else root.id
            self.summaries[summary.id] = RoleDecision(
                "summary", "structure", f"the shortened conversation of turn {turn} begins with it"
            )

    def _decide_root(self, root: Context) -> RoleDecision:
        line, signals = self._line[root.id], root.info.signals
        if line is self._main:
            return _MAIN
        if (decision := _read_role(signals)) is not None:
            return decision
        if line is not root:
            return self._decide_like(line, f"it continues the conversation of context {line.id} ({root.info.cause})")
        if root.info.cause == "new" and (alike := self._find_alike(root)) is not None:
            # The cause `new` rules out a sub-agent, even if the conversation has tools.
            has_prompt = root.info.roles.startswith("s")
            if self._line[alike.id] is self._main:
                return _MAIN_ALIKE if has_prompt else _MAIN_TOOLS
            if root.info.has_tools:
                shared = "system prompt" if has_prompt else "tools"
                return self._decide_like(alike, f"it has the {shared} of context {alike.id}")
        if root.info.has_tools:
            thread = self._main.info.signals.thread if self._main is not None else ""
            if signals.thread and thread and signals.thread != thread:
                return _on_thread(signals)
            return RoleDecision("subagent", "structure", "a conversation of its own, with tools")
        return self._decide_without_tools(root)

    def _decide_without_tools(self, root: Context) -> RoleDecision:
        alike = self._find_alike(root)
        if alike is not None and self._line[alike.id] is self._main:
            return _MAIN_ALIKE
        if (decision := self._decide_by_use(root)) is not None:
            return decision
        if alike is not None:
            return self._decide_like(alike, f"it has the system prompt of context {alike.id}")
        if root.info.quotes is None:
            # A trace from an older version, without excerpts: only the recorded cause is known.
            recorded = root.info.cause or "a call before the main conversation"
            return RoleDecision(
                "subagent" if root.info.cause == "subagent" else "side", "structure", f"recorded as {recorded}"
            )
        if self._is_label(root):
            is_side = self._is_beside_main(root)
            return (
                RoleDecision("side", "structure", "one short answer that no later request uses")
                if is_side
                else _UNKNOWN
            )
        if root.info.cause == "handoff":
            return RoleDecision("subagent", "structure", "it took over a conversation that later continued without it")
        return _UNKNOWN

    def _decide_like(self, other: Context, why: str) -> RoleDecision:
        """Return the role of another conversation, with `why` as the evidence unless the role is `unknown`."""
        role = self.by_root[other.id].role
        return _UNKNOWN if role == "unknown" else RoleDecision(role, "structure", why)

    def _decide_by_use(self, root: Context) -> RoleDecision | None:
        """Return the role that follows from quotations between this conversation and other lines.

        Return `unknown` if the quotations do not decide the role, and None if other rules may decide it.
        """
        if (user := self._find_user(root)) is not None:
            return RoleDecision("subagent", "structure", f"context {user.id} uses its answer")
        sources = [self._by_id[node].root for node in root.info.quotes or () if node in self._by_id]
        if not sources:
            return None
        if not self._is_label(root):
            return RoleDecision(
                "subagent", "structure", f"it works on the answer of turn {max(root.info.quotes or ())}"
            )
        return None if any(self._is_resumed(source, root) for source in sources) else _UNKNOWN

    @cached_property
    def _alike(self) -> dict[bytes, list[Context]]:
        """The roots in `_own` that have a system prompt or tools, grouped by both."""
        alike: dict[bytes, list[Context]] = {}
        for root in self._own:
            if (kind := _kind_of(root)) is not None:
                alike.setdefault(kind, []).append(root)
        return alike

    def _find_alike(self, root: Context) -> Context | None:
        """Return a conversation with the same tools and system prompt, or None.

        A conversation of the main line is preferred. Otherwise, return the first one whose role has already been decided.
        """
        found: Context | None = None
        kind = _kind_of(root)
        for other in self._alike.get(kind, ()) if kind is not None else ():
            if self._line[other.id] is self._main:
                return other
            if found is None and other is not root and other.id in self.by_root:
                found = other
        return found

    def _is_beside_main(self, root: Context) -> bool:
        """Return whether a short answer is clearly not part of the main conversation.

        This is the case if the main conversation has tools or several turns. Otherwise, if both answer the same question, their order
        decides: an earlier answer is not part of the main conversation, but a later one may be the real answer, because the main
        conversation might only check the user's input. If the questions differ, the main conversation must have much more text.
        """
        main = self._main
        if main is None:
            return False
        if main.info.has_tools or self._sizes[main.id] > 1:
            return True
        size = max((turn.info.text_size for turn in self._turns[main.id]), default=0)
        question = _first_question(root)
        if question is not None and question == _first_question(main):
            return root.id < main.id
        return size >= _LABEL_RATIO * max(turn.info.text_size for turn in self._turns[root.id])


def _start_of(root: Context) -> bytes:
    """Return a key for a conversation's tools and first message."""
    return root.info.preamble + root.info.meanings[:DIGEST_SIZE]


def _kind_of(root: Context) -> bytes | None:
    """Return a key for a conversation's tools and system prompt, or None if it has neither."""
    if root.info.roles.startswith("s"):
        return _start_of(root)
    return root.info.preamble if root.info.has_tools else None


def _compare(other: Context, root: Context, cause: str) -> int:
    """Return how likely it is that `root` continues the conversation of `other`, from 0 to `_SAME`."""
    same_question = _first_question(other) == _first_question(root)
    same_thread = other.info.signals.thread == root.info.signals.thread
    if cause == "system":
        fits = same_question
    elif cause == "tools":
        fits = other.info.meanings[:DIGEST_SIZE] == root.info.meanings[:DIGEST_SIZE]
    else:
        kind = _kind_of(root)
        fits = _start_of(other) == _start_of(root) or (kind is not None and _kind_of(other) == kind)
    return (4 if fits else 0) + (2 if same_thread else 0) + (1 if fits and same_question else 0)


def _first_question(root: Context) -> bytes | None:
    """Return the digest of a conversation's first user message, or None if it has none."""
    at = root.info.roles.find("u")
    return root.info.meanings[at * DIGEST_SIZE : (at + 1) * DIGEST_SIZE] if at >= 0 else None


def _find_superseded(crowded: list[Context]) -> set[int]:
    """Return the ids of the turns that the agent abandoned: it continued another answer to the same request, or retried the request."""
    superseded: set[int] = set()
    for context in crowded:
        answers = context.children
        has_continued = any(s.children for s in answers)
        is_retried = False
        for answer in reversed(answers):
            if not answer.children and (has_continued or is_retried):
                superseded.add(answer.id)
            is_retried = is_retried or answer.info.cause == "retry"
    return superseded
