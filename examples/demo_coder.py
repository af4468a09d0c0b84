"""`make demo MODEL=coder`: train Qwen2.5-Coder-1.5B to repair packages, on one GPU.

It runs the programs of `examples/train/h200-coder` one after the other: make tasks from a few packages, record an expert's traces and
write reviews for the warm start, then train and evaluate. docs/training-coder.md reports what they measured on an H200, with more packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools import parts

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train" / "h200-coder"
PACKAGES = ("deepmerge==4.0.0", "inflection==0.5.1", "munch==4.0.0", "tinydb==4.9.0")
# Estimated: 16 bytes per parameter for float32 weights, gradients and Adam, then the sampled copy, its cache, and activations.
NEEDED_GB = 48
MINUTES, MINUTES_FAST = 12, 2  # no step of GRPO is started later
HELD_OUT_FAST = 10  # tasks


@dataclass(frozen=True)
class Gpu:
    """What torch and the driver report about this machine."""

    torch: str  # its version; empty if it is not installed
    cuda: bool  # whether torch can use a GPU
    driver: bool  # whether NVIDIA's driver is installed
    memory_gb: float = 0.0  # of the first GPU


def find_gpu() -> Gpu:
    driver = shutil.which("nvidia-smi") is not None
    try:
        import torch
    except ImportError:
        return Gpu("", cuda=False, driver=driver)
    if not torch.cuda.is_available():
        return Gpu(torch.__version__, cuda=False, driver=driver)
    return Gpu(
        torch.__version__, cuda=True, driver=driver, memory_gb=torch.cuda.get_device_properties(0).total_memory / 1e9
    )


def explain_refusal(gpu: Gpu) -> str:
    """Return why the machine cannot run this demo and what to do, or an empty string if it can."""
    other = f"Run it on a machine with an NVIDIA GPU of at least {NEEDED_GB} GB, or run `make demo`, which needs only two CPU cores."
    if gpu.cuda and gpu.memory_gb < NEEDED_GB:
        return f"`make demo MODEL=coder` needs about {NEEDED_GB} GB of GPU memory, but this GPU has {gpu.memory_gb:.0f} GB. {other}"
    if gpu.cuda:
        return ""
    if not gpu.driver:
        return f"`make demo MODEL=coder` needs a GPU, but this machine has no NVIDIA driver (nvidia-smi). {other}"
    if not gpu.torch:
        return "torch is not installed. Install a build with CUDA: .venv/bin/python -m pip install torch"
    return (
        f"This machine has an NVIDIA driver, but torch {gpu.torch} cannot use a GPU. Install a build with CUDA that matches the driver: "
        ".venv/bin/python -m pip install --force-reinstall torch"
    )


def plan_tasks(out: Path) -> list[str]:
    """Return the command that makes the tasks."""
    made = ["--out", str(out / "tasks"), "--hint", "function", "--concurrency", str(os.cpu_count() or 2)]
    return [sys.executable, "-m", "turngate", "tasks", "make", "repairs", *PACKAGES, *made]


def plan_training(
    out: Path, model: Path, held_out: Iterable[str], sandbox: str, *, fast: bool, seed: int
) -> list[list[str]]:
    """Return the commands that train, once the tasks exist. `held_out` are the names of packages that training must not use."""
    kept_out = set(held_out)
    sources = [package for package in PACKAGES if package.partition("==")[0] not in kept_out]
    tasks, tokenizer = ["--tasks", str(out / "tasks")], ["--tokenizer", str(model)]
    # Only agents in the local sandbox can be started by the example's fork server.
    agents = ["--sandbox", sandbox, *([] if sandbox == "local" else ["--cold"])]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    sft = [str(out / "expert" / "sft.jsonl"), str(out / "reviews.jsonl")]
    shorter = ["--held-out", str(HELD_OUT_FAST), "--samples", "1"] if fast else []
    programs = [
        ["expert.py", *tasks, *tokenizer, "--out", str(out / "expert"), "--python", version, *agents],
        ["reviews.py", *tasks, *tokenizer, "--out", str(out / "reviews.jsonl"), *sources],
        [
            *("train.py", "--model", str(model), *tasks, "--sft", *sft, "--out", str(out / "run"), "--seed", str(seed)),
            *("--minutes", str(MINUTES_FAST if fast else MINUTES), "--python", version, *agents, *shorter),
        ],
    ]
    return [[sys.executable, str(EXAMPLE / program), *arguments] for program, *arguments in programs]


def list_held_out(tasks: Path) -> set[str]:
    """Return the names of the packages whose tasks are held out."""
    lines = (tasks / "held-out.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["metadata"]["package"] for line in lines}


def run_demo(out: Path, sandbox: str, *, fast: bool, seed: int) -> None:
    """Run the demo on a machine that can run it. Exit with an error if a command fails."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model = parts.ensure("coder")
    _run(plan_tasks(out))
    for command in plan_training(out, model, list_held_out(out / "tasks"), sandbox, fast=fast, seed=seed):
        _run(command)
    print(
        f"\nResults: {out / 'run' / 'result.json'}\nLook at the rollouts: turngate serve --data {out / 'run' / 'data'}"
    )


def _run(command: Sequence[str]) -> None:
    """Run a command in the repository. The tests of the packages use this Python, which has pytest."""
    print(f"\n$ {' '.join(command)}", flush=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}, check=False)
    if done.returncode:
        raise SystemExit(f"failed with exit code {done.returncode}: {' '.join(command)}")
