"""Train Qwen2.5-Coder-1.5B-Instruct in mini-SWE-agent to repair packages, on one GPU.

    python train.py --model MODEL_FOLDER --tasks FOLDER --out FOLDER [--sft FILE …]

    0  with --sft, fine-tune on an expert's traces first (`expert.py`, `reviews.py`)
    1  evaluate the held-out packages: several samples of each task
    2  train with GRPO: gateway, engine (bfloat16) and trainer (float32) in this process, the agents' runner in another one; with
       --shuffle, the advantages of each step are shuffled, as a control that must not help
    3  evaluate the held-out packages again

FOLDER of --tasks is the output of `turngate tasks make repairs`. Measurements are written as soon as they are known: `metrics.jsonl` (a
line per step) and `result.json`. docs/training-coder.md reports what it measured on an H200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from agent import CONTEXT, REPLY, STEPS
from compare import SHORTEST, compute_rates, count_solved_at_once, find_interval
from runner import RunnerConfig
from tasks import Part
from warm_start import fine_tune

from turngate.client.feed import Feed, Row
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.config import ServeConfig
from turngate.engines.local import LocalEngine, Model, load, save
from turngate.server.run import GatewayAddress, run_embedded, run_in_thread
from turngate.trainers.local.grpo import GrpoSettings, Learner, Step, Trainer, UpdateMetrics

import torch  # isort: skip  # after turngate.engines.local, which configures how torch's threads wait

sys.path.append(str(Path(__file__).parents[1]))  # for the modules that both examples share
from rollout_process import RunnerReport, record_result, run_rollouts, start_runners, train_beside

HERE = Path(__file__).parent
NAME = "coder"
TRAIN, HELD_OUT = "train.jsonl", "held-out.jsonl"


def configure_runner(options: argparse.Namespace, address: GatewayAddress, name: str, **more: Any) -> RunnerConfig:
    return RunnerConfig(
        url=address.url,
        key=address.admin_key,
        model=NAME,
        name=name,
        folder=str(options.out / name),
        running=options.running,
        python=options.python,
        sandbox=options.sandbox,
        fork=not options.cold,
        **more,
    )


def choose_limits(options: argparse.Namespace) -> dict[str, Any]:
    return {"edits": options.edits, "steps": options.turns, "context": options.context, "reply": options.reply}


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def evaluate(options: argparse.Namespace, address: GatewayAddress, name: str) -> None:
    config = configure_runner(
        options,
        address,
        name,
        tasks=str(options.tasks / HELD_OUT),
        count=options.held_out,
        n=options.samples,
        **choose_limits(options),
    )
    report = await run_rollouts(HERE / "runner.py", config, options.runners)
    record_result(options.out, **{name: summarize(report, shortest=1 if options.edits else SHORTEST)})
    (options.out / f"{name}.json").write_bytes(msgspec.json.encode(report.graded))


def summarize(report: RunnerReport, shortest: int = SHORTEST) -> dict[str, Any]:
    """Summarize an evaluation: pass@1 with its 95 % interval (a bootstrap over tasks), and the share of tasks solved at least once."""
    summary: dict[str, Any] = msgspec.to_builtins(report)
    del summary["graded"]
    rates = list(compute_rates(report.graded).values())
    if not rates:
        return summary
    return summary | {
        "pass_at_1": sum(rates) / len(rates),
        "interval": find_interval(rates),
        "solved_once": sum(rate > 0 for rate in rates) / len(rates),
        "solved_at_once": count_solved_at_once(report.graded, shortest) / len(report.graded),
    }


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Progress:
    """Writes a line per step, and keeps the steps."""

    def __init__(self, out: Path) -> None:
        self.steps: list[Step] = []
        self.began = time.monotonic()
        self._out = out

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def add(self, step: Step) -> None:
        self.steps.append(step)
        line = msgspec.to_builtins(step) | {"at": round(self.seconds, 2), "memory": torch.cuda.max_memory_allocated()}
        del line["rewards"]
        with (self._out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        measured = step.measured
        print(
            f"step {step.step:3d}  {self.seconds:6.1f} s  passed {step.passed or 0:.2f}  rows {measured.rows}  "
            f"tokens {measured.tokens}  stale {step.stale}  wait {step.seconds['wait']:.1f}  train {step.seconds['train']:.1f}  "
            f"entropy {measured.entropy:.2f}  from start {measured.reference_divergence}  "
            f"difference {measured.difference}  gradient {step.gradient:.2f}  "
            f"excluded {step.excluded} {list(step.why)[:2]}  refused {len(measured.refused)}",
            flush=True,
        )


class ShufflingLearner(Learner):
    """Shuffles the advantages of a step among its rows. A control: nothing can be learned from them."""

    def __init__(self, model: Model, settings: GrpoSettings, seed: int) -> None:
        super().__init__(model, settings)
        self._chance = random.Random(seed)

    def gradients(self, rows: Sequence[Row], version: int) -> UpdateMetrics:
        advantages = [row.advantage for row in rows]
        self._chance.shuffle(advantages)
        dealt = [msgspec.structs.replace(row, advantage=one) for row, one in zip(rows, advantages, strict=True)]
        return super().gradients(dealt, version)


async def train(options: argparse.Namespace, address: GatewayAddress, engine: LocalEngine) -> None:
    config = configure_runner(
        options,
        address,
        "grpo",
        tasks=str(options.tasks / TRAIN),
        part=options.part,
        seed=options.seed,
        max_lines=options.max_lines,
        short_first=options.short_first,
        count=options.train,
        n=options.n,
        rounds=options.rounds,
        **choose_limits(options),
        feed="grpo",
        ahead=options.ahead * options.groups,
    )
    settings = GrpoSettings(
        groups=options.groups,
        learning_rate=options.rate,
        warm_up=options.warm_up,
        batch_tokens=options.batch_tokens,
        tolerance=options.tolerance,
        normalise=options.normalise,
        bfloat16=options.precision == "bfloat16",
        reference_kl=options.reference_kl,
    )
    progress = Progress(options.out)
    async with GatewayClient(address.url, address.admin_key) as gateway:
        trainer = Trainer(engine, gateway, settings, watch=progress.add)
        if options.shuffle:
            trainer.learner = ShufflingLearner(engine.model, settings, options.seed)
        await trainer.restore()
        feed_config = FeedConfig(n=options.n, max_staleness=options.stale, groups="grpo.")
        async with (
            await Feed.open(gateway, "grpo", feed_config) as feed,
            start_runners(HERE / "runner.py", config, options.runners) as runners,
        ):
            report = await train_beside(runners, trainer, feed, steps=options.steps, minutes=options.minutes)
        await gateway.delete_feed("grpo")
    record_result(options.out, grpo=describe_training(progress.steps, report, progress.seconds))


def describe_training(steps: list[Step], report: RunnerReport, seconds: float) -> dict[str, Any]:
    summary: dict[str, Any] = msgspec.to_builtins(report)
    del summary["graded"]
    measured = [step.measured for step in steps]
    return {
        "steps": len(steps),
        "seconds": seconds,
        "rollouts_per_s": report.rollouts / seconds,
        "sampled_per_s": report.sampled_tokens / seconds,
        "trained_tokens": sum(one.tokens for one in measured),
        "rows": sum(one.rows for one in measured),
        "refused": sum(len(one.refused) for one in measured),
        "waited_s": sum(step.seconds["wait"] for step in steps),
        "trained_s": sum(step.seconds["train"] for step in steps),
        "passed": [round(step.passed or 0.0, 3) for step in steps],
        "runner": summary,
    }


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def run(options: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high")  # tf32 for the trainer; the engine samples in bfloat16 anyway
    network = load(options.model, "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    if options.sft:
        warm = fine_tune(
            network,
            options.sft,
            rate=options.warm_rate,
            batch_tokens=options.warm_tokens,
            seed=options.seed,
            updates=options.warm_updates,
        )
        record_result(options.out, warm=warm)
        torch.cuda.empty_cache()
        save(network, options.out / "warm", options.model)
    network.recompute = not options.keep_activations
    engine = LocalEngine(network, dtype=options.dtype, slots=options.slots, max_context=options.context)
    data = ServeConfig(
        data=str(options.out / "data"), port=0, model=NAME, tokenizer=str(options.model), max_context=options.context
    )
    with run_in_thread(run_embedded(data.check(), engine=engine)) as address:
        if options.held_out and not options.only_after:
            await evaluate(options, address, "before")
        if options.steps:
            await train(options, address, engine)
            if options.held_out:
                await evaluate(options, address, "after")
    if options.save:
        save(network, options.out / "model", options.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--tasks", type=Path, required=True, help=f"folder with {TRAIN} and {HELD_OUT}")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty")
    parser.add_argument(
        "--sft",
        type=Path,
        nargs="*",
        help="rows of `expert.py` and `reviews.py` for a warm start; without it, GRPO starts from MODEL_FOLDER",
    )
    parser.add_argument("--warm-rate", type=float, default=1.5e-5)
    parser.add_argument(
        "--warm-updates", type=int, default=0, help="updates of the warm start (0: one epoch over its rows)"
    )
    parser.add_argument("--warm-tokens", type=int, default=16384, help="tokens per update of the warm start")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed for the order of the warm start's rows and of the training tasks, and for --shuffle",
    )
    parser.add_argument("--train", type=int, default=250, help="number of tasks to train on")
    parser.add_argument(
        "--part",
        default="grpo",
        choices=get_args(Part),
        help="training tasks to use; grpo: those whose solutions the expert did not show",
    )
    parser.add_argument(
        "--max-lines", type=int, default=0, help="train only on functions of at most this many lines (0: all)"
    )
    parser.add_argument("--short-first", action="store_true", help="in each pass, train on the short functions first")
    parser.add_argument("--rounds", type=int, default=4, help="passes over these tasks")
    parser.add_argument("--held-out", type=int, default=100, help="number of held-out tasks (0: no evaluations)")
    parser.add_argument("--samples", type=int, default=4, help="rollouts per held-out task")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=12.0, help="start no step after this many minutes")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--n", type=int, default=8, help="rollouts per group")
    parser.add_argument("--rate", type=float, default=4e-6)
    parser.add_argument("--warm-up", type=int, default=0, help="updates over which the learning rate rises to --rate")
    parser.add_argument("--ahead", type=int, default=2, help="number of steps whose groups may be in progress")
    parser.add_argument("--stale", type=int, default=4, help="maximum age of a row in policy versions")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--tolerance", type=float, default=2.0, help="bfloat16 sampling and tf32 training differ")
    parser.add_argument(
        "--normalise",
        default="token",
        choices=["token", "sequence"],
        help="token: all tokens of a step weigh the same; sequence: all rollouts, so that long ones do not count more",
    )
    parser.add_argument("--reference-kl", type=float, default=0.0, help="weight of the penalty for leaving the start")
    parser.add_argument("--running", type=int, default=64, help="agents running at the same time")
    parser.add_argument(
        "--runners", type=int, default=1, help="processes that share these agents; a runner fills one core"
    )
    parser.add_argument("--turns", type=int, default=STEPS, help="maximum number of steps of an agent")
    parser.add_argument("--edits", action="store_true", help="the tasks have the command of edit_command.py")
    parser.add_argument("--context", type=int, default=CONTEXT, help="maximum number of tokens of a rollout")
    parser.add_argument("--reply", type=int, default=REPLY, help="maximum number of tokens of an answer")
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="precision of sampling")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"], help="precision of training")
    parser.add_argument("--keep-activations", action="store_true", help="more memory for a faster backward pass")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument(
        "--cold", action="store_true", help="start each agent as the catalog says, without the fork server"
    )
    parser.add_argument(
        "--python",
        default=".".join(platform.python_version_tuple()[:2]),
        help="Python version to install the agent for",
    )
    parser.add_argument("--shuffle", action="store_true", help="control: shuffle the advantages of each step")
    parser.add_argument("--only-after", action="store_true", help="evaluate only after the training")
    parser.add_argument("--save", action="store_true", help="save the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
