"""`turngate train`: build a training run, show its progress, and print its result."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turngate import tasks
from turngate.cli.options import TrainOptions
from turngate.cli.prepare import prepare_agent, require_positive, require_writable
from turngate.cli.signals import INTERRUPTED, absorb_cancellation, cancel_on_signal
from turngate.common.terminal import LiveDisplay, say
from turngate.common.terminal import console as new_console
from turngate.config import ServeConfig
from turngate.errors import ConfigError, TaskError
from turngate.rollout import ledger
from turngate.rollout.batch import BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes import get_backend
from turngate.tasks.task import Task

# Set before torch is imported: its idle threads would otherwise spin on cores that the agents need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
try:
    from turngate.trainers.local import checkpoint, report
    from turngate.trainers.local.grpo import GrpoSettings, Step
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
except ModuleNotFoundError as error:
    raise ConfigError(
        f"turngate train needs {error.name}; run pip install 'turngate[local]' (without a GPU, install the CPU build of torch first)"
    ) from None

STOPPING = (
    "Stopping: ending agents and removing their sandboxes. Run the same command to resume from the last checkpoint …"
)
_LINE_EVERY_S = 10.0  # interval between plain progress lines
_NOTHING_GRADED = 3  # exit code


class TrainingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A training run, with evaluations before and after it if it has held-out tasks."""

    goal: TrainingGoal
    folder: Path
    model_folder: Path
    tokenizer: Path
    max_context: int | None = None
    held_out: tuple[Task, ...] = ()
    held_out_n: int = 1

    def __post_init__(self) -> None:
        if self.held_out_n < 1:
            raise ConfigError(f"held_out_n must be at least 1, not {self.held_out_n}", param="held_out_n")

    def evaluation_plan(self) -> BatchPlan | None:
        """Plan the rollouts of the held-out tasks, or return None if there are none. The caller sets the folder."""
        if not self.held_out:
            return None
        return msgspec.structs.replace(self.goal.batch, tasks=self.held_out, n=self.held_out_n, name="held-out")

    @property
    def before(self) -> Path:
        return self.folder / "before"

    @property
    def after(self) -> Path:
        return self.folder / f"after-{self.goal.steps}"


class TrainingResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a training run."""

    steps: tuple[Step, ...]
    shares: tuple[StepTime, ...]  # only for steps made by this process
    before: BatchResult | None
    after: BatchResult | None
    seconds: float

    @property
    def rewards(self) -> list[float | None]:
        return [step.reward for step in self.steps]

    @property
    def new_steps(self) -> tuple[Step, ...]:
        """Steps made by this process, without those loaded from the checkpoint."""
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


async def train_and_evaluate(run: TrainingRun, place: TrainingEnvironment, display: TrainingDisplay) -> TrainingResult:
    """Train, and evaluate the held-out tasks, if any, before and after."""
    began = time.monotonic()
    before = after = None
    shares: list[StepTime] = []
    held_out = run.evaluation_plan()

    def on_step(step: Step, share: StepTime) -> None:
        shares.append(share)
        display.print_step(step, share)

    if held_out is not None:
        display.start_phase("held-out tasks, before", held_out.total)
        plan = msgspec.structs.replace(held_out, folder=run.before)
        before = await evaluate(place, plan, display.update)
        display.say(f"held-out tasks, before: {_score(before)}")
    display.start_phase("training", run.goal.steps * run.goal.settings.groups * run.goal.batch.n)
    callbacks = TrainingCallbacks(rollouts=display.update, step=on_step, note=partial(display.say, style="yellow"))
    steps = await train(place, run.goal, run.folder, run.model_folder, callbacks)
    if not shares:
        display.say(
            f"The run has already completed {len(steps)} steps, so there is nothing to train. Increase --steps to continue.",
            "yellow",
        )
    if held_out is not None:
        display.start_phase("held-out tasks, after", held_out.total)
        plan = msgspec.structs.replace(held_out, folder=run.after)
        after = await evaluate(place, plan, display.update)
        display.say(f"held-out tasks, after:  {_score(after)}")
    return TrainingResult(
        steps=tuple(steps), shares=tuple(shares), before=before, after=after, seconds=time.monotonic() - began
    )


def _score(result: BatchResult) -> str:
    overall = result.summary.overall
    reward = "none" if overall.mean_reward is None else f"{overall.mean_reward:.2f}"
    return f"{overall.passed} of {overall.graded} passed, mean reward {reward}"


class TrainingDisplay(LiveDisplay):
    """Progress of a training run: a live display on a terminal, and one line per step everywhere."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self._steps = steps
        self._done = 0
        self._phase, self._total = "starting", 1
        self._tally: BatchProgress | None = None
        self._began = self._printed = time.monotonic()

    def start_phase(self, name: str, total: int) -> None:
        self._phase, self._total, self._tally = name, total, None

    def update(self, tally: BatchProgress) -> None:
        self._tally = tally
        if self._live is None and time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            self.say(self._line())

    def say(self, text: str, style: str = "") -> None:
        say(self._console, text, style)

    def print_step(self, step: Step, share: StepTime) -> None:
        self._done = step.step
        self._printed = time.monotonic()
        self.say(describe_step(step, share))

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._began)
        done = 0 if self._tally is None else self._tally.done
        stages = "" if self._tally is None else _describe_stages(self._tally)
        return f"{seconds // 60}:{seconds % 60:02d}  {self._phase}: {done}/{self._total} rollouts" + (
            f" ({stages})" if stages else ""
        )

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 2))
        training = self._phase == "training"
        done = self._done if training else 0 if self._tally is None else self._tally.done
        total = self._steps if training else self._total
        head.add_row(ProgressBar(total=max(1, total), completed=done, width=40), Text(self._line()))
        return Group(head)


def _describe_stages(tally: BatchProgress) -> str:
    counts = {"starting": tally.states["start"], "running": tally.states["run"], "grading": tally.states["grade"]}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def describe_step(step: Step, share: StepTime) -> str:
    """Describe a step in one line."""
    measured = step.measured
    note = "not compared" if measured.difference is None else f"log-probabilities within {measured.difference:.0e}"
    bar = "█" * round(20 * (step.reward or 0.0))
    if step.reward is None:
        note = f"no rollout was graded: {'; '.join(step.why)[:300]}"
    elif not measured.signal:
        note = "no signal: the rewards within each group are equal"
    return (
        f"step {step.step:3}  reward {'none' if step.reward is None else f'{step.reward:.2f}'} {bar:20}  "
        f"passed {step.passed or 0.0:4.0%}  entropy {measured.entropy:.2f}  {note}"
        + (f"  {len(measured.refused)} rows rejected" if measured.refused else "")
        + f"  {share.whole:.0f} s (agents {share.agents:.0f}, sampling {share.sampling:.0f}, training {share.training:.0f}, "
        f"turngate {share.turngate:.1f})"
    )


def print_result(result: TrainingResult, console: Console) -> None:
    """Print the reward curve, the comparisons, and how the time was spent."""
    console.print()
    head, *bars = report.draw_curve(result.rewards)
    say(console, head, "bold")
    for line in bars:
        say(console, line)
    console.print()
    for change in result.compare():
        style = "green" if change.after > change.before else "yellow"
        say(console, f"{change.name}: {change.before:.2f} → {change.after:.2f}", style)
    gaps = [step.measured.difference for step in result.steps if step.measured.difference is not None]
    rows = sum(step.measured.compared for step in result.steps)
    if gaps:
        rejected = sum(len(step.measured.refused) for step in result.steps)
        say(
            console,
            f"Recomputed {rows} rows with the weights that sampled them: log-probabilities differ by {sum(gaps) / len(gaps):.1e} on "
            f"average; {rejected} rows rejected",
        )
    if not any(step.measured.signal for step in result.steps):
        say(
            console,
            "No step had a training signal, so the model learned nothing. Use tasks that the agent solves only some of the time.",
            "yellow",
        )
    whole = sum(share.whole for share in result.shares)
    if whole:
        split = ", ".join(
            f"{name} {sum(getattr(share, name) for share in result.shares) / whole:.0%}"
            for name in ("agents", "sampling", "training", "turngate")
        )
        tokens = sum(step.sampled_tokens for step in result.new_steps)
        say(console, f"step time: {split}; {tokens:,} sampled tokens, {tokens / whole:.0f} per second", "dim")


def write_files(result: TrainingResult, folder: Path, title: str) -> Path:
    """Write the reward curve and the numbers, and return the path of the curve."""
    note = f"{len(result.steps)} steps, {sum(len(step.rewards) for step in result.steps)} rollouts"
    if result.new_steps:
        since = "" if result.new_steps == result.steps else f" from step {result.new_steps[0].step} on"
        note += f", {result.seconds / 60:.1f} minutes{since}"
    curve = folder / "reward.svg"
    curve.write_text(report.draw_svg(title, result.rewards, result.compare(), note))
    (folder / "steps.json").write_bytes(msgspec.json.format(msgspec.json.encode(result.steps)))
    return curve


# ── from flags ──────────────────────────────────────────────────────────────────────────────────────────────────────


def train_model(options: TrainOptions) -> int:
    """Run the training described by the flags, and return the exit code."""
    run = _build_run(options)
    _check_resumable(run)
    console = new_console()
    result = asyncio.run(cancel_on_signal(_train(run, console, options.data), console, STOPPING))
    if result is None:
        say(console, "Stopped. Run the same command to resume from the last checkpoint.", "yellow")
        return INTERRUPTED
    print_result(result, console)
    plot = write_files(result, run.folder, f"{run.goal.batch.agent.name}, {run.model_folder.name}")
    say(console, f"  plot         {plot}", "dim")
    say(console, f"  checkpoint   {run.folder / 'checkpoints'}", "dim")
    return 0 if any(reward is not None for reward in result.rewards) else _NOTHING_GRADED


def _build_run(options: TrainOptions) -> TrainingRun:
    selected = _read_tasks("tasks", options.tasks)
    held_out = _read_tasks("held_out", options.held_out) if options.held_out else ()
    model_folder = Path(options.model_folder)
    if not (model_folder / "config.json").is_file():
        raise ConfigError(
            f"model_folder {model_folder} contains no model (config.json not found)", param="model_folder"
        )
    agent = prepare_agent(
        options.agent,
        options=options.option,
        context_tokens=options.context_tokens,
        instruction=max((task.instruction for task in selected), key=len),
    )
    folder = require_writable(options.out)
    temperature = require_positive("temperature", options.temperature)
    limits: dict[str, Any] = {}
    if options.max_turns is not None:
        limits = {"limits": {"turns": require_positive("max_turns", options.max_turns)}}
    plan = BatchPlan(
        tasks=selected,
        agent=agent.spec,
        installed=agent.installed,
        backend=get_backend(options.sandbox),
        model=model_folder.name,
        folder=folder / "rollouts",
        n=options.n,
        bounds=Bounds(running=options.concurrency),
        seed=options.seed,
        timeout_s=require_positive("timeout", options.timeout),
        session={"sampling": {"temperature": temperature}, **limits},
        model_limits=agent.limits,
        options=agent.options,
    )
    settings = GrpoSettings(
        groups=options.groups,
        learning_rate=require_positive("learning_rate", options.learning_rate),
        temperature=temperature,
    )
    return TrainingRun(
        goal=TrainingGoal(batch=plan, steps=options.steps, settings=settings, every=options.every),
        folder=folder,
        model_folder=model_folder,
        tokenizer=Path(options.tokenizer or model_folder),
        max_context=options.context_tokens,
        held_out=held_out,
        held_out_n=options.held_out_n,
    )


def _read_tasks(option: str, where: str) -> tuple[Task, ...]:
    try:
        return tuple(tasks.read_tasks(where))
    except TaskError as error:
        raise TaskError(f"{option}: {error.message.removeprefix('task: ')}", param=option) from None


# The option of `turngate train` behind each name in the ledger of a batch.
_OPTIONS = {
    "agent's description": "agent",
    "model": "model-folder",
    "session": "temperature or --max-turns",
    "context_tokens": "context-tokens",
}
_HELD_OUT = {**_OPTIONS, "tasks": "held-out", "n": "held-out-n"}


def _check_resumable(run: TrainingRun) -> None:
    """Raise ConfigError if the run in the folder has different options. Called before anything is started."""
    evaluation = run.evaluation_plan()
    if evaluation is not None:
        for folder in (run.before, run.after):
            _count_rounds(msgspec.structs.replace(evaluation, folder=folder), _HELD_OUT, run.folder)
    goal, newest = run.goal, checkpoint.find_newest(run.folder / "checkpoints")
    trained = 0 if newest is None else newest.state.step
    if trained >= goal.steps:  # nothing left to train
        return
    plan = goal.plan()
    rounds = _count_rounds(plan, _OPTIONS, run.folder)
    if rounds > plan.rounds:
        least = (rounds - 1) * len(plan.tasks) // goal.settings.groups + 1
        state = "has no checkpoint" if newest is None else f"ends at step {trained}"
        raise ConfigError(
            f"steps must be at least {least}, not {goal.steps}: {plan.folder} contains rollouts of later steps, but "
            f"{run.folder / 'checkpoints'} {state}; restore the missing checkpoint, pass --steps {least} or more, or choose a "
            "different --out folder",
            param="steps",
        )


def _count_rounds(plan: BatchPlan, options: Mapping[str, str], out: Path) -> int:
    """Count the rounds that a batch has started. Raise ConfigError if its folder contains a different batch."""
    if not (plan.folder / ledger.LEDGER_NAME).exists():
        return 0
    known = ledger.read_ledger(plan.folder)
    if known.head is None:
        return 0
    changed = [change.partition(": ") for change in describe_changes(known.head, plan.terms(), plan.digests())]
    if changed:
        flags = [(options.get(name, name), how) for name, _, how in changed]
        raise ConfigError(
            f"{out} contains a run with different options ({'; '.join(f'--{name}: {how}' for name, how in flags)}); resume it with its "
            f"original {' and '.join(f'--{name}' for name in dict(flags))}, or choose a different --out folder",
            param="out",
        )
    finished = (*known.finished.values(), *(late.finished for late in known.unrecorded.values()))
    return 1 + max((rollout.round for rollout in finished), default=0)


async def _train(run: TrainingRun, console: Console, data: str) -> TrainingResult | None:
    """Run the training with its own gateway and engine. Return None if it was interrupted."""
    try:
        with TrainingDisplay(console, run.goal.steps) as display:
            async with start_training(run, data) as place:
                return await train_and_evaluate(run, place, display)
    except asyncio.CancelledError:
        absorb_cancellation()
        return None


def start_training(run: TrainingRun, data: str | Path = "") -> AbstractAsyncContextManager[TrainingEnvironment]:
    """Start the gateway and the engine of a run in this process."""
    config = ServeConfig(
        host="127.0.0.1",
        port=0,
        data=str(data or run.folder / "data"),
        engine="local",
        model_folder=str(run.model_folder),
        tokenizer=str(run.tokenizer),
        model=run.goal.batch.model,
        max_context=run.max_context,
    ).check()
    engine = TimedEngine(run.model_folder, max_context=run.max_context, served=run.goal.batch.model)
    return open_environment(config, engine)


def side_by_side(left: str, right: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Lay out two transcripts in columns."""
    table = Table(show_lines=False, expand=True)
    table.add_column(left, ratio=1, overflow="fold")
    table.add_column(right, ratio=1, overflow="fold")
    for one, other in rows:
        table.add_row(Text(one), Text(other))
    return table
