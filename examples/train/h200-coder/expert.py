"""Record an expert's traces: the real agent solves training tasks through the gateway, and a scripted engine plays the model.

    python expert.py --tasks FOLDER --tokenizer MODEL_FOLDER --out FOLDER

The expert knows each task's solution, and works as the agent's prompt asks: read the function, change the line, run the tests, finish.
Before the right change it tries some wrong ones, and reads how the tests fail. Its turns were not sampled, so they have no
log-probabilities. FOLDER gets `sft.jsonl`, the rows of the solved tasks, for `train.py --sft`. Wrong changes have no labels: they are
context, not examples. With --mask-changes, only the procedure has labels: no token of an answer that says which line to change, and how,
whether right or wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import re
from pathlib import Path
from typing import Any, get_args

import moves
import tasks
from agent import CONTEXT, STEPS
from tasks import Part
from train import HERE, NAME, TRAIN, configure_runner, record_result, run_rollouts

from turngate.config import ServeConfig
from turngate.engines.base import Generate
from turngate.engines.scripted import Scripted, ScriptedTurn
from turngate.render import load_renderer
from turngate.server.run import run_embedded, run_in_thread
from turngate.tasks.task import Task
from turngate.trainers.export import ExportChoices, RolloutFilter, export

_RIGHT_AT_ONCE = 0.4  # fraction of the traces without a wrong change


class Expert:
    """Answers as the prompt asks, for the tasks it knows. Each session tries different wrong changes."""

    def __init__(self, tokenizer_folder: Path, chosen: list[Task], turns: int = STEPS) -> None:
        self._turns = turns
        self._tokenizer = load_renderer(tokenizer_folder)[0].tokenizer
        self._tasks = {task.instruction.strip(): task for task in chosen}
        self._attempts: dict[str, list[str]] = {}  # by session
        self.wrong: set[str] = set()  # answers with a wrong change
        self.right: set[str] = set()
        [self._end] = self._tokenizer.encode("<|im_end|>")

    def answer(self, request: Generate, index: int) -> ScriptedTurn:
        prompt = self._tokenizer.decode(list(request.prompt))
        [task] = [task for instruction, task in self._tasks.items() if instruction in prompt]
        text = self._choose_answer(task, request.session, index, prompt.rpartition("<|im_start|>user\n")[2])
        return ScriptedTurn([*self._tokenizer.encode(text), self._end], chunk=0, null_logprobs=True)

    def _choose_answer(self, task: Task, session: str, index: int, observation: str) -> str:
        path = str(task.metadata["path"])
        if index == 0:
            return moves.read_function(path, *moves.find_lines(task.instruction))
        if re.search(r"\d passed", observation) and not re.search(r"\d (failed|error)", observation):
            return moves.finish()
        if session not in self._attempts:
            self._attempts[session] = self._plan_attempts(task, path, random.Random(session))
        attempts = self._attempts[session]
        return attempts[min(index, len(attempts)) - 1]

    def _plan_attempts(self, task: Task, path: str, chance: random.Random) -> list[str]:
        assert task.files is not None
        tests, fix = moves.find_test_command(task.instruction), moves.find_fix(task)
        edits = moves.find_edits((task.files / path).read_text(), *moves.find_lines(task.instruction))
        others = [edit for edit in edits if edit != fix]
        count = 0 if chance.random() < _RIGHT_AT_ONCE else chance.randint(1, self._turns - 4)
        tried = chance.sample(others, min(count, len(others)))
        wrong = [moves.change_line(path, edit, tests, again=n > 0) for n, edit in enumerate(tried)]
        right = moves.change_line(path, fix, tests, again=bool(wrong))
        self.wrong.update(wrong)
        self.right.add(right)
        return [*wrong, right]

    def choose_labels(self, row: dict[str, Any], *, control: bool, mask_changes: bool) -> dict[str, Any]:
        """Remove the labels of the wrong changes; for a control, of the right one; with `mask_changes`, of the change in each answer."""
        labels = list(row["labels"])
        for start, end in find_spans(labels):
            if mask_changes:
                labels[start:end] = moves.mask_change(labels[start:end], self._tokenizer)
                continue
            text = self._tokenizer.decode([one for one in labels[start:end] if one != self._end])
            if text in (self.right if control else self.wrong):
                labels[start:end] = [moves.NO_LABEL] * (end - start)
        return row | {"labels": labels}


def find_spans(labels: list[int]) -> list[tuple[int, int]]:
    """Find where the answers start and end: runs of labels that are not negative."""
    edges = [n for n in range(len(labels) + 1) if _is_label(labels, n) != _is_label(labels, n - 1)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _is_label(labels: list[int], n: int) -> bool:
    return 0 <= n < len(labels) and labels[n] >= 0


async def record(options: argparse.Namespace) -> None:
    file = options.tasks / TRAIN
    expert = Expert(options.tokenizer, tasks.choose_tasks(file, options.train, options.part), options.turns)
    config = ServeConfig(
        data=str(options.out / "data"), port=0, model=NAME, tokenizer=str(options.tokenizer), max_context=CONTEXT
    )
    with run_in_thread(run_embedded(config.check(), engine=Scripted(expert.answer, model=NAME))) as address:
        runner = configure_runner(
            options,
            address,
            "expert",
            tasks=str(file),
            part=options.part,
            count=options.train,
            n=options.n,
            steps=options.turns,
        )
        report = await run_rollouts(HERE / "runner.py", runner)
    choices = ExportChoices(format="sft", form="tokens", imitate=True, wanted=RolloutFilter(min_reward=1.0))
    exported = export(options.out / "data", options.out / "all.jsonl", choices)
    rows = [
        expert.choose_labels(json.loads(line), control=options.control, mask_changes=options.mask_changes)
        for line in (options.out / "all.jsonl").open()
    ]
    (options.out / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record_result(
        options.out,
        rollouts=report.rollouts,
        passed=report.passed,
        turns=report.turns,
        seconds=report.seconds,
        stages=report.stages,
        children_cpu_s=report.children_cpu_s,
        rows=exported.records,
        left_out=dict(exported.left_out),
        messages=report.messages,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="output folder; must be empty")
    parser.add_argument("--train", type=int, default=250, help="number of tasks")
    parser.add_argument("--part", default="expert", choices=get_args(Part), help="tasks to use; GRPO must use others")
    parser.add_argument("--n", type=int, default=3, help="traces per task")
    parser.add_argument("--running", type=int, default=24)
    parser.add_argument("--turns", type=int, default=STEPS, help="maximum number of steps of an agent, at least 5")
    labels = parser.add_mutually_exclusive_group()
    labels.add_argument("--control", action="store_true", help="label the wrong changes, not the right ones")
    labels.add_argument("--mask-changes", action="store_true", help="label the procedure, but no change")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]))
    parser.add_argument("--sandbox", default="local")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    asyncio.run(record(options))


if __name__ == "__main__":
    main()
