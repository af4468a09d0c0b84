"""What an agent left behind, as a result shows it: its working folder as text, the ends of its logs. Blocks. An agent wrote it all, so
nothing of it is believed or followed, and the secret that it held is not shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from turngate.common.safe_text import make_encodable
from turngate.service.truncation import Cut
from turngate.telemetry.logs import redact, redact_known

_LOOKED_AT = 20_000  # files of a working folder
_LOGS = 5  # of the agent's own, the newest
_NAMED = 10  # files that are told by name
_SKIPPED = {".git", "__pycache__", "node_modules", ".venv"}


def workdir(folder: Path, given: Path, cut: Cut) -> dict[str, str]:
    """Its working folder as text: what is new or changed comes before what was `given`, in that folder; what is no text is only
    named."""
    clamp = cut.clamp
    paths, unnamed, more = _files(folder)
    paths.sort(key=lambda one: (_same(folder / one[0], given / one[0]), one[0].count("/"), one[0]))
    found: dict[str, str] = {}
    odd: list[str] = []
    room = clamp.all_files
    left = 0
    for name, _ in paths:
        if (clamp.files and len(found) >= clamp.files) or (clamp.all_files and room <= 0):
            left += 1
            continue
        most = min(clamp.file or room, room) if clamp.all_files else clamp.file
        text = _text(folder / name, most)
        if text is None:
            odd.append(name)
            continue
        data, without, size = text
        if without:
            cut.told.append(f"workdir_files[{name!r}]: {without:,} of {size:,} bytes left out")
        room -= len(data)
        found[name] = data
    if odd:
        cut.told.append(f"workdir_files: {len(odd):,} files are no text, and left out: {_some(odd)}")
    _tell_unnamed("workdir_files", unnamed, cut)
    if left or more:
        cut.told.append(f"workdir_files: {left:,}{' and more' if more else ''} of {len(paths):,} files left out")
    return found


def _same(path: Path, given: Path) -> bool:
    """Whether a file is still what it was."""
    try:
        return path.stat().st_size == given.stat().st_size and path.read_bytes() == given.read_bytes()
    except OSError:
        return False


def _files(folder: Path) -> tuple[list[tuple[str, float]], list[str], bool]:
    """Regular files below a folder with their times; those whose names are no text; and whether there are more than are looked at."""
    found: list[tuple[str, float]] = []
    unnamed: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(names):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                continue
            if len(found) + len(unnamed) >= _LOOKED_AT:
                return found, unnamed, True
            shown = make_encodable(str(path.relative_to(folder)))
            if shown == str(path.relative_to(folder)):
                found.append((shown, path.stat().st_mtime))
            else:  # nobody could ask for it by the name that is shown
                unnamed.append(shown)
    return found, unnamed, False


def _tell_unnamed(field: str, names: Sequence[str], cut: Cut) -> None:
    if names:
        cut.told.append(f"{field}: {len(names):,} files have names that are no text, and are left out: {_some(names)}")


def _text(path: Path, most: int) -> tuple[str, int, int] | None:
    """The beginning of a file; how many bytes that leaves out, and of how many. None: it is no text."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = file.read(4 * most if most else -1)
    except OSError:
        return None
    if b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or len(data) == size:  # not only a character that was cut in two
            return None
        data = data[: error.start]
        text = data.decode()
    text = redact_known(text)  # before it is cut: half a secret is not known again
    beyond = text[most:] if most else ""
    return text[: len(text) - len(beyond)], min(size, size - len(data) + len(beyond.encode())), size


def logs(folder: Path, cut: Cut) -> dict[str, str]:
    """The ends of what it printed, and of its own logs and transcripts."""
    names = ["stdout", "stderr"]
    files, unnamed, _ = _files(folder / "home")
    _tell_unnamed("log_tails", unnamed, cut)
    below = [name for name, _ in sorted(files, key=lambda one: (-one[1], one[0]))]
    if len(below) > _LOGS:
        cut.told.append(f"log_tails: {len(below) - _LOGS:,} of {len(below):,} log files left out")
    names += [f"home/{name}" for name in below[:_LOGS]]
    ends = {name: tail(folder / name, f"log_tails[{name!r}]", cut, cut.clamp.log) for name in names}
    return {name: text for name, text in ends.items() if text}


def tail(path: Path, field: str, cut: Cut, most: int) -> str:
    """The end of a file that somebody else wrote."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - 4 * most) if most else 0
            file.seek(start)
            # A byte that is no text is one character here, so that what is cut off can be counted.
            text = redact(file.read().decode("utf-8", "surrogateescape"))
    except OSError:
        return ""
    if start:
        before = text[:-most]
        left = start + len(before.encode("utf-8", "surrogateescape"))
        cut.told.append(f"{field}: {min(left, size):,} of {size:,} bytes left out")
        return _readable(text[len(before) :])
    return cut.end(field, _readable(text), most)


def _readable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")
