"""Read the files that an agent left behind: its working folder as text, and the ends of its logs. Call these functions in a thread.

The agent wrote these files, so they are untrusted. Symlinks are not followed, and known secrets are redacted.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Sequence
from pathlib import Path

from turngate.common.safe_text import make_encodable
from turngate.service.truncation import Truncator
from turngate.telemetry.logs import redact, redact_known

_MAX_FILES = 20_000  # maximum number of files that are read from one folder
_MAX_LOGS = 5  # how many of the agent's own logs are read; the newest are chosen
_MAX_NAMES = 10  # names listed in one note
_SKIPPED = {".git", "__pycache__", "node_modules", ".venv"}


def read_workdir(folder: Path, initial_files: Path, truncator: Truncator) -> dict[str, str]:
    """Read the files of a working folder as text, by path. Files that differ from those in `initial_files` come first.

    Omit binary and unreadable files, and text beyond the limits of `truncator`. The notes of `truncator` list the omissions.
    """
    clamp = truncator.clamp
    paths, unnamed, more = _find_files(folder)
    paths.sort(key=lambda file: (_is_unchanged(folder / file[0], initial_files / file[0]), file[0].count("/"), file[0]))
    texts: dict[str, str] = {}
    binary: list[str] = []
    remaining = clamp.all_files
    omitted = 0
    for name, _ in paths:
        if (clamp.files and len(texts) >= clamp.files) or (clamp.all_files and remaining <= 0):
            omitted += 1
            continue
        limit = min(clamp.file or remaining, remaining) if clamp.all_files else clamp.file
        read = _read_text(folder / name, limit)
        if read is None:
            binary.append(name)
            continue
        text, missing, size = read
        if missing:
            truncator.notes.append(f"workdir_files[{name!r}]: {missing:,} of {size:,} bytes left out")
        remaining -= len(text)
        texts[name] = text
    if binary:
        truncator.notes.append(
            f"workdir_files: binary or unreadable files left out ({len(binary):,}): {_join_first(binary)}"
        )
    _note_unnamed("workdir_files", unnamed, truncator)
    if omitted:
        truncator.notes.append(f"workdir_files: {omitted:,} of {len(paths):,} files left out")
    if more:
        truncator.notes.append(f"workdir_files: all files after the first {_MAX_FILES:,} left out")
    return texts


def _is_unchanged(path: Path, before: Path) -> bool:
    try:
        return filecmp.cmp(path, before, shallow=False)
    except OSError:
        return False


def _find_files(folder: Path) -> tuple[list[tuple[str, float]], list[str], bool]:
    """Find the regular files below a folder, except in folders such as `.git` and `node_modules`.

    Return the files with their modification times, the files whose names are not valid UTF-8, and whether there are more than `_MAX_FILES`.
    """
    files: list[tuple[str, float]] = []
    unnamed: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(names):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                continue
            if len(files) + len(unnamed) >= _MAX_FILES:
                return files, unnamed, True
            shown = make_encodable(str(path.relative_to(folder)))
            if shown == str(path.relative_to(folder)):
                files.append((shown, path.stat().st_mtime))
            else:  # a reader of the result could not open the file by its name
                unnamed.append(shown)
    return files, unnamed, False


def _note_unnamed(field: str, names: Sequence[str], truncator: Truncator) -> None:
    if names:
        truncator.notes.append(
            f"{field}: files left out because their names are not valid UTF-8 ({len(names):,}): {_join_first(names)}"
        )


def _read_text(path: Path, limit: int) -> tuple[str, int, int] | None:
    """Return the beginning of a text file, the number of bytes left out, and the file's size, or None if the file is not readable text."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = file.read(4 * limit if limit else -1)
    except OSError:
        return None
    if b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or len(data) == size:  # more than a character cut off at the end
            return None
        data = data[: error.start]
        text = data.decode()
    text = redact_known(text)  # before truncating, because half a secret would not be recognized
    beyond = text[limit:] if limit else ""
    return text[: len(text) - len(beyond)], min(size, size - len(data) + len(beyond.encode())), size


def read_log_tails(folder: Path, truncator: Truncator) -> dict[str, str]:
    """Return, by file name, the ends of an agent's stdout and stderr, and of its newest logs and transcripts."""
    names = ["stdout", "stderr"]
    files, unnamed, _ = _find_files(folder / "home")
    _note_unnamed("log_tails", unnamed, truncator)
    newest = [name for name, _ in sorted(files, key=lambda file: (-file[1], file[0]))]
    if len(newest) > _MAX_LOGS:
        truncator.notes.append(f"log_tails: {len(newest) - _MAX_LOGS:,} of {len(newest):,} log files left out")
    names += [f"home/{name}" for name in newest[:_MAX_LOGS]]
    limit = truncator.clamp.log
    tails = {name: read_tail(folder / name, f"log_tails[{name!r}]", truncator, limit) for name in names}
    return {name: text for name, text in tails.items() if text}


def read_tail(path: Path, field: str, truncator: Truncator, limit: int) -> str:
    """Return at most `limit` characters from the end of an untrusted file, with secrets redacted. A limit of 0 means no limit.

    Return an empty string if the file cannot be read. `field` is the name of the result's field, for the note about what was left out.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - 4 * limit) if limit else 0
            file.seek(start)
            # An invalid byte becomes one character, so that the missing bytes can be counted.
            text = redact(file.read().decode("utf-8", "surrogateescape"))
    except OSError:
        return ""
    if start:
        before = text[:-limit]
        missing = start + len(before.encode("utf-8", "surrogateescape"))
        truncator.notes.append(f"{field}: {min(missing, size):,} of {size:,} bytes left out")
        return _replace_invalid(text[len(before) :])
    return truncator.keep_end(field, _replace_invalid(text), limit)


def _replace_invalid(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _join_first(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (" …" if len(names) > _MAX_NAMES else "")
