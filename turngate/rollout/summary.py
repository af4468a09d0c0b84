"""Compute the statistics of a batch: per task, per round and overall. Unknown rewards are excluded from means and counted separately.

`pass@k` is the probability that at least one of k rollouts passes. With g graded rollouts, c of which passed, its unbiased estimate is
1 - C(g - c, k) / C(g, k). The overall value is the mean over the tasks with at least k graded rollouts, and the number of those tasks is
reported with it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

import msgspec

from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.outcome import ROLLOUT_CLASSES, Phase, RolloutClass
from turngate.tasks.grading.result import OUTPUT_FOLLOWS
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

_MAX_CHARS = 300  # per message
_MAX_WARNINGS = 10


class PassAtK(msgspec.Struct, frozen=True):
    """An estimate of pass@k, and the number of tasks that it is based on."""

    k: int
    estimate: float
    tasks: int  # number of tasks with at least k graded rollouts


class HistogramBin(msgspec.Struct, frozen=True):
    """One bin of the reward histogram. The last bin includes its upper end."""

    low: float
    high: float
    count: int


class RolloutStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the rollouts of one task, one round or the whole batch."""

    wanted: int
    finished: int
    graded: int  # number of rollouts with a reward
    passed: int
    mean_reward: float | None  # None if there are no rewards
    pass_at: tuple[PassAtK, ...]
    kinds: Mapping[RolloutClass, int]
    attempts: int
    mean_turns: float | None  # over the rollouts in which an agent ran
    mean_tokens: float | None
    turns: int
    sampled_tokens: int
    trained_tokens: int
    untrained: int  # graded rollouts without trained tokens
    refused: int  # rollouts in which a model call was refused
    stages: Mapping[str, float]  # mean seconds, over the rollouts that reached the stage
    phases: Mapping[Phase, float]


class TaskStats(RolloutStats, frozen=True, kw_only=True):
    """Statistics of one task over all rounds."""

    task: str
    rewards: tuple[float | None, ...]  # by round and index; None if unknown or not finished


class RoundStats(RolloutStats, frozen=True, kw_only=True):
    """Statistics of one round over all tasks."""

    round: int


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """A group that is of limited use for training, because its rewards are equal or some of them are missing."""

    task: str
    round: int = 0
    graded: int
    wanted: int
    reward: float | None = None  # the reward shared by all rollouts that are trained on
    why: Mapping[RolloutClass, int] = {}  # the number of rollouts in each class other than `graded`


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The statistics of a batch."""

    batch: str
    n: int
    overall: RolloutStats
    tasks: tuple[TaskStats, ...]  # over all rounds
    rounds: tuple[RoundStats, ...] = ()  # empty if there is only one round
    # Groups in which all rollouts that are trained on have the same reward, so the advantages are 0.
    no_signal: tuple[GroupStats, ...]
    shrunken: tuple[GroupStats, ...]  # groups with fewer rewards than finished rollouts
    histogram: tuple[HistogramBin, ...]
    # Why rollouts have no reward, by class: pairs of a message and its count, most frequent first.
    messages: Mapping[RolloutClass, Sequence[tuple[str, int]]]
    # What is wrong with the training data of rollouts: pairs of a warning and its count, most frequent first.
    warnings: Sequence[tuple[str, int]] = ()
    seconds: float = 0.0  # from the start of the batch to the end of the last rollout, including pauses
    stopped: str = ""  # why the batch stopped early


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
    """Summarize the finished rollouts. `tasks` lists all tasks of the batch, including those without a finished rollout."""
    by_task: dict[str, list[FinishedRollout]] = {task: [] for task in tasks}
    for rollout in finished:
        by_task[rollout.task].append(rollout)
    per_task = tuple(_compute_task_stats(task, n, rounds, members) for task, members in by_task.items())
    everything = [rollout for members in by_task.values() for rollout in members]
    rewards = [rollout.reward for rollout in everything if rollout.reward is not None]
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
        warnings=_count_warnings(everything),
        seconds=round(seconds, 1),
        stopped=stopped,
    )


def _compute_task_stats(task: str, n: int, rounds: int, members: Sequence[FinishedRollout]) -> TaskStats:
    graded = [rollout for rollout in members if rollout.reward is not None]
    passed = sum(bool(rollout.passed) for rollout in graded)
    estimates = tuple(PassAtK(k, pass_at_k(len(graded), passed, k), 1) for k in range(1, min(n, len(graded)) + 1))
    by_position = {rollout.round * n + rollout.index: rollout.reward for rollout in members}
    rewards = tuple(by_position.get(position) for position in range(n * rounds))
    return TaskStats(
        task=task, rewards=rewards, **msgspec.structs.asdict(_compute_stats(n * rounds, members, estimates))
    )


def _compute_round_stats(number: int, n: int, by_task: Mapping[str, Sequence[FinishedRollout]]) -> RoundStats:
    """Compute the statistics of a round as if it were a separate batch."""
    here = {task: [rollout for rollout in members if rollout.round == number] for task, members in by_task.items()}
    per_task = [
        _compute_task_stats(task, n, 1, [_as_first_round(rollout) for rollout in members])
        for task, members in here.items()
    ]
    everything = [rollout for members in here.values() for rollout in members]
    stats = _compute_stats(n * len(here), everything, _mean_pass_at(per_task, n))
    return RoundStats(round=number, **msgspec.structs.asdict(stats))


def _as_first_round(rollout: FinishedRollout) -> FinishedRollout:
    return msgspec.structs.replace(rollout, round=0)


def _mean_pass_at(tasks: Sequence[TaskStats], n: int) -> tuple[PassAtK, ...]:
    means = []
    for k in range(1, n + 1):
        estimates = [task.pass_at[k - 1].estimate for task in tasks if task.graded >= k]
        if estimates:
            means.append(PassAtK(k, fmean(estimates), len(estimates)))
    return tuple(means)


def _compute_stats(wanted: int, members: Sequence[FinishedRollout], pass_at: tuple[PassAtK, ...]) -> RolloutStats:
    rewards = [rollout.reward for rollout in members if rollout.reward is not None]
    ran = [rollout for rollout in members if "agent" in rollout.seconds]
    kinds = Counter(rollout.kind for rollout in members)
    return RolloutStats(
        wanted=wanted,
        finished=len(members),
        graded=len(rewards),
        passed=sum(bool(rollout.passed) for rollout in members),
        mean_reward=fmean(rewards) if rewards else None,
        pass_at=pass_at,
        kinds={kind: kinds[kind] for kind in ROLLOUT_CLASSES if kinds[kind]},
        attempts=sum(rollout.attempt for rollout in members),
        mean_turns=fmean(rollout.turns for rollout in ran) if ran else None,
        mean_tokens=fmean(rollout.sampled_tokens for rollout in ran) if ran else None,
        turns=sum(rollout.turns for rollout in members),
        sampled_tokens=sum(rollout.sampled_tokens for rollout in members),
        trained_tokens=sum(rollout.trained_tokens or 0 for rollout in members),
        untrained=sum(rollout.reward is not None and rollout.trained_tokens == 0 for rollout in members),
        refused=sum(rollout.refused_calls > 0 for rollout in members),
        stages=_mean_stage_seconds(members),
        phases=_mean_phase_seconds(members),
    )


def _mean_stage_seconds(members: Sequence[FinishedRollout]) -> dict[str, float]:
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in members:
        for stage, seconds in rollout.seconds.items():
            spent[stage].append(seconds)
    return {stage: round(fmean(spent[stage]), 3) for stage in PHASES if stage in spent}


def _mean_phase_seconds(members: Sequence[FinishedRollout]) -> dict[Phase, float]:
    spent: defaultdict[Phase, list[float]] = defaultdict(list)
    for rollout in members:
        sums: defaultdict[Phase, float] = defaultdict(float)
        for stage, seconds in rollout.seconds.items():
            sums[PHASES[stage]] += seconds
        for phase, total in sums.items():
            spent[phase].append(total)
    return {phase: round(fmean(values), 3) for phase, values in spent.items()}


def _iter_groups(by_task: Mapping[str, Sequence[FinishedRollout]]) -> Iterable[tuple[str, int, list[FinishedRollout]]]:
    for task, members in by_task.items():
        rounds: defaultdict[int, list[FinishedRollout]] = defaultdict(list)
        for rollout in members:
            rounds[rollout.round].append(rollout)
        yield from ((task, number, rounds[number]) for number in sorted(rounds))


def _find_no_signal(by_task: Mapping[str, Sequence[FinishedRollout]], n: int) -> Iterable[GroupStats]:
    for task, number, members in _iter_groups(by_task):
        graded = [rollout for rollout in members if rollout.reward is not None]
        trained = {rollout.reward for rollout in graded if rollout.trained_tokens != 0}
        if len(trained) == 1:
            yield GroupStats(task=task, round=number, graded=len(graded), wanted=n, reward=trained.pop())


def _find_shrunken(by_task: Mapping[str, Sequence[FinishedRollout]], n: int) -> Iterable[GroupStats]:
    for task, number, members in _iter_groups(by_task):
        graded = sum(rollout.reward is not None for rollout in members)
        if graded < len(members):
            kinds = Counter(rollout.kind for rollout in members)
            why: dict[RolloutClass, int] = {
                kind: kinds[kind] for kind in ROLLOUT_CLASSES if kinds[kind] and kind != "graded"
            }
            yield GroupStats(task=task, round=number, graded=graded, wanted=n, why=why)


def build_histogram(rewards: Sequence[float], bins: int = 10) -> tuple[HistogramBin, ...]:
    """Count the rewards in bins of equal width. The bins cover 0 to 1, or a wider range if some rewards lie outside it."""
    if not rewards:
        return ()
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    width = (high - low) / bins
    counts = Counter(min(int((reward - low) / width), bins - 1) for reward in rewards)
    return tuple(
        HistogramBin(round(low + n * width, 6), round(low + (n + 1) * width, 6), counts[n]) for n in range(bins)
    )


def _count_messages(members: Iterable[FinishedRollout]) -> dict[RolloutClass, list[tuple[str, int]]]:
    counts: defaultdict[RolloutClass, Counter[str]] = defaultdict(Counter)
    for rollout in members:
        if rollout.reward is None and rollout.message:
            reason = rollout.message.partition(OUTPUT_FOLLOWS)[0]  # the output may contain times or process numbers
            counts[rollout.kind][reason[:_MAX_CHARS]] += 1
    return {kind: counts[kind].most_common(5) for kind in ROLLOUT_CLASSES if counts[kind]}


def _count_warnings(members: Iterable[FinishedRollout]) -> list[tuple[str, int]]:
    """Return the most frequent warnings, each with its count. Warnings are not shortened, because they end with advice."""
    return Counter(warning for rollout in members for warning in rollout.warnings).most_common(_MAX_WARNINGS)
