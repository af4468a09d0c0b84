"""Grade an agent's work without running the agent again: repeat grading after infrastructure faults, and grade identical work once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.sandbox import PYTHON_CACHE
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Swe, Task

MAX_TRIES = 3
BACKOFF_S = 1.0  # pause before the second try; the pause before the third is four times as long
_MAX_GRADES = 500  # a grade with its log takes up to about 100 kB


async def grade_with_retries(task: Task, work: Work, environment: GradingEnvironment) -> Grade:
    """Grade the work with the task's grader. After an infrastructure fault, try again, with at most `MAX_TRIES` tries in total."""
    tries = 1
    while True:
        result = await grade(task, work, environment)
        if result.kind != "infrastructure fault" or tries == MAX_TRIES:
            return result
        await asyncio.sleep(BACKOFF_S * 4 ** (tries - 1))
        tries += 1


class GradeCache:
    """Grades identical work once per group.

    Only the grades of repository tests (`Swe`) depend solely on the files in the work. Other graders may also read the turns or be
    nondeterministic, so their grades are never reused. Grades without a reward are not reused either.
    """

    def __init__(self) -> None:
        # The grade of each work, with the name of its rollout. A future whose grading gives no reward has the result None, and is removed.
        self._grades: OrderedDict[str, asyncio.Future[tuple[Grade, str] | None]] = OrderedDict()

    async def grade(
        self,
        task: Task,
        work: Work,
        environment: GradingEnvironment,
        *,
        group: str,
        rollout: str,
        grade: Callable[[], Awaitable[Grade]],
    ) -> Grade:
        """Call `grade`, or return the grade of identical work in the same group, with a note that says so.

        If identical work is being graded, wait for its grade.
        """
        if not isinstance(task.grader, Swe) or work.lost:
            return await grade()
        try:
            key = await asyncio.to_thread(_compute_digest, task, work, environment, group)
        except OSError:  # grading reports the problem
            return await grade()
        if (known := self._grades.get(key)) is not None:
            self._grades.move_to_end(key)
            shared = await asyncio.shield(known)
            return await grade() if shared is None else _reuse(*shared, rollout)
        known = self._grades[key] = asyncio.get_running_loop().create_future()
        if len(self._grades) > _MAX_GRADES:
            self._grades.popitem(last=False)
        try:
            result = await grade()
        except BaseException:
            self._give_up(key, known)
            raise
        if result.kind == "graded":
            known.set_result((result, rollout))
        else:
            self._give_up(key, known)
        return result

    def _give_up(self, key: str, known: asyncio.Future[tuple[Grade, str] | None]) -> None:
        """Let all waiting rollouts grade their own work, at the same time."""
        known.set_result(None)
        if self._grades.get(key) is known:
            del self._grades[key]


def _reuse(grade: Grade, graded: str, rollout: str) -> Grade:
    source = "an earlier attempt" if graded == rollout else f"rollout {graded}"
    note = f"not graded again, because the work is identical to that of {source}"
    return msgspec.structs.replace(grade, notes=(*grade.notes, note), seconds=0.0)


def _compute_digest(task: Task, work: Work, environment: GradingEnvironment, group: str) -> str:
    """Return a digest of all that repository tests depend on: the group, the task, the environment, and the tree of the work.

    The tree consists of paths, permissions, links and contents, without Python's caches.
    """
    terms = (group, task.id, task.grader, task.image, str(task.files), environment.image, environment.resources)
    digest = hashlib.sha256(msgspec.json.encode((environment.backend.name, *terms)))
    names: dict[tuple[int, int], bytes] = {}  # the first name of each file with several hard links
    for place, folders, files in os.walk(work.folder):
        folders[:] = sorted(name for name in folders if name != PYTHON_CACHE)
        for path in (Path(place, name) for name in (*folders, *sorted(files))):
            name, state = os.fsencode(path.relative_to(work.folder)), path.lstat()
            content = os.fsencode(path.readlink()) if path.is_symlink() else b""
            if stat.S_ISREG(state.st_mode):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
                if state.st_nlink > 1:
                    content += names.setdefault((state.st_dev, state.st_ino), name)
            digest.update(b"%d %o %d " % (len(name), state.st_mode, len(content)) + name + content)
    return digest.hexdigest()
