"""Write reviews: rows that show how to find the wrong line of a function, for the warm start.

    python reviews.py --tasks FOLDER --tokenizer MODEL_FOLDER --out FILE PACKAGE==VERSION …

A review is the beginning of a trace: the question, the expert's look at the function, and its change. The bugs are mutations of real
packages, but no tests are run, so the question names no failing tests, and a review ends with the change. Thousands of them are made in
seconds. Packages that are held out are refused. Functions that have a task are left out.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import moves
from agent import MAX_OUTPUT, QUESTION, SYSTEM

from turngate.render import load_renderer
from turngate.tasks.repairs.make import Bug, list_bugs
from turngate.tasks.repairs.measure import build_test_command
from turngate.tasks.repairs.package import Package, load_package

_MAX_FUNCTION = 60  # lines


def write_review(package: Package, bug: Bug, control: random.Random | None = None) -> list[tuple[str, str]] | None:
    """Write the messages of a review, as (role, text). Return None if the bug is not in one line of a function of readable length.

    With `control`, the change is a random change to the same function instead of the right one.
    """
    mutation = bug.mutation
    lines, right = bug.text.split("\n"), package.files[bug.path].split("\n")
    n = moves.find_changed_line(lines, right)
    if n is None or mutation.last - mutation.first >= _MAX_FUNCTION:
        return None
    listing = "".join(f"{m:6d}\t{lines[m - 1]}\n" for m in range(mutation.first, mutation.last + 1))
    if len(listing) >= MAX_OUTPUT:
        return None
    change = moves.Edit(n + 1, lines[n], right[n])
    if control is not None:
        others = [edit for edit in moves.find_edits(bug.text, mutation.first, mutation.last) if edit != change]
        if not others:
            return None
        change = control.choice(others)
    tests = build_test_command(package)
    question = (
        f"There is a bug in {package.name} {package.version}. Fix the code of the package. Do not change the tests.\n\n"
        f"The bug is in the function `{mutation.function}` in `{bug.path}` (lines {mutation.first} to {mutation.last}).\n\n"
        f"Run the tests with:\n\n```\n{tests}\n```\n"
    )
    return [
        ("system", SYSTEM),
        ("user", QUESTION.replace("{{task}}", question)),
        ("assistant", moves.read_function(bug.path, mutation.first, mutation.last)),
        ("user", f"exit code 0\n{listing}"),
        ("assistant", moves.change_line(bug.path, change, tests)),
    ]


def build_row(messages: list[tuple[str, str]], tokenizer: Any, *, mask_changes: bool = False) -> dict[str, list[int]]:
    """Tokenize messages in the model's chat format. Only the last one gets labels, and with `mask_changes`, not those of its change."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages[:-1])
    prompt = tokenizer.encode(f"{text}<|im_start|>assistant\n")
    answer = list(tokenizer.encode(f"{messages[-1][1]}<|im_end|>"))
    labels = moves.mask_change(answer, tokenizer) if mask_changes else answer
    return {"input_ids": [*prompt, *answer], "labels": [moves.NO_LABEL] * len(prompt) + labels}


def find_reviews(
    package: Package,
    count: int,
    seed: int,
    known: set[tuple[str, str, str]],
    control: random.Random | None = None,
) -> Iterator[list[tuple[str, str]]]:
    """Yield reviews of a package, but not of functions in `known` (package, path, function)."""
    for bug in list_bugs(package, seed):
        if count and (package.name, bug.path, bug.mutation.function) not in known:
            review = write_review(package, bug, control)
            if review is not None:
                yield review
                count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=Path, required=True, help="the tasks of the run")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the model's tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-package", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", action="store_true", help="make random changes, not the right ones")
    parser.add_argument("--mask-changes", action="store_true", help="label the procedure, but not the change")
    parser.add_argument("sources", nargs="+", metavar="PACKAGE==VERSION")
    options = parser.parse_args()
    held_out, known = set(), set()
    for file in options.tasks.glob("*.jsonl"):
        for line in file.open():
            about = json.loads(line)["metadata"]
            known.add((about["package"], about["path"], about["function"]))
            if file.stem == "held-out":
                held_out.add(about["package"])
    tokenizer = load_renderer(options.tokenizer)[0].tokenizer
    control = random.Random(options.seed) if options.control else None
    rows = []
    for source in options.sources:
        package = load_package(source)
        if package.name in held_out:
            raise SystemExit(f"{source} is held out, so the model must not see it; leave it out")
        found = list(find_reviews(package, options.per_package, options.seed, known, control))
        print(f"{package.name}: {len(found)} reviews", flush=True)
        rows += [build_row(review, tokenizer, mask_changes=options.mask_changes) for review in found]
    random.Random(options.seed).shuffle(rows)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
