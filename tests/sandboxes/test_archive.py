"""Tar streams that an agent made up: nothing is written outside of the folder, and nothing that is there is followed."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from pathlib import Path

import pytest

from turngate.errors import SandboxError
from turngate.sandboxes import archive, folders, owner, supervisor


def made(*members: tuple[str, bytes, str | bytes]) -> io.BytesIO:
    """Of name, type, and link or content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, what in members:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = kind, 0o6777
            if isinstance(what, bytes):
                entry.size = len(what)
                tar.addfile(entry, io.BytesIO(what))
            else:
                entry.linkname = what
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
def test_names_that_lead_outside_are_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(SandboxError):
        archive.unpack(made(*REFUSED[what]), tmp_path / "out", limit=1000)
    assert sorted(os.listdir(tmp_path)) == ["out", "secret"]
    assert not Path("/tmp/turngate-evil").exists()


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """Links come last, whatever the order of the stream; so a file of the same name goes first, and the link is refused."""
    (tmp_path / "target").mkdir()
    stream = made(("a", LINK, "../target"), ("a/evil", FILE, b"x"), ("b", LINK, "a"), ("b/evil", FILE, b"x"))
    with pytest.raises(SandboxError):
        archive.unpack(stream, tmp_path / "out", limit=1000)
    assert not os.listdir(tmp_path / "target")
    with pytest.raises(SandboxError):
        (tmp_path / "again").mkdir()
        (tmp_path / "again" / "file").symlink_to(tmp_path / "target" / "new")
        archive.unpack(made(("file", FILE, b"x")), tmp_path / "again", limit=1000)
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
def test_only_links_that_stay_inside_are_made(where: str, target: str, kept: bool, tmp_path: Path) -> None:
    try:
        archive.unpack(made((where, LINK, target), ("b", LINK, "."), ("d/f", FILE, b"")), tmp_path / "out", limit=1000)
    except SandboxError:
        assert not kept
    link = tmp_path / "out" / where
    assert link.is_symlink() == kept


def test_modes_special_files_and_limits(tmp_path: Path) -> None:
    archive.unpack(
        made(("f", FILE, b"x"), ("h", HARD, "f"), ("p", PIPE, ""), ("d", FOLDER, "")), tmp_path / "a", limit=2
    )
    assert sorted(os.listdir(tmp_path / "a")) == ["d", "f", "h"]
    assert stat.S_IMODE((tmp_path / "a" / "f").stat().st_mode) == 0o755
    assert (tmp_path / "a" / "h").read_bytes() == b"x"
    with pytest.raises(SandboxError, match="larger"):
        archive.unpack(made(("f", FILE, b"x" * 11)), tmp_path / "b", limit=10)
    for junk in (b"", b"no tar at all" * 100, made(("f", FILE, b"x" * 5000)).getvalue()[:2000]):
        with pytest.raises(SandboxError):
            archive.unpack(io.BytesIO(junk), tmp_path / "c", limit=10_000)


def test_what_is_deeper_than_anybody_works_is_left_out_and_named(tmp_path: Path) -> None:
    deep = [("a/" * depth + "f", FILE, b"x") for depth in (1, archive.MAX_DEPTH - 1, archive.MAX_DEPTH, 1400)]
    links = [("link", HARD, deep[-2][0]), ("a/" * 1400 + "link", LINK, "f")]
    left = archive.unpack(made(*deep, *links), tmp_path / "out", limit=1000)
    assert len(left) == 4 and all("deep" in line or "too long" in line or "left out" in line for line in left), left
    assert (tmp_path / "out" / deep[1][0]).read_bytes() == b"x"
    assert not (tmp_path / "out" / deep[2][0]).exists()


def test_a_folder_is_packed_however_deep_it_is(tmp_path: Path) -> None:
    (tmp_path / "in" / "x").mkdir(parents=True)
    (tmp_path / "in" / "x" / "out").write_text("excluded")
    (tmp_path / "in" / "f").write_text("f")
    (tmp_path / "in" / "g").hardlink_to(tmp_path / "in" / "f")
    (tmp_path / "in" / "l").symlink_to("f")
    os.mkfifo(tmp_path / "in" / "p")
    place = tmp_path / "in"
    for _ in range(1400):
        place /= "d"
        place.mkdir()
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


def test_a_folder_of_any_depth_is_removed_and_its_owner_last(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").write_text("kept")
    box = tmp_path / "box"
    (box / "owner").mkdir(parents=True)  # a sandbox without walls may do this to it
    (box / "link").symlink_to(tmp_path / "kept")
    home = Path.cwd()
    os.chdir(box)
    try:
        for _ in range(3000):  # longer than any path can be
            Path("a").mkdir()
            Path("f").write_text("f")
            os.chdir("a")
        Path().chmod(0)
    finally:
        os.chdir(home)
    assert supervisor.remove_folder(str(box)) and not box.exists()
    assert supervisor.remove_folder(str(box))
    assert (tmp_path / "kept" / "f").read_text() == "kept"


def test_what_cannot_be_removed_keeps_its_owner_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_owner_is_known_by_more_than_its_number() -> None:
    here = owner.current_owner()
    assert owner.parse_owner(str(here)) == here
    assert not here.gone
    assert owner.Owner(
        here.host, here.boot, here.namespace, here.pid, here.started + 1
    ).gone  # the number was given anew
    assert owner.Owner(here.host, here.boot, here.namespace, 2**22 - 1, 5).gone
    assert owner.Owner(here.host, "another-boot", here.namespace, here.pid, here.started).gone
    assert not owner.Owner("another-host", "x", "y", 1, 1).gone
    assert not owner.Owner(here.host, here.boot, "another-container", 1, 1).gone
    for nonsense in ("", "a b c", "a b c d e"):
        assert owner.parse_owner(nonsense) is None
