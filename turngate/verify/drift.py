"""Drift by cause: where a call did not go on from what was there, why, and what that costs.

The gateway records a cause for every fork. Here it is held against what the stored messages show (check `cause`), and told more
closely where they show more: a template that rewrote the past dropped thinking, or spelled JSON anew, or trimmed.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from turngate.render import Renderer
from turngate.types import Ids, Message
from turngate.verify.findings import CheckResults, Fork
from turngate.verify.messages import NodeMessages, classify_change, same_meaning
from turngate.verify.store_reader import StoredContext, StoredNode, StoredSession, StoredTurn, path, path_ids

_AROUND = 6  # tokens that are shown on either side
_CAUSE_NAMES = {
    "tools": "tools changed",
    "system": "system prompt changed",
    "subagent": "sub-agent",
    "compaction": "compaction",
    "side": "side call",
    "retry": "retry",
    "resample": "asked again",
    "branch": "branch",
    "edited": "edited",
    "template": "template",
}
_CHANGE_NAMES = {"thinking": "thinking dropped", "spelling": "JSON spelling", "whitespace": "whitespace"}


def check_drift(
    session: StoredSession,
    messages: NodeMessages,
    renderer: Renderer | None,
    trained: Collection[int],
    results: CheckResults,
) -> None:
    """`trained`: the branches that are rows."""
    with results.check("structure", "cause", "why each call forked is what the messages show") as check:
        for context in session.contexts:
            if messages.is_readable(context):
                wrong = _CauseCheck(session, messages, context).wrong()
                check.expect(not wrong, wrong, node=context.id)
        for turn in session.turns:
            wrong = _find_wrong_turn_cause(turn, observed=session.config.mode == "observe")
            check.expect(not wrong, wrong, node=turn.id)
    if session.config.mode != "observe":
        teller = _ForkDescriber(session, messages, renderer, trained)
        results.forks += [teller.context(context) for context in session.contexts if _is_fork(context)]
        results.forks += [teller.turn(turn) for turn in session.turns if turn is not turn.parent.children[0]]
        results.forks.sort(key=lambda fork: fork.node)


def _is_fork(context: StoredContext) -> bool:
    again = context.parent is not None and context is not context.parent.children[0]
    return again or context.info.cause is not None


# ── is it so? ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _CauseCheck:
    """The recorded cause of one context. Calls that run side by side do not know of each other, so some may have two true ones."""

    def __init__(self, session: StoredSession, messages: NodeMessages, context: StoredContext) -> None:
        self._session, self._messages, self._context = session, messages, context
        self._told = context.info.signals
        self._said = messages.of(context)
        self._earlier = [root for root in session.roots if root.id < context.id]
        self._speaks = any(message.role == "assistant" for message in self._said)

    def wrong(self) -> str:
        """Why the recorded cause cannot be; empty if it can."""
        cause = self._context.info.cause
        if cause is None:
            return self._uncaused()
        known = {
            "retry": self._observed,
            "resample": self._observed,
            "branch": self._branch,
            "edited": self._edited,
            "compaction": self._compaction,
            "subagent": self._subagent,
            "side": self._side,
            "tools": self._tools,
            "system": self._system,
            "template": self._template,
        }
        return known[cause]() if cause in known else f"{cause!r} is no cause"

    @property
    def _root(self) -> bool:
        return self._context.parent is None

    @property
    def _helper(self) -> bool:
        return self._told.role == "subagent" or self._told.parent not in ("", self._told.thread)

    def _head(self, root: StoredContext) -> bool:
        """Whether another conversation begins with the same message."""
        theirs = self._messages.of(root)
        return bool(theirs and self._said) and same_meaning(theirs[0], self._said[0])

    def _asks(self, root: StoredContext) -> bool:
        """Whether it has the same first question."""
        ours, theirs = _first_user(self._said), _first_user(self._messages.of(root))
        return ours is not None and theirs is not None and same_meaning(ours, theirs)

    def _offered(self, root: StoredContext) -> bool:
        return root.info.preamble == self._context.info.preamble

    def _uncaused(self) -> str:
        if self._root:
            others = [root.id for root in self._earlier if root.info.signals.role != "side"]
            if self._begins_work():
                return ""
            return f"a second conversation has no cause, beside that of context {others[0]}" if others else ""
        if self._speaks and not self._anew():
            return "it holds words of the assistant's that were not sampled, and has no cause"
        if self._told.role == "side":
            return "it was told to be a side call, and has no cause"
        return ""

    def _begins_work(self) -> bool:
        """Whether it is the first one with tools, of an agent that asked for titles or the like before."""
        offering = [root for root in self._earlier if root.info.signals.role != "side" and self._messages.tools(root)]
        return bool(self._messages.tools(self._context)) and not offering

    def _anew(self) -> bool:
        return self._session.config.mode == "observe"

    def _observed(self) -> str:
        return "" if self._anew() else "only an answer can be one to a repeated question, and not the question"

    def _branch(self) -> str:
        if self._root:
            return "a branch begins at a turn, and this at the root"
        return "it is said to branch, and holds words of the assistant's that were not sampled" if self._speaks else ""

    def _edited(self) -> str:
        begun = any(self._offered(root) and self._head(root) for root in self._earlier)
        return "" if self._speaks or (self._root and begun) else "it is said to be edited, and nothing in it is"

    def _compaction(self) -> str:
        thread = self._told.thread
        goes_on = any(thread and root.info.signals.thread == thread for root in self._earlier)
        begun = [root for root in self._earlier if self._offered(root) and self._head(root)]
        if not (self._root and (goes_on or begun)):
            return "it is said to sum up a conversation, and none before it begins like it"
        kept = [root.id for root in begun if not goes_on and not self._asks(root) and self._keeps_first_answer(root)]
        return (
            f"it is said to sum up a conversation, and keeps all that followed the question of context {kept[0]}"
            if kept
            else ""
        )

    def _keeps_first_answer(self, root: StoredContext) -> bool:
        size = len(self._messages.of(root))
        if len(self._said) <= size or any(message.role == "assistant" for message in self._said[:size]):
            return False
        return any(
            same_meaning(self._messages.reply(turn), self._said[size])
            for turn in root.children
            if turn.id < self._context.id
        )

    def _subagent(self) -> str:
        if self._helper:
            return ""
        if not self._root:
            return "it is said to be a sub-agent's, and nothing told so"
        again = [root.id for root in self._earlier if self._offered(root) and self._head(root) and self._asks(root)]
        threads = {root.info.signals.thread for root in self._earlier} - {""}
        if again and not (self._told.thread and threads and self._told.thread not in threads):
            return f"it is said to be a sub-agent's, and begins and asks as context {again[0]} does"
        return "" if self._earlier else "it is said to be a sub-agent's, and there is no agent before it"

    def _side(self) -> str:
        if self._told.role == "side":
            return ""
        quiet = self._root and not self._messages.tools(self._context)
        return "" if quiet else "it is said to be a side call, and nothing told so"

    def _tools(self) -> str:
        changed = any(not self._offered(root) and self._head(root) for root in self._earlier)
        return (
            ""
            if self._root and changed
            else "its tools are said to have changed, and no conversation before it begins like it with others"
        )

    def _system(self) -> str:
        changed = any(self._offered(root) and self._asks(root) and not self._head(root) for root in self._earlier)
        return (
            ""
            if self._root and changed
            else "its system prompt is said to have changed, and no conversation before it asks the same"
        )

    def _template(self) -> str:
        answers = [message for message in self._said if message.role == "assistant"]
        turns = [self._messages.reply(turn) for turn in self._session.turns if turn.id < self._context.id]
        known = any(_resembles(turn, answer) for answer in answers for turn in turns)
        return "" if self._root and known else "the template is said to have rewritten it, and it repeats no turn"


def _resembles(turn: Message, answer: Message) -> bool:
    """Whether an answer is that turn, though its arguments may have been touched up."""
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
            else f"its cause is {cause}, and its context's {context.info.cause}"
        )
    if not earlier and not observed:
        return f"its cause is {cause}, and it is the first answer"
    if cause == "resample" and any(a.info.finish == "abort" and a.info.ended < turn.info.started for a in earlier):
        return "it is said to be asked for anew on purpose, and the answer before it was lost"
    return ""


# ── what is it, more closely, and what does it cost? ────────────────────────────────────────────────────────────────


class _ForkDescriber:
    def __init__(
        self, session: StoredSession, messages: NodeMessages, renderer: Renderer | None, trained: Collection[int]
    ) -> None:
        self._session, self._messages = session, messages
        self._tokenizer = renderer.tokenizer if renderer is not None else None
        self._stops = frozenset(renderer.stop_ids) if renderer is not None else frozenset[int]()
        self._trained = [leaf for leaf in session.leaves if leaf.id in trained]

    def _shared(self, node: StoredNode, prompt: Ids, tokens: int) -> int:
        """Tokens before a fork that a trainer reads twice: where there are rows on both sides of it."""
        through = [leaf for leaf in self._trained if node in path(leaf)]
        beside = [
            leaf
            for leaf in self._trained
            if leaf not in through and _common_prefix_size(path_ids(leaf), prompt) >= tokens
        ]
        return tokens if through and beside else 0

    def turn(self, turn: StoredTurn) -> Fork:
        """Another answer to the same prompt."""
        left = max((a for a in turn.parent.children if a.id < turn.id), key=lambda a: a.id)
        same_ids = _common_prefix_size(turn.ids, left.ids)
        prompt = turn.parent.length
        recorded = turn.info.cause or ""
        lost = (
            recorded == "retry" or left.info.finish == "abort" or not left.delivered
        )  # else both are answers, and trained
        return Fork(
            node=turn.id,
            recorded=recorded,
            cause=_CAUSE_NAMES.get(recorded, "asked at the same time"),
            left=left.id,
            token=prompt + same_ids,
            before=self._shown(
                np.concatenate([turn.parent.ids, turn.ids])[: len(turn.parent.ids) + same_ids][-_AROUND:]
            ),
            was=self._shown(left.ids[same_ids : same_ids + _AROUND]),
            now=self._shown(turn.ids[same_ids : same_ids + _AROUND]),
            shared=self._shared(turn, path_ids(turn.parent), prompt),
            sent=0,
            wasted=len(left.ids) if lost and not left.children else 0,
        )

    def context(self, context: StoredContext) -> Fork:
        prompt = path_ids(context)
        left, token = self._left(context, prompt)
        other = path_ids(left)
        cause, detail = self._cause(context, left, token)
        return Fork(
            node=context.id,
            recorded=context.info.cause or "",
            cause=cause,
            left=left.id if left is not None else None,
            token=token,
            before=self._shown(prompt[max(0, token - _AROUND) : token]),
            was=self._shown(other[token : token + _AROUND]),
            now=self._shown(prompt[token : token + _AROUND]),
            shared=self._shared(context, prompt, token),
            sent=len(prompt) - token,
            detail=detail,
        )

    def _shown(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids.tolist()) if self._tokenizer is not None else " ".join(map(str, ids.tolist()))

    def _left(self, context: StoredContext, prompt: Ids) -> tuple[StoredNode | None, int]:
        """The line that it shares most of its tokens with, down to where that line had got, and where they part."""
        best: tuple[int, int, StoredNode | None] = (0, 0, None)
        waiting: list[tuple[StoredNode, int]] = [(root, 0) for root in self._session.roots if root.id < context.id]
        while waiting:
            node, start = waiting.pop()
            alike = _common_prefix_size(node.ids, prompt[start:])
            best = max(best, (start + alike, node.id, node), key=lambda found: found[:2])
            if alike == len(node.ids):
                waiting += [(child, start + alike) for child in node.children if child.id < context.id]
        token, _, found = best
        while found is not None:  # on to the end of that line, by what came last
            after = [child for child in found.children if child.id < context.id]
            if not after:
                break
            found = max(after, key=lambda child: child.id)
        return found, token

    def _cause(self, context: StoredContext, left: StoredNode | None, token: int) -> tuple[str, str]:
        """The recorded cause, told more closely where the messages show more."""
        recorded = context.info.cause
        if recorded not in ("template", "edited"):
            return _CAUSE_NAMES.get(recorded or "", "begun at the same time"), context.info.signals.why
        was, now = self._messages.up_to(left), self._messages.up_to(context)
        for n, (old, new) in enumerate(zip(was, now, strict=False)):
            if not same_meaning(old, new):
                if old.role == new.role == "system" and classify_change(old, new) == "words":
                    return "system prompt changed", f"message {n + 1}"
                return _CHANGE_NAMES.get(classify_change(old, new), "edited"), f"message {n + 1}, {new.role}"
        # All of it means the same: what made the ids differ is how it is spelled, by the agent or by the template.
        for n, (old, new) in enumerate(zip(was, now, strict=False)):
            how = classify_change(old, new)
            if how in ("spelling", "whitespace"):
                return _CHANGE_NAMES[how], f"message {n + 1}, {new.role}, by the agent"
        return ("edited", "") if recorded == "edited" else self._rewritten(left, token, context, now)

    def _rewritten(
        self, left: StoredNode | None, token: int, context: StoredContext, now: list[Message]
    ) -> tuple[str, str]:
        """The template itself wrote the past anew. Held against its own version of the turn, which begins at the same token."""
        at = None
        for node in path(left):
            if isinstance(node, StoredTurn) and node.parent.length <= token <= node.length:
                at = node
        if at is None or self._tokenizer is None:
            return "template", ""
        message = self._messages.reply(at)
        rest = path_ids(context)[at.parent.length :].tolist()
        end = next((n + 1 for n, i in enumerate(rest) if i in self._stops), len(rest))
        said, written = self._tokenizer.decode(at.ids.tolist()), self._tokenizer.decode(rest[:end])
        if said == written:
            return "template", f"writes turn {at.id} with other ids than were sampled"
        if message.reasoning.split() and " ".join(message.reasoning.split()) not in " ".join(written.split()):
            kept = any(
                answer.reasoning.strip() == message.reasoning.strip() for answer in now if answer.role == "assistant"
            )
            return "thinking dropped", f"of turn {at.id}, by the {'template' if kept else 'agent'}"
        if said.split() == written.split():
            return "whitespace", f"of turn {at.id}, by the template"
        if message.tool_calls:
            return "JSON spelling", f"of turn {at.id}, by the template"
        return "template", f"writes turn {at.id} otherwise"


def _common_prefix_size(one: Ids, other: Ids) -> int:
    """How many tokens two begin with alike."""
    size = min(len(one), len(other))
    apart = np.flatnonzero(one[:size] != other[:size])
    return int(apart[0]) if len(apart) else size
