"""Test what engines report about a call: cached tokens and policy versions per token, in the turn, its session and its proof."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.standins import DONE, StandIn, answer_stream, event, make_request, serving
from tests.kit import gateway
from tests.verify.kit import tampering, verdict, wrong
from turngate.cli.show import show_session
from turngate.engines.base import Chunk
from turngate.engines.scripted import Scripted
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.engines.weights import PolicyWeights, VersionSpan, parse_version_spans
from turngate.gateway.draft import cut_runs


@pytest.mark.parametrize(
    ("spans", "runs"),
    [
        ([("3", 0, 4)], ((3, 4),)),
        ([("2", 0, 1), ("3", 1, 4)], ((2, 1), (3, 3))),
        ([("default", 0, 1), ("3", 1, 4)], ((1, 1), (3, 3))),  # the weights it was started with
        ([("3", 0, 2), ("3", 2, 4)], ((3, 4),)),
        ([("2", 0, 0), ("3", 0, 4)], ((3, 4),)),
        ([("3", 0, 1), ("default", 1, 2)], None),
        ([("3", 0, 1), ("2", 1, 2)], None),  # a version never decreases
        ([("9", 0, 4)], None),  # another program's numbers
        ([("3", 1, 4)], None),
        ([("3", 0, 2), ("3", 3, 4)], None),
        ([("٣", 0, 4)], ((1, 4),)),  # a digit, but not of a version
        ([], None),
    ],
)
def test_reported_spans_become_versions(spans: list[tuple[str, int, int]], runs: Any) -> None:
    assert parse_version_spans([VersionSpan(*span) for span in spans], begun_at=1, newest=3) == runs


@pytest.mark.parametrize(
    ("runs", "size", "cut"),
    [
        (((1, 2), (2, 3)), 5, ((1, 2), (2, 3))),
        (((1, 2), (2, 3)), 3, ((1, 2), (2, 1))),
        (((1, 2), (2, 3)), 2, ((1, 2),)),
        (((1, 2),), 3, ()),  # does not cover all tokens
        ((), 0, ()),
    ],
)
def test_versions_are_cut_with_their_tokens(runs: Any, size: int, cut: Any) -> None:
    assert cut_runs(runs, size) == cut


def sglang_event(ids: list[int], versions: Any, finish: Any = None) -> bytes:
    meta = {"completion_tokens": len(ids), "finish_reason": finish, "cached_tokens": 2, "weight_versions": versions}
    meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
    return event({"output_ids": ids, "meta_info": meta})


async def test_sglang_reports_cached_tokens_and_versions_of_each_token() -> None:
    first, both = [{"version": "4", "start": 0, "end": 1}], [("4", 0, 1), ("5", 1, 3)]
    last = [dict(zip(("version", "start", "end"), span, strict=True)) for span in both]
    answer = answer_stream(sglang_event([7], first), 0.02, sglang_event([7, 8, 9], last, {"type": "stop"}), DONE)
    async with serving(StandIn(answer)) as server:
        engine = SGLang(server.url)
        await engine.start()
        engine.expect(PolicyWeights(version=5, path="/w/5"))
        async with engine.generate(make_request(version=4)) as chunks:
            found = [chunk async for chunk in chunks]
        assert [chunk.version_runs for chunk in found] == [((4, 1),), ((4, 1), (5, 2))]
        assert found[-1].cached == 2
        for weights in (None, PolicyWeights(version=5, name="policy-v5", lora_path="/w/5")):
            engine.expect(weights)  # the label is not the gateway's, or that of the model under the adapter
            async with engine.generate(make_request(version=5)) as chunks:
                assert [chunk.version_runs async for chunk in chunks] == [None, None]
        await engine.close()


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}


@pytest.mark.parametrize("usage", [USAGE, {"prompt_tokens": 3, "prompt_tokens_details": None}, None])
@pytest.mark.parametrize("together", [True, False])
async def test_vllm_reports_cached_tokens_after_last_token(usage: Any, together: bool) -> None:
    choice = {"index": 0, "text": "", "logprobs": None, "token_ids": [7, 8], "finish_reason": "stop"}
    parts = [event({"choices": [choice]}), *([event({"choices": [], "usage": usage})] if usage else []), DONE]
    sent: list[Any] = [b"".join(parts)] if together else [part for each in parts for part in (each, 0.01)]
    async with serving(StandIn(answer_stream(*sent))) as server:
        engine = VLLM(server.url, "m")
        await engine.start()
        async with engine.generate(make_request()) as chunks:
            found = [chunk async for chunk in chunks]
        assert [(list(chunk.ids), chunk.finish) for chunk in found] == [([7, 8], "stop")]
        assert found[0].cached == (2 if usage is USAGE else None)
        assert json.loads(server.bodies[0])["stream_options"] == {"include_usage": True}
        await engine.close()


async def test_vllm_generate_api_reports_versions() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    choice = {"index": 0, "token_ids": [7, 8], "finish_reason": "stop", "weight_versions": spans}
    async with serving(StandIn(answer_stream(event({"choices": [choice]}), DONE))) as server:
        engine = VLLM(server.url, "m", api="generate", ranks=2)
        await engine.start()
        lane = engine.lanes()[1]
        engine.expect(PolicyWeights(version=2, path="/w/2"))  # lanes share it
        async with lane.generate(make_request(version=1)) as chunks:
            assert (await anext(chunks)).version_runs == ((1, 1), (2, 1))
        await engine.close()


class ReportingEngine(Scripted):
    """A scripted engine that reports cached tokens and versions."""

    def __init__(self, runs: Any, cached: int) -> None:
        super().__init__([])
        self.runs, self.cached = runs, cached

    def generate(self, request: Any) -> Any:
        return self._replies(request)

    @asynccontextmanager
    async def _replies(self, request: Any) -> Any:
        async def chunks() -> Any:
            yield Chunk([104, 105, 0], [-1.0, -1.0, -1.0], "stop", cached=self.cached, version_runs=self.runs)

        yield chunks()


async def test_reports_are_recorded_shown_and_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ReportingEngine(((1, 1), (2, 2)), 5)
    async with gateway(engine=engine, data=tmp_path) as g:
        await g.admin.post("/admin/fence/resume", json={"version": 2})
        session = await g.open()
        await g.ask(session.key, "Hi")
        engine.cached = 10**6  # more than the prompt: not a report that can be trusted
        await g.ask(session.key, "Ho")
        [first, second] = await g.turns(session.id)
        assert (first["version_start"], first["version_end"], first["version_runs"]) == (1, 2, [[1, 1], [2, 2]])
        assert first["cached"] == 5 and "cached" not in second
        shown = (await g.admin.get(f"/admin/sessions/{session.id}")).json()
        assert shown["cache"]["cached_tokens"] == 5 and shown["cache"]["prompt_tokens"] >= 5
        metrics = (await g.admin.get("/metrics")).text
        assert 'turngate_engine_prompt_tokens_total{source="cache"} 5' in metrics
        await g.admin.post(f"/admin/sessions/{session.id}/seal", json={})
    show_session(session.id, str(tmp_path), "", False, "", False, False)
    assert "of prompt tokens were cached (5 of" in capsys.readouterr().out
    assert verdict(tmp_path, session.id, replay=False).ok
    with tampering(tmp_path, session.id) as tamper:
        node = tamper.of_kind("sampled")[0]
        for change in (
            {"version_runs": [[1, 1], [2, 1]]},  # one token too few
            {"version_runs": [[2, 3]]},  # not the recorded first version
            {"version_runs": [[1, 1], [1, 1], [2, 1]]},
            {"version_runs": [[1, 0], [1, 1], [2, 2]]},
            {"cached": 10**6},
        ):
            was = {name: getattr(tamper.fact(node), name) for name in change}
            tamper.facts(node, **change)
            assert wrong(verdict(tmp_path, session.id, replay=False)) == {"turn"}, change
            tamper.facts(node, **was)
    assert verdict(tmp_path, session.id, replay=False).ok
