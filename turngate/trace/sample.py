"""Training rows of a trace, one per branch, and the reason why a turn is not trained. Each sampled token is trained at most once."""

from __future__ import annotations

import msgspec
import numpy as np

from turngate.trace.roles import OWN_ROLES, TurnRole, assign_roles
from turngate.trace.tree import Sampled, Trace, path_to
from turngate.types import LOGPROB_DTYPE, Ids, Logprobs


class TrainingPolicy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rules for which turns of a trace are trained."""

    roles: tuple[TurnRole, ...] = OWN_ROLES
    biased: bool = False  # also train turns sampled with a bias (top-p, grammars, forced tools …)


class RowSpan(msgspec.Struct, frozen=True):
    """The tokens of one turn inside a row."""

    node: int
    start: int
    end: int
    role: TurnRole
    trained: bool
    reason: str  # why it is not trained; empty if it is
    version_start: int
    version_end: int


class Sample(msgspec.Struct, frozen=True):
    """One row. `logprobs` is NaN for tokens that were not sampled or have no log-probability; `mask` is never set there."""

    branch: int  # id of the leaf node
    ids: Ids
    mask: np.ndarray
    logprobs: Logprobs
    spans: tuple[RowSpan, ...]

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())


def build_samples(trace: Trace, policy: TrainingPolicy | None = None, *, keep_empty: bool = False) -> list[Sample]:
    """Build one row per branch. Branches without trainable tokens are left out unless `keep_empty` is set."""
    policy = policy or TrainingPolicy()
    role_of = assign_roles(trace)
    claimed: set[int] = set()
    rows = [
        _build_row(leaf, role_of, policy, claimed)
        for leaf in sorted(_find_leaves(trace), key=lambda s: _claim_order(s, role_of))
    ]
    return [row for row in rows if keep_empty or row.trained_tokens]


def _find_leaves(trace: Trace) -> list[Sampled]:
    return [turn for turn in trace.turns() if not any(context.children for context in turn.children)]


def _claim_order(leaf: Sampled, role_of: dict[int, TurnRole]) -> tuple[bool, int, int]:
    """Return a sort key: the main conversation claims shared turns first, then the longest branch."""
    return role_of[leaf.id] != "main", -leaf.length, leaf.id


def untrainable_reason(turn: Sampled, role: TurnRole, policy: TrainingPolicy) -> str:
    """Return why a turn is not trained, or "" if it is."""
    if turn.info.fault:
        return turn.info.fault
    if turn.info.capture != "tokens":
        return f"captured as {turn.info.capture} only"
    if turn.logprobs is None:
        return "no log-probabilities"
    if len(turn.logprobs) != turn.size:
        return f"{len(turn.logprobs)} log-probabilities for {turn.size} tokens"
    if not np.isfinite(turn.logprobs).all():
        return "missing log-probabilities"
    if role not in policy.roles:
        return f"role {role}"
    if turn.info.biases and not policy.biased:
        return "biased sampling: " + ", ".join(turn.info.biases)
    return ""


def _build_row(leaf: Sampled, role_of: dict[int, TurnRole], policy: TrainingPolicy, claimed: set[int]) -> Sample:
    nodes = path_to(leaf)
    ids = np.concatenate([node.ids for node in nodes])
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.full(len(ids), np.nan, LOGPROB_DTYPE)
    spans = []
    start = 0
    for node in nodes:
        end = start + node.size
        if isinstance(node, Sampled):
            reason = untrainable_reason(node, role_of[node.id], policy)
            if not reason and node.id in claimed:
                reason = "trained in another row"
            if node.logprobs is not None and len(node.logprobs) == node.size:
                logprobs[start:end] = node.logprobs
            mask[start:end] = not reason
            claimed.add(node.id)
            spans.append(
                RowSpan(
                    node.id,
                    start,
                    end,
                    role_of[node.id],
                    not reason,
                    reason,
                    node.info.version_start,
                    node.info.version_end,
                )
            )
        start = end
    return Sample(leaf.id, ids, mask, logprobs, tuple(spans))
