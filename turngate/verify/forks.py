"""Drift by cause: where a call did not continue an existing branch, why, and what that costs.

The gateway records a cause for each fork, except for forks between concurrent calls. The check `cause` compares the recorded causes with
the stored messages. If the messages reveal more than the recorded cause, the report says so. For example, it says whether a template that
rewrote the history dropped thinking, reformatted JSON or changed whitespace.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import takewhile

import numpy as np

from turngate.render import Renderer
from turngate.types import Ids, Message
from turngate.verify.findings import CheckResults, ForkReport
from turngate.verify.messages import NodeMessages, classify_change, same_meaning
from turngate.verify.store_reader import StoredContext, StoredNode, StoredSession, StoredTurn, path, path_ids

_AROUND = 6  # tokens shown before and after a fork
_CAUSE_NAMES = {
    "tools": "tools changed",
    "system": "system prompt changed",
    "subagent": "sub-agent",
    "compaction": "compaction",
    "side": "side call",
    "handoff": "hand-off",
    "new": "new conversation",
    "retry": "retry",
    "resample": "asked again",
    "branch": "branch",
    "edited": "edited",
    "template": "template",
}
_ROOT_CAUSES = ("compaction", "handoff", "new", "tools", "system", "template")  # causes that only a root can have
_MAX_TEXT, _MAX_LINES = 9000, 30  # below these limits, the gateway compares every part of a message
_ASIDE = ("side", "summary")  # roles of calls that are not part of the conversation
_CHANGE_NAMES = {"thinking": "thinking dropped", "spelling": "JSON spelling", "whitespace": "whitespace"}


def check_drift(
    session: StoredSession,
    messages: NodeMessages,
    renderer: Renderer | None,
    trained: Collection[int],
    results: CheckResults,
) -> None:
    """Check the recorded causes and, except in observe mode, collect the session's forks.

    `trained` contains the ids of the branches whose rows a trainer receives.
    """
    with results.check("structure", "cause", "the recorded cause of each fork agrees with the messages") as check:
        for context in session.contexts:
            if messages.is_readable(context):
                wrong = _CauseCheck(session, messages, context).wrong()
                check.expect(not wrong, wrong, node=context.id)
        for turn in session.turns:
            wrong = _find_wrong_turn_cause(turn, observed=session.config.mode == "observe")
            check.expect(not wrong, wrong, node=turn.id)
    if session.config.mode != "observe":
        describer = _ForkDescriber(session, messages, renderer, trained)
        results.forks += [describer.describe_context(context) for context in session.contexts if _is_fork(context)]
        results.forks += [
            describer.describe_turn(turn) for turn in session.turns if turn is not turn.parent.children[0]
        ]
        results.forks.sort(key=lambda fork: fork.node)


def _is_fork(context: StoredContext) -> bool:
    again = context.parent is not None and context is not context.parent.children[0]
    return again or context.info.cause is not None


# ── check the recorded cause ───────────────────────────────────────────────────────────────────────────────────────────


class _CauseCheck:
    """A check of the recorded cause of one context. Several causes may be valid, because concurrent calls do not see each other."""

    def __init__(self, session: StoredSession, messages: NodeMessages, context: StoredContext) -> None:
        self._session, self._messages, self._context = session, messages, context
        self._signals = context.info.signals
        self._own_messages = messages.of(context)
        self._earlier = [root for root in session.roots if root.id < context.id]
        self._has_assistant = any(message.role == "assistant" for message in self._own_messages)

    def wrong(self) -> str:
        """Return why the recorded cause cannot be right, or "" if it can."""
        cause = self._context.info.cause
        if cause is None:
            return self._check_no_cause()
        checks = {
            "retry": self._check_retry,
            "resample": self._check_retry,
            "branch": self._check_branch,
            "edited": self._check_edited,
            "compaction": self._check_compaction,
            "subagent": self._check_subagent,
            "side": self._check_side,
            "handoff": self._check_handoff,
            "new": self._check_new,
            "tools": self._check_tools,
            "system": self._check_system,
            "template": self._check_template,
        }
        if cause in _ROOT_CAUSES and not self._is_root:
            return f"its cause is {cause!r}, but it is not a root"
        return checks[cause]() if cause in checks else f"its cause is {cause!r}, which is not a known cause"

    @property
    def _is_root(self) -> bool:
        return self._context.parent is None

    @property
    def _is_helper(self) -> bool:
        return self._signals.role == "subagent" or self._signals.parent not in ("", self._signals.thread)

    def _same_first_message(self, root: StoredContext) -> bool:
        """Return whether another conversation starts with the same message as this one."""
        theirs = self._messages.of(root)
        return bool(theirs and self._own_messages) and same_meaning(theirs[0], self._own_messages[0])

    def _same_question(self, root: StoredContext) -> bool:
        """Return whether another conversation has the same first user message as this one."""
        ours, theirs = _first_user(self._own_messages), _first_user(self._messages.of(root))
        return ours is not None and theirs is not None and same_meaning(ours, theirs)

    def _same_tools(self, root: StoredContext) -> bool:
        return root.info.preamble == self._context.info.preamble

    def _check_no_cause(self) -> str:
        if self._is_root:
            others = [root.id for root in self._earlier if root.info.signals.role not in _ASIDE]
            if self._is_first_with_tools():
                return ""
            return f"it starts a second conversation, after context {others[0]}, but has no cause" if others else ""
        if self._has_assistant and not self._is_observed():
            return "it contains assistant messages that were not sampled, but has no cause"
        if self._signals.role in _ASIDE:
            return f"its signals mark it as a {self._signals.role} call, but it has no cause"
        return ""

    def _is_first_with_tools(self) -> bool:
        """Return whether this is the first conversation with tools. Conversations marked as side calls or summaries do not count."""
        offering = [
            root for root in self._earlier if root.info.signals.role not in _ASIDE and self._messages.tools(root)
        ]
        return bool(self._messages.tools(self._context)) and not offering

    def _is_observed(self) -> bool:
        return self._session.config.mode == "observe"

    def _check_retry(self) -> str:
        cause = self._context.info.cause
        return "" if self._is_observed() else f"its cause is '{cause}', which only a turn can have"

    def _check_branch(self) -> str:
        if self._is_root:
            return "its cause is 'branch', but it is a root"
        return (
            "its cause is 'branch', but it contains assistant messages that were not sampled"
            if self._has_assistant
            else ""
        )

    def _check_edited(self) -> str:
        same_start = any(self._same_tools(root) and self._same_first_message(root) for root in self._earlier)
        return (
            ""
            if self._has_assistant or (self._is_root and same_start)
            else "its cause is 'edited', but no message was edited"
        )

    def _check_compaction(self) -> str:
        thread = self._signals.thread
        continues = any(thread and root.info.signals.thread == thread for root in self._earlier)
        similar = [root for root in self._earlier if self._same_tools(root) and self._same_first_message(root)]
        if not (continues or similar):
            return "its cause is 'compaction', but no earlier conversation has the same thread, or the same tools and first message"
        kept = [
            root.id
            for root in similar
            if not continues and not self._same_question(root) and self._keeps_first_answer(root)
        ]
        return f"its cause is 'compaction', but it keeps the first answer of context {kept[0]}" if kept else ""

    def _keeps_first_answer(self, root: StoredContext) -> bool:
        size = len(self._messages.of(root))
        if len(self._own_messages) <= size or any(message.role == "assistant" for message in self._own_messages[:size]):
            return False
        return any(
            same_meaning(self._messages.reply(turn), self._own_messages[size])
            for turn in root.children
            if turn.id < self._context.id
        )

    def _check_subagent(self) -> str:
        if self._is_helper:
            return ""
        if not self._is_root:
            return "its cause is 'subagent', but no signal confirms that"
        again = [
            root.id
            for root in self._earlier
            if self._same_tools(root) and self._same_first_message(root) and self._same_question(root)
        ]
        threads = {root.info.signals.thread for root in self._earlier} - {""}
        if again and not (self._signals.thread and threads and self._signals.thread not in threads):
            return f"its cause is 'subagent', but it starts with the same messages as context {again[0]}"
        return "" if self._earlier else "its cause is 'subagent', but no conversation precedes it"

    def _check_side(self) -> str:
        if self._signals.role in _ASIDE:
            return ""
        quiet = self._is_root and not self._messages.tools(self._context)
        return "" if quiet else "its cause is 'side', but no signal confirms that"

    def _check_handoff(self) -> str:
        answers = [message for message in self._own_messages if message.role == "assistant"]
        turns = [turn for turn in self._session.turns if turn.id < self._context.id]
        taken = any(
            same_meaning(self._messages.reply(turn), answer)
            for answer in answers
            for turn in turns
            if not (self._same_tools(turn.root) and self._same_first_message(turn.root))
        )
        return "" if taken else "its cause is 'handoff', but it repeats no answer of another conversation"

    def _check_new(self) -> str:
        if not self._messages.tools(self._context):
            return "" if self._earlier else "its cause is 'new', but no conversation precedes it"
        similar = [
            root
            for root in self._earlier
            if self._same_tools(root) and (self._same_first_message(root) or self._lack_system_prompt(root))
        ]
        if not similar:
            return "its cause is 'new', but no earlier conversation has the same tools and system prompt"
        if self._context.info.quotes:
            return f"its cause is 'new', but it quotes turn {self._context.info.quotes[0]}"
        if (turn := self._find_repeated_turn()) is not None:
            return f"its cause is 'new', but it repeats turn {turn.id}"
        kept = [root.id for root in similar if not self._same_question(root) and self._contains_question(root)]
        return f"its cause is 'new', but it contains the question of context {kept[0]}" if kept else ""

    def _lack_system_prompt(self, root: StoredContext) -> bool:
        """Return whether this conversation and another one both start without a system prompt."""
        starts = (self._own_messages[:1], self._messages.of(root)[:1])
        return not any(message.role == "system" for start in starts for message in start)

    def _find_repeated_turn(self) -> StoredTurn | None:
        answers = [message for message in self._own_messages if message.role == "assistant"]
        for turn in self._session.turns if answers else ():
            is_earlier = turn.id < self._context.id and turn.parent.info.signals.role not in _ASIDE
            if is_earlier and any(same_meaning(self._messages.reply(turn), answer) for answer in answers):
                return turn
        return None

    def _contains_question(self, root: StoredContext) -> bool:
        """Return whether a user message before the first answer contains all lines of an earlier conversation's first user message.

        The lines must be contiguous. Long messages are ignored, because the gateway does not compare all their parts.
        """
        theirs = _first_user(self._messages.of(root))
        if theirs is None or not theirs.content.strip():
            return False
        opening = takewhile(lambda message: message.role != "assistant", self._own_messages)
        texts = [m.content.rstrip() for m in opening if m.role == "user" and m.name == theirs.name]
        short = [text for text in texts if len(text) < _MAX_TEXT and text.count("\n") < _MAX_LINES]
        return any(f"\n{theirs.content.rstrip()}\n" in f"\n{text}\n" for text in short)

    def _check_tools(self) -> str:
        changed = any(not self._same_tools(root) and self._same_first_message(root) for root in self._earlier)
        return (
            ""
            if changed
            else "its cause is 'tools', but no earlier conversation has the same first message and different tools"
        )

    def _check_system(self) -> str:
        changed = any(
            self._same_tools(root) and self._same_question(root) and not self._same_first_message(root)
            for root in self._earlier
        )
        return (
            ""
            if changed
            else "its cause is 'system', but no earlier conversation has the same tools and question and a different first message"
        )

    def _check_template(self) -> str:
        answers = [message for message in self._own_messages if message.role == "assistant"]
        turns = [self._messages.reply(turn) for turn in self._session.turns if turn.id < self._context.id]
        known = any(_resembles(turn, answer) for answer in answers for turn in turns)
        return "" if known else "its cause is 'template', but it repeats no earlier turn"


def _resembles(turn: Message, answer: Message) -> bool:
    """Return whether an assistant message repeats a turn, possibly with different tool arguments."""
    if same_meaning(turn, answer):
        return True
    return turn.content.strip() == answer.content.strip() and [c.name for c in turn.tool_calls] == [
        c.name for c in answer.tool_calls
    ]


def _first_user(messages: tuple[Message, ...]) -> Message | None:
    return next((message for message in messages if message.role == "user"), None)


def _find_wrong_turn_cause(turn: StoredTurn, *, observed: bool) -> str:
    cause, context = turn.info.cause, turn.parent
    earlier = [answer for answer in context.children if answer.id < turn.id]
    if cause not in ("retry", "resample"):
        return (
            ""
            if cause in (None, context.info.cause)
            else f"its cause is {cause!r}, but the cause of its context is {context.info.cause!r}"
        )
    if not earlier and not observed:
        return f"its cause is '{cause}', but it is the first answer"
    if cause == "resample" and any(a.info.finish == "abort" and a.info.ended < turn.info.started for a in earlier):
        return "its cause is 'resample', but an earlier answer had been aborted when this turn started"
    return ""


# ── describe the fork ──────────────────────────────────────────────────────────────────────────────────────────────────


class _ForkDescriber:
    def __init__(
        self, session: StoredSession, messages: NodeMessages, renderer: Renderer | None, trained: Collection[int]
    ) -> None:
        self._session, self._messages = session, messages
        self._tokenizer = renderer.tokenizer if renderer is not None else None
        self._stops = frozenset(renderer.stop_ids) if renderer is not None else frozenset[int]()
        self._trained = [leaf for leaf in session.leaves if leaf.id in trained]

    def _count_shared(self, node: StoredNode, prompt: Ids, tokens: int) -> int:
        """Return how many tokens a trainer reads twice because of a fork.

        `tokens` is the number of tokens before the fork. Return this number if a trainer receives rows of both branches, and 0 otherwise.
        """
        through = [leaf for leaf in self._trained if node in path(leaf)]
        beside = [
            leaf
            for leaf in self._trained
            if leaf not in through and _common_prefix_size(path_ids(leaf), prompt) >= tokens
        ]
        return tokens if through and beside else 0

    def describe_turn(self, turn: StoredTurn) -> ForkReport:
        """Describe the fork at a turn that is not the first answer to its prompt."""
        left = max((a for a in turn.parent.children if a.id < turn.id), key=lambda a: a.id)
        same_ids = _common_prefix_size(turn.ids, left.ids)
        prompt = turn.parent.length
        recorded = turn.info.cause or ""
        # If the earlier answer was not lost, both answers are used.
        lost = recorded == "retry" or left.info.finish == "abort" or not left.delivered
        return ForkReport(
            node=turn.id,
            recorded=recorded,
            cause=_CAUSE_NAMES.get(recorded, "asked at the same time"),
            left=left.id,
            token=prompt + same_ids,
            before=self._decode(
                np.concatenate([turn.parent.ids, turn.ids])[: len(turn.parent.ids) + same_ids][-_AROUND:]
            ),
            was=self._decode(left.ids[same_ids : same_ids + _AROUND]),
            now=self._decode(turn.ids[same_ids : same_ids + _AROUND]),
            shared=self._count_shared(turn, path_ids(turn.parent), prompt),
            sent=0,
            wasted=len(left.ids) if lost and not left.children else 0,
        )

    def describe_context(self, context: StoredContext) -> ForkReport:
        prompt = path_ids(context)
        left, token = self._find_departure(context, prompt)
        other = path_ids(left)
        cause, detail = self._cause(context, left, token)
        return ForkReport(
            node=context.id,
            recorded=context.info.cause or "",
            cause=cause,
            left=left.id if left is not None else None,
            token=token,
            before=self._decode(prompt[max(0, token - _AROUND) : token]),
            was=self._decode(other[token : token + _AROUND]),
            now=self._decode(prompt[token : token + _AROUND]),
            shared=self._count_shared(context, prompt, token),
            sent=len(prompt) - token,
            detail=detail,
        )

    def _decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids.tolist()) if self._tokenizer is not None else " ".join(map(str, ids.tolist()))

    def _find_departure(self, context: StoredContext, prompt: Ids) -> tuple[StoredNode | None, int]:
        """Return the end of the branch that shares the longest prefix with a context, and the length of that prefix in tokens.

        Only nodes that were recorded before the context are considered. If there are none, the branch is None.
        """
        best: tuple[int, int, StoredNode | None] = (0, 0, None)
        waiting: list[tuple[StoredNode, int]] = [(root, 0) for root in self._session.roots if root.id < context.id]
        while waiting:
            node, start = waiting.pop()
            alike = _common_prefix_size(node.ids, prompt[start:])
            best = max(best, (start + alike, node.id, node), key=lambda found: found[:2])
            if alike == len(node.ids):
                waiting += [(child, start + alike) for child in node.children if child.id < context.id]
        token, _, found = best
        while found is not None:  # follow the newest children to the end of the branch
            after = [child for child in found.children if child.id < context.id]
            if not after:
                break
            found = max(after, key=lambda child: child.id)
        return found, token

    def _cause(self, context: StoredContext, left: StoredNode | None, token: int) -> tuple[str, str]:
        """Return the name of a fork's cause, and a detail such as which message changed.

        The messages may reveal a more precise cause than the recorded one.
        """
        recorded = context.info.cause
        if recorded not in ("template", "edited"):
            return _CAUSE_NAMES.get(recorded or "", "begun at the same time"), context.info.signals.why
        was, now = self._messages.up_to(left), self._messages.up_to(context)
        for n, (old, new) in enumerate(zip(was, now, strict=False)):
            if not same_meaning(old, new):
                if old.role == new.role == "system" and classify_change(old, new) == "words":
                    return "system prompt changed", f"message {n + 1}"
                return _CHANGE_NAMES.get(classify_change(old, new), "edited"), f"message {n + 1}, {new.role}"
        # All messages mean the same. The ids differ because the agent or the template spells them differently.
        for n, (old, new) in enumerate(zip(was, now, strict=False)):
            how = classify_change(old, new)
            if how in ("spelling", "whitespace"):
                return _CHANGE_NAMES[how], f"changed by the agent in message {n + 1}, {new.role}"
        return ("edited", "") if recorded == "edited" else self._explain_rewrite(left, token, context, now)

    def _explain_rewrite(
        self, left: StoredNode | None, token: int, context: StoredContext, now: list[Message]
    ) -> tuple[str, str]:
        """Return how the template or the agent changed a turn, and a detail.

        The changed turn is assumed to start at the same token as the original.
        """
        at = None
        for node in path(left):
            if isinstance(node, StoredTurn) and node.parent.length <= token <= node.length:
                at = node
        if at is None or self._tokenizer is None:
            return "template", ""
        message = self._messages.reply(at)
        rest = path_ids(context)[at.parent.length :].tolist()
        end = next((n + 1 for n, i in enumerate(rest) if i in self._stops), len(rest))
        sampled, written = self._tokenizer.decode(at.ids.tolist()), self._tokenizer.decode(rest[:end])
        if sampled == written:
            return "template", f"writes turn {at.id} with ids that differ from the sampled ones"
        if message.reasoning.split() and " ".join(message.reasoning.split()) not in " ".join(written.split()):
            kept = any(
                answer.reasoning.strip() == message.reasoning.strip() for answer in now if answer.role == "assistant"
            )
            return "thinking dropped", f"by the {'template' if kept else 'agent'} from turn {at.id}"
        if sampled.split() == written.split():
            return "whitespace", f"changed by the template in turn {at.id}"
        if message.tool_calls:
            return "JSON spelling", f"changed by the template in turn {at.id}"
        return "template", f"writes turn {at.id} differently"


def _common_prefix_size(one: Ids, other: Ids) -> int:
    size = min(len(one), len(other))
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if len(differing) else size
