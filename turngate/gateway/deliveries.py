"""Build deliveries: the rows and advantages of complete groups, without the rollouts that the feed leaves out.

A rollout that is left out, for example because it was truncated or is too old, is delivered without rows, but with the reason.

A delivery is built each time it is read. Its number always refers to the same group, but a rollout that is trainable at one read may be too
old or deleted at a later one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from turngate.client.protocol import (
    FeedConfig,
    FeedForm,
    WireColumn,
    WireDelivery,
    WireRollout,
    WireRow,
    WireSegment,
    WireTree,
    WireTreeRow,
)
from turngate.errors import NotFound, StoreError
from turngate.store.feeds import DeliveryMember, FeedRow
from turngate.store.restores import RESHIPPED
from turngate.store.store import Store
from turngate.trace.advantage import compute_advantages, is_too_large, row_weight
from turngate.trace.prefix_tree import build_tree
from turngate.trace.roles import assign_roles
from turngate.trace.sample import Sample, add_turn_rewards, build_samples, find_masked
from turngate.trace.session import Session
from turngate.trace.side_data import SideColumn, encode_values
from turngate.trace.training_report import report_training
from turngate.trace.turn_advantage import ScoredRollout, TurnAdvantages, compute_turn_advantages

# Values of `Session.stop`
_LIMIT_STOPS = ("turns", "sampled_tokens", "context_tokens", "context_length_exceeded", "limit")
_TIME_STOPS = ("seconds", "timed out")


class _DeliveredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a delivery, before its advantage is computed."""

    member: DeliveryMember
    reward: float | None  # for the group's baseline; None: not in the baseline
    excluded: str = ""
    truncated: bool = False
    timed_out: bool = False
    turns: int = 0
    sampled_tokens: int = 0
    rows: list[Sample] = []

    @property
    def scored(self) -> ScoredRollout:
        rewards = self.member.outcome.turn_rewards
        return ScoredRollout(self.rows, self.reward, None if isinstance(rewards, msgspec.UnsetType) else rewards)

    def to_wire(self, advantage: float | None, credited: TurnAdvantages | None) -> WireRollout:
        outcome = self.member.outcome
        excluded = self.excluded
        if not excluded and advantage is None:
            excluded = "its group has no other rollout with a usable reward to compare it with"
        return WireRollout(
            session=self.member.id,
            task=outcome.task,
            attempt=outcome.attempt,
            kind=outcome.kind,
            reward=outcome.reward,
            resolved=outcome.resolved,
            advantage=None if excluded else advantage,
            excluded=excluded,
            truncated=self.truncated,
            timed_out=self.timed_out,
            turns=self.turns,
            sampled_tokens=self.sampled_tokens,
            data=msgspec.json.encode(outcome.data),
            rows=()
            if excluded
            else tuple(_to_wire_row(row, row_weight(len(self.rows)), credited) for row in self.rows),
            uncredited=msgspec.UNSET if excluded or credited is None else credited.missing or msgspec.UNSET,
        )


def build_delivery(row: FeedRow, number: int, version: int, store: Store, *, form: FeedForm = "rows") -> bytes:
    """Build the delivery with this number and encode it as msgpack. Run this in a thread, since long traces take a while.

    Raise `NotFound` if the feed has been deleted.
    """
    config = read_config(row)
    members = store.feeds.members(row.key, number)
    if not members:
        raise missing_feed(row.name)  # the feed was deleted in the meantime
    reshipped = store.restores.filter_reshipped([member.session for member in members])
    rollouts = [
        _DeliveredRollout(member=member, reward=None, excluded=RESHIPPED)
        if member.session in reshipped
        else _build_rollout(store, member, config, version)
        for member in members
    ]
    advantages = compute_advantages([rollout.reward for rollout in rollouts], config.advantage)
    credited: list[TurnAdvantages] | list[None] = [None] * len(rollouts)
    if config.credit:
        credited = compute_turn_advantages([rollout.scored for rollout in rollouts], config.credit, config.advantage)
    delivery = WireDelivery(
        number=number,
        group=members[0].group,
        task=members[0].outcome.task,
        version=version,
        rollouts=tuple(
            rollout.to_wire(value, credit)
            for rollout, value, credit in zip(rollouts, advantages, credited, strict=True)
        ),
    )
    if form == "tree":
        delivery = _move_rows_to_trees(delivery, [rollout.rows for rollout in rollouts])
    return msgspec.msgpack.encode(delivery)


def _move_rows_to_trees(delivery: WireDelivery, samples: Sequence[Sequence[Sample]]) -> WireDelivery:
    """Return the delivery with its rows merged into trees. `samples` contains each rollout's samples, from which its rows were built."""
    members = [
        _TreeMember(index, sample, row)
        for index, (rollout, own) in enumerate(zip(delivery.rollouts, samples, strict=True))
        for sample, row in zip(own, rollout.rows, strict=False)  # an excluded rollout delivers no rows
    ]
    by_kind: dict[object, list[_TreeMember]] = {}  # one tree holds side data of one type and shape per name
    for member in members:
        kind = frozenset((name, side.values.dtype, side.values.shape[1:]) for name, side in member.sample.side.items())
        by_kind.setdefault(kind, []).append(member)
    return msgspec.structs.replace(
        delivery,
        rollouts=tuple(msgspec.structs.replace(rollout, rows=()) for rollout in delivery.rollouts),
        trees=tuple(map(_to_wire_tree, by_kind.values())),
    )


class _TreeMember(NamedTuple):
    rollout: int
    sample: Sample
    row: WireRow


def _to_wire_tree(members: Sequence[_TreeMember]) -> WireTree:
    tree = build_tree([member.sample for member in members], [member.rollout for member in members])
    sampled = np.repeat([part.turn is not None for part in tree.segments], [p.end - p.start for p in tree.segments])
    return WireTree(
        ids=tree.ids.astype("<i4", copy=False).view(np.uint8).data,
        logprobs=tree.logprobs[sampled].astype("<f4", copy=False).view(np.uint8).data,
        segments=tuple(WireSegment(part.end - part.start, part.parent, part.turn) for part in tree.segments),
        rows=tuple(
            WireTreeRow(
                rollout=member.rollout,
                last=path.segments[-1],
                branch=member.row.branch,
                weight=member.row.weight,
                empty_turns=path.empty_turns,
                turn_rewards=member.row.turn_rewards,
                turn_advantages=member.row.turn_advantages,
            )
            for member, path in zip(members, tree.rows, strict=True)
        ),
        side=tuple(_to_wire_column(name, column) for name, column in tree.side.items()),
    )


def _build_rollout(store: Store, member: DeliveryMember, config: FeedConfig, version: int) -> _DeliveredRollout:
    try:
        row = store.find_key(member.session)
        session = None if row is None else store.load(row)
        side = store.side_data.load(session, config.side or ()) if session is not None else None
    except StoreError as error:
        if isinstance(error.__cause__, sqlite3.Error):
            raise  # a disk error or a lock: a later attempt may succeed
        return _DeliveredRollout(member=member, reward=None, excluded=error.message)  # permanently damaged
    if session is None:
        return _DeliveredRollout(member=member, reward=None, excluded="its session was deleted")
    rows = add_turn_rewards(
        build_samples(session.trace, session.config.policy, side=side), member.outcome.turn_rewards or ()
    )
    timed_out = _is_timed_out(session, member)
    truncated = not timed_out and _is_truncated(session, member, rows)
    untrained = "" if rows else _explain_untrained(session, find_masked(side))
    in_baseline, excluded = _judge(member, rows, untrained, config, version, truncated=truncated, timed_out=timed_out)
    return _DeliveredRollout(
        member=member,
        reward=member.outcome.reward if in_baseline else None,
        excluded=excluded,
        truncated=truncated or timed_out,
        timed_out=timed_out,
        turns=session.turns,
        sampled_tokens=session.sampled_tokens,
        rows=rows,
    )


def _explain_untrained(session: Session, masked: Collection[int]) -> str:
    roles = assign_roles(session.trace)
    return report_training(session.trace, roles, session.config.policy, masked=masked).reason


def _judge(
    member: DeliveryMember,
    rows: list[Sample],
    untrained: str,
    config: FeedConfig,
    version: int,
    *,
    truncated: bool,
    timed_out: bool,
) -> tuple[bool, str]:
    """Return whether a rollout's reward counts in its group's baseline, and why the rollout is not trained on (empty if it is)."""
    outcome = member.outcome
    if outcome.reward is None:
        return False, f"no reward: {outcome.kind}" + (f" ({outcome.message})" if outcome.message else "")
    if is_too_large(outcome.reward):
        return False, f"its reward of {outcome.reward:g} is too large for computing advantages"
    if not rows:
        return False, f"it has no trainable turns: {untrained}"
    oldest = min(span.version_start for row in rows for span in row.spans if span.trained)
    if config.max_staleness is not None and version - oldest > config.max_staleness:
        return (
            False,
            f"stale: sampled at version {oldest}; the current version is {version} and max_staleness is {config.max_staleness}",
        )
    cut = config.on_timeout if timed_out else config.on_truncated if truncated else "train"
    how = "timed out" if timed_out else "truncated"
    match cut:
        case "exclude":
            return False, f"{how}: excluded by the feed's policy"
        case "mask":
            return True, f"{how}: masked by the feed's policy; its reward counts in the baseline"
        case _:
            return True, ""


def _is_timed_out(session: Session, member: DeliveryMember) -> bool:
    return session.stop in _TIME_STOPS or _agent_status(member) == "timed out"


def _is_truncated(session: Session, member: DeliveryMember, rows: list[Sample]) -> bool:
    """Return whether a limit ended the rollout or cut a trained turn short."""
    if session.stop in _LIMIT_STOPS or _agent_status(member) == "limit":
        return True
    trained = {span.node for row in rows for span in row.spans if span.trained}
    return any(turn.id in trained and turn.info.finish == "length" for turn in session.trace.turns())


def _agent_status(member: DeliveryMember) -> str:
    """Return how the agent ended, as recorded by Turngate's own runner, or an empty string if that is unknown."""
    data = member.outcome.data
    status = data.get("status") if isinstance(data, dict) else None
    return status if isinstance(status, str) else ""


def _to_wire_row(row: Sample, weight: float, credited: TurnAdvantages | None) -> WireRow:
    sampled = [row.logprobs[span.start : span.end] for span in row.spans]
    return WireRow(
        branch=row.branch,
        ids=row.ids.astype("<i4", copy=False).tobytes(),
        mask=np.packbits(row.mask).tobytes(),
        logprobs=np.concatenate(sampled).astype("<f4", copy=False).tobytes(),
        spans=row.spans,
        weight=weight,
        side=tuple(_to_wire_column(name, column) for name, column in row.side.items()),
        turn_rewards=row.turn_rewards,
        turn_advantages=() if credited is None or credited.missing else credited.of_row(row),
    )


def _to_wire_column(name: str, column: SideColumn) -> WireColumn:
    values = column.values
    return WireColumn(name, values.dtype.name, values.shape[1:], column.spans, encode_values(values))


def read_config(row: FeedRow) -> FeedConfig:
    try:
        return msgspec.json.decode(row.config, type=FeedConfig)
    except msgspec.DecodeError as error:
        raise StoreError(
            f"feed {row.name}: its settings are damaged on disk ({error}); delete the feed, and open it again"
        ) from None


def missing_feed(name: str) -> NotFound:
    return NotFound(f"unknown feed {name!r}; open it with PUT /admin/feeds/{name}")
