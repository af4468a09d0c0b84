"""Test that the verifier's own derivation of roles agrees with the gateway's, on every conversation of the role tests."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.trace.conversations import Step, read_rollout
from tests.trace.kit import Recorder, read
from tests.trace.test_role_conversations import CASES, OLD
from turngate.trace.roles import assign_roles
from turngate.trace.tree import Context, Node
from turngate.verify.findings import CheckResults
from turngate.verify.messages import NodeMessages
from turngate.verify.quotes import check_quotes
from turngate.verify.roles import derive_roles
from turngate.verify.store_reader import NodeRow, RelatedRecords, StoredSession


def store(steps: list[Step]) -> tuple[Recorder, StoredSession]:
    """Record the calls, and return the trace and the session that the verifier would read."""
    recorder = Recorder()
    messages: dict[int, bytes] = {}
    for step in steps:
        turn = recorder.add(step.call)
        assert step.call.answer is not None
        messages[turn.id] = msgspec.json.encode(read([step.call.answer]).messages(0)[0])
        added = step.call.messages[-turn.parent.added :]
        messages.setdefault(turn.parent.id, json.dumps(added).encode())
    record = {
        **{"key": 1, "id": "s", "opened": 0.0, "closed": 99.0, "status": "sealed", "stop": "", "vocabulary": ""},
        **{"folder": "", "renderer": "", "config": b"{}"},
    }
    rows = [row_of(node, messages[node.id]) for node in sorted(recorder.trace.nodes, key=lambda node: node.id)]
    return recorder, StoredSession(record, rows, {}, {}, RelatedRecords())


def row_of(node: Node, messages: bytes) -> NodeRow:
    return NodeRow(
        id=node.id,
        parent=None if node.parent is None else node.parent.id,
        kind="context" if isinstance(node, Context) else "sampled",
        ids=node.ids.tobytes(),
        logprobs=None,
        info=msgspec.msgpack.encode(node.info),
        messages=messages,
        delivered=1,
        checksum=0,
    )


@pytest.mark.parametrize("name", [*CASES, *(f"old: {name}" for name in OLD)])
def test_verifier_derives_the_same_roles(name: str) -> None:
    steps = read_rollout(CASES[name]) if name in CASES else read_rollout(OLD[name[5:]], texts=False)
    recorder, session = store(steps)
    messages = NodeMessages(session)
    assert not messages.errors
    assert derive_roles(session, messages) == assign_roles(recorder.trace)
    results = CheckResults()
    check_quotes(session, messages, results)
    assert [finding.what for finding in results.findings() if not finding.ok] == []
