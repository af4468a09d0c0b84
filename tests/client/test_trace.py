"""Traces as clients decode them: arrays, unknown values, and the deprecated access as a mapping."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from turngate.client.protocol import DecodedTrace, TraceContext, TraceTurn
from turngate.errors import BadRequest
from turngate.views.trace import decode_trace, parse_trace

CONTEXT = {"kind": "context", "id": 1, "parent": None, "ids": [5, 6], "messages": [{"role": "user", "content": "Hi"}]}
CONTEXT |= {"preamble": "", "cause": None, "dialect": "chat", "told": {"thread": "t"}}
TURN = {"kind": "sampled", "id": 2, "parent": 1, "role": "main", "ids": [7, 8], "logprobs": [-0.5, None]}
TURN |= {"message": {"role": "assistant", "content": "Yes."}, "finish": "stop", "cause": None, "version_start": 0}
TURN |= {"version_end": 0, "started": 0.0, "ended": 1.0, "sampling": None, "biases": [], "capture": "tokens"}
TURN |= {"fault": "", "engine": "", "lost": [], "delivered": True}


def make_trace(**turn: Any) -> DecodedTrace:
    nodes = [CONTEXT, {**TURN, **turn}]
    trace = {"session": "s", "status": "sealed", "stop": "", "config": {}, "vocabulary": "", "preambles": {}}
    return decode_trace(msgspec.json.encode({**trace, "nodes": nodes}))


def test_nodes_are_typed() -> None:
    context, turn = make_trace().nodes
    assert isinstance(context, TraceContext) and context.signals == {"thread": "t"} and context.ids.tolist() == [5, 6]
    assert isinstance(turn, TraceTurn) and turn.decode_message().content == "Yes." and turn.logprobs is not None
    assert turn.logprobs[0] == -0.5 and math.isnan(turn.logprobs[1])
    assert parse_trace(make_trace()).turns[0].untrained == "missing log-probabilities"


def test_values_of_a_newer_gateway_are_kept_and_not_trained() -> None:
    view = parse_trace(make_trace(role="critic", finish="paused", logprobs=[-0.5, -0.5]))
    assert (view.turns[0].role, view.turns[0].finish, view.turns[0].untrained) == ("critic", "paused", "role critic")


@pytest.mark.parametrize("ids", [[1.5], ["5"], [True], [-1], [2**31], 5, "5", None])
def test_invalid_ids_are_rejected(ids: object) -> None:
    with pytest.raises(BadRequest, match=r"nodes\[1\]\.ids"):
        make_trace(ids=ids)


@pytest.mark.parametrize("logprobs", [["-1"], [True], "x", 1])
def test_invalid_logprobs_are_rejected(logprobs: object) -> None:
    with pytest.raises(BadRequest, match=r"nodes\[1\]\.logprobs"):
        make_trace(logprobs=logprobs)


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        (b"", "it is not valid JSON: Input data was truncated"),
        (b'{"session": ', "it is not valid JSON: Input data was truncated"),
        (b"<html>", "it is not valid JSON: JSON is malformed"),
        (b'{"session": "\xff"}', "it is not valid JSON: 'utf-8' codec can't decode"),
        (b'{"unknown": ' + b"[" * 5000, "a value is nested too deeply"),
        (b"{}", "session is missing"),
    ],
    ids=["empty", "truncated", "HTML", "not UTF-8", "nested too deeply", "missing field"],
)
def test_invalid_trace_is_rejected(encoded: bytes, problem: str) -> None:
    with pytest.raises(BadRequest, match=f"^invalid trace: {problem}.*; pass the complete reply of GET"):
        decode_trace(encoded)


def test_trace_can_still_be_used_as_a_mapping() -> None:
    trace = make_trace()
    with pytest.warns(DeprecationWarning, match="0.2.0"):
        assert trace["nodes"][1]["ids"] == [7, 8] and trace["nodes"][1]["logprobs"] == [-0.5, None]
    with pytest.warns(DeprecationWarning):
        assert trace.get("nothing", 3) == 3 and dict(**trace)["session"] == "s"
    assert "nodes" in trace and "nothing" not in trace
    assert (
        trace != make_trace() and len({trace, make_trace()}) == 2
    )  # compared by identity, as arrays have no truth value
