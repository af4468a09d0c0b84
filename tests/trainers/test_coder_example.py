"""Tests for the parts of examples/train/h200-coder that need no GPU: tasks, the expert's answers, fast tests and comparisons."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.tasks.task import Solution, Task

FOLDER = Path(__file__).parents[2] / "examples" / "train" / "h200-coder"
sys.path.append(str(FOLDER.parent))  # for rollout_process
INSTRUCTION = "The bug is in the function `f` in `a.py` (lines 1 to 3).\n\nRun them with:\n\n```\npython3 -m pytest -q t.py\n```\n"
SOURCE = "class A:\n    def f(self, a, b):\n        if a < b:\n            return a + 1\n        return b\n"


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"h200_coder_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_task(old: str, new: str) -> Task:
    patch = f"--- a/a.py\n+++ b/a.py\n@@ -2 +2 @@\n-{old}\n+{new}\n"
    return Task(id="t", instruction=INSTRUCTION, solution=Solution(patch=patch), metadata={"path": "a.py", "line": 2})


def find_command(answer: str) -> str:
    found = re.search(r"```bash\n(.*)\n```", answer, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    if a < b:", "    if a <= b:"),
        ("    return a[1:]  # 1", "    return a[2:]  # 1"),
        ("    return 1 + a[1] * 1", "    return 1 + a[2] * 1"),  # not the first 1
        ("    if a == 'x/y':", "    if a != 'x/y':"),
        ("    if not a:", "    if a:"),
        ("    return f(b, a)", "    return f(a, b)"),
        ("    x = a.b*c", "    x = a.b&c"),
    ],
)
def test_expert_changes_the_line(old: str, new: str, tmp_path: Path) -> None:
    moves = load_module("moves")
    task = build_task(old, new)
    (tmp_path / "a.py").write_text(f"def f(a, b):\n{old}\n    return b\n")
    tests = moves.find_test_command(task.instruction)
    assert tests == "python3 -m pytest -q t.py"
    read = find_command(moves.read_function("a.py", *moves.find_lines(task.instruction)))
    listing = subprocess.run(read, shell=True, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert listing.splitlines()[1] == f"     2\t{old}"
    for _ in range(2):  # a second change starts from the original, too
        command = find_command(moves.change_line("a.py", moves.find_fix(task), "true"))
        subprocess.run(command, shell=True, cwd=tmp_path, check=True)
        assert (tmp_path / "a.py").read_text().split("\n")[1] == new


def test_other_changes_are_of_the_same_function() -> None:
    moves = load_module("moves")
    edits = moves.find_edits(SOURCE, 2, 5)
    assert moves.Edit(3, "        if a < b:", "        if a <= b:") in edits
    assert moves.Edit(4, "            return a + 1", "            return a + 2") in edits
    assert all(SOURCE.split("\n")[edit.line - 1] == edit.old != edit.new for edit in edits)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    if a < b:", "    if a <= b:"),
        ("    return a['é/y'][1:]", "    return a['é/y'][2:]"),
        ("    x = a.b*c", "    x = a.b&c"),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_masked_changes_have_no_labels(old: str, new: str, again: bool) -> None:
    moves, tokenizer = load_module("moves"), load_renderer(BUILTIN_TOKENIZER)[0].tokenizer
    answer = moves.change_line("a.py", moves.Edit(17, old, new), "python3 -m pytest -q t.py", again=again)
    wrong, right = (moves.escape(text) for text in moves.find_difference(old, new))
    quoted = "'\"'\"'"
    changed = ["17", old.strip(), new.strip(), "17", wrong.replace("'", quoted), right.replace("'", quoted)]
    assert [answer[first:last] for first, last in moves.find_change(answer)] == changed
    ids = tokenizer.encode(answer)
    labels = moves.mask_change(ids, tokenizer)
    assert all(label in (one, moves.NO_LABEL) for one, label in zip(ids, labels, strict=True))
    spans = moves.find_change(answer)
    for n, label in enumerate(labels):
        start, end = (len(tokenizer.decode(ids[:count])) for count in (n, n + 1))
        assert label < 0 or not any(
            start <= last and end > first for first, last in spans
        )  # nor the token after a part
    kept = tokenizer.decode([label for label in labels if label >= 0])
    assert kept.startswith("The tests still fail. Line " if again else "Line ")
    assert kept.endswith(" a.py.orig > a.py && python3 -m pytest -q t.py 2>&1 | tail -n 3\n```")
    assert sum(label < 0 for label in labels) <= sum(
        len(text) + 2 for text in changed
    )  # one token before and after each part


def test_only_changes_are_masked() -> None:
    moves, tokenizer = load_module("moves"), load_renderer(BUILTIN_TOKENIZER)[0].tokenizer
    for answer in (moves.read_function("a.py", 1, 3), moves.finish()):
        ids = tokenizer.encode(answer)
        assert moves.mask_change(ids, tokenizer) == list(ids)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [("--- a\n+++ b\n-x\n+y\n", True), ("--- a\n+++ b\n+x\n+y\n", False), ("-x\n-z\n+y\n", False)],
)
def test_small_tasks_change_one_line(patch: str, expected: bool) -> None:
    assert load_module("tasks").is_small({"solution": {"patch": patch}, "instruction": "Fix it."}) == expected


def test_short_functions_come_first(tmp_path: Path) -> None:
    def write(name: str, last: int) -> str:
        row = {
            "id": name,
            "instruction": f"The bug is in `f` (lines 1 to {last}).",
            "files": {"a.py": "x\n"},
            "grader": {"type": "script", "command": ["true"]},
            "solution": {"patch": "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x\n+y\n"},
            "metadata": {"package": name[0]},
        }
        return json.dumps(row) + "\n"

    file = tmp_path / "train.jsonl"
    lengths = {"a1": 30, "a2": 5, "b1": 12, "b2": 4, "b3": 45}
    file.write_text("".join(write(name, last) for name, last in lengths.items()))
    choose = load_module("tasks").choose_tasks
    chosen = [task.id for task in choose(file, 10, max_lines=40, short_first=True)]
    assert (set(chosen[:2]), chosen[2:]) == ({"a2", "b2"}, ["b1", "a1"])
    assert {task.id for task in choose(file, 10)} == set(lengths)


@pytest.mark.process
def test_pytest_of_agents_imports_from_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    server, work = tmp_path / "server", tmp_path / "work"
    server.mkdir()
    (work / "src").mkdir(parents=True)
    (work / "src" / "own.py").write_text("VALUE = 1\n")
    (work / "test_own.py").write_text("import own\n\n\ndef test_value():\n    assert own.VALUE == 2\n")
    command = "PYTHONPATH=src python3 -m pytest -q -p no:cacheprovider test_own.py"
    with load_module("fast_pytest").run_pytest_server(server) as path:
        env = {**os.environ, "PATH": path}
        failed = subprocess.run(command, shell=True, cwd=work, env=env, capture_output=True, text=True)
        assert (failed.returncode, "1 failed" in failed.stdout) == (1, True), failed.stdout + failed.stderr
        (work / "src" / "own.py").write_text("VALUE = 2\n")
        passed = subprocess.run(command, shell=True, cwd=work, env=env, capture_output=True, text=True)
        assert (passed.returncode, "1 passed" in passed.stdout) == (0, True), passed.stdout + passed.stderr


def test_differences_are_of_the_same_tasks() -> None:
    compare = load_module("compare")

    def grade(task: str, *rewards: float) -> list[object]:
        return [compare.RolloutLine(task, reward, "s", 3 if reward else 6) for reward in rewards]

    start = compare.compute_rates([*grade("a", 0, 0), *grade("b", 0, 1)])
    graded = [*grade("a", 1, 0), *grade("b", 1, 1), *grade("c", 1, 1)]
    assert start == {"a": 0, "b": 0.5}
    assert compare.compare(compare.compute_rates(graded), start) == (0.5, (0.5, 0.5))
    assert compare.count_solved_at_once(graded) == 5


ROW = {
    "id": "a",
    "instruction": (
        "There is a bug in a: tests fail.\n\nThe bug is in the function `f` in `a.py` (lines 1 to 2).\n\nFailing tests:\n- t.py::test_f\n\n"
        "The first one reports:\n\n```\nE   assert 3 == 2\n```\n\nRun them with:\n\n```\nPYTHON t.py\n```\n"
    ),
    "files": {"src/a.py": "def f(a):\n    return a + 2\n", "t.py": "from a import f\nassert f(1) == 2\n"},
    "metadata": {"path": "src/a.py", "function": "f"},
    "solution": {"patch": "--- a/a.py\n+++ b/a.py\n@@ -2 +2 @@\n-    return a + 2\n+    return a + 1\n"},
}


def run_fix(folder: Path, line: str, new: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} fix.py {line} <<'END'\n{new}\nEND"
    (folder / "home").mkdir(exist_ok=True)
    env = {**os.environ, "HOME": str(folder / "home")}
    return subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.process
def test_edit_command_changes_one_line_of_the_original(tmp_path: Path) -> None:
    row = {**ROW, "instruction": ROW["instruction"].replace("PYTHON", f"PYTHONPATH=src {sys.executable}")}  # type: ignore[attr-defined]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.jsonl").write_text(json.dumps(row) + "\n")
    command = [
        sys.executable,
        str(FOLDER / "edit_command.py"),
        "--tasks",
        str(tmp_path / "tasks"),
        "--out",
        str(tmp_path / "edit"),
    ]
    subprocess.run(command, check=True, capture_output=True)
    [task] = map(json.loads, (tmp_path / "edit" / "train.jsonl").read_text().splitlines())
    assert "    1  def f(a):\n    2      return a + 2\n" in task["instruction"]
    assert "E   assert 3 == 2" in task["instruction"] and "Run them with" not in task["instruction"]
    assert load_module("moves").find_lines(task["instruction"]) == (1, 2)
    for name, text in task["files"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for line, new in (("3", "x"), ("two", "x"), ("2", "")):
        assert run_fix(tmp_path, line, new).stderr.startswith("Use: python3 fix.py LINE")
    assert "exactly one new line" in run_fix(tmp_path, "2", "return a + 1\n    return a").stderr
    assert "already is `return a + 2`" in run_fix(tmp_path, "2", "return a + 2").stderr
    failed = run_fix(tmp_path, "1", "def f(a, b):")
    assert failed.returncode == 1 and "With this change, the tests still fail: TypeError: " in failed.stderr
    assert (tmp_path / "src" / "a.py").read_text() == ROW["files"]["src/a.py"]  # type: ignore[index]
    assert "already failed" in run_fix(tmp_path, "1", "  def f(a, b):").stderr
    assert "the tests still fail" in run_fix(tmp_path, "2", "def f(a, b):").stderr
    passed = run_fix(tmp_path, "2", "return a + 1")  # keeps the indentation, and restores line 1
    assert passed.returncode == 0 and passed.stdout.startswith("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    assert (tmp_path / "src" / "a.py").read_text() == "def f(a):\n    return a + 1\n"


def test_reports_of_several_runners_add_up() -> None:
    module = load_module("compare")
    from rollout_process import RunnerReport, merge_reports

    def report(rewards: list[float], **more: Any) -> Any:
        values: dict[str, Any] = {
            "rollouts": len(rewards),
            "tasks": 1,
            "kinds": {"graded": len(rewards)},
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "passed": sum(rewards) / len(rewards) if rewards else None,
            "turns": None,
            "seconds": 2.0,
            "sampled_tokens": 5,
            "own_cpu_s": 1.0,
            "children_cpu_s": 1.0,
            "stages": {"agent": 1.0 if rewards else 9.0},
            "messages": [],
            "stopped": "",
            "graded": [module.RolloutLine("a", reward, "s", 1) for reward in rewards],
        }
        return RunnerReport(**values | more)

    merged = merge_reports([report([1.0]), report([0.0, 0.0, 0.0], seconds=3.0, turns=2.0), report([], kinds={})])
    assert (merged.rollouts, merged.tasks, merged.kinds) == (4, 3, {"graded": 4})
    assert (merged.reward, merged.passed, merged.turns) == (0.25, 0.25, 2.0)
    assert (merged.seconds, merged.sampled_tokens, merged.own_cpu_s) == (3.0, 15, 3.0)
    assert merged.stages == {"agent": 1.0} and len(merged.graded) == 4


@pytest.mark.parametrize(
    ("answer", "command"),
    [
        ("I do.\n```bash\nls\n```", "ls"),
        ("I do.\n```\nls\n```\nDone.", "ls"),
        ("```bash\nls\n```\n```bash\nrm x\n```", "ls"),
        ("```python\nreturn 1\n```\nNow run\n```bash\nls\n```", "ls"),
        ("```python\nreturn 1\n```\nNow run this:\n```\nls\n```", None),
        ("```python\nreturn 1\n```\nand\n```python\nreturn 2\n```", None),
        ("```bash\nls", None),
        ("ls", None),
    ],
)
def test_command_of_an_answer(answer: str, command: str | None) -> None:
    found = re.findall(load_module("agent").ACTION, answer, re.DOTALL)
    assert found == ([] if command is None else [command])


async def test_runners_share_a_throttle(tmp_path: Path) -> None:
    from rollout_process import GatewayAccess, SharedThrottle

    (tmp_path / "started").touch()
    access = GatewayAccess(url="", key="", feed="f", ahead=3, shares=2, started=str(tmp_path / "started"))
    first, second = SharedThrottle(access), SharedThrottle(msgspec.structs.replace(access, share=1))
    for start in (first(0), second(0), first(1)):
        await asyncio.wait_for(start, 5)
    waiting = asyncio.create_task(first(2))
    done, _ = await asyncio.wait({waiting}, timeout=0.2)
    assert not done
    first.mark_trained(1)  # now three groups after it may be in progress
    await asyncio.wait_for(waiting, 5)
    first.mark_trained(100)
    for number in range(3, 90):  # the other runner has ended
        await asyncio.wait_for(first(number), 5)
    third = SharedThrottle(access)
    second.end(["a"])  # although it started more: the others were empty
    first.end(["b"])
    third.mark_trained(2)
    await asyncio.wait_for(third(2), 5)


def test_each_task_has_one_runner() -> None:
    from rollout_process import GatewayAccess

    shares = [GatewayAccess(url="", key="", share=share, shares=3) for share in range(3)]
    assert sorted(task for access in shares for task in access.choose_share(list(range(8)))) == list(range(8))
    assert sum(access.divide(8) for access in shares) >= 8
    with pytest.raises(SystemExit, match="lower --runners"):
        shares[2].choose_share([1, 2])
