"""The answers of an expert that knows a task's solution: read the function, change the wrong line, run the tests, finish.

An expert that is always right does not show what to do when tests still fail. So it can be given other changes to try first:
mutations of the same function, found in the same way as the bugs of the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from turngate.render import Tokenizer
from turngate.tasks.repairs.mutations import find_mutations
from turngate.tasks.task import Task

NO_LABEL = -100
_WORDS = re.compile(r"\w+|\s+|[=!<>]=|//|\*\*|[^\w\s]")
_SIDE = r"((?:[^/\\\n]|\\.)*)"  # one side of sed's `s` command
_CHANGE = re.compile(rf"Line (\d+), `(.*)`, should be `(.*)`\.\n\n```bash\nsed '(\d+)s/{_SIDE}/{_SIDE}/' ")


class Edit(msgspec.Struct, frozen=True):
    """A change to one line."""

    line: int
    old: str
    new: str


def find_fix(task: Task) -> Edit:
    """Return the change that repairs a task whose bug is in one line."""
    assert task.solution is not None
    [old] = re.findall(r"^-(?!--)(.*)$", task.solution.patch, re.MULTILINE)
    [new] = re.findall(r"^\+(?!\+\+)(.*)$", task.solution.patch, re.MULTILINE)
    return Edit(int(str(task.metadata["line"])), old, new)


def find_lines(instruction: str) -> tuple[int, int]:
    """Return the first and last line of the function that an instruction names."""
    lines = re.search(r"\(lines (\d+) to (\d+)\)", instruction)
    assert lines is not None
    return int(lines[1]), int(lines[2])


def find_edits(source: str, first: int, last: int) -> list[Edit]:
    """List changes to one line of a function that are as plausible as the one that repairs it."""
    lines = source.split("\n")[first - 1 : last]
    indent = len(lines[0]) - len(lines[0].lstrip())
    if any(line[:indent].strip() for line in lines):
        return []  # a text in it is indented less, so the function cannot be parsed alone
    text = "\n".join(line[indent:] for line in lines)
    edits = []
    for mutation in find_mutations(text):
        changed = mutation.apply(text).split("\n")
        if (n := find_changed_line(text.split("\n"), changed)) is not None:
            edits.append(Edit(first + n, lines[n], lines[n][:indent] + changed[n]))
    return edits


def find_changed_line(before: list[str], after: list[str]) -> int | None:
    """Return the line that differs, or None unless exactly one does."""
    if len(before) != len(after):
        return None
    different = [n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    return different[0] if len(different) == 1 else None


def find_test_command(instruction: str) -> str:
    return instruction.rstrip().removesuffix("```").rpartition("```\n")[2].strip()


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_function(path: str, first: int, last: int) -> str:
    return _answer("I read the function first.", f"cp {path} {path}.orig; nl -ba {path} | sed -n '{first},{last}p'")


def change_line(path: str, edit: Edit, tests: str, *, again: bool = False) -> str:
    wrong, right = find_difference(edit.old, edit.new)
    thought = f"Line {edit.line}, `{edit.old.strip()}`, should be `{edit.new.strip()}`."
    script = f"{edit.line}s/{escape(wrong)}/{escape(right)}/".replace("'", "'\"'\"'")
    command = f"sed '{script}' {path}.orig > {path} && {tests} 2>&1 | tail -n 3"
    return _answer(f"The tests still fail. {thought}" if again else thought, command)


def finish() -> str:
    return _answer("The tests pass, so I am done.", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")


def _answer(thought: str, command: str) -> str:
    return f"{thought}\n\n```bash\n{command}\n```"


def find_difference(old: str, new: str) -> tuple[str, str]:
    """Find the shortest sequence of words to replace whose first occurrence in the line is the right one."""
    before, after = (_WORDS.findall(text) for text in (old, new))
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
    """Escape text for either side of sed's `s` command."""
    return re.sub(r"([\\/.*\[\]^$&])", r"\\\1", text)


# ── what an answer changes ──────────────────────────────────────────────────────────────────────────────────────────


def find_change(answer: str) -> list[tuple[int, int]]:
    """Find the characters of an answer that say which line to change, and how. An answer that changes nothing has none."""
    found = _CHANGE.search(answer)
    return [found.span(group) for group in range(1, _CHANGE.groups + 1)] if found else []


def mask_change(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Return the labels of an answer's tokens, without the tokens of its change, and without the token after each part of it.

    A token that is only partly in the change has no label. The token after a part ends it. If it had a label, the model would never see
    that a change continues, and would learn to end it after one token.
    """
    spans = find_change(tokenizer.decode(ids))
    ends = [len(tokenizer.decode(ids[: n + 1])) for n in range(len(ids))]
    starts = [0, *ends[:-1]]
    hidden = [
        any(start < last and max(end, start + 1) > first for first, last in spans)
        for start, end in zip(starts, ends, strict=True)
    ]
    after = [False, *hidden[:-1]]
    return [NO_LABEL if here or before else one for one, here, before in zip(ids, hidden, after, strict=True)]
