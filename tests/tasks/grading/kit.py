"""Helpers for the grading tests: small tasks with a bug, works of agents, and environments to grade in."""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import io
import py_compile
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from tests.sandboxes import kit
from tests.speed import scaled
from turngate.sandboxes.base import Resources
from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Script, Swe, Task

BUG = "def total(prices):\n    return sum(prices[1:])\n"
FIX = "def total(prices):\n    return sum(prices)\n"

# ── a repository, graded by its tests ──

REPO: Mapping[str, str] = {
    "shop/__init__.py": "",
    "shop/prices.py": BUG,
    "tests/test_prices.py": "from shop.prices import total\n\n\ndef test_nothing():\n    assert total([]) == 0\n",
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef prices():\n    return [1, 2, 3]\n",
    "pyproject.toml": '[project]\nname = "shop"\n\n[tool.pytest.ini_options]\naddopts = "-ra"\n',
    "README.md": "A shop.\n",
}
TEST_PATCH = """\
diff --git a/tests/test_prices.py b/tests/test_prices.py
--- a/tests/test_prices.py
+++ b/tests/test_prices.py
@@ -3,3 +3,7 @@ from shop.prices import total
 
 def test_nothing():
     assert total([]) == 0
+
+
+def test_all(prices):
+    assert total(prices) == 6
diff --git a/tests/test_more.py b/tests/test_more.py
new file mode 100644
--- /dev/null
+++ b/tests/test_more.py
@@ -0,0 +1,5 @@
+from shop.prices import total
+
+
+def test_one():
+    assert total([7]) == 7
"""
SETUP = """
tar -xof .deps.tar -C "$HOME" && rm .deps.tar
g() { git -c user.name=t -c user.email=t@t -c init.defaultBranch=main -c commit.gpgSign=false "$@"; }
g init -q . && g add -A && g commit -q -m base
"""
PASS, FAIL = ("tests/test_prices.py::test_nothing",), ("tests/test_prices.py::test_all", "tests/test_more.py::test_one")
PYTEST = "python3 -m pytest -rA -p no:cacheprovider tests/test_prices.py tests/test_more.py"
SWE = Swe(
    repo="toy/shop",
    base_commit="HEAD",
    test_patch=TEST_PATCH,
    fail_to_pass=FAIL,
    pass_to_pass=PASS,
    test_cmd=PYTEST,
    before='export PYTHONPATH="$HOME/deps"',
    timeout_s=60,
)
DEPS = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments")


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@cache
def pack_deps() -> bytes:
    """Pack the installed pytest and its dependencies, compiled, as a tar file, because no sandbox has them."""
    with tempfile.TemporaryDirectory(prefix="tg-deps-") as scratch:
        target = Path(scratch, "deps")
        _copy_deps(target)
        compileall.compile_dir(target, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            tar.add(target, arcname="deps")
    return packed.getvalue()


def _copy_deps(target: Path) -> None:
    target.mkdir()
    unneeded = shutil.ignore_patterns("__pycache__", "lexers", "*.pyi")
    for name in DEPS:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        file = Path(str(spec.origin))
        if file.name != "__init__.py":
            shutil.copy2(file, target)
            continue
        shutil.copytree(file.parent, target / name, ignore=unneeded)
    lexers = Path(str(importlib.util.find_spec("pygments").origin)).parent / "lexers"  # type: ignore[union-attr]
    (target / "pygments" / "lexers").mkdir()
    for name in ("__init__.py", "_mapping.py", "diff.py", "python.py"):
        shutil.copy2(lexers / name, target / "pygments" / "lexers")
    for name in ("pluggy", "pytest"):
        info = Path(str(importlib.metadata.distribution(name)._path))  # type: ignore[attr-defined]
        write_files(target / info.name, {"METADATA": (info / "METADATA").read_bytes()})


def repository_task(folder: Path, grader: Swe = SWE, files: Mapping[str, str] = REPO) -> Task:
    """Make a SWE task with git and pytest. The grader's timeout is scaled to the speed of the machine."""
    grader = msgspec.structs.replace(grader, timeout_s=scaled(grader.timeout_s))
    write_files(folder / "files", files)
    (folder / "files" / ".deps.tar").write_bytes(pack_deps())
    return Task(id="shop", instruction="Mend total().", files=folder / "files", setup=SETUP, grader=grader)


def make_work(folder: Path, changes: Mapping[str, str | bytes | None], files: Mapping[str, str] = REPO) -> Work:
    """Make the work of an agent that changes files, or removes those whose content is None."""
    write_files(folder, dict(files))
    for name, content in changes.items():
        if content is None:
            (folder / name).unlink()
        else:
            write_files(folder, {name: content})
    return Work(folder=folder)


# ── a folder, graded by a script ──

FOLDER: Mapping[str, str] = {"prices.py": BUG}
TEST_SH = """\
#!/bin/bash
cd "$(pwd)"
if python3 "${TURNGATE_TESTS:-/tests}/check.py"; then echo 1; else echo 0; fi > "${TURNGATE_LOGS:-/logs}/verifier/reward.txt"
"""
CHECK = (
    "import sys; sys.path.insert(0, '.')\nfrom prices import total\nsys.exit(total([1, 2, 3]) != 6 or total([]) != 0)\n"
)
RUN_SH = """\
#!/bin/bash
PYTHONPATH=. python3 - "$TURNGATE_TESTS/inputs/prices.json" > "$TURNGATE_LOGS/probe/answer.json" <<'END'
import json, sys
from prices import total
print(json.dumps([total(prices) for prices in json.load(open(sys.argv[1]))]))
END
"""
JUDGE = """\
#!/bin/bash
if [ "$(tr -d ' ' < "$TURNGATE_LOGS/probe/answer.json")" = "$(cat "$TURNGATE_TESTS/expected.json")" ]; then echo 1; else echo 0; fi \
  > "$TURNGATE_LOGS/verifier/reward.txt"
"""


def script_task(folder: Path, tests: Mapping[str, str] | None = None, **fields: object) -> Task:
    write_files(folder / "files", FOLDER)
    write_files(folder / "tests", tests or {"test.sh": TEST_SH, "check.py": CHECK})
    script = msgspec.structs.replace(Script(files=folder / "tests", timeout_s=scaled(60)), **fields)
    return Task(id="prices", instruction="Mend total().", files=folder / "files", grader=script)


def probe_task(folder: Path) -> Task:
    tests = {
        "run.sh": RUN_SH,
        "test.sh": JUDGE,
        "inputs/prices.json": "[[1, 2, 3], [], [10, 0.5]]",
        "expected.json": "[6,0,10.5]",
    }
    return script_task(folder, tests, probe=("bash", "/tests/run.sh"))


# ── environments ──


def grading_environment(name: str, root: Path, **fields: object) -> GradingEnvironment:
    kit.need(name)
    return msgspec.structs.replace(
        GradingEnvironment(backend=kit.MAKE[name](root), resources=Resources(pids=256)), **fields
    )


async def grade_and_check(task: Task, work: Work | None, environment: GradingEnvironment) -> Grade:
    """Grade a work, and check that no sandbox is left behind."""
    result = await grade(task, work, environment)
    root = environment.backend.root  # type: ignore[attr-defined]
    assert not list(root.iterdir()), "a sandbox was left behind"
    assert (result.reward is None) or result.kind == "graded"
    return result
