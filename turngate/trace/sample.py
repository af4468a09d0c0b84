"""Build the training rows of a trace, one per branch, and find out why a turn is not trained.

Each sampled token is trained at most once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from turngate.trace.roles import OWN_ROLES, TurnRole, assign_roles
from turngate.trace.side_data import SideColumn, join_columns
from turngate.trace.tree import RefusedCalls, Sampled, Trace, path_to
from turngate.trace.turn_rewards import RowReward, TurnReward
from turngate.types import LOGPROB_DTYPE, NEUTRAL, SAMPLING_MASK, TRUNCATIONS, Ids, Logprobs, SideArray

REFUSED = "the agent was refused a model call"
TRAINED_ELSEWHERE = "trained in another row"
UNKNOWN_VERSION = -1
NEEDS_MASK = "trained only with its sampling mask: "


class _Temperature(msgspec.Struct, frozen=True):
    """The temperature among recorded sampling parameters.

    Other parameters are ignored, including any that this version of Turngate does not know.
    """

    temperature: float = NEUTRAL.temperature


_decode_temperature = msgspec.json.Decoder(_Temperature).decode


class TrainingPolicy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Rules that decide which turns of a trace are trained."""

    roles: tuple[TurnRole, ...] = OWN_ROLES
    biased: bool = False  # also train turns sampled with a bias (top-p, grammars, forced tools …)
    refused: bool = False  # also train sessions in which a model call was refused


class RowSpan(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of one turn's sampled tokens in a row, and whether they are trained."""

    node: int
    start: int
    end: int
    role: TurnRole
    trained: bool
    reason: str  # why the turn is not trained; empty if it is
    version_start: int
    version_end: int
    # The turn's tokens as runs of (policy version, tokens), if the weights changed during the turn and the engine reported where.
    version_runs: tuple[tuple[int, int], ...] = ()
    temperature: float = NEUTRAL.temperature  # at which the turn was sampled; left out of the wire format if it is 1


def list_token_versions(tokens: int, spans: Sequence[RowSpan]) -> np.ndarray:
    """Return the policy version that sampled each of a row's tokens, as int64.

    The version is `UNKNOWN_VERSION` for tokens that were not sampled. If the weights changed during a turn and the engine did not report
    at which token, it is `UNKNOWN_VERSION` for all tokens of the turn.
    """
    versions = np.full(tokens, UNKNOWN_VERSION, np.int64)
    for span in spans:
        start = span.start
        for version, count in span.version_runs:
            versions[start : start + count] = version
            start += count
        if not span.version_runs and span.version_start == span.version_end:
            versions[span.start : span.end] = span.version_start
    return versions


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One training row.

    `logprobs` is NaN for tokens that were not sampled or have no log-probability. `mask` is never set for these tokens.
    """

    branch: int  # id of the leaf node
    ids: Ids
    mask: np.ndarray
    logprobs: Logprobs
    spans: tuple[RowSpan, ...]
    side: Mapping[str, SideColumn] = {}  # side data by name, if the caller passed any
    turn_rewards: tuple[RowReward, ...] = ()  # of the turns that this row trains, if the caller passed any

    @property
    def trained_tokens(self) -> int:
        return int(self.mask.sum())

    def token_versions(self) -> np.ndarray:
        """Return the policy version that sampled each token. See `list_token_versions`."""
        return list_token_versions(len(self.ids), self.spans)

    def with_side(self, columns: Mapping[str, SideColumn]) -> Sample:
        """Return a copy of the row with these columns added to its side data."""
        return msgspec.structs.replace(self, side={**self.side, **columns})


def build_samples(
    trace: Trace,
    policy: TrainingPolicy | None = None,
    *,
    keep_empty: bool = False,
    side: Mapping[int, Sequence[SideArray]] | None = None,
    masks: bool = False,
) -> list[Sample]:
    """Build one row per branch. Branches without trained tokens are omitted unless `keep_empty` is set.

    `side` is the side data to add to the rows, by node id. Turns that need their sampling masks are trained only if `side` includes the
    masks, or if `masks` is set because the trainer receives them in another way.
    """
    policy = policy or TrainingPolicy()
    role_of = assign_roles(trace)
    reasons = find_untrained(trace, role_of, policy, None if masks else find_masked(side))
    claimed: set[int] = set()
    rows = [
        _build_row(leaf, role_of, reasons, claimed)
        for leaf in sorted(_find_leaves(trace), key=lambda s: _claim_order(s, role_of))
    ]
    rows = [row for row in rows if keep_empty or row.trained_tokens]
    if not side:
        return rows
    turns = {turn.id: turn for turn in trace.turns()}
    return [msgspec.structs.replace(row, side=join_columns(path_to(turns[row.branch]), side)) for row in rows]


def add_turn_rewards(rows: Sequence[Sample], rewards: Sequence[TurnReward]) -> list[Sample]:
    """Add the rewards of turns to the rows that train these turns. Rewards of turns that no row trains are left out."""
    rewards_of: dict[int | None, list[TurnReward]] = {}
    for reward in rewards:
        rewards_of.setdefault(reward.turn, []).append(reward)
    return [
        msgspec.structs.replace(row, turn_rewards=tuple(_place_rewards(row, rewards_of))) if rewards_of else row
        for row in rows
    ]


def _place_rewards(row: Sample, rewards_of: Mapping[int | None, Sequence[TurnReward]]) -> Iterator[RowReward]:
    for span in row.spans:
        if span.trained and span.end > span.start:
            for reward in rewards_of.get(span.node, ()):
                start = span.start + (reward.start or 0)
                end = span.end if reward.end is None else span.start + reward.end
                yield RowReward(span.node, start, end, reward.name, reward.value, reward.kind)


def _find_leaves(trace: Trace) -> list[Sampled]:
    return [turn for turn in trace.turns() if not any(context.children for context in turn.children)]


def _claim_order(leaf: Sampled, role_of: dict[int, TurnRole]) -> tuple[bool, int, int]:
    """Return a sort key that decides which branch trains a shared turn: the main conversation before others, then the longest branch."""
    return role_of[leaf.id] != "main", -leaf.length, leaf.id


def find_untrained(
    trace: Trace, role_of: Mapping[int, TurnRole], policy: TrainingPolicy, masked: Collection[int] | None = None
) -> dict[int, str]:
    """Return the reason why each turn is not trained, by node id. The reason is "" if the turn is trained.

    `masked` contains the nodes whose sampling masks the trainer receives. If it is None, the trainer receives all recorded masks.
    """
    excluded = find_exclusion(trace.refused, policy)
    return {
        turn.id: untrainable_reason(turn, role_of[turn.id], policy, masked is None or turn.id in masked) or excluded
        for turn in trace.turns()
    }


def find_exclusion(refused: RefusedCalls | None, policy: TrainingPolicy) -> str:
    """Return why all turns of a session are excluded from training, or "" if they are not."""
    return REFUSED if refused is not None and not policy.refused else ""


def untrainable_reason(turn: Sampled, role: TurnRole, policy: TrainingPolicy, masked: bool = True) -> str:
    """Return why a turn cannot be trained, or "" if it can. Only the turn is considered; `find_untrained` also considers its session.

    `masked` says whether the trainer receives the turn's sampling masks, if they were recorded.
    """
    if turn.info.fault:
        return turn.info.fault
    if turn.info.capture != "tokens":
        return f"captured as {turn.info.capture} only"
    if turn.logprobs is None:
        return "no log-probabilities"
    if len(turn.logprobs) != turn.size:
        return f"different numbers of log-probabilities ({len(turn.logprobs)}) and tokens ({turn.size})"
    if not np.isfinite(turn.logprobs).all():
        return "missing log-probabilities"
    if role not in policy.roles:
        return f"role {role}"
    if turn.info.biases and not policy.biased:
        if not has_sampling_masks(turn):
            return "biased sampling: " + ", ".join(turn.info.biases)
        if not masked:
            return NEEDS_MASK + ", ".join(turn.info.biases)
    return ""


def find_masked(side: Mapping[int, Sequence[SideArray]] | None) -> set[int]:
    """Return the nodes whose sampling masks are in `side`."""
    return {node for node, arrays in (side or {}).items() if any(array.name == SAMPLING_MASK for array in arrays)}


def has_sampling_masks(turn: Sampled) -> bool:
    """Return whether sampling masks describe all biases of a turn, and are recorded for all its tokens."""
    masked = sum(side.count for side in turn.info.side if side.name == SAMPLING_MASK and side.first >= 0)
    return masked == turn.size and set(turn.info.biases) <= set(TRUNCATIONS)


def read_temperature(turn: Sampled) -> float:
    """Return the temperature at which a turn was sampled.

    If it is 1, return the default object of `RowSpan.temperature`, because msgspec omits a field only if it holds that very object.
    """
    used = _decode_temperature(turn.info.sampling).temperature if turn.info.sampling else 1.0
    return NEUTRAL.temperature if used == 1 else used


def _build_row(leaf: Sampled, role_of: Mapping[int, TurnRole], reasons: Mapping[int, str], claimed: set[int]) -> Sample:
    nodes = path_to(leaf)
    ids = np.concatenate([node.ids for node in nodes])
    mask = np.zeros(len(ids), np.bool_)
    logprobs = np.full(len(ids), np.nan, LOGPROB_DTYPE)
    spans = []
    start = 0
    for node in nodes:
        end = start + node.size
        if isinstance(node, Sampled):
            reason = reasons[node.id]
            if not reason and node.id in claimed:
                reason = TRAINED_ELSEWHERE
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
                    node.info.version_runs if len(node.info.version_runs) > 1 else (),
                    read_temperature(node),
                )
            )
        start = end
    return Sample(leaf.id, ids, mask, logprobs, tuple(spans))
