"""A whole training run: evaluate the held-out tasks, train, evaluate them again, and write the result.

    async with open_run(run) as environment:
        result = await train_and_evaluate(run, environment)
    write_files(result, run.folder, "my run")

`turngate train` and `examples/demo.py` are both built on this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec

from turngate.config import MismatchLimits, ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.batch import BatchResult
from turngate.rollout.plan import BatchPlan
from turngate.tasks.task import Task
from turngate.trainers.local import report
from turngate.trainers.local.cluster import TrainingCluster, open_cluster_environment
from turngate.trainers.local.grpo import Step
from turngate.trainers.local.training import (
    StepTime,
    TimedEngine,
    TrainingCallbacks,
    TrainingEnvironment,
    TrainingGoal,
    evaluate,
    open_environment,
    train,
)


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a training run. Tasks in `held_out` are evaluated before and after training."""

    goal: TrainingGoal
    folder: Path
    model_folder: Path
    tokenizer: Path
    max_context: int | None = None
    held_out: tuple[Task, ...] = ()
    held_out_n: int = 1
    limits: MismatchLimits = MismatchLimits()  # for alarms about differences between log-probabilities

    def __post_init__(self) -> None:
        if self.held_out_n < 1:
            raise ConfigError(f"held_out_n must be at least 1, not {self.held_out_n}", param="held_out_n")

    def evaluation_plan(self) -> BatchPlan | None:
        """Return the plan of an evaluation, or None if there are no held-out tasks. The caller sets the plan's folder."""
        if not self.held_out:
            return None
        return msgspec.structs.replace(self.goal.batch, tasks=self.held_out, n=self.held_out_n, name="held-out")

    @property
    def before(self) -> Path:
        return self.folder / "before"

    @property
    def after(self) -> Path:
        return self.folder / f"after-{self.goal.steps}"

    @property
    def training_rollouts(self) -> int:
        """The number of rollouts in all training steps."""
        return self.goal.steps * self.goal.settings.groups * self.goal.batch.n

    @property
    def rollouts(self) -> int:
        """The number of rollouts in all training steps and both evaluations."""
        return self.training_rollouts + 2 * len(self.held_out) * self.held_out_n


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a training run, its two evaluations, and the duration of `train_and_evaluate` in seconds."""

    steps: tuple[Step, ...]
    shares: tuple[StepTime, ...]  # only of steps taken by this process
    before: BatchResult | None
    after: BatchResult | None
    seconds: float

    @property
    def rewards(self) -> list[float | None]:
        return [step.reward for step in self.steps]

    @property
    def new_steps(self) -> tuple[Step, ...]:
        """Steps taken by this process, excluding those loaded from the checkpoint."""
        return self.steps[len(self.steps) - len(self.shares) :]

    def compare(self) -> list[report.Comparison]:
        """Compare the rewards at the start and end of training, and those of the two evaluations."""
        comparisons = [report.compare_ends(self.rewards)]
        if self.before is not None and self.after is not None:
            first, last = self.before.summary.overall, self.after.summary.overall
            if first.mean_reward is not None and last.mean_reward is not None:
                comparisons.append(report.Comparison("reward, held-out tasks", first.mean_reward, last.mean_reward))
                comparisons.append(
                    report.Comparison("passed, held-out tasks", first.passed / first.graded, last.passed / last.graded)
                )
        return [comparison for comparison in comparisons if comparison is not None]


class RunCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Functions that are called when a phase of a run starts, during the phase, and when an evaluation ends."""

    phase: Callable[[str, int], None] = lambda name, rollouts: None
    evaluation: Callable[[str, BatchResult], None] = lambda name, result: None
    training: TrainingCallbacks = TrainingCallbacks()


def open_run(
    run: TrainingRun, data: str | Path = "", cluster: TrainingCluster | None = None
) -> AbstractAsyncContextManager[TrainingEnvironment]:
    """Start the gateway and the engine of a run in this process. The traces are stored in `data`, by default in the run's folder.

    With `cluster`, the agents run on that cluster, and `data` is the URL of a shared store.
    """
    config = ServeConfig(
        host="127.0.0.1",
        port=0,
        data=str(data or run.folder / "data"),
        engine="local",
        model_folder=str(run.model_folder),
        tokenizer=str(run.tokenizer),
        model=run.goal.batch.model,
        max_context=run.max_context,
        mismatch_difference=run.limits.difference,
        mismatch_share=run.limits.share,
        mismatch_kl=run.limits.kl,
        stale_kl=run.limits.stale_kl,
        sampling_masks=True,  # so that turns with top-p, top-k or min-p can be trained
    ).check()
    engine = TimedEngine(run.model_folder, max_context=run.max_context, served=run.goal.batch.model)
    return open_environment(config, engine) if cluster is None else open_cluster_environment(config, engine, cluster)


async def train_and_evaluate(
    run: TrainingRun, environment: TrainingEnvironment, callbacks: RunCallbacks = RunCallbacks()
) -> TrainingResult:
    """Train, and evaluate the held-out tasks, if any, before and after training."""
    began = time.monotonic()
    shares: list[StepTime] = []

    def on_step(step: Step, share: StepTime) -> None:
        shares.append(share)
        callbacks.training.step(step, share)

    before = await _evaluate(run, environment, "held-out tasks, before", run.before, callbacks)
    callbacks.phase("training", run.training_rollouts)
    training = msgspec.structs.replace(callbacks.training, step=on_step)
    steps = await train(environment, run.goal, run.folder, run.model_folder, training)
    after = await _evaluate(run, environment, "held-out tasks, after", run.after, callbacks)
    return TrainingResult(
        steps=tuple(steps), shares=tuple(shares), before=before, after=after, seconds=time.monotonic() - began
    )


async def _evaluate(
    run: TrainingRun, environment: TrainingEnvironment, name: str, folder: Path, callbacks: RunCallbacks
) -> BatchResult | None:
    plan = run.evaluation_plan()
    if plan is None:
        return None
    callbacks.phase(name, plan.total)
    result = await evaluate(environment, msgspec.structs.replace(plan, folder=folder), callbacks.training.rollouts)
    callbacks.evaluation(name, result)
    return result


def write_files(result: TrainingResult, folder: Path, title: str) -> Path:
    """Write the reward curve to `reward.svg` and the steps to `steps.json` in `folder`. Return the path of the curve."""
    note = f"steps: {len(result.steps)}, rollouts: {sum(len(step.rewards) for step in result.steps)}"
    if result.new_steps:
        since = "" if result.new_steps == result.steps else f" from step {result.new_steps[0].step} on"
        note += f", {result.seconds / 60:.1f} minutes{since}"
    curve = folder / "reward.svg"
    curve.write_text(report.draw_svg(title, result.rewards, result.compare(), note))
    (folder / "steps.json").write_bytes(msgspec.json.format(msgspec.json.encode(result.steps)))
    return curve
