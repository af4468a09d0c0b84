"""How well does an agent do with a model? n tries of each task, a table, pass@k, and a line of JSON for each try.

    python examples/evaluate.py examples/tasks --agent pi --n 4 --model vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000 --out results.jsonl

Only known rewards count. What failed by no fault of the agent's has none, and is told apart.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import turngate as tg


def evaluated(asked: argparse.Namespace) -> tg.Results:
    results = tg.Results()
    with tg.open(
        asked.model, agent=asked.agent, sandbox=asked.sandbox, tokenizer=asked.tokenizer, concurrency=asked.concurrency
    ) as client:
        for result in client.batch(asked.tasks, n=asked.n, timeout_s=asked.timeout):
            results.append(result)
            if asked.out is not None:
                with asked.out.open("a") as file:
                    file.write(json.dumps(line(result)) + "\n")
    return results


def line(result: tg.Result) -> dict[str, object]:
    return {
        "task": result.task_id,
        "reward": result.reward,
        "status": result.status,
        "class": result.kind,
        "turns": len(result.turns),
        "sampled_tokens": result.sampled_tokens,
        "seconds": result.wall_s,
        "error": result.error.message if result.error is not None else None,
    }


def told(results: tg.Results, n: int) -> str:
    """What came of it, in a few lines."""
    lines = [f"pass@{k}: {estimate:.3f}" for k in sorted({1, n}) if (estimate := results.pass_at(k)) is not None]
    kinds = Counter(result.kind or "not graded" for result in results)
    lines.append(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Evaluate an agent with a model.")
    parser.add_argument("tasks", help="a folder of tasks, a .jsonl file, hf://org/name@split")
    parser.add_argument("--model", required=True, help="KIND://MODEL@URL")
    parser.add_argument("--tokenizer", default="", help="where the model's name is not in the Hugging Face cache")
    parser.add_argument("--agent", default="mini-swe-agent")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--n", type=int, default=4, help="tries of each task")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds that the agent has")
    parser.add_argument("--out", type=Path, help="a .jsonl file")
    asked = parser.parse_args(words)
    try:
        results = evaluated(asked)
    except tg.TurngateError as wrong:
        print(f"evaluate: {wrong}", file=sys.stderr)
        return 2
    results.show()
    print(told(results, asked.n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
