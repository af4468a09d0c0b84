"""`make demo`: train an unmodified agent on two CPU cores, in about four minutes.

The agent is mini-SWE-agent from PyPI, and the model is SmolLM2-135M-Instruct, also from PyPI. The tasks are errands in a folder, such as
renaming a file, and a function on the host grades each rollout. The agent runs in a sandbox and uses Turngate as its model provider.
Turngate records what the model samples, token by token, and delivers complete groups to a GRPO trainer, which updates the weights that
the next rollouts are sampled with.

The demo first runs one rollout with the untrained model and shows its tokens, then trains. `make demo FAST=1` does the same with
fewer steps in two to three minutes, which is too short to learn much. `make demo SEED=2` uses a different seed. `make demo MODEL=coder`
trains a coding model on a GPU (`demo_coder.py`).

Only the agents run in processes of their own. `examples/one_rollout.py` shows a single rollout in detail.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
from rich.console import Console

from examples import demo_coder
from examples.train.agent import build_agent, build_tokenizer
from tools import parts
from turngate.agents.install import ensure_installed
from turngate.client.keys import ADMIN_KEY, ADMIN_KEY_FILE
from turngate.errors import SandboxUnavailable, TurngateError
from turngate.rollout.concurrency import Bounds
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend
from turngate.sandboxes.base import Backend
from turngate.tasks import read_tasks
from turngate.trainers.local.display import TrainingDisplay, print_improvements, print_result
from turngate.trainers.local.grpo import GrpoSettings
from turngate.trainers.local.run import TrainingRun, open_run, train_and_evaluate, write_files
from turngate.trainers.local.training import TrainingEnvironment, TrainingGoal, evaluate

ERRANDS = Path(__file__).parent / "train" / "errands.py"
N, GROUPS, STEPS = 8, 2, 8  # rollouts per group, groups per step, steps
HELD_OUT, HELD_OUT_FAST = 10, 5  # tasks evaluated before and after training
RUNNING = 8  # rollouts at the same time: a whole group
LEARNING_RATE = 3e-5
CONTEXT = 192  # tokens; an errand needs about 128, and a reply that goes on and on costs time
TOO_SHORT = (
    f"That was too short to learn much: without FAST=1, the demo makes {STEPS} steps of {GROUPS} × {N} rollouts."
)


def build_run(options: argparse.Namespace, sandbox: Backend, out: Path) -> TrainingRun:
    model = parts.ensure("smollm2")
    agent = build_agent()
    batch = BatchPlan(
        tasks=tuple(read_tasks(f"{ERRANDS}:training")),
        agent=agent,
        installed=ensure_installed(agent),
        backend=sandbox,
        model="smollm2-135m",
        folder=out / "rollouts",
        n=N,
        bounds=Bounds(running=RUNNING),
        seed=options.seed,
    )
    settings = GrpoSettings(groups=1 if options.fast else GROUPS, learning_rate=LEARNING_RATE)
    steps = options.steps or (3 if options.fast else STEPS)
    held_out = options.held_out or (HELD_OUT_FAST if options.fast else HELD_OUT)
    return TrainingRun(
        goal=TrainingGoal(batch=batch, steps=steps, settings=settings, every=steps),
        folder=out,
        model_folder=model,
        tokenizer=build_tokenizer(model, out / "tokenizer"),
        max_context=CONTEXT,
        held_out=tuple(read_tasks(f"{ERRANDS}:held_out", limit=held_out)),
    )


async def find_sandbox(name: str) -> Backend:
    """Find an isolated sandbox. The demo runs commands that a small model makes up, so it uses another sandbox only if asked to."""
    for candidate in [name] if name else ["bubblewrap", "docker"]:
        backend = get_backend(candidate)
        try:
            await backend.check()
        except SandboxUnavailable as error:
            missing = error
        else:
            return backend
    raise SystemExit(
        f"The demo runs commands that a small model makes up, so it needs an isolated sandbox: {missing.message}\n"
        "Install bubblewrap (apt install bubblewrap), or run make demo SANDBOX=local to run the commands as your user."
    )


def print_plan(run: TrainingRun, console: Console) -> None:
    goal = run.goal
    agent, tasks = goal.batch.agent, goal.batch.tasks
    say(
        console, f"agent    {agent.title} {agent.install.version}, unmodified, in the {goal.batch.backend.name} sandbox"
    )
    say(console, "model    SmolLM2-135M-Instruct, float32, sampled and trained in this process")
    say(console, f"tasks    {len(tasks)} errands such as “{tasks[0].instruction}”, and {len(run.held_out)} held out")
    steps = "1 step" if goal.steps == 1 else f"{goal.steps} steps"
    batches = f"{steps} of {goal.settings.groups} × {N} rollouts"
    say(console, f"GRPO     {batches}, learning rate {LEARNING_RATE:g}")


def print_page(environment: TrainingEnvironment, run: TrainingRun, console: Console) -> None:
    """Print the address of the web page that this demo's gateway serves, and where to find the key."""
    stored = run.folder / "data" / ADMIN_KEY_FILE  # not written if the environment sets the key
    key = f"`cat {stored}` prints the key for the login" if stored.exists() else f"log in with {ADMIN_KEY}"
    say(console, f"watch    {environment.gateway.url}/   ({key})\n")


async def show_first_rollout(
    run: TrainingRun, environment: TrainingEnvironment, display: TrainingDisplay, console: Console
) -> None:
    """Run one rollout with the untrained model, and show its tokens with `turngate show`."""
    plan = msgspec.structs.replace(
        run.goal.batch, tasks=run.held_out[:1], n=1, name="first", folder=run.folder / "first"
    )
    began = time.monotonic()
    display.start_phase("one rollout, untrained", 1)
    result = await evaluate(environment, plan, display.update)
    seconds = time.monotonic() - began
    rollout = next((one for one in result.finished if one.session), None)
    if rollout is None:
        say(
            console,
            "The first rollout recorded nothing. The training below shows why, if that happens again.",
            "yellow",
        )
        return
    say(console, f"One rollout of the untrained model took {seconds:.0f} s. These are its tokens:", "bold")
    command = ["show", rollout.session, "--data", str(run.folder / "data"), "--tokens"]
    say(console, f"$ turngate {' '.join(command)}", "bold")
    await asyncio.to_thread(subprocess.run, [sys.executable, "-m", "turngate", *command], check=False)


async def run_demo(options: argparse.Namespace) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    sandbox = await find_sandbox(options.sandbox)
    out = Path(options.out)
    if out.exists():
        say(console, f"(removing the files of an earlier demo in {out})", "dim")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    run = build_run(options, sandbox, out)
    print_plan(run, console)
    async with open_run(run) as environment:
        print_page(environment, run, console)
        with TrainingDisplay(console, run.goal.steps) as display:
            await show_first_rollout(run, environment, display, console)
        say(console, f"\nNow {run.rollouts} more rollouts, with training.\n", "bold")
        with TrainingDisplay(console, run.goal.steps, run.rollouts) as display:
            result = await train_and_evaluate(run, environment, display.callbacks())
            await print_improvements(environment, result, console)
    print_result(result, console)
    plot = write_files(result, out, "mini-SWE-agent with SmolLM2-135M learns errands")
    say(console, f"\n{result.seconds / 60:.1f} minutes. Plot: {plot}", "bold")
    if options.fast:
        say(console, TOO_SHORT, "yellow")
    turngate = Path(sys.executable).parent / "turngate"
    say(console, f"Look at a rollout: {turngate} show last --data {out / 'data'}", "dim")
    say(console, f"Look at all of them on the web page: {turngate} serve --data {out / 'data'}", "dim")


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line without wrapping it, so that it can be copied."""
    console.print(text, style=style or None, soft_wrap=True)


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an agent on two CPU cores, or on a GPU.")
    parser.add_argument("--model", choices=["smollm2", "coder"], default="smollm2", help="coder: needs a GPU")
    parser.add_argument("--fast", action="store_true", help="do the same with fewer steps, in two to three minutes")
    parser.add_argument("--seed", type=int, default=0, help="order of the tasks, and sampling seed")
    parser.add_argument("--steps", type=int, default=0, help=f"training steps (default: {STEPS}, or 3 with --fast)")
    parser.add_argument(
        "--held-out",
        type=int,
        default=0,
        help=f"tasks to evaluate before and after training (default: {HELD_OUT}, or {HELD_OUT_FAST} with --fast)",
    )
    parser.add_argument("--sandbox", default="", help="bubblewrap, docker or local (default: an isolated one)")
    parser.add_argument("--out", default="turngate-data/demo", help="output folder; its contents are deleted first")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    if options.model == "coder":
        if options.steps or options.held_out:
            raise SystemExit("--steps and --held-out do not apply to --model coder; leave them out")
        if refusal := demo_coder.explain_refusal(demo_coder.find_gpu()):
            raise SystemExit(refusal)
        sandbox = asyncio.run(find_sandbox(options.sandbox))
        demo_coder.run_demo(Path(options.out), sandbox.name, fast=options.fast, seed=options.seed)
    else:
        asyncio.run(run_demo(options))


if __name__ == "__main__":
    try:
        main()
    except (TurngateError, parts.PartError) as error:
        raise SystemExit(f"error: {error}") from None
    except KeyboardInterrupt:
        print("\nstopped")
        raise SystemExit(130) from None
