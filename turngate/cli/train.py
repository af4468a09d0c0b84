"""`turngate train`: build a training run from the flags, check that it can resume an earlier run in the same folder, and run it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from turngate import tasks
from turngate.cli.options import TrainOptions
from turngate.cli.prepare import prepare_agent, require_positive, require_writable
from turngate.cli.signals import INTERRUPTED, absorb_cancellation, cancel_on_signal
from turngate.common.database_url import is_database_url, refuse_password_flag
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize_line, say
from turngate.config import MismatchLimits
from turngate.errors import ConfigError, TaskError
from turngate.rollout import ledger
from turngate.rollout.cluster.placement import parse_labels
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan, describe_changes
from turngate.sandboxes import get_backend
from turngate.tasks.task import Task

# Set this before torch is imported. Otherwise its idle threads would busy-wait on cores that the agents need.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
try:
    from turngate.trainers.local import checkpoint
    from turngate.trainers.local.cluster import TrainingCluster, name_run
    from turngate.trainers.local.display import TrainingDisplay, print_result
    from turngate.trainers.local.grpo import GrpoSettings
    from turngate.trainers.local.run import TrainingResult, TrainingRun, open_run, train_and_evaluate, write_files
    from turngate.trainers.local.training import TrainingGoal
except ModuleNotFoundError as error:
    raise ConfigError(
        f"`turngate train` needs {error.name}; run `pip install 'turngate[local]'` (without a GPU, install the CPU build of torch first)"
    ) from None

STOPPING = "Stopping: ending agents and removing their sandboxes. Run the same command to resume the run …"
_NOTHING_GRADED = 3  # exit code


def train_model(options: TrainOptions) -> int:
    """Run the training described by the flags, and return the exit code."""
    console = new_console()
    cluster = _choose_cluster(options, console)
    run = _build_run(options)
    _check_resumable(run)
    result = asyncio.run(cancel_on_signal(_train(run, console, options.data, cluster), console, STOPPING))
    if result is None:
        say(console, "Stopped. Run the same command to resume the run.", "yellow")
        return INTERRUPTED
    if not result.shares:
        done = f"The run is already complete (steps: {len(result.steps)}), so there is nothing to train."
        say(console, f"{done} Increase --steps to continue.", "yellow")
    print_result(result, console)
    plot = write_files(result, run.folder, f"{run.goal.batch.agent.name}, {run.model_folder.name}")
    say(console, f"  plot         {plot}", "dim")
    say(console, f"  checkpoint   {run.folder / 'checkpoints'}", "dim")
    return 0 if any(reward is not None for reward in result.rewards) else _NOTHING_GRADED


def _choose_cluster(options: TrainOptions, console: Console) -> TrainingCluster | None:
    """Return the Ray cluster that the flags choose, or None without --ray."""
    refuse_password_flag(options.data)
    labels = parse_labels(options.ray_label or ())
    if options.ray:
        if not is_database_url(options.data):
            raise ConfigError(
                "with --ray, --data must be the URL of a PostgreSQL database that all nodes can reach, such as "
                "postgresql://user@host/turngate",
                param="data",
            )
        return TrainingCluster(
            address=options.ray,
            labels=labels,
            engine_host=options.engine_host,
            note=lambda text: say(console, sanitize_line(text), "dim"),
        )
    for name, value in (("ray_label", labels), ("engine_host", options.engine_host)):
        if value:
            raise ConfigError(f"{name} needs a cluster; also pass --ray", param=name)
    if is_database_url(options.data):
        raise ConfigError(
            "without --ray, --data must be a folder; to record in PostgreSQL, also pass --ray", param="data"
        )
    return None


def _build_run(options: TrainOptions) -> TrainingRun:
    selected = _read_tasks("tasks", options.tasks)
    held_out = _read_tasks("held_out", options.held_out) if options.held_out else ()
    model_folder = Path(options.model_folder)
    if not (model_folder / "config.json").is_file():
        raise ConfigError(
            f"model_folder {model_folder} contains no model (config.json not found); pass a Hugging Face model folder",
            param="model_folder",
        )
    agent = prepare_agent(
        options.agent,
        options=options.option,
        context_tokens=options.context_tokens,
        instruction=max((task.instruction for task in selected), key=len),
        sandbox=options.sandbox,
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
    )
    goal = TrainingGoal(batch=plan, steps=options.steps, settings=settings, every=options.every)
    if options.ray:
        name = name_run(folder)
        goal = msgspec.structs.replace(goal, batch=msgspec.structs.replace(plan, name=name), feed_name=name)
    return TrainingRun(
        goal=goal,
        folder=folder,
        model_folder=model_folder,
        tokenizer=Path(options.tokenizer or model_folder),
        max_context=options.context_tokens,
        held_out=held_out,
        held_out_n=options.held_out_n,
        limits=MismatchLimits(
            difference=options.mismatch_difference,
            share=options.mismatch_share,
            kl=options.mismatch_kl,
            stale_kl=options.stale_kl,
        ),
    )


def _read_tasks(option: str, where: str) -> tuple[Task, ...]:
    try:
        return tuple(tasks.read_tasks(where))
    except TaskError as error:
        raise TaskError(f"{option}: {error.message.removeprefix('task: ')}", param=option) from None


# Term in a batch's ledger → the option of `turngate train` that sets it, where the two names differ.
_OPTIONS = {
    "agent's description": "agent",
    "agent's sampling": "agent",
    "model": "model-folder",
    "session": "temperature or --max-turns",
    "context_tokens": "context-tokens",
    "name": "ray",
}
_HELD_OUT = {**_OPTIONS, "tasks": "held-out", "n": "held-out-n"}


def _check_resumable(run: TrainingRun) -> None:
    """Raise ConfigError if the output folder contains a run that cannot be resumed with these options."""
    evaluation = run.evaluation_plan()
    if evaluation is not None:
        for folder in (run.before, run.after):
            _count_rounds(msgspec.structs.replace(evaluation, folder=folder), _HELD_OUT, run.folder)
    goal, newest = run.goal, checkpoint.find_newest(run.folder / "checkpoints")
    trained = 0 if newest is None else newest.state.step
    if trained >= goal.steps:  # training is complete
        return
    plan = goal.plan()
    rounds = _count_rounds(plan, _OPTIONS, run.folder)
    if rounds > plan.rounds:
        least = (rounds - 1) * len(plan.tasks) // goal.settings.groups + 1
        state = "has no checkpoint" if newest is None else f"has no checkpoint after step {trained}"
        raise ConfigError(
            f"steps must be at least {least}, not {goal.steps}: {plan.folder} contains rollouts of later steps, but "
            f"{run.folder / 'checkpoints'} {state}; pass --steps {least} or more, or choose a different --out folder; "
            "if a later checkpoint was deleted, you can also restore it",
            param="steps",
        )


def _count_rounds(plan: BatchPlan, options: Mapping[str, str], out: Path) -> int:
    """Return the number of rounds up to the highest one with a finished rollout.

    Return 1 if no rollout has finished, and 0 if the folder contains no batch.

    The terms of a batch are the settings that must not change when the batch is resumed. Raise ConfigError if the batch was started with
    different terms. `options` maps the names of the terms to flags, for the error message.
    """
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


async def _train(
    run: TrainingRun, console: Console, data: str, cluster: TrainingCluster | None
) -> TrainingResult | None:
    """Start a gateway and an engine, and train. Return None if the training was interrupted."""
    try:
        with TrainingDisplay(console, run.goal.steps, run.rollouts) as display:
            async with open_run(run, data, cluster) as environment:
                return await train_and_evaluate(run, environment, display.callbacks())
    except asyncio.CancelledError:
        absorb_cancellation()
        return None
