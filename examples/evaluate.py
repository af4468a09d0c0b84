"""Evaluate an agent with a model: run n rollouts of each task, and report a table, pass@k and a line of JSON per rollout.

    python examples/evaluate.py examples/tasks --agent pi --n 4 --model vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000 --out results.jsonl

Only known rewards are counted. Rollouts that failed through no fault of the agent have no reward, and are listed separately.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import turngate as tg


def evaluate(options: argparse.Namespace) -> tg.Results:
    results = tg.Results()
    with tg.open(
        options.model,
        agent=options.agent,
        sandbox=options.sandbox,
        tokenizer=options.tokenizer,
        concurrency=options.concurrency,
    ) as client:
        for result in client.batch(options.tasks, n=options.n, timeout_s=options.timeout):
            results.append(result)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(to_record(result)) + "\n")
    return results


def to_record(result: tg.Result) -> dict[str, object]:
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


def summarize(results: tg.Results, n: int) -> str:
    lines = [f"pass@{k}: {estimate:.3f}" for k in sorted({1, n}) if (estimate := results.pass_at(k)) is not None]
    kinds = Counter(result.kind or "not graded" for result in results)
    lines.append(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Evaluate an agent with a model.")
    parser.add_argument("tasks", help="folder of tasks, .jsonl file, or hf://org/name@split")
    parser.add_argument("--model", required=True, help="KIND://MODEL@URL")
    parser.add_argument(
        "--tokenizer", default="", help="tokenizer folder, if the model is not in the Hugging Face cache"
    )
    parser.add_argument("--agent", default="mini-swe-agent")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--n", type=int, default=4, help="rollouts per task")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit for the agent in seconds")
    parser.add_argument("--out", type=Path, help=".jsonl file to append a record per rollout to")
    options = parser.parse_args(arguments)
    try:
        results = evaluate(options)
    except tg.TurngateError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    results.show()
    print(summarize(results, options.n))
    return 0


if __name__ == "__main__":
    sys.exit(main())
