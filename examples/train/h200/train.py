"""Train a tool-calling mini-swe-agent with SmolLM2-135M-Instruct on one GPU: a warm start on an expert's traces, then GRPO.

    python train.py --model MODEL_FOLDER --out FOLDER

    1  run the real agent through the gateway with a scripted expert as the model, and export the traces in the `sft` format
    2  fine-tune the model on the exported traces
    3  evaluate the held-out tasks
    4  train with GRPO: gateway, engine and trainer in this process, the agents' runner in another one (`runner.py`), a feed between them
    5  evaluate the held-out tasks again

Measurements are written to FOLDER as soon as they are known: `metrics.jsonl` (a line per step) and `result.json`. docs/training-h200.md
reports a run on an H200.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import re
import shutil
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import tasks
import torch
from runner import CONTEXT, RunnerConfig

from turngate.client.feed import Feed
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.config import ServeConfig
from turngate.engines.base import Engine, Generate
from turngate.engines.local import LocalEngine, Model, load, save
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.render import load_renderer
from turngate.server.run import GatewayAddress, run_embedded, run_in_thread
from turngate.trainers.export import ExportChoices, RolloutFilter, export
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer

sys.path.append(str(Path(__file__).parents[1]))  # for the modules that both examples share
from rollout_process import RunnerReport, record_result, run_rollouts, start_runners, train_beside
from supervised import update

HERE = Path(__file__).parent
RUNNER = HERE / "runner.py"
NAME = "smollm2"


# ── the model folder ────────────────────────────────────────────────────────────────────────────────────────────────


def add_tool_template(model: Path, new: Path) -> Path:
    """Link the model into a new folder, with a chat template that supports tools. The model's own template does not."""
    new.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.is_file() and not file.name.startswith(".") and not (new / file.name).exists():
            (new / file.name).symlink_to(file.resolve())
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    for name, text in {
        "tokenizer_config.json": json.dumps(config, indent=2),
        "chat_template.jinja": (HERE / "chat_template.jinja").read_text(),
    }.items():
        (new / name).unlink(missing_ok=True)
        (new / name).write_text(text)
    return new


# ── gateway and runner ──────────────────────────────────────────────────────────────────────────────────────────────


def run_gateway(model: Path, data: Path, engine: Engine) -> AbstractContextManager[GatewayAddress]:
    """Run a gateway in its own thread, so that its CPU time can be measured separately."""
    config = ServeConfig(data=str(data), port=0, model=NAME, tokenizer=str(model), max_context=CONTEXT).check()
    return run_in_thread(run_embedded(config, engine=engine))


# ── 1: the expert ───────────────────────────────────────────────────────────────────────────────────────────────────


def build_expert(model: Path) -> Scripted:
    """Build a scripted engine that knows the commands for each instruction, and reads the output of earlier commands.

    Nothing is sampled, so there are no log-probabilities.
    """
    tokenizer = load_renderer(model)[0].tokenizer
    [end] = tokenizer.encode("<|im_end|>")
    moves = {row["instruction"]: row["metadata"]["moves"] for row in tasks.expert()}

    def script(request: Generate, index: int) -> ScriptedTurn:
        prompt = tokenizer.decode(list(request.prompt))
        instruction = re.findall(r"<\|im_start\|>user\n(.*?)\n\nUse bash", prompt, re.DOTALL)[0]
        responses = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
        command = moves[instruction][index].replace("{seen}", responses[-1].split()[-1] if responses else "")
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return ScriptedTurn([*tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>"), end], chunk=0, null_logprobs=True)

    return Scripted(script, model=NAME)


async def record_expert(options: argparse.Namespace, model: Path, out: Path) -> Path:
    """Run the expert, export its traces, and return the exported file."""
    data, rows = out / "expert", out / "sft.jsonl"
    with run_gateway(model, data, build_expert(model)) as address:
        report = await run_rollouts(
            RUNNER, _runner_config(options, address, "expert", options.traces, 1, out / "expert-batch")
        )
    choices = ExportChoices(format="sft", form="tokens", imitate=True, wanted=RolloutFilter(min_reward=1.0))
    exported = export(data, rows, choices)
    record_result(
        out,
        expert=summarize(report),
        exported={"records": exported.records, "left_out": dict(exported.left_out)},
    )
    return rows


# ── 2: the warm start ───────────────────────────────────────────────────────────────────────────────────────────────


def warm_start(options: argparse.Namespace, model: Model, file: Path, out: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()][: options.warm_rows or None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.warm_rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, losses, rng = time.monotonic(), [], random.Random(0)
    batches = [
        batch for _ in range(options.warm_epochs) for batch in _batches(rng.sample(rows, len(rows)), options.warm_batch)
    ]
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = options.warm_rate * min(1.0, (number + 1) / 5) * (1 - number / len(batches))
        losses.append(update(model, optimizer, batch))
    record_result(
        out,
        warm={
            "rows": len(rows),
            "tokens": sum(len(row["input_ids"]) for row in rows),
            "learnt": sum(label >= 0 for row in rows for label in row["labels"]),
            "updates": len(losses),
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "seconds": time.monotonic() - began,
        },
    )


def _batches(rows: list[Any], size: int) -> list[list[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


# ── 3 to 5: before, GRPO, after ─────────────────────────────────────────────────────────────────────────────────────


async def train_and_evaluate(options: argparse.Namespace, model: Path, network: Model, out: Path) -> None:
    engine = LocalEngine(network, dtype=options.dtype, slots=options.slots, max_context=CONTEXT)
    with run_gateway(model, out / "data", engine) as address:
        if options.held_out:
            await evaluate(options, address, out, "before")
            await evaluate(options, address, out, "before_greedy", 0.0)
        if options.steps:
            await train(options, address, engine, out)
        if options.steps and options.held_out:
            await evaluate(options, address, out, "after")
            await evaluate(options, address, out, "after_greedy", 0.0)
    if options.save:
        save(network, out / "model", model)


async def evaluate(
    options: argparse.Namespace, address: GatewayAddress, out: Path, name: str, temperature: float = 1.0
) -> None:
    config = _runner_config(options, address, "held_out", options.held_out, 1, out / name)
    report = await run_rollouts(RUNNER, msgspec.structs.replace(config, temperature=temperature))
    record_result(out, **{name: summarize(report)})


def summarize(report: RunnerReport) -> dict[str, Any]:
    """Return the report with the share of passed rollouts by kind of task, instead of one line per rollout."""
    by_kind: dict[str, list[bool]] = {}
    for one in report.graded:
        by_kind.setdefault(one.task.rsplit("-", 1)[1], []).append(one.reward >= 1)
    summary: dict[str, Any] = msgspec.to_builtins(report)
    return summary | {
        "graded": len(report.graded),
        "by_kind": {kind: round(sum(values) / len(values), 3) for kind, values in sorted(by_kind.items())},
    }


async def train(options: argparse.Namespace, address: GatewayAddress, engine: LocalEngine, out: Path) -> None:
    config = _runner_config(options, address, "training", options.steps * options.groups + 50, options.n, out / "grpo")
    began, cpu = time.monotonic(), measure_threads()
    steps: list[Step] = []

    def watch(step: Step) -> None:
        steps.append(step)
        line = msgspec.to_builtins(step) | {"at": round(time.monotonic() - began, 2)}
        del line["rewards"]
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"step {step.step:3d}  {line['at']:6.1f} s  reward {step.reward or 0:.2f}  passed {step.passed or 0:.2f}  "
            f"stale {step.stale}  wait {step.seconds['wait']:.1f}  train {step.seconds['train']:.1f}  "
            f"difference {step.measured.difference}",
            flush=True,
        )

    settings = GrpoSettings(
        groups=options.groups,
        learning_rate=options.rate,
        batch_tokens=options.batch_tokens,
        tolerance=options.tolerance,
    )
    async with GatewayClient(address.url, address.admin_key) as gateway:
        trainer = Trainer(engine, gateway, settings, watch=watch)
        await trainer.restore()
        feed_config = FeedConfig(n=options.n, max_staleness=options.stale)
        async with await Feed.open(gateway, "grpo", feed_config) as feed:
            throttled = msgspec.structs.replace(config, feed="grpo", ahead=options.ahead * options.groups)
            async with start_runners(RUNNER, throttled) as runners:
                report = await train_beside(runners, trainer, feed, steps=options.steps, minutes=options.minutes)
            await gateway.delete_feed("grpo")
    seconds = time.monotonic() - began
    spent = {name: round(value - cpu.get(name, 0.0), 2) for name, value in measure_threads().items()}
    record_result(
        out,
        grpo={
            "steps": len(steps),
            "seconds": seconds,
            "rollouts": report.rollouts,
            "rollouts_per_s": report.rollouts / seconds,
            "sampled_tokens": report.sampled_tokens,
            "sampled_per_s": report.sampled_tokens / seconds,
            "trained_tokens": sum(step.measured.tokens for step in steps),
            "waited_s": sum(step.seconds["wait"] for step in steps),
            "trained_s": sum(step.seconds["train"] for step in steps),
            "first_ten": _mean(steps[:10]),
            "last_ten": _mean(steps[-10:]),
            "cpu_by_thread": spent,
            "runner": summarize(report),
            "apart": [value for step in steps if (value := step.measured.difference) is not None][-20:],
        },
    )


def _mean(steps: list[Step]) -> dict[str, float]:
    known = [step for step in steps if step.reward is not None and step.passed is not None]
    return {
        "reward": sum(step.reward or 0 for step in known) / max(1, len(known)),
        "passed": sum(step.passed or 0 for step in known) / max(1, len(known)),
    }


def _runner_config(
    options: argparse.Namespace, address: GatewayAddress, tasks: str, count: int, n: int, folder: Path
) -> RunnerConfig:
    return RunnerConfig(
        url=address.url,
        key=address.admin_key,
        model=NAME,
        folder=str(folder),
        tasks=tasks,
        count=count,
        n=n,
        running=options.running,
        python=options.python,
        sandbox=options.sandbox,
        fork=not options.cold,
    )


# ── CPU time ────────────────────────────────────────────────────────────────────────────────────────────────────


def measure_threads() -> dict[str, float]:
    """Measure the CPU seconds of each thread of this process. Threads that Python did not start are summed up as `torch`."""
    names = {thread.native_id: re.sub(r"[-_ ]?\d+$", "", thread.name) for thread in threading.enumerate()}
    spent: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # the thread has ended
        name = names.get(int(task.name), "torch")
        spent[name] = spent.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty")
    parser.add_argument("--sft", type=Path, help="an earlier export to use; without it, the expert is run first")
    parser.add_argument("--only-traces", action="store_true", help="stop after the export")
    parser.add_argument("--traces", type=int, default=210, help="number of expert rollouts")
    parser.add_argument("--warm-rows", type=int, default=140, help="number of exported rows to fine-tune on (0: all)")
    parser.add_argument("--warm-epochs", type=int, default=2)
    parser.add_argument("--warm-batch", type=int, default=14)
    parser.add_argument("--warm-rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0, help="start no step after this many minutes")
    parser.add_argument("--groups", type=int, default=4, help="groups per step")
    parser.add_argument("--n", type=int, default=8, help="rollouts per group")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--ahead", type=int, default=3, help="number of steps whose groups may be in progress")
    parser.add_argument("--stale", type=int, default=6, help="maximum age of a row in policy versions")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--held-out", type=int, default=63, help="number of held-out tasks (0: skip the evaluations)")
    parser.add_argument("--running", type=int, default=48, help="agents running at the same time")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="precision of sampling; training uses float32",
    )
    parser.add_argument("--sandbox", default="local")
    parser.add_argument(
        "--cold", action="store_true", help="start each agent as the catalog says, without fork_server.py"
    )
    parser.add_argument(
        "--python",
        default=".".join(platform.python_version_tuple()[:2]),
        help="Python version to install the agent for",
    )
    parser.add_argument("--save", action="store_true", help="save the trained model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model = add_tool_template(options.model, options.out / "base")
    rows = options.sft or asyncio.run(record_expert(options, model, options.out))
    if options.only_traces:
        return
    if rows.parent != options.out:
        shutil.copyfile(rows, options.out / "sft.jsonl")
    network = load(model, "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    warm_start(options, network, rows, options.out)
    asyncio.run(train_and_evaluate(options, model, network, options.out))


if __name__ == "__main__":
    main()
