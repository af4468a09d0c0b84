"""Run one rollout and show it in detail: an unmodified agent solves a task through the gateway, and the result is a training row.

The agent is Pi from npm. Only the model is not real: the scripted engine replays `replies.json`, so no GPU and no weights are needed.
Everything else is what a training run uses: sandbox, relay, gateway, trace, row and grade. The commands are printed as they run; try them
with your own engine (`--engine vllm --engine-url … --model … --tokenizer …`).
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


def turngate(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a turngate command, and print or capture its output."""
    if not capture:
        console.print(f"\n$ turngate {shlex.join(arguments)}", style="bold", markup=False, soft_wrap=True)
    return subprocess.run(
        [sys.executable, "-m", "turngate", *arguments],
        stdout=subprocess.PIPE if capture else None,
        text=True,
        check=True,
    )


def check_promises(view: dict[str, Any]) -> dict[str, bool]:
    """Check in the recorded data that the trace is a valid training row."""
    nodes = {node["id"]: node for node in view["nodes"]}
    [row] = view["rows"]
    path_ids: list[int] = []
    for span in row["spans"]:
        path_ids += nodes[nodes[span["node"]]["parent"]]["ids"] + nodes[span["node"]]["ids"]
    sampled = [node for node in view["nodes"] if node["kind"] == "sampled"]
    return {
        "The five turns are one row": len(row["spans"]) == 5,
        "Every turn was sampled after exactly the ids before it": path_ids == row["ids"],
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
        view = json.loads(turngate("show", "last", "--json", "--data", data, capture=True).stdout)
        [work] = Path(data, "rollouts").glob("*/work/main.py")
        console.print(f"\nlast line of main.py after the rollout: {work.read_text().splitlines()[-1].strip()!r}")
        outcome = json.loads((work.parents[1] / "outcome.json").read_text())
        graded = (outcome["kind"], outcome["reward"]) == ("graded", 1.0)
        checks = check_promises(view) | {
            "A test that the agent never saw, in a sandbox that it never touched, returned reward 1": graded
        }
        for promise, passed in checks.items():
            console.print(f"{promise}: {'yes' if passed else 'NO'}.", style="green" if passed else "red")
        console.print(
            "\nThe scripted engine played the model, so the log-probabilities are synthetic. The data of this example has been deleted.",
            style="dim",
        )
        if not all(checks.values()):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
