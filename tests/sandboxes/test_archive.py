"""Tar streams crafted by an agent: nothing is written outside of the folder, and existing links are not followed."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from turngate.common import owner
from turngate.errors import SandboxError
from turngate.sandboxes import archive, folders, supervisor


def make_tar(*members: tuple[str, bytes, str | bytes]) -> io.BytesIO:
    """Make a tar stream from (name, type, link target or content)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, content in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o6777
            if isinstance(content, bytes):
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
            else:
                entry.linkname = content
                tar.addfile(entry)
    stream.seek(0)
    return stream


FILE, FOLDER, LINK, HARD, PIPE = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE
REFUSED = {
    "up": [("../evil", FILE, b"x")],
    "up from below": [("a/../../evil", FILE, b"x")],
    "absolute": [("/tmp/turngate-evil", FILE, b"x")],
    "a folder up": [("../evil", FOLDER, "")],
    "a hard link up": [("x", HARD, "../secret")],
    "a hard link to an absolute path": [("x", HARD, "/etc/passwd")],
    "no name": [("./", FILE, b"x")],
    "a file where a folder is": [("a", FOLDER, ""), ("a", FILE, b"x")],
    "a folder where a file is": [("a", FILE, b"x"), ("a/b", FILE, b"x")],
}


@pytest.mark.parametrize("what", REFUSED)
def test_names_outside_of_folder_are_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(SandboxError):
        archive.unpack(make_tar(*REFUSED[what]), tmp_path / "out", limit=1000)
    assert sorted(os.listdir(tmp_path)) == ["out", "secret"]
    assert not Path("/tmp/turngate-evil").exists()


def test_links_are_not_written_through(tmp_path: Path) -> None:
    """Links are created last, so a file of the same name comes first and the link is refused."""
    (tmp_path / "target").mkdir()
    stream = make_tar(("a", LINK, "../target"), ("a/evil", FILE, b"x"), ("b", LINK, "a"), ("b/evil", FILE, b"x"))
    with pytest.raises(SandboxError):
        archive.unpack(stream, tmp_path / "out", limit=1000)
    assert not os.listdir(tmp_path / "target")
    with pytest.raises(SandboxError):
        (tmp_path / "again").mkdir()
        (tmp_path / "again" / "file").symlink_to(tmp_path / "target" / "new")
        archive.unpack(make_tar(("file", FILE, b"x")), tmp_path / "again", limit=1000)
    assert not os.listdir(tmp_path / "target")


@pytest.mark.parametrize(
    ("where", "target", "kept"),
    [
        ("a", "b", True),
        ("a", "b/c", True),
        ("d/a", "../b", True),
        ("d/a", "..", True),
        ("a", "..", False),
        ("a", "../x", False),
        ("d/a", "../../x", False),
        ("d/a", "../e/../../x", False),
        ("a", "/etc/passwd", False),
        ("a", "b/../../x", False),
        ("a", "b/b/../..", False),
        ("a", "", False),
    ],
)
def test_only_links_inside_folder_are_created(where: str, target: str, kept: bool, tmp_path: Path) -> None:
    try:
        archive.unpack(
            make_tar((where, LINK, target), ("b", LINK, "."), ("d/f", FILE, b"")), tmp_path / "out", limit=1000
        )
    except SandboxError:
        assert not kept
    link = tmp_path / "out" / where
    assert link.is_symlink() == kept


def test_modes_special_files_and_limits(tmp_path: Path) -> None:
    archive.unpack(
        make_tar(("f", FILE, b"x"), ("h", HARD, "f"), ("p", PIPE, ""), ("d", FOLDER, "")), tmp_path / "a", limit=2
    )
    assert sorted(os.listdir(tmp_path / "a")) == ["d", "f", "h"]
    assert stat.S_IMODE((tmp_path / "a" / "f").stat().st_mode) == 0o755
    assert (tmp_path / "a" / "h").read_bytes() == b"x"
    with pytest.raises(SandboxError, match="larger"):
        archive.unpack(make_tar(("f", FILE, b"x" * 11)), tmp_path / "b", limit=10)
    for junk in (b"", b"no tar at all" * 100, make_tar(("f", FILE, b"x" * 5000)).getvalue()[:2000]):
        with pytest.raises(SandboxError):
            archive.unpack(io.BytesIO(junk), tmp_path / "c", limit=10_000)


def test_too_deep_entries_are_skipped_and_named(tmp_path: Path) -> None:
    deep = [("a/" * depth + "f", FILE, b"x") for depth in (1, archive.MAX_DEPTH - 1, archive.MAX_DEPTH, 1400)]
    links = [("link", HARD, deep[-2][0]), ("a/" * 1400 + "link", LINK, "f")]
    skipped = archive.unpack(make_tar(*deep, *links), tmp_path / "out", limit=1000)
    assert len(skipped) == 4 and all("deep" in line or "too long" in line or "left out" in line for line in skipped), (
        skipped
    )
    assert (tmp_path / "out" / deep[1][0]).read_bytes() == b"x"
    assert not (tmp_path / "out" / deep[2][0]).exists()


@pytest.mark.full
def test_folder_of_any_depth_is_packed(tmp_path: Path) -> None:
    (tmp_path / "in" / "x").mkdir(parents=True)
    (tmp_path / "in" / "x" / "out").write_text("excluded")
    (tmp_path / "in" / "f").write_text("f")
    (tmp_path / "in" / "g").hardlink_to(tmp_path / "in" / "f")
    (tmp_path / "in" / "l").symlink_to("f")
    os.mkfifo(tmp_path / "in" / "p")
    folder = tmp_path / "in"
    for _ in range(1400):
        folder /= "d"
        folder.mkdir()
    packed = io.BytesIO()
    archive.pack(tmp_path / "in", packed, {"x/out"})
    packed.seek(0)
    with tarfile.open(fileobj=packed) as tar:
        names = tar.getnames()
    assert sorted(names)[:3] == [".", "./d", "./d/d"] and "./" + "/".join(["d"] * 1400) in names
    assert {"./f", "./g", "./l", "./x"} <= set(names) and not {"./p", "./x/out"} & set(names)
    assert supervisor.remove_folder(str(tmp_path / "in"))
    packed.seek(0)
    archive.unpack(packed, tmp_path / "out", limit=1000)
    assert (tmp_path / "out" / "f").samefile(tmp_path / "out" / "g") and (tmp_path / "out" / "l").is_symlink()


def test_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_text("kept")
    box = tmp_path / "box"
    (box / "owner").mkdir(parents=True)  # a sandbox without isolation may do this
    (box / "link").symlink_to(tmp_path / "kept")
    start = Path.cwd()
    os.chdir(box)
    try:
        for _ in range(3000):  # longer than the limit on paths
            Path("a").mkdir()
            Path("f").write_text("f")
            os.chdir("a")
        Path().chmod(0)
    finally:
        os.chdir(start)
    assert supervisor.remove_folder(str(box)) and not box.exists()
    assert supervisor.remove_folder(str(box))
    assert (tmp_path / "kept" / "f").read_text() == "kept"


def test_failed_removal_is_error_and_keeps_owner_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    box = folders.create_folder(tmp_path, "local", "files")
    (box / "files" / "f").write_text("f")
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", lambda *_, **__: os.stat("/nowhere"))  # a file system that refuses
        with pytest.raises(SandboxError, match="could not be removed"):
            folders.remove_folder(box)
    assert (box / "owner").exists()
    folders.remove_folder(box)
    assert not box.exists()


def test_owner_is_identified_by_host_boot_namespace_and_start() -> None:
    current = owner.current_owner()
    assert owner.parse_owner(str(current)) == current
    assert not current.gone
    assert owner.Owner(
        current.host, current.boot, current.namespace, current.pid, current.started + 1
    ).gone  # the process id was reused
    assert owner.Owner(current.host, current.boot, current.namespace, 2**22 - 1, 5).gone
    assert owner.Owner(current.host, "another-boot", current.namespace, current.pid, current.started).gone
    assert not owner.Owner("another-host", "x", "y", 1, 1).gone
    assert not owner.Owner(current.host, current.boot, "another-container", 1, 1).gone
    for nonsense in ("", "a b c", "a b c d e"):
        assert owner.parse_owner(nonsense) is None
