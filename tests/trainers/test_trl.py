"""Tests with the real `trl` package in its own environment: the tests of `inside_trl/` and the examples."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import tomllib

import pytest

from tests.nested import ROOT, TIERS, environment, run, run_tests
from tests.speed import scaled
from tools import parts

pytestmark = [pytest.mark.needs("trl", "agent:pi", "agent:mini-swe-agent"), pytest.mark.full]

PART = "trl"
AT_LEAST = 4  # tests marked as real in `inside_trl/`


@pytest.fixture(scope="module")
def python() -> str:
    """The Python interpreter of the environment with trl."""
    return str(parts.ensure(PART) / "bin" / "python")


@pytest.mark.parametrize("marks", TIERS)
def test_inside_trl_tests_pass(python: str, marks: str) -> None:
    """Run the tests of `inside_trl/` in its environment, without failing on its warnings."""
    passed = run_tests(python, "tests/trainers/inside_trl", marks, "-W", "default")
    assert passed >= (AT_LEAST if marks == "real" else 39)


FIND_UNDECLARED = """
import ast, sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from packaging.requirements import Requirement

declared, pending = set(), [Requirement(text) for text in sys.argv[2:]]
while pending:
    requirement = pending.pop()
    if requirement.name not in declared:
        declared.add(requirement.name)
        try:
            needs = map(Requirement, requires(requirement.name) or ())
        except PackageNotFoundError:
            continue
        pending += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
names = {name.lower().replace("_", "-") for name in declared}
distributions = packages_distributions()
for node in ast.parse(open(sys.argv[1]).read()).body:
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", None) or ""]
    for module in modules:
        packages = distributions.get(module.split(".")[0], [])
        if packages and not {name.lower().replace("_", "-") for name in packages} & {*names, "turngate"}:
            print(module)
"""


@pytest.mark.parametrize("example", ["async_grpo.py", "one_rollout.py", "cpu.py", "random_grader.py"])
def test_example_imports_only_what_the_extra_installs(python: str, example: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["trl"]]
    command = [python, "-c", FIND_UNDECLARED, f"examples/trl/{example}", *needs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60), check=True)
    assert done.stdout == ""


@pytest.mark.repeat  # inside_trl/test_sessions.py trains, too
def test_dry_run_trains(python: str) -> None:
    output = run(python, "examples/trl/async_grpo.py", "--dry-run", "--steps", "5")
    steps = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5]
    assert abs(steps[0]["kl"]) < 1e-5


FAILING_POLICY = """
import async_grpo, cpu

def fail(policy, call):
    raise ValueError("the model has no weights")

cpu.Policy._sample = fail
async_grpo.main()
"""


def test_dry_run_fails_if_the_policy_fails(python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="n") as scratch:  # a short path, for unix sockets
        done = subprocess.run(
            [python, "-c", FAILING_POLICY, "--dry-run", "--agent", "pi"],
            cwd=ROOT,
            env=environment(ROOT / "examples" / "trl", TMPDIR=scratch),
            capture_output=True,
            text=True,
            timeout=scaled(120),
            check=False,
        )
    assert done.returncode == 1, done.stderr[-4000:]
    assert "RuntimeError: the policy stopped answering: ValueError('the model has no weights')" in done.stderr


@pytest.mark.repeat
def test_one_rollout_example_prints_rows(python: str) -> None:
    output = run(python, "examples/trl/one_rollout.py", "--dry-run", "--sandbox", "local")
    assert "pi on fix-add: finished, turns: 1, reward 0" in output
    assert re.search(r"row of \d+ tokens, 32 trained, .* advantage 0, policy version 0", output)
