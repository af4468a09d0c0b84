"""What the gateway counts and times, and how Prometheus is told of it.

`Metrics` is one process's numbers: the pipeline (`turn.py`), the model calls, the journal and the verbs of sessions add to them as things
happen. That is on the path of every turn, so it is a handful of additions to plain numbers, a few microseconds in all. `server/metrics.py`
adds what is only looked at when somebody asks, sums over workers, and serves the text that `written` makes. `FAMILIES` is all
there is; no label holds anything that an agent, a task or a session chooses, so that the number of series stays small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isnan
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:  # it is imported only where spans are switched on
    from turngate.telemetry.spans import EngineSpan, TurnSpan

Labels = tuple[str, ...]
Across = Literal["sum", "max", "same"]
# Seconds. The gateway's own work is about a millisecond, an engine's about a minute.
OWN_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ENGINE_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COMMIT_S = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)
LAG_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REWARDS = (-1.0, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
LARGEST_REWARD = 1e30  # that is added up as it is: two of a float's largest would be no number any more, for good
MEDIA = "text/plain; version=0.0.4; charset=utf-8"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One metric. `across`: what several workers' values are together; `same`: it is of the store, and whoever is asked tells it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    across: Across = "sum"


FAMILIES = (
    Family(name="turngate_info", kind="gauge", labels=("version", "engine"), across="same", about="1, with what runs."),
    Family(name="turngate_workers", kind="gauge", about="Workers that answered."),
    Family(
        name="turngate_workers_silent",
        kind="gauge",
        across="same",
        about="Workers that did not; theirs is missing here.",
    ),
    Family(name="turngate_sessions_open", kind="gauge", about="Sessions that are open."),
    Family(name="turngate_sessions_resting", kind="gauge", about="Of those, how many have no trace in memory."),
    Family(name="turngate_sessions_opened_total", kind="counter", labels=("mode",), about="Sessions opened."),
    Family(
        name="turngate_sessions_ended_total",
        kind="counter",
        labels=("status",),
        about="Sessions ended: sealed or cancelled.",
    ),
    Family(
        name="turngate_turns_total",
        kind="counter",
        labels=("dialect", "mode", "finish"),
        about="Turns recorded, by how they ended; abort: cut short.",
    ),
    Family(
        name="turngate_prompt_tokens_total",
        kind="counter",
        labels=("mode",),
        about="Tokens of the prompts of recorded turns.",
    ),
    Family(
        name="turngate_sampled_tokens_total",
        kind="counter",
        labels=("mode",),
        about="Tokens sampled in recorded turns.",
    ),
    Family(
        name="turngate_call_errors_total",
        kind="counter",
        labels=("dialect", "boundary", "kind"),
        about="Model calls that were answered with an error, by whose it was.",
    ),
    Family(
        name="turngate_own_seconds",
        kind="histogram",
        labels=("dialect",),
        bounds=OWN_S,
        about="What a call took less its waiting for the engine and the fence: the gateway's own time, writing to the agent included.",
    ),
    Family(
        name="turngate_engine_seconds", kind="histogram", bounds=ENGINE_S, about="What a call waited for the engine."
    ),
    Family(
        name="turngate_engine_first_seconds",
        kind="histogram",
        bounds=ENGINE_S,
        about="Until the engine's first tokens came.",
    ),
    Family(
        name="turngate_held_seconds",
        kind="histogram",
        bounds=ENGINE_S,
        about="What calls waited at the fence, where they did.",
    ),
    Family(name="turngate_engine_calls", kind="gauge", about="Calls that the engine works on."),
    Family(name="turngate_engine_errors_total", kind="counter", labels=("kind",), about="Engine calls that failed."),
    Family(
        name="turngate_engines",
        kind="gauge",
        labels=("state",),
        across="max",
        about="Replicas that are up or down, as last seen.",
    ),
    Family(name="turngate_fence_version", kind="gauge", across="max", about="The policy version in force."),
    Family(name="turngate_fence_paused", kind="gauge", across="max", about="1 while calls are held for new weights."),
    Family(name="turngate_store_commit_seconds", kind="histogram", bounds=COMMIT_S, about="Until a turn was durable."),
    Family(
        name="turngate_loop_lag_seconds",
        kind="histogram",
        bounds=LAG_S,
        about="How late a timer on the event loop was, looked at twice a second.",
    ),
    Family(
        name="turngate_feed_newest", kind="gauge", labels=("feed",), across="same", about="Deliveries that a feed has."
    ),
    Family(
        name="turngate_feed_handed",
        kind="gauge",
        labels=("feed",),
        across="same",
        about="The highest that was handed out.",
    ),
    Family(
        name="turngate_feed_committed",
        kind="gauge",
        labels=("feed",),
        across="same",
        about="The highest that is trained.",
    ),
    Family(
        name="turngate_feed_waiting_groups",
        kind="gauge",
        labels=("feed",),
        across="same",
        about="Groups that are not complete.",
    ),
    Family(
        name="turngate_feed_waiting_rollouts",
        kind="gauge",
        labels=("feed",),
        across="same",
        about="Rollouts that wait in those.",
    ),
    Family(name="turngate_rollouts_total", kind="counter", labels=("class",), about="Outcomes recorded, by class."),
    Family(
        name="turngate_rollout_reward",
        kind="histogram",
        bounds=REWARDS,
        about="Rewards of the outcomes that have one. Where some are negative, its sum may fall.",
    ),
    Family(name="process_cpu_seconds_total", kind="counter", about="CPU time, all workers together."),
    Family(name="process_resident_memory_bytes", kind="gauge", about="Memory, all workers together."),
    Family(name="process_open_fds", kind="gauge", about="Open files and connections, all workers together."),
    Family(name="process_max_fds", kind="gauge", across="max", about="The most of those that one process may have."),
    Family(name="process_start_time_seconds", kind="gauge", across="max", about="When the newest worker was started."),
)


class Distribution:
    """How often which values were seen: a histogram of one set of labels."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # each up to its bound, less those before; the last is all beyond
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Series(msgspec.Struct, frozen=True):
    """One set of labels of a metric. `counts`: of a histogram, whose `value` is the sum."""

    labels: Labels
    value: float
    counts: tuple[int, ...] = ()


class Snapshot(msgspec.Struct, frozen=True):
    """All of one process's numbers at one moment, by family."""

    families: dict[str, list[Series]] = {}


class Measured:
    """One model call on its way through: what it waited for, and its span where there are spans."""

    __slots__ = ("began", "engine_s", "first_s", "held_s", "span")

    def __init__(self, began: float) -> None:
        self.began = began  # time.perf_counter()
        self.held_s = 0.0
        self.engine_s = 0.0
        self.first_s = -1.0  # less than 0: nothing came
        self.span: TurnSpan | None = None


class Asked:
    """One call that the engine works on, from asking to the end: `came` when something came of it, `waits` when more is waited for."""

    __slots__ = ("_mark", "_measured", "_metrics", "span")

    def __init__(self, metrics: Metrics, measured: Measured) -> None:
        self._metrics = metrics
        self._measured = measured
        self.span: EngineSpan | None = None
        metrics.engine_calls += 1
        self._mark = perf_counter()  # less than 0: nobody waits

    def came(self) -> None:
        measured = self._measured
        measured.engine_s += perf_counter() - self._mark
        self._mark = -1.0
        if measured.first_s < 0:
            measured.first_s = measured.engine_s

    def waits(self) -> None:
        self._mark = perf_counter()

    def failed(self, kind: str) -> None:
        self._metrics.count("turngate_engine_errors_total", kind)
        if self.span is not None:
            self.span.failed(kind)

    def over(self, finish: str, prompt: int, sampled: int) -> None:
        self._metrics.engine_calls -= 1
        if self._mark >= 0:
            self._measured.engine_s += perf_counter() - self._mark
        if self.span is not None:
            self.span.over(finish, prompt, sampled)


class Metrics:
    """One process's numbers. Only ever touched on the event loop, but for the journal's writer, which adds when it is awaited."""

    def __init__(self) -> None:
        self.engine_calls = 0
        self.commit = Distribution(COMMIT_S)
        self.lag = Distribution(LAG_S)
        self._counters: dict[str, dict[Labels, float]] = {f.name: {} for f in FAMILIES if f.kind == "counter"}
        self._turns = self._counters["turngate_turns_total"]
        self._prompt = self._counters["turngate_prompt_tokens_total"]
        self._sampled = self._counters["turngate_sampled_tokens_total"]
        self._own: dict[str, Distribution] = {}  # by dialect
        self._engine = Distribution(ENGINE_S)
        self._first = Distribution(ENGINE_S)
        self._held = Distribution(ENGINE_S)
        self._reward = Distribution(REWARDS)

    # ── on the path of a turn ───────────────────────────────────────────────────────────────────────────────────

    def recorded(self, dialect: str, mode: str, finish: str, prompt: int, sampled: int) -> None:
        """A turn is in the store."""
        turn, of = (dialect, mode, finish), (mode,)
        self._turns[turn] = self._turns.get(turn, 0) + 1
        self._prompt[of] = self._prompt.get(of, 0) + prompt
        self._sampled[of] = self._sampled.get(of, 0) + sampled

    def served(self, dialect: str, measured: Measured, now: float) -> None:
        """A call is answered, with a turn or an error."""
        own = self._own.get(dialect)
        if own is None:
            own = self._own[dialect] = Distribution(OWN_S)
        own.add(max(0.0, now - measured.began - measured.engine_s - measured.held_s))
        if measured.engine_s:
            self._engine.add(measured.engine_s)
        if measured.first_s >= 0:
            self._first.add(measured.first_s)
        if measured.held_s:
            self._held.add(measured.held_s)

    # ── elsewhere ───────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, name: str, *labels: str) -> None:
        values = self._counters[name]
        values[labels] = values.get(labels, 0) + 1

    def outcome(self, kind: str, reward: float | None) -> None:
        self.count("turngate_rollouts_total", kind)
        if reward is not None:
            self._reward.add(min(max(reward, -LARGEST_REWARD), LARGEST_REWARD))

    def snapshot(self, also: Mapping[str, Iterable[tuple[Labels, float]]]) -> Snapshot:
        """With what somebody has looked up just now."""
        found: dict[str, list[Series]] = {
            name: [Series(labels, value) for labels, value in values.items()] for name, values in self._counters.items()
        }
        found["turngate_engine_calls"] = [Series((), self.engine_calls)]
        found["turngate_own_seconds"] = [_series((dialect,), seen) for dialect, seen in self._own.items()]
        for name, seen in (
            ("turngate_engine_seconds", self._engine),
            ("turngate_engine_first_seconds", self._first),
            ("turngate_held_seconds", self._held),
            ("turngate_store_commit_seconds", self.commit),
            ("turngate_loop_lag_seconds", self.lag),
            ("turngate_rollout_reward", self._reward),
        ):
            found[name] = [_series((), seen)]
        for name, looked_up in also.items():
            found[name] = [Series(labels, value) for labels, value in looked_up]
        return Snapshot(found)


def _series(labels: Labels, seen: Distribution) -> Series:
    return Series(labels, seen.total, tuple(seen.counts))


def together(snapshots: Sequence[Snapshot]) -> Snapshot:
    """Several workers' as one; the first is of the one that was asked."""
    found: dict[str, list[Series]] = {}
    for family in FAMILIES:
        by_labels: dict[Labels, Series] = {}
        for snapshot in snapshots[:1] if family.across == "same" else snapshots:
            for series in snapshot.families.get(family.name, ()):
                before = by_labels.get(series.labels)
                by_labels[series.labels] = series if before is None else _joined(family.across, before, series)
        found[family.name] = list(by_labels.values())
    return Snapshot(found)


def _joined(across: Across, one: Series, other: Series) -> Series:
    if across == "max":
        return one if one.value >= other.value else other
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Series(one.labels, one.value + other.value, counts)


def by_worker(snapshots: Mapping[int, Snapshot]) -> list[tuple[tuple[tuple[str, str], ...], Snapshot]]:
    """Each worker's own, to be written with its number as a label."""
    return [((("worker", str(number)),), snapshot) for number, snapshot in sorted(snapshots.items())]


def written(parts: Sequence[tuple[tuple[tuple[str, str], ...], Snapshot]]) -> bytes:
    """The text that Prometheus reads. Each snapshot has labels of its own, or none."""
    lines: list[str] = []
    for family in FAMILIES:
        found = [(more, series) for more, snapshot in parts for series in snapshot.families.get(family.name, ())]
        if not found:
            continue
        lines += [f"# HELP {family.name} {_escaped(family.about)}", f"# TYPE {family.name} {family.kind}"]
        for more, series in found:
            own = () if family.across == "same" else more
            labels = [*zip(family.labels, series.labels, strict=True), *own]
            lines += _histogram(family, labels, series) if series.counts else [_line(family.name, labels, series.value)]
    return ("\n".join(lines) + "\n").encode()


def _histogram(family: Family, labels: list[tuple[str, str]], series: Series) -> list[str]:
    lines, sofar = [], 0
    for bound, count in zip((*map(_number, family.bounds), "+Inf"), series.counts, strict=True):
        sofar += count
        lines.append(_line(f"{family.name}_bucket", [*labels, ("le", bound)], sofar))
    return [*lines, _line(f"{family.name}_sum", labels, series.value), _line(f"{family.name}_count", labels, sofar)]


def _line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    spelled = ",".join(f'{label}="{_escaped(text, quotes=True)}"' for label, text in labels)
    return f"{name}{{{spelled}}} {_number(value)}" if spelled else f"{name} {_number(value)}"


def _number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escaped(text: str, *, quotes: bool = False) -> str:
    plain = text.replace("\\", r"\\").replace("\n", r"\n")
    return plain.replace('"', r"\"") if quotes else plain
