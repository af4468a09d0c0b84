"""Train with asynchronous GRPO on SWE tasks, using TRL and vLLM, on groups of n rollouts of a real agent.

    # 1. vLLM, to which TRL sends new weights (on the second of two GPUs)
    CUDA_VISIBLE_DEVICES=1 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-8B --port 8000 --dtype bfloat16 \\
        --logprobs-mode processed_logprobs --max-model-len 65536 --weight-transfer-config '{"backend":"nccl"}'
    # 2. the gateway between agents and vLLM
    export TURNGATE_ADMIN_KEY=…
    turngate serve --engine vllm --engine-url http://127.0.0.1:8000 --model Qwen/Qwen3-8B --tokenizer Qwen/Qwen3-8B
    # 3. the trainer (on the first GPU)
    CUDA_VISIBLE_DEVICES=0 python examples/trl/async_grpo.py --model Qwen/Qwen3-8B --tasks swe-rows.jsonl --sandbox docker \\
        --agent mini-swe-agent --n 8 --steps 200 --output run1
    # to resume it from a checkpoint
    … --resume run1/checkpoint-120

    python examples/trl/async_grpo.py --dry-run        # everything on a CPU in a minute, with a tiny model and a random grader

docs/trl.md explains the settings, LoRA and training on several GPUs.
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
from transformers import PrinterCallback, ProgressCallback, TrainerCallback  # noqa: E402
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

DRY_RUN_DEFAULTS: dict[str, Any] = {
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
DEFAULTS: dict[str, Any] = {
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


def build_plan(options: argparse.Namespace, selected: tuple[Task, ...], folder: Path) -> BatchPlan:
    """Plan n rollouts of every task per round, with more rounds than the trainer will need."""
    agent = find_agent(options.agent).spec
    return BatchPlan(
        tasks=selected,
        agent=agent,
        installed=ensure_installed(agent, lambda line: print(line, file=sys.stderr)),
        backend=get_backend(options.sandbox),
        model=options.served or options.model,
        folder=folder,
        n=options.n,
        rounds=100_000,
        bounds=Bounds(running=options.concurrency),
        session={
            "limits": {"turns": options.turns, "context_tokens": options.context},
            "max_tokens": options.tokens,  # per turn
        },
    )


def build_worker(options: argparse.Namespace, plan: BatchPlan, url: str, key: str) -> TurngateWorker:
    feed_config = FeedConfig(
        n=options.n,
        advantage="normalised",
        max_staleness=options.staleness,
        on_truncated=options.on_truncated,  # whether to train, mask or exclude a rollout that filled its context
    )
    config = WorkerConfig(
        gateway=url,
        feed=options.feed,
        choices=feed_config,
        plan=plan,
        longest_row=options.context,
        adapter="trl-policy" if options.lora else "",  # the name that TRL gives its adapters
    )
    return TurngateWorker(config, admin_key=key, checkpoint=options.resume)


def build_trainer_config(options: argparse.Namespace) -> AsyncGRPOConfig:
    on_cpu: dict[str, Any] = {"use_cpu": True, "bf16": False, "token_budget": 0, "gradient_checkpointing": False}
    return AsyncGRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=options.rows,
        learning_rate=options.learning_rate,
        num_generations=options.n,
        max_staleness=options.staleness,
        temperature=1.0,  # must match the worker's, which sets it for every session
        save_steps=options.save_steps,
        report_to=[],
        vllm_server_base_url=options.vllm,
        **(on_cpu if options.dry_run else {"dtype": "bfloat16"}),
    )


def build_adapter(rank: int) -> Any:
    from peft import LoraConfig  # not part of the `trl` extra

    return LoraConfig(r=rank, target_modules="all-linear")


def train(
    options: argparse.Namespace, selected: tuple[Task, ...], url: str, key: str, transfer: object
) -> CheckpointedTrainer:
    worker = build_worker(options, build_plan(options, selected, options.output / "rollouts"), url, key)
    prompts = [{"prompt": [{"role": "user", "content": task.instruction}]} for task in selected]
    trainer = CheckpointedTrainer(
        options.model,
        args=build_trainer_config(options),
        train_dataset=Dataset.from_list(prompts),  # TRL only counts epochs with it; the rows come from the worker
        rollout_worker=worker,
        weight_transfer=transfer,  # None: TRL sends weights to vLLM over NCCL
        peft_config=build_adapter(options.lora) if options.lora else None,
    )
    if options.dry_run:
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(PrintMetrics)
    fence_weight_sync(trainer, url, admin_key=key)
    trainer.train(resume_from_checkpoint=options.resume and str(options.resume))
    return trainer


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train with asynchronous GRPO on SWE tasks, through Turngate.")
    parser.add_argument("--dry-run", action="store_true", help="train a tiny model on this machine's CPU")
    parser.add_argument("--model", help="model folder or name on the Hugging Face Hub; loaded by TRL")
    parser.add_argument("--served", default="", help="the gateway's name for the model (default: --model)")
    parser.add_argument("--tasks", help="folder of tasks, or file of SWE rows")
    parser.add_argument("--gateway", default="http://127.0.0.1:8700")
    parser.add_argument("--vllm", default="http://127.0.0.1:8000", help="URL of vLLM, to which TRL sends new weights")
    parser.add_argument("--feed", default="trl")
    parser.add_argument("--agent", default="mini-swe-agent")
    parser.add_argument("--sandbox")
    parser.add_argument("--n", type=int, help="rollouts per group")
    parser.add_argument("--concurrency", type=int, help="rollouts at the same time")
    parser.add_argument("--turns", type=int, help="maximum turns per rollout")
    parser.add_argument("--tokens", type=int, help="maximum tokens per turn")
    parser.add_argument("--context", type=int, help="maximum tokens of a conversation: prompt and answers")
    parser.add_argument("--on-truncated", default="train", choices=("train", "mask", "exclude"))
    parser.add_argument("--staleness", type=int, default=4, help="maximum age of a rollout in policy versions")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rows", type=int, help="rows per step and GPU")
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--lora", type=int, help="train an adapter of this rank instead of all weights")
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--resume", type=Path, help="checkpoint folder to resume from")
    options = parser.parse_args()
    for name, value in (DRY_RUN_DEFAULTS if options.dry_run else DEFAULTS).items():
        if not getattr(options, name):
            setattr(options, name, value)
    missing = [name for name in ("model", "tasks", "output") if not getattr(options, name)]
    if missing and not options.dry_run:
        parser.error(f"pass --{missing[0]}, or --dry-run")
    return options


class PrintMetrics(TrainerCallback):
    """Prints the metrics of each step as JSON."""

    names = ("loss", "grad_norm", "kl", "ratio", "reward", "rollout/reward_mean", "sample/staleness_max")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if logs and "loss" in logs:
            metrics = {name: logs[name] for name in self.names if name in logs}
            print(json.dumps({"step": state.global_step, **metrics}), flush=True)


def dry_run(options: argparse.Namespace) -> None:
    """Train a tiny model on a CPU, and print the metrics of each step."""
    import cpu

    cpu.patch_trl()
    with ExitStack() as stack:
        if options.output is None:
            options.output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-trl-")))
        options.model = options.model or str(cpu.make_model(options.output / "model"))
        grader = Function(name=f"{HERE / 'random_grader.py'}:grade")
        selected = tuple(msgspec.structs.replace(task, grader=grader) for task in tasks.read_tasks(options.tasks))
        local = stack.enter_context(cpu.run_gateway(Path(options.model), options.served))
        trainer = train(options, selected, local.url, local.key, local.policy)
    print(
        f"Done: TRL trained a tiny model for {trainer.state.global_step} steps on rollouts of {options.agent} with random rewards. "
        "To train a real model, start vLLM and the gateway, and pass --model, --tasks and --output instead of --dry-run."
    )


def main() -> None:
    options = parse_options()
    if options.dry_run:
        dry_run(options)
        return
    selected = tuple(tasks.read_tasks(options.tasks))
    train(options, selected, options.gateway, os.environ.get("TURNGATE_ADMIN_KEY", ""), None)


if __name__ == "__main__":
    main()
