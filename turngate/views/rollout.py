"""One rollout in detail: its tree, conversation, tokens and exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np

from turngate.dialects import decode_stored_messages
from turngate.dialects.chat import message_to_wire
from turngate.render import Tokenizer
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.advantage import row_weight
from turngate.trace.roles import RoleDecision, TurnRole, decide_roles
from turngate.trace.sample import Sample, find_untrained, has_sampling_masks
from turngate.trace.training_report import list_warnings, report_training
from turngate.trace.tree import Context, Node, Sampled, path_ids, path_to
from turngate.trace.turn_rewards import TurnReward
from turngate.types import Ids, Json, Message
from turngate.views.session import SessionView
from turngate.views.tokens import TokenDecoder, TokenTexts

MAX_CHARS = 20_000  # longer texts are shortened unless requested in full
_LABEL = 90  # maximum characters of a node's label
_DIGITS = 6  # decimal places of a log-probability


class RolloutView:
    """One rollout as the web page shows it: tree, conversation, tokens and exports.

    `tokenizer` is None if the rollout's tokenizer is not available on this machine.
    """

    def __init__(self, session_view: SessionView, tokenizer: Tokenizer | None) -> None:
        self._session_view = session_view
        self._decoder = TokenDecoder(tokenizer)
        self._messages: dict[int, list[Message]] = {}  # by node id
        self._rewards = _group_rewards(session_view.turn_rewards)

    # ── nodes ──────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def nodes(self) -> list[Node]:
        return sorted(self._session_view.session.trace.nodes, key=lambda node: node.id)

    @cached_property
    def by_id(self) -> dict[int, Node]:
        return {node.id: node for node in self.nodes}

    @cached_property
    def role_decisions(self) -> dict[int, RoleDecision]:
        return decide_roles(self._session_view.session.trace)

    @cached_property
    def roles(self) -> dict[int, TurnRole]:
        return {node: decision.role for node, decision in self.role_decisions.items()}

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The number of each turn in recording order, starting at 1, by node id."""
        return {node.id: n for n, node in enumerate((n for n in self.nodes if isinstance(n, Sampled)), 1)}

    @cached_property
    def branches(self) -> list[Sample]:
        """The rows of all branches. Turns that need their sampling masks count as trained."""
        return self._session_view.samples(keep_empty=True, masks=True)

    @cached_property
    def rows(self) -> list[Sample]:
        return [branch for branch in self.branches if branch.trained_tokens]

    @cached_property
    def exported_rows(self) -> list[Sample]:
        """The rows of the web page's exports. They do not contain sampling masks, so turns that need their masks are not trained."""
        biased = any(turn.info.biases for turn in self._session_view.session.trace.turns())
        return self._session_view.samples() if biased else self.rows

    @cached_property
    def row_of(self) -> dict[int, int]:
        """The index of the training row that trains each turn, by node id. Untrained turns are omitted."""
        return {span.node: n for n, row in enumerate(self.rows) for span in row.spans if span.trained}

    @cached_property
    def _reasons(self) -> dict[int, str]:
        session = self._session_view.session
        return find_untrained(session.trace, self.roles, session.config.policy)

    def read_messages(self, node: Node) -> list[Message]:
        if node.id not in self._messages:
            raw = self._session_view.texts[node.id]
            if isinstance(node, Context):
                self._messages[node.id] = decode_stored_messages(node.info.dialect, raw)
            else:
                self._messages[node.id] = [msgspec.json.decode(raw, type=Message)]
        return self._messages[node.id]

    def totals(self, excluded: str = "", failure: str = "") -> dict[str, Json]:
        """Return the rollout's counters and warnings.

        `excluded` is the reason why its outcome does not count, and `failure` is the fault that ended it.
        """
        session = self._session_view.session
        return {
            "nodes": len(self.nodes),
            "tokens": session.trace.tokens(),
            "sampled_tokens": session.sampled_tokens,
            "cached_tokens": session.cache.cached_tokens,
            "cache_rate": session.cache.rate,
            "trained_tokens": sum(row.trained_tokens for row in self.rows),
            "rows": len(self.rows),
            "turns": session.turns,
            "roles": dict(Counter(self.roles.values())),
            "warnings": list_warnings(
                report_training(session.trace, self.roles, session.config.policy, excluded, failure),
                session.trace.refused,
            ),
        }

    # ── the tree ────────────────────────────────────────────────────────────────────────────────────────────────

    def tree(self) -> dict[str, Json]:
        branches = sorted(self._branches(), key=lambda b: (b["role"] != "main", -b["tokens"], b["leaf"]))
        return {
            "nodes": [self._node(node) for node in self.nodes],
            "forks": self.forks(),
            "branches": branches,
            "main": branches[0]["leaf"] if branches else None,
            "count": len(self.nodes),
        }

    def _node(self, node: Node) -> dict[str, Json]:
        about: dict[str, Json] = {
            "id": node.id,
            "parent": None if node.parent is None else node.parent.id,
            "tokens": node.size,
            "start": node.length - node.size,
            "cause": node.info.cause,
            "label": self._label(node),
        }
        if isinstance(node, Context):
            return {**about, "kind": "context", "dialect": node.info.dialect}
        return {**about, "mean_logprob": _mean_logprob(node), **self._turn(node)}

    def _turn(self, turn: Sampled) -> dict[str, Json]:
        info = turn.info
        return {
            "kind": "sampled",
            "turn": self.numbers[turn.id],
            "role": self.roles[turn.id],
            "evidence": self.role_decisions[turn.id].describe(),
            "finish": info.finish,
            "trained": turn.id in self.row_of,
            "reason": self._reasons[turn.id],
            "row": self.row_of.get(turn.id),
            "version_start": info.version_start,
            "version_end": info.version_end,
            "version_runs": info.version_runs,
            "cached": None if info.cached < 0 else info.cached,
            "started": info.started,
            "ended": info.ended,
            "capture": info.capture,
            "fault": info.fault,
            "biases": info.biases,
            **({"masked": True} if info.biases and has_sampling_masks(turn) else {}),
            "delivered": turn.delivered,
            "rewards": self._rewards.get(turn.id, []),
        }

    def _branches(self) -> Iterator[dict[str, Json]]:
        numbers = {row.branch: n for n, row in enumerate(self.rows)}
        for branch in self.branches:
            leaf = self.by_id[branch.branch]
            yield {
                "leaf": leaf.id,
                "role": self.roles[leaf.id],
                "nodes": len(path_to(leaf)),
                "tokens": leaf.length,
                "trained": branch.trained_tokens,
                "row": numbers.get(leaf.id),
            }

    def _label(self, node: Node) -> str:
        messages = self.read_messages(node)
        if not messages:
            return ""
        message = messages[-1]
        text = _one_line(message.content) or _one_line(message.reasoning)
        if isinstance(node, Context):
            return _shorten(f"{message.role}: {text}")
        called = ", ".join(call.name for call in message.tool_calls)
        return _shorten(" → ".join(part for part in (_shorten(text), _one_line(called)) if part))

    # ── forks ───────────────────────────────────────────────────────────────────────────────────────────────────

    def forks(self) -> list[dict[str, Json]]:
        """Return the nodes that did not continue an existing branch, each with the branch that it left and the first token that differs."""
        return [fork for node in self.nodes if (fork := self._fork(node)) is not None]

    def _fork(self, node: Node) -> dict[str, Json] | None:
        other = self._find_forked_branch(node)
        if other is None and node.info.cause is None:
            return None
        fork: dict[str, Json] = {"node": node.id, "cause": node.info.cause, "from": None, "at": None, "shared": None}
        fork |= {"was": None, "now": None, "detail": (node if isinstance(node, Context) else node.parent).info.detail}
        if other is None:
            return fork
        ours, theirs = path_ids(node), path_ids(other)
        at = _common_prefix(ours, theirs)
        return {
            **fork,
            "from": other.id,
            "at": at,
            "shared": at,
            "was": self._token(other, at),
            "now": self._token(node, at),
        }

    def _find_forked_branch(self, node: Node) -> Node | None:
        """Find the branch that `node` forked from. Return None if there is no such branch.

        Return the earliest sibling of `node` or, for a new root, the end of the earlier conversation that shares the longest prefix.
        """
        siblings: Sequence[Node]
        if node.parent is not None:
            siblings = node.parent.children
            earlier = [sibling for sibling in siblings if sibling.id < node.id]
            return earlier[0] if earlier else None
        if node.info.cause is None:
            return None
        # A new root is treated as a fork of the earlier conversation with the longest common prefix.
        ends = [_deepest(root, node.id) for root in self._session_view.session.trace.roots if root.id < node.id]
        ours = path_ids(node)
        return max(ends, key=lambda end: (_common_prefix(ours, path_ids(end)), end.length), default=None)

    def _token(self, end: Node, at: int) -> dict[str, Json] | None:
        """Return the token at a position on the path to `end`, or None if the path is shorter."""
        for node in path_to(end):
            start = node.length - node.size
            if start <= at < node.length:
                place = at - start
                texts = self._decoder.decode(node)
                text = None if texts is None else texts.text[place]
                return {"id": int(node.ids[place]), "text": text, "node": node.id}
        return None

    # ── the conversation ────────────────────────────────────────────────────────────────────────────────────────

    def messages(self, *, after: int = 0, limit: int = 50, branch: int | None = None, only: int | None = None) -> Json:
        nodes = self._along(branch)
        whole = only is not None
        nodes = [node for node in nodes if node.id == only] if whole else [node for node in nodes if node.id > after]
        page = nodes[:limit]
        return {
            "nodes": [self._messages_to_json(node, whole=whole) for node in page],
            "next": page[-1].id if page else after,
            "more": len(nodes) > len(page),
        }

    def _messages_to_json(self, node: Node, *, whole: bool) -> dict[str, Json]:
        about: dict[str, Json] = {
            "id": node.id,
            "parent": None if node.parent is None else node.parent.id,
            "kind": "context",
            "role": None,
            "turn": None,
            "cause": node.info.cause,
            "at": None,
            "tokens": node.size,
            "messages": [_message_to_json(message, whole=whole) for message in self.read_messages(node)],
        }
        if isinstance(node, Context):
            return about
        info = node.info
        turn = self._turn(node)
        del turn["started"], turn["ended"]
        return {**about, **turn, "at": info.started, "seconds": round(info.ended - info.started, 3)}

    def _along(self, branch: int | None) -> list[Node]:
        if branch is None:
            return self.nodes
        end = self.by_id.get(branch)
        return [] if end is None else path_to(end)

    # ── the tokens ──────────────────────────────────────────────────────────────────────────────────────────────

    def tokens(self, *, node: int | None = None, token: int = 0, limit: int = 4000, branch: int | None = None) -> Json:
        """Return up to `limit` tokens of a branch, or of all nodes, starting at index `token` of node `node`.

        A few more may be returned, so that the result never ends inside a character.
        """
        nodes = self._along(branch)
        ids = [candidate.id for candidate in nodes]
        place = 0 if node is None else ids.index(node) if node in ids else len(ids)
        parts: list[dict[str, Json]] = []
        remaining = limit
        following: dict[str, int] | None = None
        for current in nodes[place:]:
            start = min(token, current.size)
            token = 0
            if remaining <= 0:
                following = {"node": current.id, "token": start}
                break
            texts = self._decoder.decode(current)
            end = min(current.size, start + remaining)
            if texts is not None:
                end = texts.end(end)
            parts.append(self._part(current, texts, start, end))
            remaining -= end - start
            if end < current.size:
                following = {"node": current.id, "token": end}
                break
        return {
            "nodes": parts,
            "next": following,
            "total": sum(candidate.size for candidate in nodes),
            "readable": self._decoder.is_available,
        }

    def _part(self, node: Node, texts: TokenTexts | None, start: int, end: int) -> dict[str, Json]:
        ids = node.ids[start:end]
        about: dict[str, Json] = {
            "id": node.id,
            "parent": None if node.parent is None else node.parent.id,
            "kind": "context",
            "role": None,
            "turn": None,
            "tokens": node.size,
            "start": node.length - node.size,
            "from": start,
            "cause": node.info.cause,
            "ids": ids,
            "logprobs": None,
            "trained": False,
            "reason": "",
            "row": None,
            **self._decoder.to_json(ids, texts, start, end),
        }
        if isinstance(node, Context):
            return about
        turn = self._turn(node)
        del turn["started"], turn["ended"]
        return {**about, **turn, "logprobs": _round_logprobs(node, start, end)}

    # ── exports ────────────────────────────────────────────────────────────────────────────────────────────────

    def training_rows(
        self, outcome: RecordedOutcome | None, advantage: float | None, about: Mapping[str, Json]
    ) -> Iterator[Json]:
        """Yield the exported rows, with the fields that `turngate export rows` writes.

        `about` contains the fields that describe the rollout, such as `session`, `task` and `reward`.
        """
        session = self._session_view.session
        status = outcome.data.get("status") if outcome and isinstance(outcome.data, dict) else None
        for row in self.exported_rows:
            trained = [span for span in row.spans if span.trained]
            yield {
                **about,
                "advantage": advantage,
                "weight": row_weight(len(self.exported_rows)),
                "truncated": session.truncated or status in ("limit", "timed out"),
                "stop": session.stop,
                "model": session.config.model,
                "branch": row.branch,
                "ids": row.ids,
                "mask": row.mask,
                "logprobs": row.logprobs,
                "version_start": min(span.version_start for span in trained),
                "version_end": max(span.version_end for span in trained),
                "spans": row.spans,
                "outcome": None if outcome is None else outcome.data,
                "vocabulary": session.vocabulary,
            }

    def conversations(self, about: Mapping[str, Json]) -> Iterator[Json]:
        """Yield the conversation of each branch in OpenAI's format. `about` contains the fields to add to each conversation."""
        preambles = self._session_view.preambles
        for branch in self.branches:
            nodes = path_to(self.by_id[branch.branch])
            root = nodes[0]
            assert isinstance(root, Context)
            tools = preambles.get(root.info.preamble, (b"[]", b""))[0]
            yield {
                **about,
                "branch": branch.branch,
                "role": self.roles[branch.branch],
                "trained_tokens": branch.trained_tokens,
                "dialect": root.info.dialect,
                "tools": msgspec.Raw(tools or b"[]"),
                "messages": [message_to_wire(message) for node in nodes for message in self.read_messages(node)],
            }


def _common_prefix(ours: Ids, theirs: Ids) -> int:
    """Return how many ids two paths have in common at the start."""
    size = min(len(ours), len(theirs))
    differences = np.flatnonzero(ours[:size] != theirs[:size])
    return int(differences[0]) if len(differences) else size


def _deepest(root: Context, before: int) -> Node:
    """Return the last node of the longest path that starts at `root`. Only nodes with ids below `before` are considered."""
    best: Node = root
    waiting: list[Node] = [root]
    while waiting:
        node = waiting.pop()
        if node.length > best.length:
            best = node
        waiting.extend(child for child in node.children if child.id < before)
    return best


def _mean_logprob(turn: Sampled) -> float | None:
    if turn.logprobs is None or not len(turn.logprobs) or not np.isfinite(turn.logprobs).all():
        return None
    return round(float(turn.logprobs.astype(np.float64).mean()), _DIGITS)


def _round_logprobs(turn: Sampled, start: int, end: int) -> Json:
    """Return the rounded log-probabilities, or None if the turn does not have one per token. In JSON, NaN becomes null."""
    if turn.logprobs is None or len(turn.logprobs) != turn.size:
        return None
    return np.round(turn.logprobs[start:end].astype(np.float64), _DIGITS)


def _message_to_json(message: Message, *, whole: bool) -> dict[str, Json]:
    cut: dict[str, int] = {}

    def short(name: str, text: str) -> str:
        if whole or len(text) <= MAX_CHARS:
            return text
        cut[name] = len(text)
        return f"{text[: MAX_CHARS * 3 // 4]}\n…\n{text[-MAX_CHARS // 4 :]}"

    encoded: dict[str, Json] = {"role": message.role, "content": short("content", message.content)}
    if message.reasoning:
        encoded["reasoning"] = short("reasoning", message.reasoning)
    if message.tool_calls:
        encoded["tool_calls"] = [
            {"id": call.id, "name": call.name, "arguments": short(f"tool_calls.{n}.arguments", call.arguments)}
            for n, call in enumerate(message.tool_calls)
        ]
    rest = {"tool_call_id": message.tool_call_id, "name": message.name, "beyond": message.unsupported}
    encoded |= {name: value for name, value in rest.items() if value}
    return {**encoded, "cut": cut} if cut else encoded


def _group_rewards(rewards: Sequence[TurnReward]) -> dict[int | None, list[Json]]:
    """Return the rewards of each turn as JSON, by node id. Rewards whose turn is unknown have the key None."""
    by_turn: dict[int | None, list[Json]] = {}
    for reward in rewards:
        by_turn.setdefault(reward.turn, []).append(msgspec.to_builtins(reward))
    return by_turn


def _one_line(text: str) -> str:
    return " ".join(text[: 4 * _LABEL].split())


def _shorten(text: str) -> str:
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"
