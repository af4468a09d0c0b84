"""The answers of an expert that knows a task's solution: read the function, change the wrong line, run the tests, finish."""

from __future__ import annotations

import re
import shlex

from turngate.tasks.task import Task


def list_moves(task: Task) -> list[str]:
    """List the expert's answers for a task."""
    path = str(task.metadata["path"])
    lines = re.search(r"\(lines (\d+) to (\d+)\)", task.instruction)
    assert lines is not None and task.solution is not None
    [old] = re.findall(r"^-(?!--)(.*)$", task.solution.patch, re.MULTILINE)
    [new] = re.findall(r"^\+(?!\+\+)(.*)$", task.solution.patch, re.MULTILINE)
    wrong, right = find_difference(old, new)
    line = task.metadata["line"]
    command = f"{line}s/{escape(wrong)}/{escape(right)}/"
    tests = task.instruction.rstrip().removesuffix("```").rpartition("```\n")[2].strip()
    return [
        _answer("I read the function first.", f"nl -ba {path} | sed -n '{lines[1]},{lines[2]}p'"),
        _answer(f"Line {line} is wrong: `{wrong}` should be `{right}`.", f"sed -i {shlex.quote(command)} {path}"),
        _answer("Now I run the failing tests.", tests),
        _answer("The tests pass, so I am done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
    ]


def _answer(thought: str, command: str) -> str:
    return f"{thought}\n\n```bash\n{command}\n```"


def find_difference(old: str, new: str) -> tuple[str, str]:
    """Find the shortest piece of words to replace, such that its first occurrence in the line is the right one."""
    before, after = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (old, new))
    first = 0
    while first < min(len(before), len(after)) and before[first] == after[first]:
        first += 1
    last = 0
    while last < min(len(before), len(after)) - first and before[-1 - last] == after[-1 - last]:
        last += 1
    while True:
        wrong, right = ("".join(words[first : len(words) - last]) for words in (before, after))
        if wrong.strip() and old.replace(wrong, right, 1) == new:
            return wrong, right
        first, last = max(0, first - 1), max(0, last - 1)


def escape(text: str) -> str:
    """Escape a text for both sides of sed's command s."""
    return re.sub(r"([\\/.*\[\]^$&])", r"\\\1", text)
