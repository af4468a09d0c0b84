"""What `turngate train` does around a training run: put it together, show how far it is, and tell at the end what came of it."""

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
from turngate.cli.run import INTERRUPTED, Chosen, chosen_agent, heeded, positive, stoppable, writable
from turngate.cli.terminal import Showing, say
from turngate.cli.terminal import console as new_console
from turngate.config import ServeConfig
from turngate.errors import ConfigError, TaskError
from turngate.rollout import ledger
from turngate.rollout.batch import BatchResult
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.rollout.progress import BatchProgress
from turngate.sandboxes import get_backend
from turngate.tasks.task import Task

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: its threads would spin while agents want the cores
try:
    from turngate.trainers.local import checkpoint, report
    from turngate.trainers.local.grpo import Settings, Step
    from turngate.trainers.local.training import (
        Clocked,
        Goal,
        Place,
        Shares,
        TrainingCallbacks,
        evaluate,
        opened,
        train,
    )
except ModuleNotFoundError as error:
    raise ConfigError(
        f"turngate train needs {error.name}: pip install 'turngate[local]' (without a GPU, torch's CPU build first)"
    ) from None

STOPPING = "Stopping: agents are ended and their sandboxes removed; the same command goes on from the last checkpoint …"
_OFTEN = 10.0  # seconds between plain lines
_NOTHING_GRADED = 3  # the exit code that `turngate run` has for it


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One training run, with its evaluations where there are held-out tasks."""

    goal: Goal
    folder: Path
    model_folder: Path
    tokenizer: Path
    max_context: int | None = None
    held_out: tuple[Task, ...] = ()
    held_out_n: int = 1

    def __post_init__(self) -> None:
        if self.held_out_n < 1:
            raise ConfigError(f"held_out_n: {self.held_out_n} must be at least 1", param="held_out_n")

    def evaluation(self) -> BatchPlan | None:
        """Of the held-out tasks, if there are any. It is done in two folders: before and after."""
        if not self.held_out:
            return None
        return msgspec.structs.replace(self.goal.batch, tasks=self.held_out, n=self.held_out_n, name="held-out")

    @property
    def before(self) -> Path:
        return self.folder / "before"

    @property
    def after(self) -> Path:
        return self.folder / f"after-{self.goal.steps}"


class Came(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    steps: tuple[Step, ...]
    shares: tuple[Shares, ...]  # of the steps of this run
    before: BatchResult | None
    after: BatchResult | None
    seconds: float

    @property
    def rewards(self) -> list[float | None]:
        return [step.reward for step in self.steps]

    @property
    def made(self) -> tuple[Step, ...]:
        """The steps of this run, without those that a checkpoint told of."""
        return self.steps[len(self.steps) - len(self.shares) :]

    def compared(self) -> list[report.Compared]:
        found = [report.gain(self.rewards)]
        if self.before is not None and self.after is not None:
            first, last = self.before.summary.overall, self.after.summary.overall
            if first.mean_reward is not None and last.mean_reward is not None:
                found.append(report.Compared("reward, held-out tasks", first.mean_reward, last.mean_reward))
                found.append(
                    report.Compared("passed, held-out tasks", first.passed / first.graded, last.passed / last.graded)
                )
        return [one for one in found if one is not None]


async def carried_out(run: Run, place: Place, watching: Watching) -> Came:
    began = time.monotonic()
    before = after = None
    shares: list[Shares] = []
    held_out = run.evaluation()

    def stepped(step: Step, share: Shares) -> None:
        shares.append(share)
        watching.step(step, share)

    if held_out is not None:
        watching.phase("held-out tasks, before", held_out.total)
        plan = msgspec.structs.replace(held_out, folder=run.before)
        before = await evaluate(place, plan, watching.see)
        watching.say(f"held-out tasks, before: {_score(before)}")
    watching.phase("training", run.goal.steps * run.goal.settings.groups * run.goal.batch.n)
    told = TrainingCallbacks(rollouts=watching.see, step=stepped, note=partial(watching.say, style="yellow"))
    steps = await train(place, run.goal, run.folder, run.model_folder, told)
    if not shares:
        watching.say(
            f"the run has made {len(steps)} steps already, so nothing is trained, whatever else was changed; ask for more --steps to go on",
            "yellow",
        )
    if held_out is not None:
        watching.phase("held-out tasks, after", held_out.total)
        plan = msgspec.structs.replace(held_out, folder=run.after)
        after = await evaluate(place, plan, watching.see)
        watching.say(f"held-out tasks, after:  {_score(after)}")
    return Came(steps=tuple(steps), shares=tuple(shares), before=before, after=after, seconds=time.monotonic() - began)


def _score(result: BatchResult) -> str:
    overall = result.summary.overall
    reward = "none" if overall.mean_reward is None else f"{overall.mean_reward:.2f}"
    return f"{overall.passed} of {overall.graded} passed, mean reward {reward}"


class Watching(Showing):
    """Live progress: where it is, on a terminal; one line per step anywhere."""

    def __init__(self, console: Console, steps: int) -> None:
        super().__init__(console)
        self._steps = steps
        self._done = 0
        self._phase, self._total = "starting", 1
        self._tally: BatchProgress | None = None
        self._began = self._told = time.monotonic()

    def phase(self, name: str, total: int) -> None:
        self._phase, self._total, self._tally = name, total, None

    def see(self, tally: BatchProgress) -> None:
        self._tally = tally
        if self._live is None and time.monotonic() - self._told > _OFTEN:
            self._told = time.monotonic()
            self.say(self._line())

    def say(self, text: str, style: str = "") -> None:
        say(self._console, text, style)

    def step(self, step: Step, share: Shares) -> None:
        self._done = step.step
        self._told = time.monotonic()
        self.say(told(step, share))

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._began)
        done = 0 if self._tally is None else self._tally.done
        where = "" if self._tally is None else _where(self._tally)
        return f"{seconds // 60}:{seconds % 60:02d}  {self._phase}: {done}/{self._total} rollouts" + (
            f" ({where})" if where else ""
        )

    def _picture(self) -> Group:
        head = Table.grid(padding=(0, 2))
        training = self._phase == "training"
        done = self._done if training else 0 if self._tally is None else self._tally.done
        total = self._steps if training else self._total
        head.add_row(ProgressBar(total=max(1, total), completed=done, width=40), Text(self._line()))
        return Group(head)


def _where(tally: BatchProgress) -> str:
    counts = {"starting": tally.states["start"], "running": tally.states["run"], "grading": tally.states["grade"]}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def told(step: Step, share: Shares) -> str:
    """One step in one line."""
    measured = step.measured
    exact = "not compared" if measured.difference is None else f"log-probabilities within {measured.difference:.0e}"
    bar = "█" * round(20 * (step.reward or 0.0))
    if step.reward is None:
        exact = f"nothing was graded: {'; '.join(step.why)[:300]}"
    elif not measured.signal:
        exact = "no signal: within each group all rewards are alike"
    return (
        f"step {step.step:3}  reward {'none' if step.reward is None else f'{step.reward:.2f}'} {bar:20}  "
        f"passed {step.passed or 0.0:4.0%}  entropy {measured.entropy:.2f}  {exact}"
        + (f"  {len(measured.refused)} rows refused" if measured.refused else "")
        + f"  {share.whole:.0f} s (agents {share.agents:.0f}, sampling {share.sampling:.0f}, training {share.training:.0f}, "
        f"turngate {share.turngate:.1f})"
    )


def summed_up(came: Came, console: Console) -> None:
    """The curve, what was compared, and where the time went."""
    console.print()
    head, *bars = report.curve(came.rewards)
    say(console, head, "bold")
    for line in bars:
        say(console, line)
    console.print()
    for one in came.compared():
        style = "green" if one.after > one.before else "yellow"
        say(console, f"{one.name}: {one.before:.2f} → {one.after:.2f}", style)
    apart = [step.measured.difference for step in came.steps if step.measured.difference is not None]
    rows = sum(step.measured.compared for step in came.steps)
    if apart:
        refused = sum(len(step.measured.refused) for step in came.steps)
        say(
            console,
            f"{rows} rows recomputed with the weights that sampled them: log-probabilities differ by {sum(apart) / len(apart):.1e} on "
            f"average; {refused} refused",
        )
    if not any(step.measured.signal for step in came.steps):
        say(
            console,
            "No step had a signal, so nothing was learnt: tasks that are sometimes solved are needed.",
            "yellow",
        )
    whole = sum(share.whole for share in came.shares)
    if whole:
        spent = ", ".join(
            f"{name} {sum(getattr(share, name) for share in came.shares) / whole:.0%}"
            for name in ("agents", "sampling", "training", "turngate")
        )
        tokens = sum(step.sampled_tokens for step in came.made)
        say(console, f"time of the steps: {spent}; {tokens:,} sampled tokens, {tokens / whole:.0f} per second", "dim")


def kept(came: Came, folder: Path, title: str) -> Path:
    """The picture and the numbers as files. Where the picture is."""
    note = f"{len(came.steps)} steps, {sum(len(step.rewards) for step in came.steps)} rollouts"
    if came.made:
        since = "" if came.made == came.steps else f" from step {came.made[0].step} on"
        note += f", {came.seconds / 60:.1f} minutes{since}"
    picture = folder / "reward.svg"
    picture.write_text(report.svg(title, came.rewards, came.compared(), note))
    (folder / "steps.json").write_bytes(msgspec.json.format(msgspec.json.encode(came.steps)))
    return picture


# ── from flags ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ordered(given: Mapping[str, Any]) -> int:
    """Train what the flags of `turngate train` ask for. The exit code."""
    run = _run(given)
    _goes_on(run)
    console = new_console()
    came = asyncio.run(stoppable(_opened(run, console, given["data"]), console, STOPPING))
    if came is None:
        say(console, "stopped; the same command goes on from the last checkpoint", "yellow")
        return INTERRUPTED
    summed_up(came, console)
    picture = kept(came, run.folder, f"{run.goal.batch.agent.name}, {run.model_folder.name}")
    say(console, f"  picture      {picture}", "dim")
    say(console, f"  checkpoint   {run.folder / 'checkpoints'}", "dim")
    return 0 if any(reward is not None for reward in came.rewards) else _NOTHING_GRADED


def _run(given: Mapping[str, Any]) -> Run:
    wanted = _tasks(given, "tasks")
    held_out = _tasks(given, "held_out") if given["held_out"] else ()
    model_folder = Path(given["model_folder"])
    if not (model_folder / "config.json").is_file():
        raise ConfigError(f"model_folder: {model_folder} holds no model (config.json)", param="model_folder")
    chosen: Chosen = chosen_agent(given, max((task.instruction for task in wanted), key=len))
    folder = writable(given["out"])
    temperature = positive(given, "temperature")
    limits: dict[str, Any] = {} if given["max_turns"] is None else {"limits": {"turns": positive(given, "max_turns")}}
    plan = BatchPlan(
        tasks=wanted,
        agent=chosen.spec,
        installed=chosen.installed,
        backend=get_backend(given["sandbox"]),
        model=model_folder.name,
        folder=folder / "rollouts",
        n=given["n"],
        bounds=Bounds(running=given["concurrency"]),
        seed=given["seed"],
        timeout_s=positive(given, "timeout"),
        session={"sampling": {"temperature": temperature}, **limits},
        model_limits=chosen.told,
        options=chosen.options,
    )
    settings = Settings(groups=given["groups"], learning_rate=positive(given, "learning_rate"), temperature=temperature)
    return Run(
        goal=Goal(batch=plan, steps=given["steps"], settings=settings, every=given["every"]),
        folder=folder,
        model_folder=model_folder,
        tokenizer=Path(given["tokenizer"] or model_folder),
        max_context=given["context_tokens"],
        held_out=held_out,
        held_out_n=given["held_out_n"],
    )


def _tasks(given: Mapping[str, Any], option: str) -> tuple[Task, ...]:
    try:
        return tuple(tasks.read_tasks(given[option]))
    except TaskError as error:
        raise TaskError(f"{option}: {error.message.removeprefix('task: ')}", param=option) from None


# By what the ledger of a batch calls it, the option of `turngate train` that it comes from.
_OPTIONS = {
    "agent's description": "agent",
    "model": "model-folder",
    "session": "temperature or --max-turns",
    "context_tokens": "context-tokens",
}
_HELD_OUT = {**_OPTIONS, "tasks": "held-out", "n": "held-out-n"}


def _goes_on(run: Run) -> None:
    """What cannot be gone on with is told before anything is started."""
    evaluation = run.evaluation()
    if evaluation is not None:
        for folder in (run.before, run.after):
            _begun(msgspec.structs.replace(evaluation, folder=folder), _HELD_OUT, run.folder)
    goal, found = run.goal, checkpoint.newest(run.folder / "checkpoints")
    trained = 0 if found is None else found.state.step
    if trained >= goal.steps:  # nothing will be
        return
    plan = goal.plan()
    rounds = _begun(plan, _OPTIONS, run.folder)
    if rounds > plan.rounds:
        least = (rounds - 1) * len(plan.tasks) // goal.settings.groups + 1
        there = "has no checkpoint" if found is None else f"has only step {trained}"
        raise ConfigError(
            f"steps: {goal.steps} is too few: {plan.folder} holds the rollouts of more, and {run.folder / 'checkpoints'} {there}; bring "
            f"back what is missing there, go on with --steps {least} or more, or choose another --out folder",
            param="steps",
        )


def _begun(plan: BatchPlan, options: Mapping[str, str], out: Path) -> int:
    """How many rounds of it have begun. Refused where its folder holds another batch."""
    if not (plan.folder / ledger.LEDGER_NAME).exists():
        return 0
    known = ledger.read_ledger(plan.folder)
    if known.head is None:
        return 0
    changed = [one.partition(": ") for one in describe_changes(known.head, plan.terms(), plan.digests())]
    if changed:
        told = [(options.get(name, name), how) for name, _, how in changed]
        raise ConfigError(
            f"{'; '.join(f'--{name}: {how}' for name, how in told)}. {out} holds a run that was begun otherwise: go on with its "
            f"{' and '.join(f'--{name}' for name in dict(told))}, or choose another --out folder",
            param="out",
        )
    finished = (*known.finished.values(), *(late.finished for late in known.unrecorded.values()))
    return 1 + max((one.round for one in finished), default=0)


async def _opened(run: Run, console: Console, data: str) -> Came | None:
    try:
        with Watching(console, run.goal.steps) as watching:
            async with ready(run, data) as place:
                return await carried_out(run, place, watching)
    except asyncio.CancelledError:
        heeded()
        return None


def ready(run: Run, data: str | Path = "") -> AbstractAsyncContextManager[Place]:
    """Gateway and engine for a run, in this process."""
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
    engine = Clocked(run.model_folder, max_context=run.max_context, served=run.goal.batch.model)
    return opened(config, engine)


def side_by_side(left: str, right: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Two transcripts."""
    table = Table(show_lines=False, expand=True)
    table.add_column(left, ratio=1, overflow="fold")
    table.add_column(right, ratio=1, overflow="fold")
    for one, other in rows:
        table.add_row(Text(one), Text(other))
    return table
