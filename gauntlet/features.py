"""What rows carry besides ids, mask and log-probabilities: the columns, and how each is judged.

Every value that a gateway delivers is compared with what the mock engine reported or the host decided. All functions here are pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gauntlet import proof
from gauntlet.gateways.base import Row
from gauntlet.gateways.delivery import Delivery, Feature, Segment, Verdict
from gauntlet.tokens import Json

FEATURES: dict[Feature, str] = {
    "experts": "the experts that each token was routed to, aligned with the tokens across turns and a branch",
    "masks": "the ids that were left to sample from, for each trained token",
    "tree": "rows as a tree, in which each shared turn occurs once",
    "turn rewards": "rewards that the host gives to single turns, aligned with the tokens of these turns",
    "teacher": "a teacher's log-probability of each trained token",
    "versions": "the policy version that sampled each trained token, even if the weights change within a turn",
    "loaders": "rows that a trainer's own package loads, with every value unchanged",
}


def judge(feature: Feature, delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> Verdict:
    """Compare a delivery with the engine's log and the rewards of the turns, in the order of the log."""
    try:
        _check_turns(delivery.rows, log)
        _JUDGES[feature](delivery, log, rewards)
    except Mismatch as mismatch:
        return Verdict("wrong", str(mismatch))
    return Verdict("yes", ", ".join(delivery.loaded))


class Mismatch(Exception):
    """What a gateway delivered differs from the truth. The text says how."""


def _check_turns(rows: Sequence[Row], log: Sequence[Json]) -> None:
    """Check that the rows train every turn. Otherwise, a gateway that delivers no rows would pass."""
    for n, entry in enumerate(log):
        if not any(_find_trained(row, entry) for row in rows):
            raise Mismatch(f"no row trains turn {n + 1}")


def _find_turn(row: Row, entry: Json) -> range | None:
    """Find the tokens that a turn sampled in a row. The ids before them must be those that the engine saw."""
    start, ids = entry["prompt_tokens"], entry["ids"]
    found = range(start, start + len(ids))
    if list(row.ids[start : found.stop]) != ids or proof.digest(row.ids[:start]) != entry["prompt_digest"]:
        return None
    return found


def _find_trained(row: Row, entry: Json) -> range | None:
    found = _find_turn(row, entry)
    return found if found is not None and all(row.mask[n] for n in found) else None


def _compare(delivery: Delivery, expected: Callable[[Row], Iterator[tuple[int, Any]]], what: str) -> None:
    if len(delivery.values) != len(delivery.rows):
        raise Mismatch(f"{len(delivery.rows) - len(delivery.values)} of {len(delivery.rows)} rows have no {what}")
    missing = different = total = 0
    for row, values in zip(delivery.rows, delivery.values, strict=True):
        for n, value in expected(row):
            total += 1
            given = values[n] if n < len(values) else None
            missing += given is None
            different += given is not None and not _is_equal(given, value)
    if missing or different:
        raise Mismatch(f"{what}: of {total} tokens, {different} have wrong values and {missing} have none")


def _is_equal(given: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return abs(float(given) - expected) <= 1e-6
    return bool(given == expected)


def _judge_experts(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    def expected(row: Row) -> Iterator[tuple[int, list[int]]]:
        for n, state in enumerate(proof.digests(row.ids)[:-1]):  # the last token was never an input of the engine
            yield n, proof.experts(state)

    _compare(delivery, expected, "routed experts")


def _judge_masks(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    def expected(row: Row) -> Iterator[tuple[int, list[int]]]:
        states = [0, *proof.digests(row.ids)]
        return ((n, proof.sampling_mask(states[n], row.ids[n])) for n in range(len(row.ids)) if row.mask[n])

    _compare(delivery, expected, "sampling masks")


def _judge_teacher(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    def expected(row: Row) -> Iterator[tuple[int, float]]:
        states = proof.digests(row.ids)
        return ((n, proof.teacher_logprob(states[n])) for n in range(len(row.ids)) if row.mask[n])

    _compare(delivery, expected, "teacher scores")


def _judge_versions(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    if len({version for entry in log for version in entry["versions"]}) < 2:
        raise Mismatch("the weights of the engine were not changed")

    def expected(row: Row) -> Iterator[tuple[int, int]]:
        for entry in log:
            found = _find_trained(row, entry)
            for n, version in zip(found or (), entry["versions"] if found else (), strict=True):
                yield n, 0 if version == "default" else int(version)

    _compare(delivery, expected, "versions")


def _judge_rewards(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    if len(delivery.values) != len(delivery.rows):
        raise Mismatch("rows have no turn rewards")
    for n, (entry, reward) in enumerate(zip(log, rewards, strict=True)):
        given = 0.0
        for row, values in zip(delivery.rows, delivery.values, strict=True):
            given += sum(values[at] or 0.0 for at in _find_trained(row, entry) or ())
        if abs(given - reward) > 1e-6:
            raise Mismatch(f"turn {n + 1} has the reward {reward:g}, but the rewards of its tokens sum to {given:g}")
    total = sum(value or 0.0 for values in delivery.values for value in values)
    if abs(total - sum(rewards)) > 1e-6:
        raise Mismatch(f"the rewards of all turns sum to {sum(rewards):g}, but those of all tokens sum to {total:g}")


def _judge_tree(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    if len(delivery.leaves) != len(delivery.rows):
        raise Mismatch(f"the tree has {len(delivery.leaves)} of {len(delivery.rows)} rows")
    for row, leaf in zip(delivery.rows, delivery.leaves, strict=True):
        if _join_path(delivery.segments, leaf) != list(row.ids):
            raise Mismatch("a row differs from its path in the tree")
    shared = 0
    for n, row in enumerate(delivery.rows):
        shared += max((_count_shared(row, other, log) for other in delivery.rows[:n]), default=0)
    if not shared:
        raise Mismatch("no two rows share a turn")
    tokens, flat = sum(len(each.ids) for each in delivery.segments), sum(len(row.ids) for row in delivery.rows)
    if tokens > flat - shared:
        raise Mismatch(f"the tree has {tokens} tokens, although {shared} of {flat} are shared")


def _join_path(segments: Sequence[Segment], leaf: int) -> list[int]:
    ids: list[int] = []
    at: int | None = leaf
    while at is not None:
        ids = [*segments[at].ids, *ids]
        at = segments[at].parent
    return ids


def _count_shared(row: Row, other: Row, log: Sequence[Json]) -> int:
    """Count the tokens up to the last turn that two rows share."""
    ends = [found.stop for entry in log if (found := _find_turn(row, entry)) and _find_turn(other, entry)]
    return max(ends, default=0)


def _judge_loaders(delivery: Delivery, log: Sequence[Json], rewards: Sequence[float]) -> None:
    if not delivery.loaded:
        raise Mismatch("no trainer loaded the rows")
    for trainer, loaded in delivery.loaded.items():
        if sorted(map(_flatten, loaded)) != sorted(map(_flatten, delivery.rows)):
            raise Mismatch(f"the rows that {trainer} loaded differ from the delivered rows")


def _flatten(row: Row) -> tuple[Any, ...]:
    """Return a row in a form that can be compared, up to its last trained token, after which trainers may cut it off."""
    end = max((n + 1 for n, trained in enumerate(row.mask) if trained), default=0)
    logprobs = [value or 0.0 if trained else 0.0 for value, trained in zip(row.logprobs, row.mask, strict=True)]
    return tuple(row.ids[:end]), tuple(map(int, row.mask[:end])), tuple(round(value, 5) for value in logprobs[:end])


_JUDGES: dict[Feature, Callable[[Delivery, Sequence[Json], Sequence[float]], None]] = {
    "experts": _judge_experts,
    "masks": _judge_masks,
    "tree": _judge_tree,
    "turn rewards": _judge_rewards,
    "teacher": _judge_teacher,
    "versions": _judge_versions,
    "loaders": _judge_loaders,
}
