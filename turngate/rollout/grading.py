"""Grade an agent's work without running the agent again: repeat grading after infrastructure faults, and grade identical work once."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections import OrderedDict
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
        self._grades: OrderedDict[tuple[str, str], _GradeOfWork] = OrderedDict()

    async def grade(
        self, task: Task, work: Work, environment: GradingEnvironment, *, group: str, rollout: str
    ) -> Grade:
        """Grade the work, or return the grade of identical work in the same group, with a note that says so.

        Identical work that is being graded at the moment is waited for.
        """
        if not isinstance(task.grader, Swe) or work.lost:
            return await grade_with_retries(task, work, environment)
        known = self._find(group, await asyncio.to_thread(_compute_digest, work))
        async with known.lock:
            if known.grade is None:
                result = await grade_with_retries(task, work, environment)
                if result.kind == "graded":
                    known.grade, known.rollout = result, rollout
                return result
        note = f"not graded again, because the work is identical to that of rollout {known.rollout}"
        return msgspec.structs.replace(known.grade, notes=(*known.grade.notes, note), seconds=0.0)

    def _find(self, group: str, digest: str) -> _GradeOfWork:
        known = self._grades.setdefault((group, digest), _GradeOfWork())
        self._grades.move_to_end((group, digest))
        if len(self._grades) > _MAX_GRADES:
            self._grades.popitem(last=False)
        return known


class _GradeOfWork:
    """The grade of all identical work in a group, once it is known."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()  # held while the work is graded
        self.grade: Grade | None = None
        self.rollout = ""  # whose work was graded


def _compute_digest(work: Work) -> str:
    """Return a digest of what a repository's tests see of the work: paths, permissions, links and contents, without Python's caches."""
    digest = hashlib.sha256("\0".join(work.left_out).encode("utf-8", "surrogateescape"))
    for place, folders, files in os.walk(work.folder):
        folders[:] = sorted(name for name in folders if name != PYTHON_CACHE)
        for path in (Path(place, name) for name in (*folders, *sorted(files))):
            mode = path.lstat().st_mode
            content = os.fsencode(path.readlink()) if path.is_symlink() else b""
            if stat.S_ISREG(mode):
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").digest()
            name = os.fsencode(path.relative_to(work.folder))
            digest.update(b"%d %o %d " % (len(name), mode, len(content)) + name + content)
    return digest.hexdigest()
