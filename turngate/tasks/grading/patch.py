"""Find the files that a patch touches, by parsing its headers."""

from __future__ import annotations

import re

_HUNK = re.compile(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_OCTAL = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_PLAIN = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b'"': b'"', b"\\": b"\\", b"a": b"\a", b"b": b"\b"}


def find_touched_files(patch: str) -> tuple[str, ...]:
    """Return the paths of all files that a patch changes, adds, removes or renames. For a rename, return both paths."""
    paths: dict[str, None] = {}
    old = new = 0  # lines that remain in the current hunk
    for line in patch.split("\n"):
        if old > 0 or new > 0:
            old, new = old - (line[:1] in " -" or not line), new - (line[:1] in " +" or not line)
            continue
        if hunk := _HUNK.match(line):
            old, new = (int(count) if count is not None else 1 for count in hunk.groups())
            continue
        for path in _paths_in_header(line.removesuffix("\r")):
            paths[path] = None
    return tuple(paths)


def _paths_in_header(line: str) -> list[str]:
    for start in ("--- ", "+++ "):
        if line.startswith(start):
            name = _unquote_name(line[len(start) :])
            return [] if name == "/dev/null" else [name.partition("/")[2]] if "/" in name else []
    for start in ("rename from ", "rename to ", "copy to "):
        if line.startswith(start):
            return [_unquote_name(line[len(start) :])]
    if line.startswith("diff --git "):
        return _paths_in_git_header(line.removeprefix("diff --git "))
    return []


def _paths_in_git_header(words: str) -> list[str]:
    """Parse `a/x b/x` from a `diff --git` line.

    For an empty file or a change of mode, no other line contains the file's name.
    """
    if words.startswith('"'):
        end = re.match(r'"(?:[^"\\]|\\.)*"', words)
        return [_unquote_name(end[0]).partition("/")[2]] if end else []
    half = len(words) // 2
    if words[half : half + 1] == " " and words[:half].partition("/")[2] == words[half + 1 :].partition("/")[2]:
        return [words[:half].partition("/")[2]]
    return []  # a rename, whose names are on other lines


def _unquote_name(text: str) -> str:
    """Return the file name from a header line, without Git's quotes and without a date after it.

    Git quotes names with unusual characters.
    """
    if not text.startswith('"'):
        return text.partition("\t")[0].rstrip()
    raw = text[1 : text.rindex('"')].encode("utf-8", "surrogateescape")

    def unescape(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _PLAIN.get(code, code)

    return _OCTAL.sub(unescape, raw).decode("utf-8", "surrogateescape")
