"""Cheating works against tests of a repository: none is paid, none breaks the grader, and the honest one is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.sandboxes.kit import backends
from tests.speed import scaled
from tests.tasks.grading import kit
from turngate.tasks.grading.types import Grade, GradingEnvironment

pytestmark = [pytest.mark.needs("bubblewrap"), pytest.mark.full, pytest.mark.alone]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> kit.Task:
    grader = msgspec.structs.replace(kit.SWE, reward="fraction", timeout_s=30)
    return kit.repository(tmp_path_factory.mktemp("shop"), grader)


def unpaid(found: Grade) -> None:
    """Not resolved, and not a single test that failed before is said to pass."""
    assert found.kind == "graded", found.message
    assert found.resolved is False, found.log
    assert all(found.cases.get(case) != "passed" for case in kit.FAIL), found.log
    assert found.reward is not None and found.reward <= 1 / 3 + 1e-9


@pytest.mark.parametrize("name", attacks.REPOSITORY)
async def test_cheating_does_not_pay(name: str, shop: kit.Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    unpaid(await kit.graded(shop, kit.worked(tmp_path / "work", attacks.REPOSITORY[name]), walled))


@pytest.mark.parametrize("name", attacks.FOLDERS)
async def test_nor_do_links_and_git(name: str, shop: kit.Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    work = kit.worked(tmp_path / "work", {})
    attacks.FOLDERS[name](work.folder)
    unpaid(await kit.graded(shop, work, walled))
    assert not Path("/tmp/git-ran-it").exists()


@pytest.mark.real
async def test_honest_work_beside_all_of_it_is_paid(shop: kit.Task, walled: GradingEnvironment, tmp_path: Path) -> None:
    """Whoever mends the code resolves the task, also where the work has things in it that are set aside."""
    junk = {"tests/test_prices.py": attacks.ALWAYS, "conftest.py": attacks.HOOK, "sitecustomize.py": attacks.RUNTEST}
    junk |= {"pyproject.toml": "x = " + "[" * 3000 + "]" * 3000, "lib/pyproject.toml": "x = " + "9" * 5000}
    found = await kit.graded(shop, kit.worked(tmp_path / "work", {"shop/prices.py": kit.FIX, **junk}), walled)
    assert (found.kind, found.reward, found.resolved) == ("graded", 1.0, True), found.log
    assert set(found.cases.values()) == {"passed"}
    assert found.notes == (
        "conftest.py: added by the work and set aside",
        "lib/pyproject.toml: added by the work and set aside",
        "pyproject.toml: the work changed its pytest settings; the task's own file is used",
        "sitecustomize.py: added by the work and set aside",
        "tests/test_prices.py: changed by the work; the task's own file is used",
    )


LENT = """
import os, sys
KEY = next((open(p + "/key", "rb").read() for p in sys.path if os.path.exists(p + "/key")), b"")
assert not KEY, "the key was read"
os._exit(0)
"""


async def test_nothing_of_the_work_is_read_before_the_witness(walled: GradingEnvironment, tmp_path: Path) -> None:
    """PYTHONPATH holds the working folder, first. What would be read from it at once is set aside."""
    grader = msgspec.structs.replace(kit.SWE, before='export PYTHONPATH="$PWD:$HOME/deps"', timeout_s=30)
    task = kit.repository(tmp_path / "task", grader)
    stolen = {"encodings/__init__.py": LENT, "io.py": LENT, "json.py": "import atexit, os\n" + attacks.FORGED}
    unpaid(await kit.graded(task, kit.worked(tmp_path / "cheat", stolen), walled))
    honest = {"shop/prices.py": kit.FIX, "shop/io.py": "", "shop/encodings/__init__.py": "", "encodings/x.py": ""}
    found = await kit.graded(task, kit.worked(tmp_path / "honest", honest), walled)
    assert (found.reward, found.notes) == (1.0, ("encodings/x.py: added by the work and set aside",)), found.log


async def test_tests_that_only_cases_name_are_the_tasks_own(walled: GradingEnvironment, tmp_path: Path) -> None:
    """They lie far from those of the patch. A doctest's file is no test."""
    files = {**kit.REPO, "far/check_b.py": "from shop.b import f\ndef test_b(): assert f() == 1\n"}
    files["shop/b.py"] = 'def f():\n    """\n    >>> f()\n    1\n    """\n    return 1\n'
    cases = (*kit.PASS, "far/check_b.py::test_b", "shop/b.py::shop.b.f")
    command = f"{kit.PYTEST} far/check_b.py shop/b.py --doctest-modules"
    task = kit.repository(
        tmp_path / "task", msgspec.structs.replace(kit.SWE, pass_to_pass=cases, test_cmd=command), files
    )
    cheat = {"shop/prices.py": kit.FIX, "far/check_b.py": "def test_b(): pass\n", "shop/b.py": "def f(): return 2\n"}
    found = await kit.graded(task, kit.worked(tmp_path / "cheat", cheat, files), walled)
    assert (found.reward, found.cases["far/check_b.py::test_b"]) == (0.0, "failed"), found.log
    assert found.notes == ("far/check_b.py: changed by the work; the task's own file is used",)
    honest = {"shop/prices.py": kit.FIX, "shop/b.py": files["shop/b.py"].replace("return 1", "return 2 - 1")}
    found = await kit.graded(task, kit.worked(tmp_path / "honest", honest, files), walled)
    assert (found.reward, found.notes) == (1.0, ()), found.log


async def test_a_repository_that_is_pytest_can_be_mended(walled: GradingEnvironment, tmp_path: Path) -> None:
    """And one whose pytest.ini lies below the folder where the tests are started."""
    test = "def test_x():\n    text = [open(f'src/_pytest/{n}.py').read() for n in ('mod', 'new')]\n    assert text == ['1', '2']\n"
    files = {"src/_pytest/mod.py": "0", "lib/pytest.ini": "[pytest]\n", "lib/test_mod.py": test}
    case = ("lib/test_mod.py::test_x",)
    command = "python3 -m pytest -rA -p no:cacheprovider lib/test_mod.py"
    grader = msgspec.structs.replace(
        kit.SWE, test_patch="", fail_to_pass=case, pass_to_pass=(), test_cmd=command, timeout_s=30
    )
    task = kit.repository(tmp_path / "task", grader, files)
    fix = {
        "src/_pytest/mod.py": "1",
        "src/_pytest/new.py": "2",
        "_pytest/__init__.py": "raise SystemExit(0)\n",
    }
    found = await kit.graded(task, kit.worked(tmp_path / "w", fix, files), walled)
    assert (found.kind, found.reward) == ("graded", 1.0), found.message + found.log
    assert found.notes == ("_pytest/__init__.py: added by the work and set aside",)


DEEPER = {
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "-p evil"\n',
    "setup.cfg": "[tool:pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\naddopts = -p evil\n",
    ".pytest.ini": "[pytest]\naddopts = -p evil\n",
}


async def test_settings_between_the_root_and_the_tests_are_the_tasks(
    walled: GradingEnvironment, tmp_path: Path
) -> None:
    files = {"lib/checks/test_x.py": "def test_x(): assert open('answer').read() == '42'\n", "answer": "0"}
    grader = msgspec.structs.replace(
        kit.SWE,
        test_patch="",
        fail_to_pass=("lib/checks/test_x.py::test_x",),
        pass_to_pass=(),
        test_cmd="python3 -m pytest -rA -p no:cacheprovider lib/checks/test_x.py",
        timeout_s=30,
    )
    task = kit.repository(tmp_path / "task", grader, files)
    for name, text in DEEPER.items():
        cheat = {f"lib/{name}": text, "evil.py": attacks.ITEMS}
        found = await kit.graded(task, kit.worked(tmp_path / name, cheat, files), walled)
        assert (found.kind, found.reward) == ("graded", 0.0), name
        assert found.notes == (f"lib/{name}: added by the work and set aside",)


async def test_settings_that_are_nothing_to_pytest_are_the_agents(walled: GradingEnvironment, tmp_path: Path) -> None:
    files = {**kit.REPO, "setup.cfg": "[metadata]\nname = shop\n\n[tool:pytest]\naddopts = -ra\n"}
    task = kit.repository(tmp_path / "task", msgspec.structs.replace(kit.SWE, timeout_s=30), files)
    fix = {"shop/prices.py": kit.FIX, "tox.ini": "[tox]\n", "lib/pyproject.toml": '[project]\nname = "x"\n'}
    cfg = files["setup.cfg"].replace("name = shop", "name = shop\nversion = 2")
    look = "grep -q version setup.cfg && test -e tox.ini && test -e lib/pyproject.toml && "
    ours = msgspec.structs.replace(
        task,
        grader=msgspec.structs.replace(
            kit.SWE,
            test_cmd=f"if [ -d lib ]; then {look}{kit.PYTEST}; else {kit.PYTEST}; fi",
            timeout_s=scaled(60),
        ),
    )
    found = await kit.graded(ours, kit.worked(tmp_path / "a", {**fix, "setup.cfg": cfg}, files), walled)
    assert (found.reward, found.notes) == (1.0, ()), found.log
    cfg = files["setup.cfg"] + "  -p shop.evil\n"
    found = await kit.graded(task, kit.worked(tmp_path / "b", {**fix, "setup.cfg": cfg}, files), walled)
    assert found.notes == ("setup.cfg: the work changed its pytest settings; the task's own file is used",)


@pytest.mark.parametrize("sandbox", backends("docker", "local"))
async def test_the_same_in_other_sandboxes(sandbox: str, shop: kit.Task, root: Path, tmp_path: Path) -> None:
    ground = kit.ground(sandbox, root)
    found = await kit.graded(shop, kit.worked(tmp_path / "honest", {"shop/prices.py": kit.FIX}), ground)
    assert (found.kind, found.reward, found.resolved, found.notes) == ("graded", 1.0, True, ()), found.log
    # In docker: it ends the grader's container. That is tried again, in case it had another reason; then the work is blamed.
    cheat = {"docker": attacks.REPOSITORY["kills everything"], "local": attacks.package(attacks.SWALLOW)}[sandbox]
    unpaid(await kit.graded(shop, kit.worked(tmp_path / "cheat", cheat), ground))
