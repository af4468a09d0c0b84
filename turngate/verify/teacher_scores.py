"""Check the teacher scores that are cached for a session (`teacher-scores.db` in the data folder): lengths, ranges and checksums.

The scores are not part of the recording. The check is omitted for a session without cached scores.
"""

from __future__ import annotations

import hashlib
import sqlite3
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.store_reader import StoredSession, StoredTurn, path_ids

_FILE = "teacher-scores.db"
_TOLERANCE = 1e-3
_NO_LOGPROB = -9999.0  # vLLM sends this if a log-probability is missing
_PROMISE = "every cached score belongs to a sampled token, is finite, and is at most 0"
_BUSY_S = 10.0
_QUERY = "SELECT model, version, top_k, turn, logprobs, top_ids, top_logprobs, checksum FROM scores WHERE session=?"


def check_teacher_scores(session: StoredSession, folder: Path, results: CheckResults) -> None:
    """Check the scores that are cached for the turns of a session."""
    file = folder / _FILE
    if not file.is_file():
        return
    try:
        rows = _read_rows(file, session.id)
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        _report_unreadable(file, error, results)
        return
    if not rows:
        return
    turns = {_digest(turn): turn for turn in session.turns if len(turn.ids)}
    with results.check("structure", "teacher scores", _PROMISE) as check:
        for row in rows:
            turn = turns.get(row[3])
            if check.expect(turn is not None, f"scores from {row[0]!r} belong to no turn of the session"):
                assert turn is not None
                _check_scores(row, turn, check)


def _report_unreadable(file: Path, error: sqlite3.DatabaseError | UnicodeDecodeError, results: CheckResults) -> None:
    # If the schema is damaged, SQLite's error message may not be valid UTF-8.
    why = str(error) if isinstance(error, sqlite3.DatabaseError) else "its schema cannot be read"
    with results.check("structure", "teacher scores", _PROMISE) as check:
        # The file may be locked, or an export may have been killed before it created the table.
        if isinstance(error, sqlite3.OperationalError):
            check.skip(f"{file} cannot be read ({why})")
        else:
            check.expect(False, f"{file} is damaged ({why})")


def _read_rows(file: Path, session: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S)) as db:
        db.text_factory = lambda raw: raw.decode("utf-8", "backslashreplace")
        return db.execute(_QUERY, (session,)).fetchall()


def _digest(turn: StoredTurn) -> bytes:
    """Return the digest of a turn's ids and context, under which its scores are stored."""
    ids = path_ids(turn).astype("<i4")
    return hashlib.blake2b(ids.tobytes() + len(turn.ids).to_bytes(8, "little"), digest_size=16).digest()


def _check_scores(row: tuple[Any, ...], turn: StoredTurn, check: VerifyCheck) -> None:
    model, version, top_k, digest, *blobs, checksum = row
    whose = f"its scores from {model!r}"
    label = f"{model}/{version}/{top_k}/".encode()
    if not check.expect(all(isinstance(blob, bytes) for blob in blobs), f"{whose} are not bytes", node=turn.id):
        return
    check.expect(
        zlib.crc32(label + digest + b"".join(blobs)) == checksum, f"{whose} do not match their checksum", node=turn.id
    )
    valid = isinstance(top_k, int) and top_k >= 0
    if not check.expect(
        valid, f"{whose} have top_k {top_k!r}, but it must be a whole number, 0 or greater", node=turn.id
    ):
        return
    size = 4 * len(turn.ids)
    due = [size, size * top_k, size * top_k]
    if not check.expect([len(blob) for blob in blobs] == due, f"{whose} have the wrong length", node=turn.id):
        return
    logprobs, tops = np.frombuffer(blobs[0], "<f4"), np.frombuffer(blobs[2], "<f4").reshape(len(turn.ids), top_k)
    for name, values in (("log-probabilities", logprobs), ("log-probabilities of the most likely tokens", tops)):
        fine = bool((np.isfinite(values) & (values > _NO_LOGPROB) & (values <= _TOLERANCE)).all())
        check.expect(fine, f"some {name} in {whose} are missing, not finite or greater than 0", node=turn.id)
    if top_k:
        check.expect(bool((np.frombuffer(blobs[1], "<i4") >= 0).all()), f"{whose} have a negative id", node=turn.id)
        check.expect(
            bool((tops[:, 0] + _TOLERANCE >= logprobs).all() and (tops[:, 1:] <= tops[:, :-1] + _TOLERANCE).all()),
            f"the most likely tokens in {whose} are not sorted by probability, or are all less likely than the sampled token",
            node=turn.id,
        )
