"""Give repair tasks a command that changes a line and runs the tests, so that one short answer is a complete attempt.

    python edit_command.py --tasks FOLDER --out FOLDER

A small model wastes most attempts on the shell: quotes, regular expressions, a file that an earlier change broke. SWE-agent offers
an edit command for that reason. Here it is a script in the task's folder. The instruction shows the function with line numbers, so
the agent need not read it first:

    python3 fix.py 17 <<'END'
        return a + b
    END

Each call starts from the original file, keeps the line's indentation, and runs the failing tests. If they pass, the agent's run ends. A
change that already failed is rejected without rerunning the tests. The grader does not use the script: it runs the package's tests on the
agent's work, as for every task.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import moves
from tasks import count_lines, is_small

_SCRIPT_NAME, _ORIGINAL = "fix.py", ".fix/original"
# The script runs in most turns, so it imports almost nothing: with `subprocess` and `pathlib`, it takes three times as long to start.
# Its own files are in the sandbox's home, so that rollouts that change nothing leave identical work, which is graded once.
_SCRIPT = '''\
"""Replace a line of the original file, and run the tests: python3 fix.py LINE <<'END', the new line, END."""
import os, sys

file, first, last, tests = {constants}
usage = f"Use: python3 fix.py LINE <<'END', then the new line, then END; LINE is a number from {{first}} to {{last}}"
words = sys.argv[1:]
if len(words) != 1 or not words[0].isdecimal() or not first <= int(words[0]) <= last:
    sys.exit(usage)
number, new = int(words[0]), sys.stdin.read().strip()
if not new:
    sys.exit(usage)
if "\\n" in new:
    sys.exit("Only one line is wrong, so give exactly one new line.")
with open("{original}") as source:
    original = source.read()
lines = original.split("\\n")
old = lines[number - 1]
if new == old.strip():
    sys.exit(f"Line {{number}} already is `{{new}}`. Try another change.")
change = f"{{number}} {{new!r}}\\n"
own = os.path.expanduser("~/.fix-")  # tried, output, errors
with open(own + "tried", "a+") as tried:
    tried.seek(0)
    if change in tried.readlines():
        sys.exit(f"This change to line {{number}} already failed. Try another change, or another line.")
lines[number - 1] = old[: len(old) - len(old.lstrip())] + new
with open(file, "w") as changed:
    changed.write("\\n".join(lines))
# `env`, because the command may begin with PYTHONPATH=src
code = os.waitstatus_to_exitcode(os.system(f"timeout 6 env {{tests}} < /dev/null > '{{own}}output' 2> '{{own}}errors'"))
if code == 0:
    print("{finished}")
    sys.exit()
with open(file, "w") as changed:
    changed.write(original)
if code == 124:
    failure = "With this change, the tests hang."
else:
    with open(own + "output", errors="replace") as output, open(own + "errors", errors="replace") as errors:
        result = (output.read().strip() or errors.read().strip()).split("\\n")[-1]
    failure = f"With this change, the tests still fail: {{result}}."
    with open(own + "tried", "a") as tried:  # not after a timeout: the machine may be busy
        tried.write(change)
sys.exit(f"{{failure}} The line is restored. Try another change.")
'''
_FINISHED = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # a command's output that ends mini-SWE-agent's run


def add_command(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of `turngate tasks make repairs --hint function` whose task has the command and shows the function."""
    path, name = row["metadata"]["path"], row["metadata"]["function"]
    first, last = moves.find_lines(row["instruction"])
    text = row["files"][path]
    listing = "\n".join(f"{n:5d}  {line}" for n, line in enumerate(text.split("\n")[first - 1 : last], first))
    tests = moves.find_test_command(row["instruction"])
    instruction = (
        f"One line of the function `{name}` in `{path}` (lines {first} to {last}) is wrong:\n\n```\n{listing}\n```\n\n"
        f"{_find_failures(row['instruction'])}\n"
    )
    script = _SCRIPT.format(constants=repr((path, first, last, tests)), original=_ORIGINAL, finished=_FINISHED)
    files = {**row["files"], _SCRIPT_NAME: script, _ORIGINAL: text}
    return {**row, "instruction": instruction, "files": files}


def _find_failures(instruction: str) -> str:
    """Return the part of the instruction that names the failing tests and reports the first failure."""
    found = re.search(r"^Failing tests.*?(?=\n\nRun them with:)", instruction, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tasks", type=Path, required=True, help="output of `turngate tasks make repairs --hint function`"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--max-lines", type=int, default=0, help="keep only functions of at most this many lines (0: all)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for file in sorted(options.tasks.glob("*.jsonl")):
        rows = [row for row in map(json.loads, file.read_text().splitlines()) if is_small(row)]
        if options.max_lines:
            rows = [row for row in rows if count_lines(row) <= options.max_lines]
        (options.out / file.name).write_text("".join(json.dumps(add_command(row)) + "\n" for row in rows))
        print(f"{file.name}: {len(rows)} tasks")


if __name__ == "__main__":
    main()
