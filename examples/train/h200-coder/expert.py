"""Record an expert's traces: the real agent solves the training tasks through the gateway, and a scripted engine plays the model.

    python expert.py --tasks FOLDER --tokenizer MODEL_FOLDER --out FOLDER

The expert knows each task's solution, and works as the agent's prompt asks: read the function, change the line, run the tests, finish. Its
turns were not sampled, so they have no log-probabilities. FOLDER gets `sft.jsonl`, the rows of the solved tasks, for `train.py --sft`.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import tasks
from agent import CONTEXT
from moves import list_moves
from train import NAME, TRAIN, configure_runner, read_report, record_result, start_runner

from turngate.config import ServeConfig
from turngate.engines.base import Generate
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.render import load_renderer
from turngate.server.run import run_embedded, run_in_thread
from turngate.tasks.task import Task
from turngate.trainers.export import ExportChoices, RolloutFilter, export


def build_expert(tokenizer_folder: Path, chosen: list[Task]) -> Scripted:
    tokenizer = load_renderer(tokenizer_folder)[0].tokenizer
    [end] = tokenizer.encode("<|im_end|>")
    moves = {task.instruction.strip(): list_moves(task) for task in chosen}

    def script(request: Generate, index: int) -> ScriptedTurn:
        prompt = tokenizer.decode(list(request.prompt))
        [answers] = [answers for instruction, answers in moves.items() if instruction in prompt]
        return ScriptedTurn(
            [*tokenizer.encode(answers[min(index, len(answers) - 1)]), end], chunk=0, null_logprobs=True
        )

    return Scripted(script, model=NAME)


async def record(options: argparse.Namespace) -> None:
    chosen = tasks.choose_tasks(options.tasks / TRAIN, options.train)
    config = ServeConfig(
        data=str(options.out / "data"), port=0, model=NAME, tokenizer=str(options.tokenizer), max_context=CONTEXT
    )
    with run_in_thread(run_embedded(config.check(), engine=build_expert(options.tokenizer, chosen))) as address:
        runner = configure_runner(
            options, address, "expert", tasks=str(options.tasks / TRAIN), count=options.train, n=1
        )
        async with start_runner(runner) as process:
            report = await read_report(process)
    choices = ExportChoices(format="sft", form="tokens", imitate=True, wanted=RolloutFilter(min_reward=1.0))
    exported = export(options.out / "data", options.out / "sft.jsonl", choices)
    record_result(
        options.out,
        rollouts=report.rollouts,
        passed=report.passed,
        seconds=report.seconds,
        rows=exported.records,
        left_out=dict(exported.left_out),
        messages=report.messages,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty")
    parser.add_argument("--train", type=int, default=250)
    parser.add_argument("--running", type=int, default=24)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(record(options))


if __name__ == "__main__":
    main()
