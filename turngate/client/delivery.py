"""Decode the deliveries of a feed into numpy arrays, and validate them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from turngate.client.protocol import WireColumn, WireDelivery, WireRollout, WireRow, WireTree, WireTreeRow
from turngate.errors import TurngateError
from turngate.store.outcomes import OutcomeClass
from turngate.trace.prefix_tree import InvalidTree, PrefixTree, RowPath, Segment, TreePath, check_tree, list_attended
from turngate.trace.sample import RowSpan, list_token_versions
from turngate.trace.side_data import DTYPES, SideColumn, decode_values
from turngate.trace.turn_advantage import spread_advantages
from turngate.trace.turn_rewards import RowReward, spread_rewards
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids, Json, Logprobs

_delivery = msgspec.msgpack.Decoder(WireDelivery)


class DamagedDelivery(TurngateError):
    """A delivery is damaged and cannot be used for training."""

    kind = "delivery_damaged"


class Row(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One training row. `logprobs` is NaN for tokens that were not sampled, and always finite where `mask` is set."""

    ids: Ids
    mask: np.ndarray  # bool: which tokens are trained
    logprobs: Logprobs
    spans: tuple[RowSpan, ...]  # the turns in the row
    branch: int
    weight: float  # 1/K if the rollout has K rows
    advantage: float  # of the rollout
    # By name: the side data that `FeedConfig.side` requests, if it was recorded, and the teacher's scores.
    side: Mapping[str, SideColumn] = {}
    turn_rewards: tuple[RowReward, ...] = ()  # the rewards of the turns that this row trains
    # One per span; None for turns without an advantage. Empty without `FeedConfig.credit`, and if the rollout is `uncredited`.
    turn_advantages: tuple[float | None, ...] = ()
    unscored: str = ""  # why the teacher's scores are missing; empty if they are not, or if the feed has no teacher
    path: TreePath | None = None  # the row in its tree; None if rows are not delivered as trees

    def token_versions(self) -> np.ndarray:
        """Return the policy version that sampled each token, as int64. It is -1 for tokens that were not sampled.

        It is also -1 for the tokens of a turn during which the weights changed, if the engine did not report at which token they changed.
        """
        return list_token_versions(len(self.ids), self.spans)

    def token_rewards(self) -> np.ndarray:
        """Return the sum of the turn rewards at each token, as float32. A turn's rewards are at its last token; other tokens have 0."""
        return spread_rewards(len(self.ids), self.turn_rewards)

    def token_advantages(self) -> np.ndarray:
        """Return the advantage of each trained token's turn, as float32.

        The value is NaN for tokens that are not trained and for turns that have no advantage.
        """
        return spread_advantages(len(self.ids), self.spans, self.turn_advantages)


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """The training data of one row of a tree, except its tokens.

    The fields other than `rollout` have the same meaning as those of `Row`.
    """

    rollout: int  # index in `Delivery.rollouts`
    weight: float
    advantage: float
    turn_rewards: tuple[RowReward, ...] = ()
    turn_advantages: tuple[float | None, ...] = ()


class DeliveredTree(msgspec.Struct, frozen=True, eq=False):
    """Rows of a group as a tree, in which tokens that several rows share, such as the task's prompt, are stored once.

    The ids and side data share the memory of the encoded delivery.
    """

    tree: PrefixTree
    rows: tuple[TreeRow, ...]  # one for each of `tree.rows`

    def rebuild_rows(self) -> list[Row]:
        """Return the rows in the form that a feed with `form="rows"` delivers. This copies the tokens."""
        return [
            Row(
                ids=sample.ids,
                mask=sample.mask,
                logprobs=sample.logprobs,
                spans=sample.spans,
                branch=sample.branch,
                weight=row.weight,
                advantage=row.advantage,
                side=sample.side,
                turn_rewards=row.turn_rewards,
                turn_advantages=row.turn_advantages,
                path=TreePath(self.tree, path.segments),
            )
            for sample, row, path in zip(self.tree.rebuild_rows(), self.rows, self.tree.rows, strict=True)
        ]


class DeliveredRollout(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One rollout in a delivery. It has rows only if it is trained on and the delivery has no trees."""

    session: str
    task: str
    attempt: int
    kind: OutcomeClass
    reward: float | None
    resolved: bool | None
    advantage: float | None  # None: not trained on
    excluded: str  # why the rollout is not trained on; empty if it is
    truncated: bool  # a limit or a timeout ended the rollout
    timed_out: bool
    rows: tuple[Row, ...]
    turns: int
    sampled_tokens: int
    data: Json  # the runner's own data from the outcome
    uncredited: str = ""  # why its rows have no turn advantages, although `FeedConfig.credit` is set


class Delivery(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One complete group of rollouts."""

    number: int
    group: str
    task: str
    version: int  # policy version when the group was handed out
    rollouts: tuple[DeliveredRollout, ...]
    # All rows, if the feed was opened with `form="tree"`. Usually there is one tree. Rows whose side data differs in name, type or shape
    # are in different trees.
    trees: tuple[DeliveredTree, ...] = ()

    def rows(self) -> list[Row]:
        """Return all rows of the delivery. Rows of trees are returned in the order of the trees, as copies."""
        rows = [row for rolled in self.rollouts for row in rolled.rows]
        return rows + [row for tree in self.trees for row in tree.rebuild_rows()]


def decode_delivery(raw: bytes) -> Delivery:
    """Decode and validate a delivery. Side data and the ids of trees share the memory of `raw`, and are read-only."""
    return convert_delivery(_delivery.decode(raw))


def convert_delivery(wire: WireDelivery) -> Delivery:
    """Convert a decoded delivery to numpy arrays, and validate it."""
    return Delivery(
        number=wire.number,
        group=wire.group,
        task=wire.task,
        version=wire.version,
        rollouts=tuple(_decode_rollout(rolled) for rolled in wire.rollouts),
        trees=tuple(_decode_tree(tree, n, wire) for n, tree in enumerate(wire.trees or ())),
    )


def _decode_rollout(wire: WireRollout) -> DeliveredRollout:
    if wire.rows and wire.advantage is None:
        raise DamagedDelivery(f"session {wire.session}: the rollout has rows but no advantage")
    return DeliveredRollout(
        session=wire.session,
        task=wire.task,
        attempt=wire.attempt,
        kind=wire.kind,
        reward=wire.reward,
        resolved=wire.resolved,
        advantage=wire.advantage,
        excluded=wire.excluded,
        truncated=wire.truncated,
        timed_out=wire.timed_out,
        rows=tuple(_decode_row(row, wire) for row in wire.rows),
        turns=wire.turns,
        sampled_tokens=wire.sampled_tokens,
        data=msgspec.json.decode(wire.data),
        uncredited=wire.uncredited or "",
    )


def _decode_row(wire: WireRow, rolled: WireRollout) -> Row:
    """Decode and validate a row, so that trainers do not have to."""
    where = f"session {rolled.session}, branch {wire.branch}"
    for name, data in (("token ids", wire.ids), ("log-probabilities", wire.logprobs)):
        if len(data) % 4:
            raise DamagedDelivery(f"{where}: the {name} have {len(data)} bytes, which is not a multiple of 4")
    ids = np.frombuffer(wire.ids, "<i4").astype(ID_DTYPE)
    if len(wire.mask) != -(-len(ids) // 8):
        raise DamagedDelivery(
            f"{where}: the mask has {len(wire.mask)} bytes, but {len(ids)} tokens need {-(-len(ids) // 8)}, with one bit per token"
        )
    mask = np.unpackbits(np.frombuffer(wire.mask, np.uint8), count=len(ids)).astype(np.bool_)
    sampled = np.frombuffer(wire.logprobs, "<f4")
    if len(sampled) != sum(span.end - span.start for span in wire.spans):
        raise DamagedDelivery(
            f"{where}: the number of log-probabilities ({len(sampled)}) does not match the number of tokens in the row's spans"
        )
    logprobs = np.full(len(ids), np.nan, LOGPROB_DTYPE)
    trained = np.zeros(len(ids), np.bool_)
    at = 0
    for span in wire.spans:
        if not 0 <= span.start <= span.end <= len(ids):
            raise DamagedDelivery(
                f"{where}: a turn spans tokens {span.start} to {span.end}, but the row has {len(ids)} tokens"
            )
        if span.version_runs and sum(tokens for _, tokens in span.version_runs) != span.end - span.start:
            raise DamagedDelivery(f"{where}: the policy versions of turn {span.node} do not cover its tokens exactly")
        logprobs[span.start : span.end] = sampled[at : at + span.end - span.start]
        trained[span.start : span.end] = span.trained
        at += span.end - span.start
    if not np.array_equal(mask, trained):
        raise DamagedDelivery(f"{where}: the mask does not match the trained turns")
    if not np.isfinite(logprobs[mask]).all():
        raise DamagedDelivery(f"{where}: a trained token has a missing or non-finite log-probability")
    _check_turn_values(wire, len(ids), len(wire.spans), where)
    assert rolled.advantage is not None
    return Row(
        ids=ids,
        mask=mask,
        logprobs=logprobs,
        spans=wire.spans,
        branch=wire.branch,
        weight=wire.weight,
        advantage=rolled.advantage,
        side={column.name: _decode_column(column, len(ids), where) for column in wire.side},
        turn_rewards=wire.turn_rewards,
        turn_advantages=wire.turn_advantages,
    )


def _decode_column(wire: WireColumn, tokens: int, where: str) -> SideColumn:
    """Decode and validate side data. The values share the memory of the encoded delivery and are read-only."""
    if wire.dtype not in DTYPES:
        raise DamagedDelivery(f"{where}: the side data {wire.name} has the unknown type {wire.dtype!r}")
    edges = [0, *(edge for span in wire.spans for edge in span), tokens]
    if edges != sorted(edges):
        raise DamagedDelivery(
            f"{where}: the spans of the side data {wire.name}, {wire.spans}, overlap, are out of order, or lie outside the {tokens} tokens"
        )
    count = sum(end - start for start, end in wire.spans)
    try:
        values = decode_values(wire.data, wire.dtype, wire.shape)
    except ValueError:
        values = None
    if values is None or len(values) != count:
        raise DamagedDelivery(
            f"{where}: the size of the side data {wire.name} in bytes ({len(wire.data)}) does not match the number of values ({count})"
        )
    return SideColumn(wire.spans, values)


def _decode_tree(wire: WireTree, number: int, delivery: WireDelivery) -> DeliveredTree:
    """Decode and validate a tree. The ids and side data share the memory of the encoded delivery and are read-only."""
    where = f"group {delivery.group}, tree {number}"
    segments: list[Segment] = []
    start = 0
    for index, part in enumerate(wire.segments):
        if part.tokens < 1:
            raise DamagedDelivery(f"{where}: segment {index} is empty")
        if part.parent is not None and not 0 <= part.parent < index:
            raise DamagedDelivery(
                f"{where}: segment {index} has the parent {part.parent}, which is not an earlier segment"
            )
        above = None if part.parent is None else segments[part.parent]
        position = 0 if above is None else above.position + above.end - above.start
        attends = list_attended(segments, part.parent)
        segments.append(Segment(start, start + part.tokens, part.parent, position, attends, part.turn))
        start += part.tokens
    # Compared before arrays are created, because a damaged number may be too large for memory.
    count = sum(part.tokens for part in wire.segments if part.turn is not None)
    if not segments:
        raise DamagedDelivery(f"{where}: there are no segments")
    if len(wire.ids) != 4 * start or len(wire.logprobs) != 4 * count:
        raise DamagedDelivery(
            f"{where}: the segments have {start} tokens, of which {count} are sampled, but there are {len(wire.ids) // 4} ids and "
            f"{len(wire.logprobs) // 4} log-probabilities"
        )
    sizes = [part.tokens for part in wire.segments]
    sampled = np.repeat([part.turn is not None for part in wire.segments], sizes)
    logprobs = np.full(start, np.nan, LOGPROB_DTYPE)
    logprobs[sampled] = np.frombuffer(wire.logprobs, "<f4")
    trained = [part.turn is not None and part.turn.trained_in is not None for part in wire.segments]
    tree = PrefixTree(
        ids=np.frombuffer(wire.ids, "<i4").astype(ID_DTYPE, copy=False),
        positions=np.concatenate(
            [np.arange(s.position, s.position + s.end - s.start, dtype=np.int32) for s in segments]
        ),
        mask=np.repeat(trained, sizes),
        logprobs=logprobs,
        segments=tuple(segments),
        rows=tuple(_decode_path(row, segments, where) for row in wire.rows),
        side={column.name: _decode_column(column, start, where) for column in wire.side},
    )
    try:
        check_tree(tree)
    except InvalidTree as error:
        raise DamagedDelivery(f"{where}: {error}") from None
    rows = zip(wire.rows, tree.rows, strict=True)
    return DeliveredTree(
        tree, tuple(_decode_tree_row(row, [segments[n] for n in path.segments], delivery, where) for row, path in rows)
    )


def _decode_path(wire: WireTreeRow, segments: Sequence[Segment], where: str) -> RowPath:
    if not 0 <= wire.last < len(segments):
        raise DamagedDelivery(
            f"{where}: branch {wire.branch} ends in segment {wire.last}, which does not exist; the last segment is {len(segments) - 1}"
        )
    path: list[int] = []
    at: int | None = wire.last
    while at is not None:
        path.append(at)
        at = segments[at].parent
    return RowPath(wire.branch, tuple(path[::-1]), wire.empty_turns)


def _decode_tree_row(wire: WireTreeRow, path: Sequence[Segment], delivery: WireDelivery, where: str) -> TreeRow:
    where = f"{where}, branch {wire.branch}"
    if not 0 <= wire.rollout < len(delivery.rollouts):
        raise DamagedDelivery(f"{where}: the row belongs to rollout {wire.rollout}, which does not exist")
    advantage = delivery.rollouts[wire.rollout].advantage
    if advantage is None:
        raise DamagedDelivery(f"{where}: the row belongs to rollout {wire.rollout}, which has no advantage")
    tokens = path[-1].position + path[-1].end - path[-1].start
    if any(not 0 <= span.start == span.end <= tokens for span in wire.empty_turns):
        raise DamagedDelivery(
            f"{where}: the span of a turn without tokens is not empty, or is outside the row, which has {tokens} tokens"
        )
    turns = len({part.turn.node for part in path if part.turn is not None}) + len(wire.empty_turns)
    _check_turn_values(wire, tokens, turns, where)
    return TreeRow(
        rollout=wire.rollout,
        weight=wire.weight,
        advantage=advantage,
        turn_rewards=wire.turn_rewards,
        turn_advantages=wire.turn_advantages,
    )


def _check_turn_values(wire: WireRow | WireTreeRow, tokens: int, turns: int, where: str) -> None:
    if any(not 0 <= reward.start < reward.end <= tokens for reward in wire.turn_rewards):
        raise DamagedDelivery(
            f"{where}: the span of a turn reward is empty or outside the row, which has {tokens} tokens"
        )
    if wire.turn_advantages and len(wire.turn_advantages) != turns:
        raise DamagedDelivery(
            f"{where}: the number of turn advantages ({len(wire.turn_advantages)}) does not match the number of turns ({turns})"
        )
