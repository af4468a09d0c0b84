"""Asynchronous GRPO on SWE tasks with TRL and vLLM: groups of n rollouts of a real agent, through Turngate.

    # 1. vLLM, which TRL sends new weights to (two GPUs: one here, one for the trainer)
    CUDA_VISIBLE_DEVICES=1 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-8B --port 8000 --dtype bfloat16 \\
        --logprobs-mode processed_logprobs --max-model-len 65536 --weight-transfer-config '{"backend":"nccl"}'
    # 2. the gateway between agents and vLLM
    export TURNGATE_ADMIN_KEY=…
    turngate serve --engine vllm --engine-url http://127.0.0.1:8000 --model Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-8B
    # 3. this
    CUDA_VISIBLE_DEVICES=0 python examples/trl/async_grpo.py --model Qwen/Qwen3-8B --tasks swe-rows.jsonl --sandbox docker \\
        --agent mini-swe-agent --n 8 --steps 200 --output run1
    # and after whatever ended it:
    … --resume run1/checkpoint-120

    python examples/trl/async_grpo.py --dry-run        # all of it on a CPU in a minute, with a tiny model and a grader that rolls dice

docs/trl.md explains the choices, and LoRA and several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from trl.experimental.async_grpo import AsyncGRPOConfig  # noqa: E402

from turngate import tasks  # noqa: E402
from turngate.agents.install import ensure_installed  # noqa: E402
from turngate.agents.spec import find_agent  # noqa: E402
from turngate.client.protocol import FeedConfig  # noqa: E402
from turngate.rollout.concurrency import Bounds  # noqa: E402
from turngate.rollout.plan import BatchPlan  # noqa: E402
from turngate.sandboxes import get_backend  # noqa: E402
from turngate.tasks.task import Function, Task  # noqa: E402
from turngate.trainers.trl.trainer import CheckpointedTrainer  # noqa: E402
from turngate.trainers.trl.weights import fence_weight_sync  # noqa: E402
from turngate.trainers.trl.worker import TurngateWorker, WorkerConfig  # noqa: E402

DRY: dict[str, Any] = {  # what a dry run has in place of what is not given
    "served": "policy",
    "tasks": str(HERE.parent / "tasks" / "fix-add"),
    "sandbox": "local",
    "n": 2,
    "steps": 5,
    "rows": 2,
    "turns": 3,
    "tokens": 16,
    "context": 6000,
    "learning_rate": 1e-3,
    "concurrency": 2,
    "save_steps": 2,
}
REAL: dict[str, Any] = {
    "sandbox": "bubblewrap",
    "n": 8,
    "steps": 200,
    "rows": 16,
    "turns": 60,
    "tokens": 4096,
    "context": 60_000,
    "learning_rate": 1e-6,
    "concurrency": 32,
    "save_steps": 20,
}


def plan(given: argparse.Namespace, wanted: tuple[Task, ...], folder: Path) -> BatchPlan:
    """What is run: every task n times a round, for as many rounds as the trainer wants."""
    agent = find_agent(given.agent).spec
    return BatchPlan(
        tasks=wanted,
        agent=agent,
        installed=ensure_installed(agent, lambda line: print(line, file=sys.stderr)),
        backend=get_backend(given.sandbox),
        model=given.served or given.model,
        folder=folder,
        n=given.n,
        rounds=100_000,
        bounds=Bounds(running=given.concurrency),
        session={
            "limits": {"turns": given.turns, "context_tokens": given.context},
            "max_tokens": given.tokens,  # of one turn
        },
    )


def worker(given: argparse.Namespace, ran: BatchPlan, url: str, key: str) -> TurngateWorker:
    choices = FeedConfig(
        n=given.n,
        advantage="normalised",
        max_staleness=given.staleness,
        on_truncated=given.on_truncated,  # a rollout that filled its context: train it, mask it, or leave it out
    )
    config = WorkerConfig(
        gateway=url,
        feed=given.feed,
        choices=choices,
        plan=ran,
        longest_row=given.context,
        adapter="trl-policy" if given.lora else "",  # as TRL calls them
    )
    return TurngateWorker(config, admin_key=key, checkpoint=given.resume)


def settings(given: argparse.Namespace) -> AsyncGRPOConfig:
    on_cpu: dict[str, Any] = {"use_cpu": True, "bf16": False, "token_budget": 0, "gradient_checkpointing": False}
    return AsyncGRPOConfig(
        output_dir=str(given.output),
        max_steps=given.steps,
        per_device_train_batch_size=given.rows,
        learning_rate=given.learning_rate,
        num_generations=given.n,
        max_staleness=given.staleness,
        temperature=1.0,  # as the worker's, which pins it in every session
        save_steps=given.save_steps,
        report_to=[],
        vllm_server_base_url=given.vllm,
        **(on_cpu if given.dry_run else {"dtype": "bfloat16"}),
    )


def train(
    given: argparse.Namespace, wanted: tuple[Task, ...], url: str, key: str, transfer: object
) -> CheckpointedTrainer:
    rollouts = worker(given, plan(given, wanted, given.output / "rollouts"), url, key)
    asked = [{"prompt": [{"role": "user", "content": task.instruction}]} for task in wanted]
    trainer = CheckpointedTrainer(
        given.model,
        args=settings(given),
        train_dataset=Dataset.from_list(asked),  # TRL counts its epochs by it; the rows come from the worker
        rollout_worker=rollouts,
        weight_transfer=transfer,  # None: TRL's own, over NCCL into vLLM
        peft_config=LoraConfig(r=given.lora, target_modules="all-linear") if given.lora else None,
    )
    fence_weight_sync(trainer, url, admin_key=key)
    trainer.train(resume_from_checkpoint=given.resume and str(given.resume))
    return trainer


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Asynchronous GRPO on SWE tasks, through Turngate.")
    parser.add_argument("--dry-run", action="store_true", help="on this machine's CPU, with a tiny model")
    parser.add_argument("--model", help="a model folder, or a name on the hub; TRL loads it")
    parser.add_argument("--served", default="", help="what the gateway calls it, if something else")
    parser.add_argument("--tasks", help="a folder of tasks, or a file of SWE rows")
    parser.add_argument("--gateway", default="http://127.0.0.1:8700")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", help="where TRL sends new weights")
    parser.add_argument("--feed", default="trl")
    parser.add_argument("--agent", default="mini-swe-agent")
    parser.add_argument("--sandbox")
    parser.add_argument("--n", type=int, help="rollouts of a group")
    parser.add_argument("--concurrency", type=int, help="rollouts at once")
    parser.add_argument("--turns", type=int, help="at most, of a rollout")
    parser.add_argument("--tokens", type=int, help="at most, of a turn")
    parser.add_argument("--context", type=int, help="tokens, at most: prompt and answers together")
    parser.add_argument("--on-truncated", default="train", choices=("train", "mask", "exclude"))
    parser.add_argument("--staleness", type=int, default=4, help="policy versions that a rollout may be behind")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="of a step, on each GPU")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora", type=int, help="the rank of an adapter to train, instead of all weights")
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", type=Path, help="a checkpoint's folder")
    given = parser.parse_args()
    for name, value in (DRY if given.dry_run else REAL).items():
        if not getattr(given, name):
            setattr(given, name, value)
    missing = [name for name in ("model", "tasks", "output") if not getattr(given, name)]
    if missing and not given.dry_run:
        parser.error(f"give --{missing[0]}, or --dry-run")
    return given


def dry_run(given: argparse.Namespace) -> None:
    """Everything at once, on a CPU; prints what came of it as JSON."""
    import cpu

    cpu.patch_trl()
    with ExitStack() as stack:
        if given.output is None:
            given.output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-trl-")))
        given.model = given.model or str(cpu.make_model(given.output / "model"))
        chance = Function(name=f"{HERE / 'chance.py'}:grade")
        wanted = tuple(msgspec.structs.replace(task, grader=chance) for task in tasks.read_tasks(given.tasks))
        stage = stack.enter_context(cpu.stage(Path(given.model), given.served))
        trainer = train(given, wanted, stage.url, stage.key, stage.transfer)
        steps = [line for line in trainer.state.log_history if "loss" in line]
        told = ("step", "loss", "grad_norm", "kl", "ratio", "reward", "rollout/reward_mean", "sample/staleness_max")
        for line in steps:
            print(json.dumps({name: line[name] for name in told if name in line}))


def main() -> None:
    given = flags()
    if given.dry_run:
        dry_run(given)
        return
    wanted = tuple(tasks.read_tasks(given.tasks))
    train(given, wanted, given.gateway, os.environ.get("TURNGATE_ADMIN_KEY", ""), None)


if __name__ == "__main__":
    main()
