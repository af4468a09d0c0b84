"""What came of a batch, in numbers: per task and overall. Only known rewards count; one that is not known is in no mean, and is told.

`pass@k` is the chance that at least one of k rollouts passes, estimated without bias from the g that were graded, c of which
passed: 1 - C(g - c, k) / C(g, k). Overall it is the mean over the tasks that have at least k graded rollouts, and says how many those are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.outcome import ROLLOUT_CLASSES, Phase, RolloutClass
from turngate.trace.pass_at_k import pass_at_k as pass_at_k

PHASES: Mapping[str, Phase] = {
    "sandbox": "start",
    "files": "start",
    "setup": "start",
    "session": "run",
    "relay": "run",
    "launch": "run",
    "agent": "run",
    "seal": "run",
    "collect": "run",
    "clean": "run",
    "record": "run",
    "grade": "grade",
}


class PassAtK(msgspec.Struct, frozen=True):
    k: int
    estimate: float
    tasks: int  # that have at least k graded rollouts


class HistogramBin(msgspec.Struct, frozen=True):
    """Of the histogram of rewards: from, to (the last one holds its upper end), how many."""

    low: float
    high: float
    count: int


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """Of some rollouts: one task's, or all."""

    wanted: int
    finished: int
    graded: int  # that have a reward
    passed: int
    mean_reward: float | None  # None: there is no reward
    pass_at: tuple[PassAtK, ...]
    kinds: Mapping[RolloutClass, int]
    attempts: int
    mean_turns: float | None  # of those that an agent ran in
    mean_tokens: float | None
    turns: int
    sampled_tokens: int
    stages: Mapping[str, float]  # mean seconds, of those that came to the stage
    phases: Mapping[Phase, float]


class TaskStats(RolloutStats, frozen=True, kw_only=True):
    task: str
    rewards: tuple[float | None, ...]  # by round and index; None: not known, or not there yet


class RoundStats(RolloutStats, frozen=True, kw_only=True):
    round: int


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose rollouts, of one round, a trainer has to look at twice."""

    task: str
    round: int = 0
    graded: int
    wanted: int
    reward: float | None = None  # that all of them have
    why: Mapping[RolloutClass, int] = {}  # the classes of those without a reward


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    batch: str
    n: int
    overall: RolloutStats
    tasks: tuple[TaskStats, ...]  # over all rounds
    rounds: tuple[RoundStats, ...] = ()  # where there is more than one
    no_signal: tuple[GroupStats, ...]  # every known reward is the same: no advantage can be told from it
    shrunken: tuple[GroupStats, ...]  # fewer rewards than rollouts that are finished
    histogram: tuple[HistogramBin, ...]
    messages: Mapping[
        RolloutClass, Sequence[tuple[str, int]]
    ]  # what was said of those without a reward, most frequent first
    seconds: float = 0.0  # from the first rollout's beginning to the last one's end, pauses included
    stopped: str = ""  # why it ended early


def summarize(
    batch: str,
    tasks: Sequence[str],
    n: int,
    finished: Iterable[FinishedRollout],
    *,
    rounds: int = 1,
    seconds: float = 0.0,
    stopped: str = "",
) -> Summary:
    """`tasks` are all of the batch, in order, whether any of their rollouts is finished or not."""
    by_task: dict[str, list[FinishedRollout]] = {task: [] for task in tasks}
    for one in finished:
        by_task[one.task].append(one)
    per_task = tuple(_compute_task_stats(task, n, rounds, found) for task, found in by_task.items())
    everything = [one for found in by_task.values() for one in found]
    rewards = [one.reward for one in everything if one.reward is not None]
    return Summary(
        batch=batch,
        n=n,
        overall=_compute_stats(n * rounds * len(by_task), everything, _mean_pass_at(per_task, n)),
        tasks=per_task,
        rounds=tuple(_compute_round_stats(number, n, by_task) for number in range(rounds)) if rounds > 1 else (),
        no_signal=tuple(_find_no_signal(by_task, n)),
        shrunken=tuple(_find_shrunken(by_task, n)),
        histogram=build_histogram(rewards),
        messages=_count_messages(everything),
        seconds=round(seconds, 1),
        stopped=stopped,
    )


def _compute_task_stats(task: str, n: int, rounds: int, found: Sequence[FinishedRollout]) -> TaskStats:
    graded = [one for one in found if one.reward is not None]
    passed = sum(bool(one.passed) for one in graded)
    estimates = tuple(PassAtK(k, pass_at_k(len(graded), passed, k), 1) for k in range(1, min(n, len(graded)) + 1))
    by_place = {one.round * n + one.index: one.reward for one in found}
    rewards = tuple(by_place.get(place) for place in range(n * rounds))
    return TaskStats(task=task, rewards=rewards, **msgspec.structs.asdict(_compute_stats(n * rounds, found, estimates)))


def _compute_round_stats(number: int, n: int, by_task: Mapping[str, Sequence[FinishedRollout]]) -> RoundStats:
    """As if it were a batch of its own."""
    here = {task: [one for one in found if one.round == number] for task, found in by_task.items()}
    per_task = [
        _compute_task_stats(task, n, 1, [_as_first_round(one) for one in found]) for task, found in here.items()
    ]
    members = [one for found in here.values() for one in found]
    numbers = _compute_stats(n * len(here), members, _mean_pass_at(per_task, n))
    return RoundStats(round=number, **msgspec.structs.asdict(numbers))


def _as_first_round(one: FinishedRollout) -> FinishedRollout:
    return msgspec.structs.replace(one, round=0)


def _mean_pass_at(tasks: Sequence[TaskStats], n: int) -> tuple[PassAtK, ...]:
    found = []
    for k in range(1, n + 1):
        estimates = [task.pass_at[k - 1].estimate for task in tasks if task.graded >= k]
        if estimates:
            found.append(PassAtK(k, fmean(estimates), len(estimates)))
    return tuple(found)


def _compute_stats(wanted: int, found: Sequence[FinishedRollout], pass_at: tuple[PassAtK, ...]) -> RolloutStats:
    rewards = [one.reward for one in found if one.reward is not None]
    ran = [one for one in found if "agent" in one.seconds]
    kinds = Counter(one.kind for one in found)
    return RolloutStats(
        wanted=wanted,
        finished=len(found),
        graded=len(rewards),
        passed=sum(bool(one.passed) for one in found),
        mean_reward=fmean(rewards) if rewards else None,
        pass_at=pass_at,
        kinds={kind: kinds[kind] for kind in ROLLOUT_CLASSES if kinds[kind]},
        attempts=sum(one.attempt for one in found),
        mean_turns=fmean(one.turns for one in ran) if ran else None,
        mean_tokens=fmean(one.sampled_tokens for one in ran) if ran else None,
        turns=sum(one.turns for one in found),
        sampled_tokens=sum(one.sampled_tokens for one in found),
        stages=_mean_stage_seconds(found),
        phases=_mean_phase_seconds(found),
    )


def _mean_stage_seconds(found: Sequence[FinishedRollout]) -> dict[str, float]:
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        for stage, seconds in one.seconds.items():
            spent[stage].append(seconds)
    return {stage: round(fmean(spent[stage]), 3) for stage in PHASES if stage in spent}


def _mean_phase_seconds(found: Sequence[FinishedRollout]) -> dict[Phase, float]:
    spent: defaultdict[Phase, list[float]] = defaultdict(list)
    for one in found:
        sums: defaultdict[Phase, float] = defaultdict(float)
        for stage, seconds in one.seconds.items():
            sums[PHASES[stage]] += seconds
        for phase, total in sums.items():
            spent[phase].append(total)
    return {phase: round(fmean(values), 3) for phase, values in spent.items()}


def _iter_groups(by_task: Mapping[str, Sequence[FinishedRollout]]) -> Iterable[tuple[str, int, list[FinishedRollout]]]:
    for task, found in by_task.items():
        rounds: defaultdict[int, list[FinishedRollout]] = defaultdict(list)
        for one in found:
            rounds[one.round].append(one)
        yield from ((task, number, rounds[number]) for number in sorted(rounds))


def _find_no_signal(by_task: Mapping[str, Sequence[FinishedRollout]], n: int) -> Iterable[GroupStats]:
    for task, number, found in _iter_groups(by_task):
        known = [one.reward for one in found if one.reward is not None]
        if len(set(known)) == 1:
            yield GroupStats(task=task, round=number, graded=len(known), wanted=n, reward=known[0])


def _find_shrunken(by_task: Mapping[str, Sequence[FinishedRollout]], n: int) -> Iterable[GroupStats]:
    for task, number, found in _iter_groups(by_task):
        graded = sum(one.reward is not None for one in found)
        if graded < len(found):
            kinds = Counter(one.kind for one in found)
            why: dict[RolloutClass, int] = {
                kind: kinds[kind] for kind in ROLLOUT_CLASSES if kinds[kind] and kind != "graded"
            }
            yield GroupStats(task=task, round=number, graded=graded, wanted=n, why=why)


def build_histogram(rewards: Sequence[float], most: int = 10) -> tuple[HistogramBin, ...]:
    """From 0 to 1, or as far as there are rewards beyond that."""
    if not rewards:
        return ()
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    width = (high - low) / most
    counts = Counter(min(int((reward - low) / width), most - 1) for reward in rewards)
    return tuple(
        HistogramBin(round(low + n * width, 6), round(low + (n + 1) * width, 6), counts[n]) for n in range(most)
    )


def _count_messages(found: Iterable[FinishedRollout]) -> dict[RolloutClass, list[tuple[str, int]]]:
    said: defaultdict[RolloutClass, Counter[str]] = defaultdict(Counter)
    for one in found:
        if one.reward is None and one.message:
            said[one.kind][one.message[:300]] += 1
    return {kind: said[kind].most_common(5) for kind in ROLLOUT_CLASSES if said[kind]}
