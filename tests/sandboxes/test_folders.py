"""What grading needs of a sandbox: given folders, copies with exclusions, and commands that leave nothing running."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.sandboxes import kit
from turngate.common.owner import current_owner
from turngate.errors import SandboxError, SandboxTooLarge
from turngate.sandboxes import supervisor
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec


async def test_working_folder_and_extra_folders(backend: Backend) -> None:
    spec = SandboxSpec(workdir="/testbed/repo", folders=() if backend.name == "local" else ("/tests", "/logs"))
    assert ("workdir" in backend.not_enforced(spec)) == (backend.name == "local")
    sandbox = await backend.create(spec)
    try:
        workdir = (await sandbox.exec(["pwd"])).stdout.decode().strip()
        assert workdir == sandbox.workdir and (backend.name == "local" or workdir == "/testbed/repo")
        for folder in (workdir, *spec.folders):
            done = await sandbox.exec(["/bin/sh", "-c", 'ls -A "$1" && touch "$1/file"', "sh", folder])
            assert (done.exit_code, done.stdout) == (0, b""), done.stderr
    finally:
        await sandbox.stop()


@pytest.mark.needs("bubblewrap")
@pytest.mark.full
@pytest.mark.parametrize("place", ["/", "/usr/x", "/etc", "relative", "/a/../b"])
async def test_invalid_working_folder_is_error(place: str, root: Path) -> None:
    kit.need("bubblewrap")
    with pytest.raises(SandboxError, match="cannot be a folder of a bubblewrap sandbox"):
        await kit.MAKE["bubblewrap"](root).create(SandboxSpec(workdir=place))


async def test_parent_folder_that_cannot_be_created_is_sandbox_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    backend = kit.MAKE["local"](tmp_path / "file" / "sandboxes")
    for work in (backend.sweep(), backend.create(SandboxSpec())):
        with pytest.raises(SandboxError, match=r"Not a directory.*set TMPDIR to another folder"):
            await work


async def test_sweep_counts_only_removed_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = msgspec.structs.replace(current_owner(), pid=2**31 - 1)
    for name in ("local-1", "local-2"):
        (root / name).mkdir()
        (root / name / supervisor.OWNER_FILE).write_text(str(ended))
    remove = supervisor.remove_folder
    with monkeypatch.context() as patched:
        patched.setattr(supervisor, "remove_folder", lambda path: not path.endswith("local-2") and remove(path))
        assert await kit.MAKE["local"](root).sweep() == 1
    assert await kit.MAKE["local"](root).sweep() == 1
    assert not list(root.iterdir())


async def test_excluded_files_are_not_copied(sandbox: Sandbox, tmp_path: Path) -> None:
    script = "mkdir -p .git/x sub/.git keep; touch .git/x/a .gitignore sub/.git/b keep/c"
    await sandbox.exec(["/bin/sh", "-c", script])
    await sandbox.download(sandbox.workdir, tmp_path / "out", exclude=(".git",))
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert names == [".gitignore", "keep/c", "sub/.git/b"]
    await sandbox.upload(tmp_path / "out", "again", exclude={"keep", "sub/.git/b"})
    assert (await sandbox.exec(["find", "again", "-type", "f"])).stdout == b"again/.gitignore\n"


async def test_long_output_is_truncated_in_the_middle(sandbox: Sandbox) -> None:
    loud = "echo begin; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo end"
    done = await sandbox.exec(["/bin/sh", "-c", loud], keep=10_000)
    assert done.stdout.startswith(b"begin\n") and done.stdout.endswith(b"\nend\n")
    assert b"2990011 of 3000011 bytes omitted" in done.stdout and len(done.stdout) < 10_100
    assert (await sandbox.exec(["echo", "short"], keep=10_000)).stdout == b"short\n"
    for keep in (0, 1):
        done = await sandbox.exec(["echo", "short"], keep=keep)
        assert done.stdout.decode() == "\n… 6 of 6 bytes omitted …\n"


async def test_exec_can_kill_leftover_processes(sandbox: Sandbox) -> None:
    daemon = "(setsid sh -c 'sleep 4401' &) >/dev/null 2>&1; exit 3"
    done = await sandbox.exec(["/bin/sh", "-c", daemon], leave=False)
    assert done.exit_code == 3 and not kit.processes("sleep\x004401")
    assert (await sandbox.exec(["echo", "still there"])).stdout == b"still there\n"


async def test_oversized_folder_is_refused(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngate.sandboxes.posix.FOLDER_LIMIT", 1_000_000)
    await sandbox.exec(["truncate", "-s", "1G", "endless"])
    with pytest.raises(SandboxTooLarge, match="larger than 1000000 bytes"):
        await sandbox.download(sandbox.workdir, tmp_path / "out")
