"""Cheating works against tests of a repository: none is paid, none breaks the grader, and the honest one is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.redteam import attacks
from tests.tasks.grading import kit
from turngate.tasks.grading.grade import Grade, Ground


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
async def test_cheating_does_not_pay(name: str, shop: kit.Task, walled: Ground, tmp_path: Path) -> None:
    unpaid(await kit.graded(shop, kit.worked(tmp_path / "work", attacks.REPOSITORY[name]), walled))


@pytest.mark.parametrize("name", attacks.FOLDERS)
async def test_nor_do_links_and_git(name: str, shop: kit.Task, walled: Ground, tmp_path: Path) -> None:
    work = kit.worked(tmp_path / "work", {})
    attacks.FOLDERS[name](work.folder)
    unpaid(await kit.graded(shop, work, walled))
    assert not Path("/tmp/git-ran-it").exists()


async def test_honest_work_beside_all_of_it_is_paid(shop: kit.Task, walled: Ground, tmp_path: Path) -> None:
    """Whoever mends the code resolves the task, also where the work has things in it that are set aside."""
    junk = {"tests/test_prices.py": attacks.ALWAYS, "conftest.py": attacks.HOOK, "sitecustomize.py": attacks.RUNTEST}
    found = await kit.graded(shop, kit.worked(tmp_path / "work", {"shop/prices.py": kit.FIX, **junk}), walled)
    assert (found.kind, found.reward, found.resolved) == ("graded", 1.0, True), found.log
    assert set(found.cases.values()) == {"passed"}
    assert found.notes == (
        "conftest.py: added by the work, and set aside",
        "sitecustomize.py: added by the work, and set aside",
        "tests/test_prices.py: changed by the work; the task's own is used",
    )


@pytest.mark.parametrize("sandbox", ["docker", "local"])
async def test_the_same_in_other_sandboxes(sandbox: str, shop: kit.Task, root: Path, tmp_path: Path) -> None:
    ground = kit.ground(sandbox, root)
    found = await kit.graded(shop, kit.worked(tmp_path / "honest", {"shop/prices.py": kit.FIX}), ground)
    assert (found.kind, found.reward, found.resolved, found.notes) == ("graded", 1.0, True, ()), found.log
    # In docker: it ends the grader's container. That is tried again, in case it had another reason; then the work is blamed.
    cheat = {"docker": attacks.REPOSITORY["kills everything"], "local": attacks.package(attacks.SWALLOW)}[sandbox]
    unpaid(await kit.graded(shop, kit.worked(tmp_path / "cheat", cheat), ground))
