"""Routed experts from a stand-in for vLLM, over several turns: what is requested, recorded, delivered and exported."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests import kit
from tests.engines.standins import DONE, StandIn, answer_stream, event, generated, serving
from tests.exact.agent import Agent, Reply, World, asgi
from tests.exact.side_engine import hash_prefixes
from tests.exact.test_side_data import read_feed
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER
from turngate.server.app import Gateway
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.side_data import decode_experts
from turngate.trainers.routed_experts import to_verl
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

MODELS = {"/health": 200, "/v1/models": {"data": [{"id": "m", "max_model_len": 100_000}]}}


def route(ids: list[int]) -> np.ndarray:
    """The experts of each token, which depend on all tokens up to it: 2 layers × 3."""
    hashes = hash_prefixes(ids)
    return np.stack([hashes >> shift & 255 for shift in (0, 4, 8, 10, 12, 16)], 1).astype(np.uint8).reshape(-1, 2, 3)


class Engine:
    """A stand-in for vLLM that answers "Answer N." and can abort its generations."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.aborts = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        ids = kit.say(f"Answer {len(self.requests)}.").ids
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        if self.aborts:
            return await answer_stream(event(generated(list(ids[:2]), [-0.5, -0.5])), cut=True)(request)
        file = io.BytesIO()
        np.save(file, route([*body["token_ids"], *ids])[start:-1])
        last = generated(list(ids[2:]), [-0.5] * (len(ids) - 2), "stop")
        last["choices"][0]["routed_experts"] = base64.b64encode(file.getvalue()).decode()
        return await answer_stream(event(generated(list(ids[:2]), [-0.5, -0.5])), event(last), DONE)(request)

    @property
    def starts(self) -> list[int]:
        return [body["sampling_params"].get("routed_experts_prompt_start", 0) for body in self.requests]


def settings(folder: Path, url: str, **more: Any) -> ServeConfig:
    given = {"engine": "vllm", "engine_url": [url], "engine_api": "generate", "model": "m", "routed_experts": "auto"}
    return ServeConfig(data=str(folder), tokenizer=str(BUILTIN_TOKENIZER), **{**given, **more})


async def talk(agent: Agent, engine: Engine) -> None:
    """Three turns, of which the second is first aborted, and a branch from the first."""
    agent.tools = None
    agent.messages = [kit.user("Begin.")]
    first = await call(agent)
    engine.aborts = True
    with pytest.raises(AssertionError, match="the response ended early"):  # instead of the end of the stream
        await call(agent)
    engine.aborts = False
    await call(agent)
    await call(agent)
    agent.messages = [kit.user("Begin."), first.message, kit.user("Another way.")]
    await call(agent)


async def call(agent: Agent) -> Reply:
    reply = await agent.call(kit.say(""), stream=True)
    agent.messages = [*agent.messages, reply.message, kit.user("Go on.")]
    return reply


async def test_experts_of_every_token_are_recorded_once(tmp_path: Path) -> None:
    engine = Engine()
    async with serving(StandIn(engine.answer, MODELS)) as server:
        gateway = Gateway(settings(tmp_path, server.url).check(), renderer=(kit.renderer(), None))
        await gateway.start()
        try:
            world = World(gateway, gateway.engine)  # type: ignore[arg-type]
            agent = world.agent(metadata={"group": "g"})
            await talk(agent, engine)
            await gateway.sessions.seal(agent.session_id)
            outcome = RecordedOutcome(kind="graded", reward=1.0, group="g", task="t")
            gateway.outcomes.record(agent.session_id, outcome)
            rows = await read_feed(world)
            key = [(b"authorization", f"Bearer {gateway.admin_key}".encode())]
            path = f"/v1/rollouts/{agent.session_id}/trajectory"
            status, trajectory = await asgi(gateway, "GET", path, b"", key)
            assert status == 200
        finally:
            await gateway.stop()
    prompts = [len(body["token_ids"]) for body in engine.requests]
    replies = [len(kit.say(f"Answer {n + 1}.").ids) for n in range(len(prompts))]
    last_of_first, last_of_third = prompts[0] + replies[0] - 1, prompts[2] + replies[2] - 1
    assert engine.starts == [0, last_of_first, last_of_first, last_of_third, last_of_first]
    assert len(rows) == 4  # two branches, in both forms of the feed
    for row in rows:
        column = row.side["routed_experts"]
        assert column.spans == ((0, len(row.ids) - 1),)
        assert np.array_equal(to_verl(column, len(row.ids)), route(row.ids.tolist())[:-1])
    check_trajectory(json.loads(trajectory)["trajectory"])
    check_exports(tmp_path)
    with SessionReader(tmp_path) as reader, open_row_source(tmp_path) as source:
        options = VerifyOptions(rows=source, renderers=Renderers(given=kit.renderer()))
        verdict = verify(reader, agent.session_id, options)
    assert verdict.ok, verdict.wrong


def check_trajectory(steps: list[Any]) -> None:
    """Each step of the prime-rl API has the experts from the last token of the step before it on."""
    assert len(steps) == 4  # without the aborted one
    for step in steps:
        tokens = step["tokens"]
        payload, ids = tokens["routed_experts"], tokens["prompt_ids"] + tokens["completion_ids"]
        found = np.frombuffer(base64.b64decode(payload["data"]), payload["dtype"]).reshape(payload["shape"])
        assert found.tolist() == route(ids)[payload["start"] : -1].tolist()
    assert [step["tokens"]["routed_experts"]["start"] > 0 for step in steps] == [False, True, True, True]


def check_exports(folder: Path) -> None:
    for format, field, tokens in (
        ("verl", "routed_experts", lambda record: record["prompt_ids"] + record["response_ids"]),
        ("slime", "rollout_routed_experts", lambda record: record["tokens"]),
    ):
        out = folder / f"{format}.jsonl"
        export(folder, out, ExportChoices(format=format, side=("routed_experts",)))
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(records) == 2
        for record in records:
            assert decode_experts(record[field]).tolist() == route(tokens(record))[:-1].tolist()
    with pytest.raises(ConfigError, match=r"--side must name only routed_experts for format verl, not scores$"):
        export(folder, folder / "no.jsonl", ExportChoices(format="verl", side=("routed_experts", "scores")))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"routed_experts": "many"}, "must be LAYERSxEXPERTS, such as 48x8"),
        ({"routed_experts": "0x8"}, "must be LAYERSxEXPERTS"),
        ({"engine_api": "completions"}, "needs --engine-api generate"),
        ({"engine": "sglang"}, "must be LAYERSxEXPERTS, such as 48x8, with the engine 'sglang'"),
        ({"engine": "scripted", "engine_url": []}, "needs the engine 'vllm' or 'sglang', not 'scripted'"),
    ],
)
def test_settings_that_cannot_work_are_rejected(given: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        settings(tmp_path, "http://127.0.0.1:1", **given).check()


def test_shape_is_read_from_the_settings(tmp_path: Path) -> None:
    assert settings(tmp_path, "http://127.0.0.1:1", engine="sglang", routed_experts="48x8").check().expert_shape == (
        48,
        8,
    )
    assert settings(tmp_path, "http://127.0.0.1:1").check().expert_shape is None
