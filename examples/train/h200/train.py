"""From traces to a better agent on one GPU: a tool-calling mini-swe-agent, SmolLM2-135M-Instruct, a warm start, then GRPO.

    python train.py --model MODEL_FOLDER --out FOLDER

    1  an expert plays the model's part: real rollouts of the real agent through the gateway, exported with `turngate export sft`
    2  a warm start on what was exported
    3  the held-out tasks, before
    4  GRPO: gateway, engine and trainer in this process, the agents' runner in another one (`roll.py`), a feed between them
    5  the held-out tasks, after

Everything that is measured is in FOLDER as soon as it is known: `metrics.jsonl` (a line per step), `result.json`. How it was run on an
H200, and what came of it: docs/training-h200.md.
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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import tasks
import torch
from roll import CONTEXT, Came, Orders
from torch.nn import functional as F

from turngate.client.feed import Feed, FeedConfig
from turngate.client.gateway import GatewayClient
from turngate.common.loop_thread import LoopThread
from turngate.config import ServeConfig
from turngate.engines.base import Engine, Generate
from turngate.engines.local import LocalEngine, Model, load, save
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.render import load_renderer as load_renderer
from turngate.server.run import GatewayAddress, run_embedded
from turngate.trainers.export import ExportChoices, RolloutFilter, export
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer

HERE = Path(__file__).parent
NAME = "smollm2"


# ── the model folder ────────────────────────────────────────────────────────────────────────────────────────────────


def with_tools(model: Path, new: Path) -> Path:
    """The same model with a chat template that knows tools: the model's own has none."""
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


class Gateway:
    """In a thread of its own, so that what it costs can be told from the rest."""

    def __init__(self, model: Path, data: Path, engine: Engine) -> None:
        self._thread = LoopThread("gateway")
        config = ServeConfig(data=str(data), port=0, model=NAME, tokenizer=str(model), max_context=CONTEXT).check()
        self._running = run_embedded(config, engine=engine)

    def __enter__(self) -> GatewayAddress:
        self._thread.start()
        return self._thread.run(self._running.__aenter__())

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._running.__aexit__(None, None, None))
        self._thread.stop()


@asynccontextmanager
async def runner(orders: Orders) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(HERE / "roll.py"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders))
        process.stdin.close()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ended(process: asyncio.subprocess.Process) -> Came:
    assert process.stdout is not None
    said = await process.stdout.read()
    if await process.wait():
        raise SystemExit(f"roll.py ended with {process.returncode}")
    return msgspec.json.decode(said, type=Came)


async def rolled(orders: Orders) -> Came:
    async with runner(orders) as process:
        return await ended(process)


# ── 1: the expert ───────────────────────────────────────────────────────────────────────────────────────────────────


def expert(model: Path) -> Scripted:
    """Knows what to do by what is asked and how often; what it has to find out it reads like any other. Nothing is sampled here, so there
    are no log-probabilities."""
    tokenizer = load_renderer(model)[0].tokenizer
    [end] = tokenizer.encode("<|im_end|>")
    moves = {row["instruction"]: row["metadata"]["moves"] for row in tasks.expert()}

    def script(request: Generate, index: int) -> ScriptedTurn:
        prompt = tokenizer.decode(list(request.prompt))
        asked = re.findall(r"<\|im_start\|>user\n(.*?)\n\nUse bash", prompt, re.DOTALL)[0]
        shown = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", prompt, re.DOTALL)
        command = moves[asked][index].replace("{seen}", shown[-1].split()[-1] if shown else "")
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        return ScriptedTurn([*tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>"), end], chunk=0, null_logprobs=True)

    return Scripted(script, model=NAME)


async def traces(given: argparse.Namespace, model: Path, out: Path) -> Path:
    data, rows = out / "expert", out / "sft.jsonl"
    with Gateway(model, data, expert(model)) as address:
        came = await rolled(_orders(given, address, "expert", given.traces, 1, out / "expert-batch"))
    choices = ExportChoices(format="sft", form="tokens", imitate=True, wanted=RolloutFilter(min_reward=1.0))
    told = export(data, rows, choices)
    note(out, expert=msgspec.to_builtins(came), exported={"records": told.records, "left_out": dict(told.left_out)})
    return rows


# ── 2: the warm start ───────────────────────────────────────────────────────────────────────────────────────────────


def warm_start(given: argparse.Namespace, model: Model, file: Path, out: Path) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()][: given.warm_rows or None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.warm_rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, losses, draw = time.monotonic(), [], random.Random(0)
    batches = [
        batch for _ in range(given.warm_epochs) for batch in _batches(draw.sample(rows, len(rows)), given.warm_batch)
    ]
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = given.warm_rate * min(1.0, (number + 1) / 5) * (1 - number / len(batches))
        losses.append(_learnt(model, optimizer, batch))
    note(
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
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _learnt(model: Model, optimizer: torch.optim.Optimizer, batch: list[Any]) -> float:
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for n, row in enumerate(batch):
        ids[n, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        labels[n, : len(row["labels"])] = torch.tensor(row["labels"])
    ids, wanted = ids.to(model.device), labels.to(model.device).roll(-1, 1)
    wanted[:, -1] = -100
    at = wanted >= 0
    loss = F.cross_entropy(model(ids, at=at).float(), wanted[at])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


# ── 3 to 5: before, GRPO, after ─────────────────────────────────────────────────────────────────────────────────────


async def trained(given: argparse.Namespace, model: Path, network: Model, out: Path) -> None:
    engine = LocalEngine(network, dtype=given.dtype, slots=given.slots, max_context=CONTEXT)
    with Gateway(model, out / "data", engine) as address:
        if given.held_out:
            await held_out(given, address, out, "before")
            await held_out(given, address, out, "before_greedy", 0.0)
        if given.steps:
            await learn(given, address, engine, out)
        if given.steps and given.held_out:
            await held_out(given, address, out, "after")
            await held_out(given, address, out, "after_greedy", 0.0)
    if given.save:
        save(network, out / "model", model)


async def held_out(
    given: argparse.Namespace, address: GatewayAddress, out: Path, name: str, temperature: float = 1.0
) -> None:
    orders = _orders(given, address, "held_out", given.held_out, 1, out / name)
    came = await rolled(msgspec.structs.replace(orders, temperature=temperature))
    note(out, **{name: msgspec.to_builtins(came)})


async def learn(given: argparse.Namespace, address: GatewayAddress, engine: LocalEngine, out: Path) -> None:
    orders = _orders(given, address, "training", given.steps * given.groups + 50, given.n, out / "grpo")
    began, cpu = time.monotonic(), threads()
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
            f"apart {step.measured.difference}",
            flush=True,
        )

    settings = GrpoSettings(
        groups=given.groups, learning_rate=given.rate, batch_tokens=given.batch_tokens, tolerance=given.tolerance
    )
    async with GatewayClient(address.url, address.admin_key) as gateway:
        trainer = Trainer(engine, gateway, settings, watch=watch)
        await trainer.restore()
        config = FeedConfig(n=given.n, max_staleness=given.stale)
        async with await Feed.open(gateway, "grpo", config) as feed:
            paced = msgspec.structs.replace(orders, feed="grpo", ahead=given.ahead * given.groups)
            async with runner(paced) as process:
                telling = asyncio.create_task(ended(process))
                while trainer.state.step < given.steps and time.monotonic() - began < 60 * given.minutes:
                    step = asyncio.create_task(trainer.run(feed, trainer.state.step + 1))
                    await asyncio.wait({step, telling}, return_when=asyncio.FIRST_COMPLETED)
                    if not step.done():
                        step.cancel()
                        raise SystemExit(f"the runner ended: {await telling}")
                    await step
                process.terminate()
                came = await telling
            await gateway.delete_feed("grpo")
    seconds = time.monotonic() - began
    spent = {name: round(value - cpu.get(name, 0.0), 2) for name, value in threads().items()}
    note(
        out,
        grpo={
            "steps": len(steps),
            "seconds": seconds,
            "rollouts": came.rollouts,
            "rollouts_per_s": came.rollouts / seconds,
            "sampled_tokens": came.sampled_tokens,
            "sampled_per_s": came.sampled_tokens / seconds,
            "trained_tokens": sum(step.measured.tokens for step in steps),
            "waited_s": sum(step.seconds["wait"] for step in steps),
            "trained_s": sum(step.seconds["train"] for step in steps),
            "first_ten": _mean(steps[:10]),
            "last_ten": _mean(steps[-10:]),
            "cpu_by_thread": spent,
            "runner": msgspec.to_builtins(came),
            "apart": [value for step in steps if (value := step.measured.difference) is not None][-20:],
        },
    )


def _mean(steps: list[Step]) -> dict[str, float]:
    known = [step for step in steps if step.reward is not None and step.passed is not None]
    return {
        "reward": sum(step.reward or 0 for step in known) / max(1, len(known)),
        "passed": sum(step.passed or 0 for step in known) / max(1, len(known)),
    }


def _orders(given: argparse.Namespace, address: GatewayAddress, which: str, count: int, n: int, folder: Path) -> Orders:
    return Orders(
        url=address.url,
        key=address.admin_key,
        model=NAME,
        folder=str(folder),
        tasks=which,
        count=count,
        n=n,
        running=given.running,
        python=given.python,
        sandbox=given.sandbox,
        warm=not given.cold,
    )


# ── what it cost ────────────────────────────────────────────────────────────────────────────────────────────────────


def threads() -> dict[str, float]:
    """Seconds of CPU by thread of this process; those that Python has not begun are together under `torch`."""
    names = {thread.native_id: re.sub(r"[-_ ]?\d+$", "", thread.name) for thread in threading.enumerate()}
    spent: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        name = names.get(int(task.name), "torch")
        spent[name] = spent.get(name, 0.0) + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def note(out: Path, **found: Any) -> None:
    file = out / "result.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    new = file.with_suffix(".new")
    new.write_text(json.dumps(before | found, indent=1))
    new.replace(file)
    for name, value in found.items():
        print(f"{name}: {json.dumps(value)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    parser.add_argument("--sft", type=Path, help="what was exported before; without it the expert plays first")
    parser.add_argument("--only-traces", action="store_true", help="end after the export")
    parser.add_argument("--traces", type=int, default=210, help="rollouts of the expert")
    parser.add_argument("--warm-rows", type=int, default=140, help="how many of them the warm start takes; 0: all")
    parser.add_argument("--warm-epochs", type=int, default=2)
    parser.add_argument("--warm-batch", type=int, default=14)
    parser.add_argument("--warm-rate", type=float, default=5e-5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=20.0, help="no step is begun after so many")
    parser.add_argument("--groups", type=int, default=4, help="of one step")
    parser.add_argument("--n", type=int, default=8, help="rollouts of a group")
    parser.add_argument("--rate", type=float, default=1e-5)
    parser.add_argument("--ahead", type=int, default=3, help="steps whose groups may have begun")
    parser.add_argument("--stale", type=int, default=6, help="policy versions that a row may be behind")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--held-out", type=int, default=63, help="tasks; 0: none are tried")
    parser.add_argument("--running", type=int, default=48, help="agents at once")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of sampling; training is float32"
    )
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--cold", action="store_true", help="start each agent as the catalog has it, without warm.py")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="for the agent")
    parser.add_argument("--save", action="store_true", help="keep the trained model")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = with_tools(given.model, given.out / "base")
    rows = given.sft or asyncio.run(traces(given, model, given.out))
    if given.only_traces:
        return
    if rows.parent != given.out:
        shutil.copyfile(rows, given.out / "sft.jsonl")
    network = load(model, "cuda" if torch.cuda.is_available() else "cpu", torch.float32)
    warm_start(given, network, rows, given.out)
    asyncio.run(trained(given, model, network, given.out))


if __name__ == "__main__":
    main()
