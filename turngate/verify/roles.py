"""Derive the role of each turn a second time, from the stored nodes and messages, with independent code.

Evidence is considered in the same order as in `turngate/trace/roles.py`: delivery, the agent's signals and rules, then structure.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from turngate.types import Message
from turngate.verify.messages import NodeMessages
from turngate.verify.store_reader import StoredCallSignals, StoredContext, StoredSession, StoredTurn

_DIGEST = 16  # bytes of a digest
_SHORT = 120  # characters of a title or a commit message
_CONTINUING = ("compaction", "system", "tools", "template", "edited", "handoff")


def derive_roles(session: StoredSession, messages: NodeMessages) -> dict[int, str]:
    """Return the role of each turn, by node id."""
    roots = _Roots(session, messages)
    return {turn.id: _derive_role(turn, roots, messages) for turn in session.turns}


def _derive_role(turn: StoredTurn, roots: _Roots, messages: NodeMessages) -> str:
    if turn.info.finish == "abort":
        return "aborted"
    if _is_superseded(turn):
        return "superseded"
    signals, root_signals = turn.parent.info.signals, turn.root.info.signals
    if stated := _read_stated_role(signals):
        return stated
    threads = {signals.thread, root_signals.thread}
    if "" not in threads and len(threads) == 2 and offers_tools(turn.parent, messages):
        return "subagent"
    if len(roots.all) == 1:
        return "main"
    return "summary" if turn.id in roots.summaries else roots.roles[turn.root.id]


def _read_stated_role(signals: StoredCallSignals) -> str:
    return signals.role or ("subagent" if signals.parent not in ("", signals.thread) else "")


def _is_superseded(turn: StoredTurn) -> bool:
    """Return whether a turn is superseded: it has no continuation, and it was lost, retried, or replaced by another answer."""
    if turn.children:
        return False
    others = [answer for answer in turn.parent.children if answer is not turn]
    used = any(answer.children for answer in others)
    asked_again = any(answer.id > turn.id and answer.info.cause == "retry" for answer in others)
    return used or asked_again or not turn.delivered


def offers_tools(context: StoredContext, messages: NodeMessages) -> bool:
    tools = messages.tools(context)
    return context.info.has_tools if tools is None else bool(tools)


class _Roots:
    """The conversations of a session, one per root, and their roles.

    A *line* is a conversation together with the later ones that continue it. `heads` maps each root's id to the first root of its line.
    """

    def __init__(self, session: StoredSession, messages: NodeMessages) -> None:
        self.all = session.roots
        self._messages = messages
        self._turns = {turn.id: turn for turn in session.turns}
        self._of_root = {root.id: [t for t in session.turns if t.root is root] for root in self.all}
        self._contexts = session.contexts
        self.heads: dict[int, StoredContext] = {}
        for root in self.all:
            before = self._find_continued(root)
            self.heads[root.id] = self.heads[before.id] if before is not None else root

    # ── lines ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _find_continued(self, root: StoredContext) -> StoredContext | None:
        cause = root.info.cause
        earlier = [r for r in self.all if r.id < root.id and not _is_helper(r)]
        if cause not in _CONTINUING or not earlier:
            return None
        if cause == "handoff":
            repeated = _split(root.info.meanings)
            turns = [t for r in earlier for t in self._of_root[r.id] if t.info.meaning in repeated]
            source = turns[-1].root if turns else None
            return None if source is None or self._goes_on(source, root) else source
        if cause == "compaction" and self._only_looks_shorter(root, earlier):
            return None
        if cause == "tools" and offers_tools(root, self._messages):
            earlier = [r for r in earlier if offers_tools(r, self._messages)]
        alike = [r.id for r in self._alike(root)]
        return max(earlier, key=lambda r: (_resemblance(r, root, r.id in alike), r.id), default=None)

    def _only_looks_shorter(self, root: StoredContext, earlier: list[StoredContext]) -> bool:
        """Return whether a shorter request is the only evidence of a recorded compaction, as can happen in older traces."""
        if offers_tools(root, self._messages) or root.info.quotes is not None or "a" in root.info.roles:
            return False
        thread = root.info.signals.thread
        return not any(_question(r) == _question(root) or (thread and r.info.signals.thread == thread) for r in earlier)

    def _goes_on(self, source: StoredContext, root: StoredContext) -> bool:
        """Return whether the line of `source` (see the class) has a turn after the last turn of `root`."""
        last = max((turn.id for turn in self._of_root[root.id]), default=root.id)
        return any(turn.id > last for turn in self._of_line(self.heads[source.id]))

    def _of_line(self, head: StoredContext) -> list[StoredTurn]:
        return [turn for r in self.all if self.heads.get(r.id) is head for turn in self._of_root[r.id]]

    # ── roles ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def main(self) -> StoredContext | None:
        own = [root for root in self.all if not _is_helper(root)]
        for root in own:
            if offers_tools(root, self._messages):
                return self.heads[root.id]
        heads = list(dict.fromkeys(self.heads[root.id].id for root in own))
        by_id = {root.id: root for root in self.all}

        def rank(head: int) -> tuple[int, bool, bool]:
            root = by_id[head]
            return len(self._of_line(root)), not self._is_short(root), not self._is_used(root)

        if not heads:
            return None
        best = max(heads, key=rank)
        equals = [by_id[head] for head in heads if rank(head) == rank(best)]
        if len(equals) > 1 and self._is_short(by_id[best]):
            # If these are short answers to different system prompts, nothing distinguishes a title from the answer to the user.
            prompts = {(root.info.preamble, root.info.meanings[:_DIGEST]) for root in equals}
            if len(prompts) > 1 or by_id[best].info.roles[:1] != "s":
                return None
        return by_id[best]

    @cached_property
    def summaries(self) -> set[int]:
        """The ids of the turns that wrote the summaries with which shortened conversations begin."""
        found: set[int] = set()
        for root in self.all:
            quoted = [self._turns[n] for n in root.info.quotes or () if n in self._turns]
            if root.info.cause != "compaction" or not quoted:
                continue
            newest = max(quoted, key=lambda turn: turn.id)
            before = newest.parent.parent
            ends_branch = not any(context.children for context in newest.children)
            is_marked = newest.parent.info.signals.role in ("side", "summary")
            if before is None:
                is_summary = is_marked or self._may_summarize(newest, root)
            else:
                is_transcript = before in quoted and not self._reply(before).tool_calls
                is_summary = not is_transcript and (is_marked or _has_past(before))
            if is_summary and ends_branch and not self._reply(newest).tool_calls and newest.root is not root:
                found.add(newest.id)
        return found

    def _may_summarize(self, turn: StoredTurn, shortened: StoredContext) -> bool:
        """Return whether `turn`, the first turn of its conversation, may summarize an earlier conversation.

        Its conversation must quote the earlier one, or have no tools although the earlier one and `shortened` have some.
        """
        lacks_tools = offers_tools(shortened, self._messages) and not offers_tools(turn.parent, self._messages)
        for root in self.all:
            before = [t for t in self._of_root[root.id] if t.id < turn.id] if root is not turn.root else []
            is_quoted = any(t.id in (turn.root.info.quotes or ()) for t in before)
            is_source = is_quoted or (lacks_tools and offers_tools(root, self._messages))
            if is_source and any(_has_past(t) for t in before):
                return True
        return False

    @cached_property
    def roles(self) -> dict[int, str]:
        """The role of each conversation, by the id of its root."""
        roles: dict[int, str] = {}
        for root in sorted(self.all, key=lambda r: self.heads[r.id] is not r):
            head = self.heads[root.id]
            stated = _read_stated_role(root.info.signals)
            if stated:
                roles[root.id] = stated
            elif head is self.main:
                roles[root.id] = "main"
            elif head is not root:
                roles[root.id] = roles[head.id]
            elif offers_tools(root, self._messages):
                alike = [r for r in self._alike(root) if self.heads[r.id] is self.main or r.id in roles]
                mains = [r for r in alike if self.heads[r.id] is self.main]
                is_new = root.info.cause == "new" and alike
                roles[root.id] = ("main" if mains else roles[alike[0].id]) if is_new else "subagent"
            else:
                roles[root.id] = self._judge(root, roles)
        return roles

    def _judge(self, root: StoredContext, roles: dict[int, str]) -> str:
        """Return the role of a conversation that has no tools and continues no other conversation."""
        short = self._is_short(root)
        alike = self._alike(root)
        if any(self.heads[r.id] is self.main for r in alike):
            return "main"
        if self._is_used(root):
            return "subagent"
        sources = [self._turns[n].root for n in root.info.quotes or () if n in self._turns]
        if sources and not short:
            return "subagent"
        if sources and not any(self._goes_on(source, root) for source in sources):
            return "unknown"
        if any(r.id in roles for r in alike):
            return next(roles[r.id] for r in alike if r.id in roles)
        if root.info.quotes is None:
            return "subagent" if root.info.cause == "subagent" else "side"
        if short:
            return "side" if self._is_beside_main(root) else "unknown"
        return "subagent" if root.info.cause == "handoff" else "unknown"

    def _alike(self, root: StoredContext) -> list[StoredContext]:
        """Return the other conversations, except helpers, with the same tools and system prompt, or [] if `root` has neither."""
        others = [r for r in self.all if r is not root and not _is_helper(r)]
        if root.info.roles[:1] == "s":
            return [r for r in others if _same_start(r, root)]
        if not offers_tools(root, self._messages):
            return []
        return [r for r in others if r.info.preamble == root.info.preamble and r.info.roles[:1] != "s"]

    def _is_beside_main(self, root: StoredContext) -> bool:
        if self.main is None:
            return False
        longest = max((self._text_size(turn) for turn in self._of_root[self.main.id]), default=0)
        own = max((self._text_size(turn) for turn in self._of_root[root.id]), default=0)
        if offers_tools(self.main, self._messages) or len(self._of_line(self.main)) > 1:
            return True
        if _question(root) != b"" and _question(root) == _question(self.main):
            # Before the longer answer, a short one is a title. After it, the short one may be the answer to the user.
            return root.id < self.main.id
        return longest >= 4 * own

    def _is_used(self, root: StoredContext) -> bool:
        """Return whether a context of another line quotes an answer of this conversation."""
        own = {turn.id for turn in self._of_root[root.id]}
        head = self.heads[root.id]
        quoting = (c for c in self._contexts if own.intersection(c.info.quotes or ()))
        return any(self.heads[context.root.id] is not head for context in quoting)

    def _is_short(self, root: StoredContext) -> bool:
        turns = self._of_root[root.id]
        if len(turns) != 1 or turns[0].info.text_size < 0:
            return False
        return self._text_size(turns[0]) <= _SHORT and not self._reply(turns[0]).tool_calls

    def _text_size(self, turn: StoredTurn) -> int:
        return -1 if turn.info.text_size < 0 else len(self._reply(turn).content)

    def _reply(self, turn: StoredTurn) -> Message:
        return self._messages.reply(turn)


def _is_helper(root: StoredContext) -> bool:
    return _read_stated_role(root.info.signals) in ("side", "summary", "subagent")


def _has_past(turn: StoredTurn) -> bool:
    """Return whether a turn has earlier turns in its conversation, or begins a shortened conversation."""
    return turn.parent.parent is not None or turn.root.info.cause == "compaction"


def _same_start(one: StoredContext, other: StoredContext) -> bool:
    return (one.info.preamble, one.info.meanings[:_DIGEST]) == (other.info.preamble, other.info.meanings[:_DIGEST])


def _question(root: StoredContext) -> bytes:
    """Return the digest of a conversation's first user message, or empty bytes if it has none."""
    before, user, _ = root.info.roles.partition("u")
    return root.info.meanings[_DIGEST * len(before) :][:_DIGEST] if user else b""


def _split(meanings: bytes) -> Iterable[bytes]:
    return {meanings[at : at + _DIGEST] for at in range(0, len(meanings), _DIGEST)}


def _resemblance(earlier: StoredContext, root: StoredContext, is_alike: bool) -> int:
    """Return a score for how likely it is that `root` continues the conversation of `earlier`, given the recorded cause of `root`.

    `is_alike` says whether both have the same tools and the same system prompt, or the same tools and no system prompt.
    """
    same_question = _question(earlier) == _question(root)
    match root.info.cause:
        case "tools":
            fits = earlier.info.meanings[:_DIGEST] == root.info.meanings[:_DIGEST]
        case "system":
            fits = same_question
        case _:
            fits = is_alike or _same_start(earlier, root)
    same_thread = root.info.signals.thread == earlier.info.signals.thread
    return 4 * fits + 2 * same_thread + (fits and same_question)
