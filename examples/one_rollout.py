"""An unmodified agent does a task through the gateway, and comes out as a training row: one rollout, in detail.

The agent is Pi, as it is on npm. Only the model is not real: the scripted engine samples the replies of `replies.json`, so that this
needs no GPU and no weights. Everything else is what a training run uses: sandbox, relay, gateway, trace, row, grade. The commands that
it runs are printed; try them with your own engine (`--engine vllm --engine-url … --model … --tokenizer …`).
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

HERE = Path(__file__).parent
TASK, SCRIPT = HERE / "tasks" / "fix-add", HERE / "replies.json"
console = Console(highlight=False)


def turngate(*words: str, shown: bool = True) -> subprocess.CompletedProcess[str]:
    """One command of ours; its output goes to the terminal unless it is wanted here."""
    if shown:
        console.print(f"\n$ turngate {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
    return subprocess.run(
        [sys.executable, "-m", "turngate", *words], stdout=None if shown else subprocess.PIPE, text=True, check=True
    )


def promises(view: dict[str, Any]) -> dict[str, bool]:
    """What makes a trace a training row, looked at in the recorded data."""
    nodes = {node["id"]: node for node in view["nodes"]}
    [row] = view["rows"]
    path: list[int] = []
    for span in row["spans"]:
        path += nodes[nodes[span["node"]]["parent"]]["ids"] + nodes[span["node"]]["ids"]
    sampled = [node for node in view["nodes"] if node["kind"] == "sampled"]
    return {
        "The five turns are one row": len(row["spans"]) == 5,
        "Every turn was sampled after exactly the ids before it": path == row["ids"],
        "Every sampled token has its own log-probability": all(
            len(node["logprobs"]) == len(node["ids"]) and None not in node["logprobs"] for node in sampled
        ),
        "Only sampled tokens are trained": sum(row["mask"]) == sum(len(node["ids"]) for node in sampled),
    }


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="turngate-one-") as folder:
        data = f"{folder}/data"
        turngate("run", "--agent", "pi", "--task", str(TASK), "--script", str(SCRIPT), "--data", data)
        turngate("show", "last", "--data", data)
        turngate("show", "last", "--tokens", "--data", data)
        view = json.loads(turngate("show", "last", "--json", "--data", data, shown=False).stdout)
        [work] = Path(data, "rollouts").glob("*/work/main.py")
        console.print(f"\nmain.py, as the agent left it: {work.read_text().splitlines()[-1].strip()!r}")
        outcome = json.loads((work.parents[1] / "outcome.json").read_text())
        graded = (outcome["kind"], outcome["reward"]) == ("graded", 1.0)
        held = promises(view) | {
            "A test that the agent never saw, in a sandbox it never touched, gave it reward 1": graded
        }
        for promise, kept in held.items():
            console.print(f"{promise}: {'yes' if kept else 'NO'}.", style="green" if kept else "red")
        console.print(
            "\nThe model was played by the scripted engine: its log-probabilities are made up. The data of this example is removed again.",
            style="dim",
        )
        if not all(held.values()):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
