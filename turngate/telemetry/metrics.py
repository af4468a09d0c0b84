"""Counters and histograms of one process, and their encoding in the Prometheus text format.

`FAMILIES` lists every metric. Every turn updates the metrics, so updates are plain additions that take a few microseconds per turn. Agents,
tasks and sessions cannot choose label values, so the number of series stays small.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, isnan
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import msgspec

from turngate.types import Usage

if TYPE_CHECKING:  # imported at run time only if spans are enabled
    from turngate.telemetry.spans import EngineSpan, TurnSpan

Labels = tuple[str, ...]
Merge = Literal["sum", "max", "same"]
# Bucket bounds in seconds, except for rewards. The gateway takes about a millisecond, an engine up to several minutes.
OWN_BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ENGINE_BOUNDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
COMMIT_BOUNDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5)
LAG_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
REWARD_BOUNDS = (-1.0, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
MAX_REWARD = 1e30  # larger rewards are clipped, so that the sum stays finite
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricFamily(msgspec.Struct, frozen=True, kw_only=True):
    """The definition of one metric.

    `merge` says how to combine the values of several workers: `sum`, `max`, or `same` if all workers report the same value.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    labels: Labels = ()
    bounds: tuple[float, ...] = ()
    merge: Merge = "sum"


FAMILIES = (
    MetricFamily(
        name="turngate_info",
        kind="gauge",
        labels=("version", "engine"),
        merge="same",
        about="Always 1, with Turngate's version and the engine as labels.",
    ),
    MetricFamily(name="turngate_workers", kind="gauge", about="Workers whose values are included in these metrics."),
    MetricFamily(
        name="turngate_workers_silent",
        kind="gauge",
        merge="same",
        about="Workers that did not answer. Their values are missing.",
    ),
    MetricFamily(name="turngate_sessions_open", kind="gauge", about="Open sessions."),
    MetricFamily(name="turngate_sessions_resting", kind="gauge", about="Open sessions whose trace is not in memory."),
    MetricFamily(name="turngate_sessions_opened_total", kind="counter", labels=("mode",), about="Sessions opened."),
    MetricFamily(
        name="turngate_sessions_ended_total",
        kind="counter",
        labels=("status",),
        about="Sessions ended: sealed or cancelled.",
    ),
    MetricFamily(
        name="turngate_turns_total",
        kind="counter",
        labels=("dialect", "mode", "finish"),
        about="Turns recorded, by finish reason. A turn with finish abort was cut off.",
    ),
    MetricFamily(
        name="turngate_prompt_tokens_total",
        kind="counter",
        labels=("mode",),
        about="Prompt tokens of recorded turns.",
    ),
    MetricFamily(
        name="turngate_engine_prompt_tokens_total",
        kind="counter",
        labels=("source",),
        about="Prompt tokens of turns whose engine reported its cache use, by source: cache or computed.",
    ),
    MetricFamily(
        name="turngate_sampled_tokens_total",
        kind="counter",
        labels=("mode",),
        about="Tokens sampled in recorded turns.",
    ),
    MetricFamily(
        name="turngate_call_errors_total",
        kind="counter",
        labels=("dialect", "boundary", "kind"),
        about="Model calls answered with an error, by boundary and kind.",
    ),
    MetricFamily(
        name="turngate_own_seconds",
        kind="histogram",
        labels=("dialect",),
        bounds=OWN_BOUNDS,
        about="Gateway time per call, including writes to the agent, but not waits for the engine, the fence or a share of the engines.",
    ),
    MetricFamily(
        name="turngate_engine_seconds",
        kind="histogram",
        bounds=ENGINE_BOUNDS,
        about="Time that a call waited for the engine.",
    ),
    MetricFamily(
        name="turngate_engine_first_seconds",
        kind="histogram",
        bounds=ENGINE_BOUNDS,
        about="Time until the engine returned the first tokens of a call.",
    ),
    MetricFamily(
        name="turngate_held_seconds",
        kind="histogram",
        bounds=ENGINE_BOUNDS,
        about="Time that a call waited at the fence or for its share of the engines, if it had to wait.",
    ),
    MetricFamily(name="turngate_engine_calls", kind="gauge", about="Calls in progress at the engine."),
    MetricFamily(
        name="turngate_engine_errors_total", kind="counter", labels=("kind",), about="Engine calls that failed."
    ),
    MetricFamily(
        name="turngate_engines",
        kind="gauge",
        labels=("state",),
        merge="max",
        about="Engine replicas at the last health check, by state: up or down.",
    ),
    MetricFamily(name="turngate_fence_version", kind="gauge", merge="max", about="Current policy version."),
    MetricFamily(
        name="turngate_fence_paused",
        kind="gauge",
        merge="max",
        about="1 while calls are held, for a weight update or because a cell has no lease.",
    ),
    MetricFamily(
        name="turngate_store_commit_seconds",
        kind="histogram",
        bounds=COMMIT_BOUNDS,
        about="Time to commit a turn to the store.",
    ),
    MetricFamily(
        name="turngate_loop_lag_seconds",
        kind="histogram",
        bounds=LAG_BOUNDS,
        about="Delay of a timer on the event loop, sampled twice a second.",
    ),
    MetricFamily(
        name="turngate_cell_unshipped_sessions",
        kind="gauge",
        merge="same",
        about="Cell: ended sessions that are not in the shared store yet.",
    ),
    MetricFamily(
        name="turngate_cell_unshipped_seconds",
        kind="gauge",
        merge="same",
        about="Cell: how long the oldest unshipped session has been due for shipping.",
    ),
    MetricFamily(
        name="turngate_cell_failed_shipments",
        kind="gauge",
        merge="same",
        about="Cell: sessions that cannot be shipped, because they are damaged or their id is taken.",
    ),
    MetricFamily(
        name="turngate_cell_lease_seconds",
        kind="gauge",
        merge="same",
        about="Cell: seconds until it stops serving, unless its lease is renewed; 0 if it has stopped.",
    ),
    MetricFamily(
        name="turngate_feed_newest",
        kind="gauge",
        labels=("feed",),
        merge="same",
        about="Highest delivery number that was assigned.",
    ),
    MetricFamily(
        name="turngate_feed_handed",
        kind="gauge",
        labels=("feed",),
        merge="same",
        about="Highest delivery number that was handed out.",
    ),
    MetricFamily(
        name="turngate_feed_committed",
        kind="gauge",
        labels=("feed",),
        merge="same",
        about="Highest delivery number that was committed as trained.",
    ),
    MetricFamily(
        name="turngate_feed_waiting_groups",
        kind="gauge",
        labels=("feed",),
        merge="same",
        about="Incomplete groups.",
    ),
    MetricFamily(
        name="turngate_feed_waiting_rollouts",
        kind="gauge",
        labels=("feed",),
        merge="same",
        about="Rollouts in incomplete groups.",
    ),
    MetricFamily(
        name="turngate_rollouts_total", kind="counter", labels=("class",), about="Outcomes recorded, by class."
    ),
    MetricFamily(
        name="turngate_rollout_reward",
        kind="histogram",
        bounds=REWARD_BOUNDS,
        about="Rewards of outcomes that have one. The sum can decrease if rewards are negative.",
    ),
    MetricFamily(
        name="turngate_mismatch_tokens_total",
        kind="counter",
        labels=("weights",),
        about="Tokens whose log-probability a trainer reported, by the weights that sampled them: "
        "same (as the trainer's), older or unknown.",
    ),
    MetricFamily(
        name="turngate_mismatch_over_total",
        kind="counter",
        labels=("weights",),
        about="Tokens whose log-probability, as reported by a trainer, differs from the engine's by more than the setting "
        "mismatch_difference.",
    ),
    MetricFamily(
        name="turngate_mismatch_alarms_total",
        kind="counter",
        labels=("kind",),
        about="Alarms raised by trainers' reports of log-probabilities, by kind: difference, kl, stale_kl or not_finite.",
    ),
    MetricFamily(name="process_cpu_seconds_total", kind="counter", about="CPU time of all workers."),
    MetricFamily(name="process_resident_memory_bytes", kind="gauge", about="Resident memory of all workers."),
    MetricFamily(name="process_open_fds", kind="gauge", about="Open files and connections of all workers."),
    MetricFamily(name="process_max_fds", kind="gauge", merge="max", about="Limit on open files per process."),
    MetricFamily(
        name="process_start_time_seconds", kind="gauge", merge="max", about="Start time of the newest worker."
    ),
)


class Histogram:
    """Observations for one set of labels, counted per bucket."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # per bucket, not cumulative; the last bucket is above all bounds
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class MetricSeries(msgspec.Struct, frozen=True):
    """The value of a metric for one set of labels. For a histogram, `value` is the sum, and `counts` holds the count of each bucket."""

    labels: Labels
    value: float
    counts: tuple[int, ...] = ()


class MetricsSnapshot(msgspec.Struct, frozen=True):
    """The metrics of a project, a worker or several workers at one moment, by family."""

    families: dict[str, list[MetricSeries]] = {}


class CallTiming:
    """The times of one model call, its span if spans are enabled, and the size of its prompt."""

    __slots__ = ("began", "engine_s", "first_s", "held_s", "prompt_usage", "span")

    def __init__(self, began: float) -> None:
        self.began = began  # time.perf_counter()
        self.held_s = 0.0
        self.engine_s = 0.0
        self.first_s = -1.0  # negative until the first tokens arrive
        self.span: TurnSpan | None = None
        self.prompt_usage: Usage | None = None  # without sampled tokens; None until the size of the prompt is known


class EngineTimer:
    """Measures how long a call waits for the engine. Call `mark_received` and `mark_waiting` alternately, and then `finish`."""

    __slots__ = ("_mark", "_metrics", "_timing", "span")

    def __init__(self, metrics: Metrics, timing: CallTiming) -> None:
        self._metrics = metrics
        self._timing = timing
        self.span: EngineSpan | None = None
        metrics.engine_calls += 1
        self._mark = perf_counter()  # when the wait began; negative while not waiting

    def mark_received(self) -> None:
        timing = self._timing
        timing.engine_s += perf_counter() - self._mark
        self._mark = -1.0
        if timing.first_s < 0:
            timing.first_s = timing.engine_s

    def mark_waiting(self) -> None:
        self._mark = perf_counter()

    def fail(self, kind: str) -> None:
        self._metrics.count("turngate_engine_errors_total", kind)
        if self.span is not None:
            self.span.set_error(kind)

    def finish(self, finish: str, prompt: int, sampled: int) -> None:
        self._metrics.engine_calls -= 1
        if self._mark >= 0:
            self._timing.engine_s += perf_counter() - self._mark
        if self.span is not None:
            self.span.finish(finish, prompt, sampled)


class Metrics:
    """Counters and histograms of one project in one process. Not thread-safe; used only on the event loop."""

    def __init__(self) -> None:
        self.engine_calls = 0
        self.commit = Histogram(COMMIT_BOUNDS)
        self.lag = Histogram(LAG_BOUNDS)
        self._counters: dict[str, dict[Labels, float]] = {f.name: {} for f in FAMILIES if f.kind == "counter"}
        self._turns = self._counters["turngate_turns_total"]
        self._prompt = self._counters["turngate_prompt_tokens_total"]
        self._sampled = self._counters["turngate_sampled_tokens_total"]
        self.sampled_tokens = 0  # in all modes
        self._own: dict[str, Histogram] = {}  # by dialect
        self._engine = Histogram(ENGINE_BOUNDS)
        self._first = Histogram(ENGINE_BOUNDS)
        self._held = Histogram(ENGINE_BOUNDS)
        self._reward = Histogram(REWARD_BOUNDS)

    # ── on the path of a turn ───────────────────────────────────────────────────────────────────────────────────

    def count_turn(self, dialect: str, mode: str, finish: str, prompt: int, sampled: int) -> None:
        """Count a recorded turn and its tokens."""
        turn, by_mode = (dialect, mode, finish), (mode,)
        self._turns[turn] = self._turns.get(turn, 0) + 1
        self._prompt[by_mode] = self._prompt.get(by_mode, 0) + prompt
        self._sampled[by_mode] = self._sampled.get(by_mode, 0) + sampled
        self.sampled_tokens += sampled

    def count_cache(self, cached: int, prompt: int) -> None:
        """Count the prompt tokens that the engine had in its cache, and those that it computed."""
        self.count("turngate_engine_prompt_tokens_total", "cache", by=cached)
        self.count("turngate_engine_prompt_tokens_total", "computed", by=prompt - cached)

    def observe_call(self, dialect: str, timing: CallTiming, now: float) -> None:
        """Record the times of a finished call, whether it succeeded or failed."""
        own = self._own.get(dialect)
        if own is None:
            own = self._own[dialect] = Histogram(OWN_BOUNDS)
        own.observe(max(0.0, now - timing.began - timing.engine_s - timing.held_s))
        if timing.engine_s:
            self._engine.observe(timing.engine_s)
        if timing.first_s >= 0:
            self._first.observe(timing.first_s)
        if timing.held_s:
            self._held.observe(timing.held_s)

    # ── elsewhere ───────────────────────────────────────────────────────────────────────────────────────────────

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        values = self._counters[name]
        values[labels] = values.get(labels, 0) + by

    def count_outcome(self, kind: str, reward: float | None) -> None:
        self.count("turngate_rollouts_total", kind)
        if reward is not None:
            self._reward.observe(min(max(reward, -MAX_REWARD), MAX_REWARD))

    def snapshot(self, gauges: Mapping[str, Iterable[tuple[Labels, float]]]) -> MetricsSnapshot:
        """Return these metrics together with the values in `gauges`, which the caller has just read."""
        families: dict[str, list[MetricSeries]] = {
            name: [MetricSeries(labels, value) for labels, value in values.items()]
            for name, values in self._counters.items()
        }
        families["turngate_engine_calls"] = [MetricSeries((), self.engine_calls)]
        families["turngate_own_seconds"] = [_to_series((dialect,), own) for dialect, own in self._own.items()]
        for name, histogram in (
            ("turngate_engine_seconds", self._engine),
            ("turngate_engine_first_seconds", self._first),
            ("turngate_held_seconds", self._held),
            ("turngate_store_commit_seconds", self.commit),
            ("turngate_loop_lag_seconds", self.lag),
            ("turngate_rollout_reward", self._reward),
        ):
            families[name] = [_to_series((), histogram)]
        for name, values in gauges.items():
            families[name] = [MetricSeries(labels, value) for labels, value in values]
        return MetricsSnapshot(families)


def _to_series(labels: Labels, histogram: Histogram) -> MetricSeries:
    return MetricSeries(labels, histogram.total, tuple(histogram.counts))


def merge_snapshots(snapshots: Sequence[MetricsSnapshot]) -> MetricsSnapshot:
    """Combine the snapshots of several workers or projects. Values that are the same in all of them come from the first snapshot."""
    families: dict[str, list[MetricSeries]] = {}
    for family in FAMILIES:
        by_labels: dict[Labels, MetricSeries] = {}
        for snapshot in snapshots[:1] if family.merge == "same" else snapshots:
            for series in snapshot.families.get(family.name, ()):
                other = by_labels.get(series.labels)
                by_labels[series.labels] = series if other is None else _merge_series(family.merge, other, series)
        families[family.name] = list(by_labels.values())
    return MetricsSnapshot(families)


def _merge_series(merge: Merge, first: MetricSeries, second: MetricSeries) -> MetricSeries:
    if merge == "max":
        return first if first.value >= second.value else second
    counts = tuple(a + b for a, b in zip(first.counts, second.counts, strict=True))
    return MetricSeries(first.labels, first.value + second.value, counts)


def label_by_worker(
    snapshots: Mapping[int, MetricsSnapshot],
) -> list[tuple[tuple[tuple[str, str], ...], MetricsSnapshot]]:
    """Pair each worker's snapshot with a `worker` label."""
    return [((("worker", str(number)),), snapshot) for number, snapshot in sorted(snapshots.items())]


def to_prometheus(parts: Sequence[tuple[tuple[tuple[str, str], ...], MetricsSnapshot]]) -> bytes:
    """Encode snapshots, each with its extra labels, in the Prometheus text format."""
    lines: list[str] = []
    for family in FAMILIES:
        rows = [(extra, series) for extra, snapshot in parts for series in snapshot.families.get(family.name, ())]
        if not rows:
            continue
        lines += [f"# HELP {family.name} {_escape(family.about)}", f"# TYPE {family.name} {family.kind}"]
        for extra, series in rows:
            worker = () if family.merge == "same" else extra
            labels = [*zip(family.labels, series.labels, strict=True), *worker]
            lines += (
                _histogram_lines(family, labels, series)
                if series.counts
                else [_sample_line(family.name, labels, series.value)]
            )
    return ("\n".join(lines) + "\n").encode()


def _histogram_lines(family: MetricFamily, labels: list[tuple[str, str]], series: MetricSeries) -> list[str]:
    lines, cumulative = [], 0
    for bound, count in zip((*map(_format_number, family.bounds), "+Inf"), series.counts, strict=True):
        cumulative += count
        lines.append(_sample_line(f"{family.name}_bucket", [*labels, ("le", bound)], cumulative))
    return [
        *lines,
        _sample_line(f"{family.name}_sum", labels, series.value),
        _sample_line(f"{family.name}_count", labels, cumulative),
    ]


def _sample_line(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    pairs = ",".join(f'{label}="{_escape(text, quotes=True)}"' for label, text in labels)
    return f"{name}{{{pairs}}} {_format_number(value)}" if pairs else f"{name} {_format_number(value)}"


def _format_number(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escape(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped
