"""Cheating works against the tests of a repository: none is resolved, none breaks the grader, and honest work is resolved."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.sandboxes.kit import backends
from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.tasks.grading.types import Grade, GradingEnvironment

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> kit.Task:
    grader = msgspec.structs.replace(kit.SWE, reward="fraction", timeout_s=30)
    return kit.repository_task(tmp_path_factory.mktemp("shop"), grader)


def assert_unresolved(result: Grade) -> None:
    """Check that the task is not resolved and that no failing test is reported as passed."""
    assert result.kind == "graded", result.message
    assert result.resolved is False, result.log
    assert all(result.cases.get(case) != "passed" for case in kit.FAIL), result.log
    assert result.reward is not None and result.reward <= 1 / 3 + 1e-9


@pytest.mark.parametrize("name", attacks.REPOSITORY)
async def test_cheating_work_is_not_resolved(
    name: str, shop: kit.Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    assert_unresolved(
        await kit.grade_and_check(shop, kit.make_work(tmp_path / "work", attacks.REPOSITORY[name]), isolated)
    )


@pytest.mark.parametrize("name", attacks.FOLDERS)
async def test_link_and_git_attacks_are_not_resolved(
    name: str, shop: kit.Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    work = kit.make_work(tmp_path / "work", {})
    attacks.FOLDERS[name](work.folder)
    assert_unresolved(await kit.grade_and_check(shop, work, isolated))
    assert not Path("/tmp/git-ran-it").exists()


@pytest.mark.real
async def test_honest_work_with_junk_files_is_resolved(
    shop: kit.Task, isolated: GradingEnvironment, tmp_path: Path
) -> None:
    """A fix resolves the task even if the work has files that are set aside."""
    junk = {
        "tests/test_prices.py": attacks.ALWAYS_PASS,
        "conftest.py": attacks.HOOK,
        "sitecustomize.py": attacks.RUNTEST,
    }
    junk |= {"pyproject.toml": "x = " + "[" * 3000 + "]" * 3000, "lib/pyproject.toml": "x = " + "9" * 5000}
    result = await kit.grade_and_check(
        shop, kit.make_work(tmp_path / "work", {"shop/prices.py": kit.FIX, **junk}), isolated
    )
    assert (result.kind, result.reward, result.resolved) == ("graded", 1.0, True), result.log
    assert set(result.cases.values()) == {"passed"}
    assert result.notes == (
        "conftest.py: added by the work and set aside",
        "lib/pyproject.toml: added by the work and set aside",
        "pyproject.toml: pytest settings changed by the work; the task's own file is used",
        "sitecustomize.py: added by the work and set aside",
        "tests/test_prices.py: changed by the work; the task's own file is used",
    )


SHADOW_MODULE = """
import os, sys
KEY = next((open(p + "/key", "rb").read() for p in sys.path if os.path.exists(p + "/key")), b"")
assert not KEY, "the key was read"
os._exit(0)
"""


async def test_work_cannot_shadow_modules_before_witness_starts(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """The working folder comes first on PYTHONPATH. Modules that Python would import at startup are set aside."""
    grader = msgspec.structs.replace(kit.SWE, before='export PYTHONPATH="$PWD:$HOME/deps"', timeout_s=30)
    task = kit.repository_task(tmp_path / "task", grader)
    shadowing = {
        "encodings/__init__.py": SHADOW_MODULE,
        "io.py": SHADOW_MODULE,
        "json.py": "import atexit, os\n" + attacks.FORGED_OUTPUT,
    }
    assert_unresolved(await kit.grade_and_check(task, kit.make_work(tmp_path / "cheat", shadowing), isolated))
    honest = {"shop/prices.py": kit.FIX, "shop/io.py": "", "shop/encodings/__init__.py": "", "encodings/x.py": ""}
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "honest", honest), isolated)
    assert (result.reward, result.notes) == (1.0, ("encodings/x.py: added by the work and set aside",)), result.log


async def test_test_files_named_only_by_cases_are_restored(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """Test files outside the patch are restored, but a source file with a doctest is not."""
    files = {**kit.REPO, "far/check_b.py": "from shop.b import f\ndef test_b(): assert f() == 1\n"}
    files["shop/b.py"] = 'def f():\n    """\n    >>> f()\n    1\n    """\n    return 1\n'
    cases = (*kit.PASS, "far/check_b.py::test_b", "shop/b.py::shop.b.f")
    command = f"{kit.PYTEST} far/check_b.py shop/b.py --doctest-modules"
    task = kit.repository_task(
        tmp_path / "task", msgspec.structs.replace(kit.SWE, pass_to_pass=cases, test_cmd=command), files
    )
    cheat = {"shop/prices.py": kit.FIX, "far/check_b.py": "def test_b(): pass\n", "shop/b.py": "def f(): return 2\n"}
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "cheat", cheat, files), isolated)
    assert (result.reward, result.cases["far/check_b.py::test_b"]) == (0.0, "failed"), result.log
    assert result.notes == ("far/check_b.py: changed by the work; the task's own file is used",)
    honest = {"shop/prices.py": kit.FIX, "shop/b.py": files["shop/b.py"].replace("return 1", "return 2 - 1")}
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "honest", honest, files), isolated)
    assert (result.reward, result.notes) == (1.0, ()), result.log


async def test_repository_of_pytest_itself_can_be_fixed(isolated: GradingEnvironment, tmp_path: Path) -> None:
    """Its pytest.ini is below the folder where the tests are started."""
    test = "def test_x():\n    text = [open(f'src/_pytest/{n}.py').read() for n in ('mod', 'new')]\n    assert text == ['1', '2']\n"
    files = {"src/_pytest/mod.py": "0", "lib/pytest.ini": "[pytest]\n", "lib/test_mod.py": test}
    case = ("lib/test_mod.py::test_x",)
    command = "python3 -m pytest -rA -p no:cacheprovider lib/test_mod.py"
    grader = msgspec.structs.replace(
        kit.SWE, test_patch="", fail_to_pass=case, pass_to_pass=(), test_cmd=command, timeout_s=30
    )
    task = kit.repository_task(tmp_path / "task", grader, files)
    fix = {
        "src/_pytest/mod.py": "1",
        "src/_pytest/new.py": "2",
        "_pytest/__init__.py": "raise SystemExit(0)\n",
    }
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "w", fix, files), isolated)
    assert (result.kind, result.reward) == ("graded", 1.0), result.message + result.log
    assert result.notes == ("_pytest/__init__.py: added by the work and set aside",)


NESTED_SETTINGS = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n',
    "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\naddopts = -p evil\n",
    ".pytest.ini": "[pytest]\naddopts = -p evil\n",
}


async def test_nested_pytest_settings_are_set_aside(isolated: GradingEnvironment, tmp_path: Path) -> None:
    files = {"lib/checks/test_x.py": "def test_x(): assert open('answer').read() == '42'\n", "answer": "0"}
    grader = msgspec.structs.replace(
        kit.SWE,
        test_patch="",
        fail_to_pass=("lib/checks/test_x.py::test_x",),
        pass_to_pass=(),
        test_cmd="python3 -m pytest -rA -p no:cacheprovider lib/checks/test_x.py",
        timeout_s=30,
    )
    task = kit.repository_task(tmp_path / "task", grader, files)
    for name, text in NESTED_SETTINGS.items():
        cheat = {f"lib/{name}": text, "evil.py": attacks.COLLECTION_PLUGIN}
        result = await kit.grade_and_check(task, kit.make_work(tmp_path / name, cheat, files), isolated)
        assert (result.kind, result.reward) == ("graded", 0.0), name
        assert result.notes == (f"lib/{name}: added by the work and set aside",)


async def test_settings_unrelated_to_pytest_are_kept(isolated: GradingEnvironment, tmp_path: Path) -> None:
    files = {**kit.REPO, "setup.cfg": "[metadata]\nname = shop\n\n[tool:pytest]\naddopts = -ra\n"}
    task = kit.repository_task(tmp_path / "task", msgspec.structs.replace(kit.SWE, timeout_s=30), files)
    fix = {"shop/prices.py": kit.FIX, "tox.ini": "[tox]\n", "lib/pyproject.toml": '[project]\nname = "x"\n'}
    cfg = files["setup.cfg"].replace("name = shop", "name = shop\nversion = 2")
    look = "grep -q version setup.cfg && test -e tox.ini && test -e lib/pyproject.toml && "
    kept_task = msgspec.structs.replace(
        task,
        grader=msgspec.structs.replace(
            kit.SWE,
            test_cmd=f"if [ -d lib ]; then {look}{kit.PYTEST}; else {kit.PYTEST}; fi",
            timeout_s=scaled(60),
        ),
    )
    result = await kit.grade_and_check(
        kept_task, kit.make_work(tmp_path / "a", {**fix, "setup.cfg": cfg}, files), isolated
    )
    assert (result.reward, result.notes) == (1.0, ()), result.log
    cfg = files["setup.cfg"] + "  -p shop.evil\n"
    result = await kit.grade_and_check(task, kit.make_work(tmp_path / "b", {**fix, "setup.cfg": cfg}, files), isolated)
    assert result.notes == ("setup.cfg: pytest settings changed by the work; the task's own file is used",)


@pytest.mark.parametrize("sandbox", backends("docker", "local"))
async def test_honest_and_cheating_work_in_other_sandboxes(
    sandbox: str, shop: kit.Task, root: Path, tmp_path: Path
) -> None:
    environment = kit.grading_environment(sandbox, root)
    result = await kit.grade_and_check(
        shop, kit.make_work(tmp_path / "honest", {"shop/prices.py": kit.FIX}), environment
    )
    assert (result.kind, result.reward, result.resolved, result.notes) == ("graded", 1.0, True, ()), result.log
    # In docker the attack ends the grader's container. Grading is retried, in case of another cause, before the work is blamed.
    cheat = {"docker": attacks.REPOSITORY["kills everything"], "local": attacks.package(attacks.SWALLOW)}[sandbox]
    assert_unresolved(await kit.grade_and_check(shop, kit.make_work(tmp_path / "cheat", cheat), environment))
