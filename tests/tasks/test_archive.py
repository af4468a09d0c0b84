"""Archives of tasks: what they contain, how they are checked, and what a machine refuses to unpack."""

from __future__ import annotations

import errno
import hashlib
import io
import math
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from turngate.errors import BadRequest, ConfigError, TaskError, TurngateError
from turngate.tasks import archive_cache, load_task
from turngate.tasks.archive import PackedTask, pack_task
from turngate.tasks.archive_cache import ArchiveCache, ArchiveError
from turngate.tasks.task import Function, HostVariable, Part, Rubric, Script, Solution, Task

SECRET = "sesame-4711"


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def describe_folder(folder: Path) -> dict[str, tuple[str, int, bytes]]:
    """Return the type, mode and content of everything in a folder."""
    found = {}
    for place, folders, names in os.walk(os.fsencode(folder)):
        for name in (*folders, *names):
            path = Path(os.fsdecode(os.path.join(place, name)))
            key = str(path.relative_to(folder))
            if path.is_symlink():
                found[key] = ("link", 0, os.fsencode(path.readlink()))
            else:
                mode = path.stat().st_mode & 0o777
                found[key] = ("folder", mode, b"") if path.is_dir() else ("file", mode, path.read_bytes())
    return found


@pytest.fixture
def cache(tmp_path: Path) -> ArchiveCache:
    return ArchiveCache(tmp_path / "cache")


def test_archive_depends_only_on_content(tmp_path: Path) -> None:
    def digest(name: str, change: Callable[[Path], object] = lambda folder: None) -> str:
        files = write_files(tmp_path / name, {"b.txt": "b", "a/x.sh": "x", "a/y": "y"})
        for path in files.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        change(files)
        return pack_task(Task(id="t", instruction="x", files=files)).archive

    first = digest("one")
    assert len(first) == 64 and digest("two/three", lambda folder: os.utime(folder / "b.txt", (1, 1))) == first
    changes: dict[str, Callable[[Path], object]] = {
        "content": lambda folder: (folder / "b.txt").write_text("c"),
        "mode": lambda folder: (folder / "a/x.sh").chmod(0o755),
        "name": lambda folder: (folder / "b.txt").rename(folder / "c.txt"),
        "folder": lambda folder: (folder / "empty").mkdir(),
        "link": lambda folder: (folder / "link").symlink_to("b.txt"),
    }
    assert len({first, *(digest(name, change) for name, change in changes.items())}) == 1 + len(changes)


def test_task_without_files_has_no_archive(cache: ArchiveCache) -> None:
    task = Task(id="t", instruction="x", source="tasks.jsonl, row 3", grader=Function(name="json:loads"))
    packed = cache.store(task)
    assert packed == pack_task(task) and packed.archive == "" and packed.task.source == ""
    assert cache.open_task(packed, {}) == msgspec.structs.replace(task, source="")


def test_unpacked_files_equal_the_originals(tmp_path: Path, cache: ArchiveCache) -> None:
    files = write_files(tmp_path / "files", {"run.sh": "#!/bin/sh", "deep/er/file": "x" * 100_000, "n" * 200: "long"})
    (files / "run.sh").chmod(0o775)
    (files / "deep/er/file").chmod(0o444)
    (files / "empty").mkdir(mode=0o700)
    (files / "link").symlink_to("deep/er/file")
    (files / "up").mkdir()
    (files / "up/link").symlink_to("../run.sh")
    Path(os.fsdecode(os.fsencode(files) + b"/not-utf8-\xff")).write_text("odd")
    expected = describe_folder(files)
    os.mkfifo(files / "pipe")  # left out, as in an upload into a sandbox
    task = Task(id="t", instruction="x", files=files)
    packed = cache.store(task)
    assert packed == pack_task(task) and packed.task.files == Path("files")
    unpacked = cache.open_task(packed, {})
    assert unpacked.files is not None and describe_folder(unpacked.files) == expected


def test_every_path_of_a_task_is_packed(tmp_path: Path, cache: ArchiveCache) -> None:
    names = ("files", "environment", "tests", "other", "solution")
    paths = {name: write_files(tmp_path / name, {"name.txt": name}) for name in names}
    module = write_files(tmp_path / "elsewhere", {"grade.py": "def grade(subject): return 1.0", "private.txt": SECRET})
    graders = (
        Script(files=paths["tests"]),
        Script(files=paths["other"]),
        Script(files=paths["tests"], command=("true",)),
        Function(name=f"{module / 'grade.py'}:grade"),
        Function(name="json:loads"),
    )
    task = Task(
        id="t",
        instruction="x",
        files=paths["files"],
        dockerfile=paths["environment"],
        grader=Rubric(parts=tuple(Part(name=str(n), weight=1.0, grader=one) for n, one in enumerate(graders))),
        solution=Solution(files=paths["solution"]),
    )
    packed = cache.store(task)
    opened = cache.open_task(packed, {})
    assert isinstance(opened.grader, Rubric) and opened.solution is not None
    first, second, third, function, installed = (part.grader for part in opened.grader.parts)
    assert isinstance(first, Script) and isinstance(second, Script) and isinstance(third, Script)
    assert isinstance(function, Function) and installed == Function(name="json:loads")
    assert first.files == third.files, "the same folder is packed once"
    places = (opened.files, opened.dockerfile, first.files, second.files, opened.solution.files)
    assert [(place / "name.txt").read_text() for place in places if place is not None] == list(names)
    file = Path(function.name.rpartition(":")[0])
    assert file.read_text() == "def grade(subject): return 1.0" and function.name.endswith(".py:grade")
    assert SECRET.encode() not in cache.read(packed.archive), "only the function's own file is packed"
    assert str(tmp_path).encode() not in cache.read(packed.archive)


def test_function_in_task_folder_keeps_its_neighbours(tmp_path: Path, cache: ArchiveCache) -> None:
    folder = write_files(
        tmp_path / "t",
        {
            "instruction.md": "x",
            "task.toml": '[turngate]\ngrader = "grade.py:grade"',
            "grade.py": "",
            "expected.json": "{}",
            "files/a": "a",
        },
    )
    opened = cache.open_task(cache.store(load_task(folder)), {})
    assert isinstance(opened.grader, Function) and opened.files is not None
    file = Path(opened.grader.name.rpartition(":")[0])
    assert file.with_name("expected.json").read_text() == "{}" and opened.files == file.with_name("files")


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("target", ["/etc/passwd", "../../outside", "a/../../../x"])
def test_link_to_another_place_cannot_travel(tmp_path: Path, cache: ArchiveCache, target: str) -> None:
    files = write_files(tmp_path / "files", {"a/b": ""})
    (files / "link").symlink_to(target)
    task = Task(id="t", instruction="x", files=files)
    with pytest.raises(
        TaskError, match=r"task: t: files/link is a link to .*, or replace the link with a copy of its target"
    ):
        cache.store(task)
    assert pack_task(task).archive, "on this machine, the link stays what it is"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == []


def test_large_task_cannot_travel(tmp_path: Path) -> None:
    cache = ArchiveCache(tmp_path / "cache", max_bytes=40_000)
    files = write_files(tmp_path / "files", {"a": "x" * 20_000})
    packed = cache.store(Task(id="t", instruction="x", files=files))
    assert cache.has(packed.archive)
    write_files(files, {"b": "x" * 20_000})
    with pytest.raises(TaskError, match=r"task: t: its files exceed 0 MB.*put large files into an image"):
        cache.store(Task(id="t", instruction="x", files=files))
    with pytest.raises(ArchiveError, match="the limit is 40000"):
        cache.add("0" * 64, bytes(40_001))
    assert len(list((tmp_path / "cache").iterdir())) == 1, "no temporary file is left"


def test_missing_files_name_the_task(tmp_path: Path, cache: ArchiveCache) -> None:
    task = Task(id="t", instruction="x", files=tmp_path / "gone")
    for pack in (pack_task, cache.store):
        with pytest.raises(TaskError, match=r"task: t: .*gone cannot be read \(No such file or directory\)"):
            pack(task)


def test_full_disk_is_not_the_fault_of_the_task(
    tmp_path: Path, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def open_full(**_: object) -> Iterator[Any]:
        def write(data: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        yield SimpleNamespace(name=str(tmp_path / "new"), write=write)

    monkeypatch.setattr(archive_cache.tempfile, "NamedTemporaryFile", open_full)
    task = Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "x"}))
    with pytest.raises(ArchiveError, match=r"new cannot be written \(No space left on device\)"):
        cache.store(task)


def craft_archive(*members: tuple[str, bytes, str]) -> bytes:
    """Build a tar archive with members that `ArchiveCache.store` would never write."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, kind, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"evil"))
    return buffer.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("/tmp/evil", tarfile.REGTYPE, "")],
        [("files/../../evil", tarfile.REGTYPE, "")],
        [("files/link", tarfile.SYMTYPE, "/etc")],
        [("files/link", tarfile.SYMTYPE, "../../..")],
        [("files", tarfile.SYMTYPE, ".."), ("files/evil", tarfile.REGTYPE, "")],
        [("files/hard", tarfile.LNKTYPE, "../../evil")],
        [("files/device", tarfile.CHRTYPE, "")],
        [("files/pipe", tarfile.FIFOTYPE, "")],
        [("files/sparse", tarfile.GNUTYPE_SPARSE, "")],
    ],
)
def test_unsafe_archive_is_not_unpacked(
    tmp_path: Path, cache: ArchiveCache, members: list[tuple[str, bytes, str]]
) -> None:
    data = craft_archive(*members)
    digest = hashlib.sha256(data).hexdigest()
    cache.add(digest, data)
    packed = PackedTask(task=Task(id="t", instruction="x", files=Path("files")), archive=digest)
    with pytest.raises(ArchiveError, match=f"archive {digest[:12]} "):
        cache.open_task(packed, {})
    assert {path.name for path in tmp_path.rglob("*")} == {"cache", f"{digest}.tar"}


@pytest.mark.parametrize(
    "fields",
    [
        {"files": Path("/etc")},
        {"grader": Function(name="/etc/grade.py:grade")},
        {"grader": Script(files=Path("files/../../x"))},
        {"solution": Solution(files=Path(".."))},
    ],
)
def test_task_cannot_refer_to_files_outside_its_archive(
    tmp_path: Path, cache: ArchiveCache, fields: dict[str, Any]
) -> None:
    packed = cache.store(Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "a"})))
    task = Task(id="t", instruction="x", **fields)
    with pytest.raises(ArchiveError, match="a packed task may refer only to paths inside its archive"):
        cache.open_task(PackedTask(task=task, archive=packed.archive), {})
    with pytest.raises(ArchiveError, match="the rollout's order specifies no archive"):
        cache.open_task(PackedTask(task=task), {})


@pytest.mark.parametrize("name", ["", "x", "../" + "0" * 61, "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_archive_name_must_be_a_digest(cache: ArchiveCache, name: str) -> None:
    with pytest.raises(ArchiveError):
        cache.add(name, b"")
    with pytest.raises(ArchiveError, match="must be a SHA-256 in hex"):
        cache.read(name)


# ── what is checked ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_damaged_archive_is_detected_and_removed(tmp_path: Path, cache: ArchiveCache) -> None:
    packed = cache.store(Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "a"})))
    data = cache.read(packed.archive)
    with pytest.raises(ArchiveError, match="arrived damaged"):
        cache.add(packed.archive, data[:-1] + b"x")
    file = tmp_path / "cache" / f"{packed.archive}.tar"
    file.write_bytes(data.replace(b"files/a", b"files/b"))
    with pytest.raises(ArchiveError, match="was damaged and has been removed"):
        cache.open_task(packed, {})
    assert not cache.has(packed.archive)
    with pytest.raises(ArchiveError, match=f"archive {packed.archive[:12]} is not in"):
        cache.open_task(packed, {})
    cache.add(packed.archive, data)
    assert cache.open_task(packed, {}).files == tmp_path / "cache" / packed.archive / "files"


@pytest.mark.parametrize("settled_ns", [0, archive_cache._SETTLED_NS])
@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "test.sh").write_text("echo 1 > /reward"),
        lambda folder: (folder / "test.sh").chmod(0o600),
        lambda folder: (folder / "test.sh").unlink(),
        lambda folder: (folder / "conftest.py").write_text(""),
        lambda folder: (folder / "data").rmdir() or (folder / "data").symlink_to("/"),
        lambda folder: (folder / "link").unlink() or (folder / "link").symlink_to("data"),
    ],
)
def test_changed_folder_is_unpacked_again(
    tmp_path: Path,
    cache: ArchiveCache,
    change: Callable[[Path], object],
    settled_ns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archive_cache, "_SETTLED_NS", settled_ns)
    tests = write_files(tmp_path / "tests", {"test.sh": "exit 1"})
    (tests / "data").mkdir()
    (tests / "link").symlink_to("test.sh")
    expected = describe_folder(tests)
    packed = cache.store(Task(id="t", instruction="x", grader=Script(files=tests)))

    def open_tests() -> Path:
        grader = cache.open_task(packed, {}).grader
        assert isinstance(grader, Script) and grader.files is not None
        return grader.files

    folder = open_tests()
    inode = folder.stat().st_ino
    assert open_tests().stat().st_ino == inode, "an unchanged folder is used again"
    change(folder)
    assert describe_folder(open_tests()) == expected
    assert len(list((tmp_path / "cache").iterdir())) == 2, "no temporary folder is left"


def test_unchanged_folder_is_not_read_again(
    tmp_path: Path, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = cache.store(Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "a"})))
    file = tmp_path / "cache" / f"{packed.archive}.tar"
    cache.open_task(packed, {})
    cache.open_task(packed, {})  # too early to trust the times of the last changes
    data = file.read_bytes()
    file.unlink()
    with pytest.raises(ArchiveError):
        cache.open_task(packed, {})
    file.write_bytes(data)
    monkeypatch.setattr(archive_cache, "_SETTLED_NS", 0)
    cache.open_task(packed, {})
    file.unlink()
    assert cache.open_task(packed, {}).files is not None
    with pytest.raises(ArchiveError):
        ArchiveCache(tmp_path / "cache").open_task(packed, {})  # another process checks it itself


# ── values of a machine ─────────────────────────────────────────────────────────────────────────────────────────────

HOST_TASK = """
[environment]
env = { KEY = "${MY_KEY}", MODE = "literal" }
[verifier]
env = { KEY = "${MY_KEY}", OTHER = "${NOT_THERE:-none}" }
[solution]
env = { KEY = "${MY_KEY}" }
"""


def load_host_task(folder: Path) -> Task:
    files = {"instruction.md": "x", "task.toml": HOST_TASK, "tests/test.sh": "", "solution/solve.sh": ""}
    return load_task(write_files(folder, files))


def test_values_of_this_machine_do_not_travel(
    tmp_path: Path, cache: ArchiveCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    task = load_host_task(tmp_path / "t")
    assert task.env == {"KEY": SECRET, "MODE": "literal"} and len(task.host_env) == 4
    packed = cache.store(task)
    assert SECRET not in repr(packed) and SECRET.encode() not in cache.read(packed.archive)
    opened = cache.open_task(packed, {"MY_KEY": "theirs", "NOT_THERE": "here"})
    assert isinstance(opened.grader, Script) and opened.solution is not None
    assert opened.env == {"KEY": "theirs", "MODE": "literal"} and opened.solution.env == {"KEY": "theirs"}
    assert opened.grader.env == {"KEY": "theirs", "OTHER": "here"}
    with pytest.raises(ConfigError, match="task t needs the environment variable MY_KEY, which is not set") as missing:
        cache.open_task(packed, {})
    assert missing.value.param == "MY_KEY"


@pytest.mark.parametrize("name", ["TURNGATE_ADMIN_KEY", "PGPASSWORD"])
def test_task_cannot_read_keys_of_a_machine(cache: ArchiveCache, name: str) -> None:
    variable = HostVariable(place="environment", name="X", variable=name)
    packed = PackedTask(task=Task(id="t", instruction="x", host_env=(variable,)))
    with pytest.raises(TurngateError, match=f"must not use the environment variable {name}"):
        cache.open_task(packed, {name: SECRET})


# ── the bound on the cache ──────────────────────────────────────────────────────────────────────────────────────────


def make_archive(number: int, size: int = 10_000) -> tuple[str, bytes]:
    """Return an archive with one file, and its digest."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        member = tarfile.TarInfo("f")
        member.size, member.mode = size, 0o644
        tar.addfile(member, io.BytesIO(bytes([number]) * size))
    return hashlib.sha256(raw.getvalue()).hexdigest(), raw.getvalue()


def age(folder: Path, digest: str, seconds: float) -> None:
    """Make the last use of an archive look older."""
    for path in folder.glob(f"{digest}.*"):
        at = time.time() - seconds
        os.utime(path, (at, at))


def test_least_recently_used_archives_are_removed(tmp_path: Path) -> None:
    archives = [make_archive(number) for number in range(4)]
    size = len(archives[0][1])
    cache = ArchiveCache(tmp_path, cache_bytes=size * 3.5)
    for position, (digest, data) in enumerate(archives[:3]):
        cache.add(digest, data)
        age(tmp_path, digest, 3600 - position)
    with cache.hold(archives[0][0]):
        pass  # used again, so the second is the oldest
    age(tmp_path, archives[0][0], 100)
    cache.add(*archives[3])
    assert [cache.has(digest) for digest, _ in archives] == [True, False, True, True]
    cache.open_task(
        PackedTask(task=Task(id="t", instruction="x"), archive=archives[2][0]), {}
    )  # unpacking takes space, too
    age(tmp_path, archives[2][0], 50)
    cache.add(*archives[3])
    assert [cache.has(digest) for digest, _ in archives] == [False, False, True, True]


def test_archives_in_use_are_not_removed(tmp_path: Path) -> None:
    archives = [make_archive(number) for number in range(3)]
    cache = ArchiveCache(tmp_path, cache_bytes=1)
    (used, data), (other, more) = archives[:2]
    cache.add(used, data)
    task = PackedTask(task=Task(id="t", instruction="x", files=Path("f")), archive=used)
    folder = cache.open_task(task, {}).files.parent
    (folder / "read-only").mkdir()
    (folder / "read-only").chmod(0o500)
    with ArchiveCache(tmp_path).hold(used):  # as another process would
        age(tmp_path, used, 3600)
        cache.add(other, more)
        assert cache.has(used) and folder.is_dir() and cache.has(other)  # the other one has just arrived
    age(tmp_path, used, 3600)
    cache.add(*archives[2])
    assert not cache.has(used) and not folder.exists() and cache.has(other)


@pytest.mark.parametrize("refused", ["chmod", "unlink"])
def test_archive_that_cannot_be_removed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
) -> None:
    (stuck, data), added = make_archive(1), make_archive(2)
    cache = ArchiveCache(tmp_path, cache_bytes=1)
    cache.add(stuck, data)
    (tmp_path / stuck / "folder").mkdir(parents=True)
    age(tmp_path, stuck, 3600)
    change = getattr(Path, refused)

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name in (f"{stuck}.tar", "folder"):  # it belongs to another user
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return change(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, refused, refuse)
        cache.add(*added)
    assert cache.has(added[0]) and cache.has(stuck) == (refused == "unlink")
    assert (f"{stuck}.tar cannot be removed from the cache (Operation not permitted)" in caplog.text) == cache.has(
        stuck
    )


def test_projects_share_no_archive_but_one_limit(tmp_path: Path) -> None:
    archives = [make_archive(number) for number in range(3)]
    cache = ArchiveCache(tmp_path, cache_bytes=len(archives[0][1]) * 2.5)
    alpha, beta = cache.open_project("alpha"), cache.open_project("beta")
    digest, data = archives[0]
    alpha.add(digest, data)
    packed = PackedTask(task=Task(id="t", instruction="x", files=Path("f")), archive=digest)
    ghost = msgspec.structs.replace(packed, archive="0" * 64)
    for other in (cache, beta):
        assert not other.has(digest)
        refusals = []
        for wanted in (packed, ghost):
            with pytest.raises(ArchiveError) as refused:
                other.open_task(wanted, {})
            refusals.append(refused.value.message.replace(wanted.archive[:12], "DIGEST"))
        assert refusals[0] == refusals[1]
    beta.add(digest, data)  # who has the content may use it
    assert alpha.open_task(packed, {}).files != beta.open_task(packed, {}).files
    age(tmp_path / "projects" / "alpha", digest, 3600)
    age(tmp_path / "projects" / "beta", digest, 1800)
    beta.add(*archives[1])
    assert not alpha.has(digest) and beta.has(archives[1][0])


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-a", "a" * 41])
def test_project_of_an_archive_must_be_a_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadRequest, match="project must be 1 to 40 lowercase letters"):
        ArchiveCache(tmp_path).open_project(name)


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".new-1", tmp_path / ".unpack-2"
    old.write_bytes(b"x")
    os.utime(old, (1, 1))
    new.mkdir()
    ArchiveCache(tmp_path).add(*make_archive(1))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize(("text", "size"), [("", 20e9), ("0.5", 5e8), ("0", math.inf)])
def test_size_of_the_cache(text: str, size: float) -> None:
    assert archive_cache.read_cache_bytes({archive_cache.CACHE_VARIABLE: text}) == size


@pytest.mark.parametrize("text", ["much", "-1", "nan"])
def test_invalid_size_of_the_cache_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="TURNGATE_ARCHIVE_CACHE_GB must be 0"):
        archive_cache.read_cache_bytes({archive_cache.CACHE_VARIABLE: text})
