"""Fill a shared store with finished rollouts, as fast as PostgreSQL accepts them, for measurements.

    python bench/fill_shared_store.py postgresql://user@host/database --sessions 100000 --turns 50

The rows have valid checksums, so the page and `turngate show` read them. They are not a true recording, and `turngate verify` reports that.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Iterator

import msgspec
import numpy as np
import psycopg

from turngate.common.database_url import parse_database_url
from turngate.store.outcomes import RecordedOutcome
from turngate.store.shared.store import SharedStore
from turngate.store.shared.totals import BUCKET_SECONDS
from turngate.trace.session import SessionConfig
from turngate.trace.tree import ContextInfo, SampledInfo

BATCH = 500  # sessions per COPY
GROUP = 8  # rollouts per group
TOKENS = 16  # sampled per turn
ADD_ATTEMPTS = (
    "INSERT INTO attempts (rollout, attempt, session, state, started, ended)"
    " SELECT id, 1, id, 'settled', opened, closed FROM sessions"
)
# The totals that the triggers would have computed.
SUM_SESSIONS = "INSERT INTO session_totals SELECT id, key*%s, opened+%s, %s, %s, 3 FROM sessions"
SUM_BUCKETS = (
    f"INSERT INTO bucket_totals SELECT CAST(trunc(time/{BUCKET_SECONDS}) AS BIGINT), count(*) FILTER (WHERE kind='turn'),"
    " %s*count(*) FILTER (WHERE kind='turn'), count(*) FILTER (WHERE kind='outcome')"
    " FROM events WHERE kind IN ('turn', 'outcome') GROUP BY 1"
)
ADD_DELIVERIES = (
    "INSERT INTO events (time, session, kind, data) SELECT max(opened)+70, '', 'delivery', convert_to(json_build_object("
    f"'feed', 'bench', 'number', key/{GROUP}, 'group', 'g' || key/{GROUP}, 'rollouts', count(*))::text, 'UTF8')"
    f" FROM sessions GROUP BY key/{GROUP} ORDER BY key/{GROUP}"
)
ADD_WEIGHT_UPDATES = (
    "INSERT INTO events (time, session, kind, data) SELECT opened, '', 'fence',"
    " convert_to(json_build_object('version', row_number() OVER (ORDER BY key))::text, 'UTF8') FROM sessions WHERE key%%%s=0 ORDER BY key"
)


class NodeTemplate(msgspec.Struct, frozen=True):
    """A node of every session. Only the session's key and the checksum differ."""

    id: int
    place: str  # what follows the session's key in the checksummed text
    content: bytes  # the checksummed bytes
    columns: bytes  # COPY's text of the columns between the key and the checksum


def build_nodes(turns: int) -> list[NodeTemplate]:
    nodes, pack, parent = [], msgspec.msgpack.encode, None
    for n in range(turns):
        prompt = ContextInfo(b"p" * 16, b"m" * 16, "u", False)
        asked = msgspec.json.encode([{"role": "user", "content": f"Output of command {n}: " + "ok " * 10}])
        ids = np.arange(n, n + 24, dtype=np.int32).tobytes()
        nodes.append(_template(2 * n + 1, parent, "context", ids, None, pack(prompt), asked))
        reply = SampledInfo(b"m" * 16, b"", b"", "stop", n // 20, n // 20, float(n), float(n) + 0.5)
        said = msgspec.json.encode({"role": "assistant", "content": f"Run command {n + 1}."})
        scores = np.full(TOKENS, -0.5, np.float32).tobytes()
        ids = np.arange(n, n + TOKENS, dtype=np.int32).tobytes()
        nodes.append(_template(2 * n + 2, 2 * n + 1, "sampled", ids, scores, pack(reply), said))
        parent = 2 * n + 2
    return nodes


def _template(
    node: int, parent: int | None, kind: str, ids: bytes, scores: bytes | None, info: bytes, messages: bytes
) -> NodeTemplate:
    cells = [b"%d" % node, b"\\N" if parent is None else b"%d" % parent, kind.encode(), _hex(ids)]
    cells += [b"\\N" if scores is None else _hex(scores), _hex(info), _hex(messages), b"1"]
    content = ids + (scores or b"\0") + info + messages
    return NodeTemplate(node, f"/{node}/{parent}/{kind}", content, b"\t".join(cells))


def _hex(data: bytes) -> bytes:
    return b"\\\\x" + data.hex().encode()


def copy_nodes(nodes: list[NodeTemplate], keys: range) -> Iterator[bytes]:
    for key in keys:
        lines = []
        for node in nodes:
            checksum = zlib.crc32(node.content, zlib.crc32(f"{key}{node.place}".encode()))
            lines.append(b"%d\t%s\t%d\n" % (key, node.columns, checksum))
        yield b"".join(lines)


def copy_sessions(keys: range, start: float, step: float) -> Iterator[bytes]:
    for key in keys:
        name, opened = f"bench-{key:08d}", start + key * step
        config = SessionConfig(
            model="m", metadata={"agent": "bench", "task": f"t{key % 500}", "group": f"g{key // GROUP}"}
        )
        secret = _hex(f"secret {key}".encode())
        cells = (
            key,
            name,
            secret.decode(),
            _hex(msgspec.json.encode(config)).decode(),
            opened,
            opened + 60,
            "sealed",
            "",
            "",
        )
        yield ("\t".join(map(str, cells)) + "\n").encode()


def copy_outcomes(keys: range, start: float, step: float) -> Iterator[bytes]:
    for key in keys:
        outcome = _outcome(key).encode()
        yield f"{key}\t{start + key * step + 61}\t".encode() + _hex(outcome) + b"\n"


def _outcome(key: int) -> RecordedOutcome:
    """Return an outcome: a tenth of the rollouts failed, a third of the others passed."""
    named = {"group": f"g{key // GROUP}", "task": f"t{key % 500}"}
    if key % 30 == 0:
        return RecordedOutcome(kind="infrastructure fault", message=f"sandbox {key} could not be started", **named)
    if key % 10 == 0:
        return RecordedOutcome(
            kind="agent failed", message=f"agent exited with status {key % 7} after {key} s", **named
        )
    return RecordedOutcome(kind="graded", reward=float(key % 3 == 0), resolved=key % 3 == 0, **named)


def copy_events(keys: range, turns: int, start: float, step: float) -> Iterator[bytes]:
    per_session = turns + 6
    for key in keys:
        name, opened, seq = f"bench-{key:08d}", start + key * step, (key - 1) * per_session
        kinds = [("opened", b'{"mode":"exact","model":"m"}')]
        kinds += [("stage", b'{"stage":"%s"}' % stage) for stage in (b"sandbox", b"agent", b"grade")]
        kinds += [("turn", b'{"sampled_tokens":%d,"finish":"stop"}' % TOKENS)] * turns
        kinds += [("sealed", b"{}"), ("outcome", msgspec.json.encode(_outcome(key).event_data()))]
        lines = []
        for n, (kind, data) in enumerate(kinds, 1):
            lines.append(f"{seq + n}\t{opened + n}\t{name}\t{kind}\t".encode() + _hex(data) + b"\n")
        yield b"".join(lines)


def fill(url: str, sessions: int, turns: int) -> None:
    SharedStore(parse_database_url(url)).close()  # creates the tables
    nodes, step = build_nodes(turns), 2.0
    start, began = time.time() - sessions * step - 3600, time.monotonic()
    with psycopg.connect(url) as db:
        row = db.execute("SELECT coalesce(max(key), 0) FROM sessions").fetchone()
        if row is None or row[0]:
            raise SystemExit("the store is not empty; use a new database")
        db.execute("ALTER TABLE events DISABLE TRIGGER events_added")  # the totals are computed once, at the end
        for first in range(1, sessions + 1, BATCH):
            keys = range(first, min(first + BATCH, sessions + 1))
            for columns, rows in (
                (
                    "sessions (key, id, secret, config, opened, closed, status, vocabulary, stop)",
                    copy_sessions(keys, start, step),
                ),
                (
                    "nodes (session, id, parent, kind, ids, logprobs, info, messages, delivered, checksum)",
                    copy_nodes(nodes, keys),
                ),
                ("outcomes (session, recorded, outcome)", copy_outcomes(keys, start, step)),
                ("events (seq, time, session, kind, data)", copy_events(keys, turns, start, step)),
            ):
                with db.cursor().copy(f"COPY {columns} FROM STDIN") as copy:
                    for chunk in rows:
                        copy.write(chunk)
            db.commit()
        print(f"copied {sessions} sessions, {sessions * turns} turns in {time.monotonic() - began:.0f} s", flush=True)
        db.execute("ALTER TABLE events ENABLE TRIGGER events_added")
        db.execute("UPDATE event_counter SET newest=(SELECT max(seq) FROM events)")
        db.execute("SELECT setval(pg_get_serial_sequence('sessions', 'key'), (SELECT max(key) FROM sessions))")
        db.execute(ADD_ATTEMPTS)
        db.execute(SUM_SESSIONS, (turns + 6, turns + 6, turns, TOKENS * turns))
        db.execute(SUM_BUCKETS, (TOKENS,))
        db.execute(ADD_DELIVERIES)
        db.execute(ADD_WEIGHT_UPDATES, (max(1, sessions // 20),))
        db.commit()
        db.autocommit = True
        db.execute("ANALYZE")
    print(f"filled in {time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=50)
    options = parser.parse_args()
    fill(options.url, options.sessions, options.turns)


if __name__ == "__main__":
    main()
