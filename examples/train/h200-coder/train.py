"""Train Qwen2.5-Coder-1.5B-Instruct in mini-SWE-agent to repair packages, on one GPU.

    python train.py --model MODEL_FOLDER --tasks FOLDER --out FOLDER [--sft FILE]

    0  with --sft, fine-tune on an expert's traces first (`expert.py`)
    1  evaluate the held-out packages: several samples of each task
    2  train with GRPO: gateway, engine (bfloat16) and trainer (float32) in this process, the agents' runner in another one
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from agent import CONTEXT
from runner import RunnerConfig, RunnerReport
from warm_start import fine_tune

from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.config import ServeConfig
from turngate.engines.local import LocalEngine, load, save
from turngate.server.run import GatewayAddress, run_embedded, run_in_thread
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer

import torch  # isort: skip  # after turngate.engines.local, which configures how torch's threads wait

HERE = Path(__file__).parent
NAME = "coder"
TRAIN, HELD_OUT = "train.jsonl", "held-out.jsonl"


# ── the runner ──────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def start_runner(config: RunnerConfig) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "runner.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config))
        process.stdin.close()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def read_report(process: asyncio.subprocess.Process) -> RunnerReport:
    assert process.stdout is not None
    output = await process.stdout.read()
    if await process.wait():
        raise SystemExit(f"runner.py failed with exit code {process.returncode}")
    return msgspec.json.decode(output, type=RunnerReport)


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


# ── evaluation ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def evaluate(options: argparse.Namespace, address: GatewayAddress, name: str) -> None:
    config = configure_runner(
        options,
        address,
        name,
        tasks=str(options.tasks / HELD_OUT),
        count=options.held_out,
        n=options.samples,
    )
    async with start_runner(config) as process:
        report = await read_report(process)
    record_result(options.out, **{name: summarize(report)})
    (options.out / f"{name}.json").write_bytes(msgspec.json.encode(report.graded))


def summarize(report: RunnerReport) -> dict[str, Any]:
    """Summarize an evaluation: pass@1 with its 95 % interval (a bootstrap over tasks), and the share of tasks solved at least once."""
    by_task: dict[str, list[float]] = {}
    for one in report.graded:
        by_task.setdefault(one.task, []).append(float(one.reward >= 1))
    rates = [sum(passed) / len(passed) for passed in by_task.values()]
    chance = random.Random(0)
    means = sorted(sum(chance.choices(rates, k=len(rates))) / len(rates) for _ in range(2000)) if rates else [0.0]
    summary: dict[str, Any] = msgspec.to_builtins(report)
    del summary["graded"]
    return summary | {
        "pass_at_1": sum(rates) / len(rates) if rates else None,
        "interval": [means[len(means) // 40], means[-1 - len(means) // 40]],
        "solved_once": sum(rate > 0 for rate in rates) / len(rates) if rates else None,
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
            f"entropy {measured.entropy:.2f}  apart {measured.difference}  gradient {step.gradient:.2f}  "
            f"excluded {step.excluded} {list(step.why)[:2]}  refused {len(measured.refused)}",
            flush=True,
        )


async def train(options: argparse.Namespace, address: GatewayAddress, engine: LocalEngine) -> None:
    config = configure_runner(
        options,
        address,
        "grpo",
        tasks=str(options.tasks / TRAIN),
        count=options.train,
        n=options.n,
        rounds=options.rounds,
        feed="grpo",
        ahead=options.ahead * options.groups,
    )
    settings = GrpoSettings(
        groups=options.groups,
        learning_rate=options.rate,
        batch_tokens=options.batch_tokens,
        tolerance=options.tolerance,
    )
    progress = Progress(options.out)
    async with GatewayClient(address.url, address.admin_key) as gateway:
        trainer = Trainer(engine, gateway, settings, watch=progress.add)
        await trainer.restore()
        feed_config = FeedConfig(n=options.n, max_staleness=options.stale, groups="grpo.")
        async with await Feed.open(gateway, "grpo", feed_config) as feed, start_runner(config) as process:
            reporting = asyncio.create_task(read_report(process))
            while progress.seconds < 60 * options.minutes and trainer.state.step < options.steps:
                step = asyncio.create_task(trainer.run(feed, trainer.state.step + 1))
                await asyncio.wait({step, reporting}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    step.cancel()
                    raise SystemExit(f"the runner ended early: {await reporting}")
                await step
            seconds = progress.seconds
            process.terminate()
            report = await reporting
        await gateway.delete_feed("grpo")
    record_result(options.out, grpo=describe_training(progress.steps, report, seconds))


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
    network.recompute = True
    if options.sft:
        warm = fine_tune(network, options.sft, epochs=options.warm_epochs, rate=options.warm_rate)
        record_result(options.out, warm=warm)
        torch.cuda.empty_cache()
    engine = LocalEngine(network, dtype=options.dtype, slots=options.slots, max_context=CONTEXT)
    data = ServeConfig(
        data=str(options.out / "data"), port=0, model=NAME, tokenizer=str(options.model), max_context=CONTEXT
    )
    with run_in_thread(run_embedded(data.check(), engine=engine)) as address:
        if options.held_out:
            await evaluate(options, address, "before")
        if options.steps:
            await train(options, address, engine)
            if options.held_out:
                await evaluate(options, address, "after")
    if options.save:
        save(network, options.out / "model", options.model)


def record_result(out: Path, **entries: Any) -> None:
    """Add entries to result.json, and print them."""
    file = out / "result.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(before | entries, indent=1))
    new.replace(file)
    for name, value in entries.items():
        print(f"{name}: {json.dumps(value)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of Qwen2.5-Coder-1.5B-Instruct")
    parser.add_argument("--tasks", type=Path, required=True, help=f"folder with {TRAIN} and {HELD_OUT}")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty")
    parser.add_argument(
        "--sft", type=Path, help="rows of `expert.py` for a warm start; without it, GRPO starts from the base model"
    )
    parser.add_argument("--warm-epochs", type=int, default=2)
    parser.add_argument("--warm-rate", type=float, default=1e-5)
    parser.add_argument("--train", type=int, default=250, help="number of tasks to train on")
    parser.add_argument("--rounds", type=int, default=4, help="passes over these tasks")
    parser.add_argument("--held-out", type=int, default=100, help="number of held-out tasks (0: no evaluations)")
    parser.add_argument("--samples", type=int, default=4, help="rollouts per held-out task")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=12.0, help="start no step after this many minutes")
    parser.add_argument("--groups", type=int, default=8, help="groups per step")
    parser.add_argument("--n", type=int, default=8, help="rollouts per group")
    parser.add_argument("--rate", type=float, default=4e-6)
    parser.add_argument("--ahead", type=int, default=2, help="number of steps whose groups may be in progress")
    parser.add_argument("--stale", type=int, default=4, help="maximum age of a row in policy versions")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--tolerance", type=float, default=2.0, help="bfloat16 sampling and tf32 training differ")
    parser.add_argument("--running", type=int, default=64, help="agents running at the same time")
    parser.add_argument("--slots", type=int, default=96)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"], help="precision of sampling")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument(
        "--cold", action="store_true", help="start each agent as the catalog says, without the fork server"
    )
    parser.add_argument(
        "--python",
        default=".".join(platform.python_version_tuple()[:2]),
        help="Python version to install the agent for",
    )
    parser.add_argument("--save", action="store_true", help="save the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
