"""Check a teacher's cached scores of a session (`teacher-scores.db` in its data folder): their lengths, ranges and checksums.

The scores are not part of the recording. The check is omitted for a session without any.
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
_QUERY = "SELECT model, version, top_k, turn, logprobs, top_ids, top_logprobs, checksum FROM scores WHERE session=?"


def check_teacher_scores(session: StoredSession, folder: Path, results: CheckResults) -> None:
    """Check the scores that are cached for the turns of a session."""
    rows = _read_rows(folder / _FILE, session.id)
    if not rows:
        return
    turns = {_digest(turn): turn for turn in session.turns if len(turn.ids)}
    with results.check(
        "structure", "teacher scores", "every cached score belongs to a sampled token, is finite and at most 0"
    ) as check:
        for row in rows:
            turn = turns.get(row[3])
            if check.expect(turn is not None, f"scores from {row[0]!r} belong to no turn of the session"):
                assert turn is not None
                _check_scores(row, turn, check)


def _read_rows(file: Path, session: str) -> list[tuple[Any, ...]]:
    if not file.is_file():
        return []
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as db:
        return db.execute(_QUERY, (session,)).fetchall()


def _digest(turn: StoredTurn) -> bytes:
    """Return the digest of a turn's ids and context, by which its scores are stored."""
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
    size = 4 * len(turn.ids)
    due = [size, size * top_k, size * top_k]
    if not check.expect([len(blob) for blob in blobs] == due, f"{whose} have the wrong length", node=turn.id):
        return
    logprobs, tops = np.frombuffer(blobs[0], "<f4"), np.frombuffer(blobs[2], "<f4").reshape(len(turn.ids), top_k)
    for name, values in (("log-probabilities", logprobs), ("log-probabilities of the most likely tokens", tops)):
        fine = bool((np.isfinite(values) & (values > _NO_LOGPROB) & (values <= _TOLERANCE)).all())
        check.expect(fine, f"{whose} have {name} that are missing, not finite or greater than 0", node=turn.id)
    if top_k:
        check.expect(bool((np.frombuffer(blobs[1], "<i4") >= 0).all()), f"{whose} have a negative id", node=turn.id)
        check.expect(
            bool((tops[:, 0] + _TOLERANCE >= logprobs).all() and (np.diff(tops, axis=1) <= _TOLERANCE).all()),
            f"{whose} have most likely tokens that are not sorted by probability, or that are all less likely than the token itself",
            node=turn.id,
        )
