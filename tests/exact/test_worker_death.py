"""Random conversations with side data at a gateway whose workers are killed: every value is at its own token, and none is missing.

The engine is a stand-in for vLLM. The experts that it reports for a token depend on all tokens up to it, so a value at another token, or on
another branch, is found.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import random
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from aiohttp import web

from tests import kit
from tests.engines.standins import DONE, StandIn, answer_stream, event, generated, serving
from tests.exact.agent import Reply, read_stream
from tests.exact.test_router_replay import MODELS, route
from tests.speed import scaled
from tests.workers.test_processes import ServeProcess, start_serve
from turngate.client.feed import Delivery, Feed, FeedConfig, FeedForm, Row
from turngate.client.gateway import GatewayClient
from turngate.common.sharding import slot_of
from turngate.render import BUILTIN_TOKENIZER
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.side_data import decode_columns
from turngate.trainers.tree_batch import list_rows, pack_trees, read_trees
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("torch")]

NAME = "routed_experts"
STEPS = ("go on", "go on", "retry", "back", "compact", "aborted", "truncated", "killed", "killed in a reply")


class Engine:
    """Answers with random tokens. `behavior` says how the next call goes."""

    def __init__(self, rng: random.Random) -> None:
        self.behavior = "go on"
        self.replying = asyncio.Event()  # set once a reply that waits for a kill has begun
        self.reported: list[
            tuple[list[int], int]
        ] = []  # of complete replies: all ids, and the first token with experts
        self._rng = rng

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        behavior, self.behavior = self.behavior, "go on"
        words = " ".join(self._rng.choice(("red", "green", "blue", "one", "two")) for _ in range(6))
        ids = list(kit.say(words).ids)
        first = event(generated(ids[:2], [-0.5, -0.5]))
        if behavior == "aborted":
            return await answer_stream(first, cut=True)(request)
        if behavior == "killed in a reply":
            self.replying.set()
            return await answer_stream(first, asyncio.Event())(request)
        ids = ids[:-2] if behavior == "truncated" else ids
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        file = io.BytesIO()
        np.save(file, route([*body["token_ids"], *ids])[start:-1])
        finish = "length" if behavior == "truncated" else "stop"
        last = generated(ids[2:], [-0.5] * (len(ids) - 2), finish)
        last["choices"][0][NAME] = base64.b64encode(file.getvalue()).decode()
        self.reported.append(([*body["token_ids"], *ids], start))
        return await answer_stream(first, event(last), DONE)(request)

    def check(self, ids: Sequence[int], column: Any) -> None:
        """Check the side data of a row: the values that calls reported for its prefixes, and no others."""
        ids = list(ids)
        due = {
            token
            for whole, start in self.reported
            if ids[: len(whole)] == whole
            for token in range(start, len(whole) - 1)
        }
        tokens = [token for start, end in column.spans for token in range(start, end)]
        assert tokens == sorted(due) and tokens
        assert np.array_equal(column.values, route(ids)[tokens])


class Conversation:
    """An agent that keeps its own history and calls the gateway over HTTP."""

    def __init__(self, serve: ServeProcess, engine: Engine, http: httpx.AsyncClient, rng: random.Random) -> None:
        self._serve, self._engine, self._http, self._rng = serve, engine, http, rng
        self.session = ""
        self._key: dict[str, str] = {}
        self._messages = [kit.user("Begin.")]

    async def open(self) -> None:
        opened = await asyncio.to_thread(self._serve.open, metadata={"group": "g"})
        self.session, self._key = opened["id"], {"authorization": f"Bearer {opened['api_key']}"}

    async def step(self, kind: str) -> None:
        self._engine.behavior = kind
        match kind:
            case "aborted":
                with pytest.raises(
                    AssertionError, match="the response ended early"
                ):  # instead of the end of the stream
                    await self._ask()
            case "killed":  # the owner dies between two calls, and its successor loads the session
                self._kill_owner()
                await self._go_on()
            case "killed in a reply":
                self._engine.replying.clear()
                asking = asyncio.create_task(self._ask())
                await asyncio.wait_for(self._engine.replying.wait(), scaled(20))
                self._kill_owner()
                with pytest.raises((httpx.HTTPError, AssertionError)):
                    await asking
            case "retry" if len(self._messages) > 2:
                self._messages = self._messages[:-2]
                await self._go_on()
            case "back":
                self._messages = self._messages[: 2 * self._rng.randrange(len(self._messages) // 2 + 1) + 1]
                await self._go_on()
            case "compact":
                self._messages = [kit.user(f"Summary {self._rng.random()}: all is well. Continue.")]
                await self._go_on()
            case _:
                await self._go_on()

    async def _go_on(self) -> None:
        """Call, and call again if a killed worker took the connection with it, as agents do."""
        async with asyncio.timeout(scaled(30)):
            while True:
                try:
                    reply = await self._ask()
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
        self._messages = [*self._messages, reply.message, kit.user(f"Next {self._rng.random()}.")]

    async def _ask(self) -> Reply:
        body = {"model": "m", "messages": self._messages, "stream": True}
        answer = await self._http.post(self._serve.url + "/v1/chat/completions", json=body, headers=self._key)
        if answer.status_code == 503:  # "retry the request in a moment"
            answer.raise_for_status()
        assert answer.status_code == 200, answer.text
        return read_stream(200, answer.content)

    def _kill_owner(self) -> None:
        os.kill(self._serve.workers[slot_of(self.session) % 2], signal.SIGKILL)


@pytest.mark.parametrize("evicts", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.repeat) for seed in (1, 2))])
async def test_every_value_is_at_its_own_token(tmp_path: Path, seed: int, evicts: bool) -> None:
    """`evicts`: the trace leaves memory before each step."""
    rng = random.Random(seed)
    engine = Engine(rng)
    data = tmp_path / "data"
    options = ("--engine", "vllm", "--engine-api", "generate", "--model", "m", "--routed-experts", "auto")
    more = ("--tokenizer", BUILTIN_TOKENIZER, "--rest-s", "0.1" if evicts else "0")
    with ExitStack() as stack:
        async with serving(StandIn(engine.answer, MODELS)) as server:
            arguments = (*options, "--engine-url", server.url, *more)
            serve = await asyncio.to_thread(stack.enter_context, start_serve(data, *arguments))
            async with httpx.AsyncClient(trust_env=False, timeout=scaled(60)) as http:
                conversation = Conversation(serve, engine, http, rng)
                await conversation.open()
                kinds = [*rng.sample(STEPS, len(STEPS)), *rng.choices(STEPS, k=4), "go on"]
                for kind in ["go on", *kinds]:
                    if evicts:
                        await wait_until_evicted(serve, http)
                    await conversation.step(kind)
            rows = await deliver(serve, conversation.session)
            await asyncio.to_thread(stack.close)
    assert len(rows["rows"]) == len(rows["tree"]) > 1
    for row in [*rows["rows"], *rows["tree"]]:
        engine.check(row.ids.tolist(), row.side[NAME])
    check_exports(data, engine, len(rows["rows"]))
    with SessionReader(data) as reader, open_row_source(data) as source:
        verdict = verify(
            reader, conversation.session, VerifyOptions(rows=source, renderers=Renderers(given=kit.renderer()))
        )
    assert verdict.ok, verdict.wrong


async def wait_until_evicted(serve: ServeProcess, http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(scaled(30)):
        while True:
            with suppress(httpx.TransportError):  # a connection to a killed worker
                metrics = (await http.get(serve.url + "/metrics", headers=serve.admin)).text
                if "turngate_sessions_resting 1" in metrics:
                    return
            await asyncio.sleep(0.05)


async def deliver(serve: ServeProcess, session: str) -> dict[str, list[Row]]:
    """End the session, and return its rows in both forms of a feed."""
    rows = {}
    async with GatewayClient(serve.url, (serve.data / "admin-key").read_text().strip()) as client:
        await client.seal(session)
        await client.record(session, RecordedOutcome(kind="graded", reward=1.0, group="g", task="t"))
        config = FeedConfig(n=1, advantage="none", from_start=True, side=(NAME,))
        for form in get_args(FeedForm):
            async with await Feed.open(client, "f", config, after=0, form=form) as feed:
                delivery = await feed.next(scaled(20))
                assert delivery is not None
                rows[form] = delivery.rows()
                if form == "tree":
                    check_batch(delivery)
    return rows


def check_batch(delivery: Delivery) -> None:
    """Check that a batch for PyTorch has each value at the tokens that rows have it at."""
    batch = pack_trees(delivery.trees)
    packed = batch.side[NAME]
    value_of = dict(zip(packed.tokens.tolist(), packed.values.numpy(), strict=True))
    offset = 0
    for delivered in delivery.trees:
        for row in delivered.rebuild_rows():
            assert row.path is not None
            parts = [delivered.tree.segments[index] for index in row.path.segments]
            places = [offset + place for part in parts for place in range(part.start, part.end)]
            assert batch.ids[places].tolist() == row.ids.tolist()
            tokens = [token for span in row.side[NAME].spans for token in range(*span)]
            assert [token for token, place in enumerate(places) if place in value_of] == tokens
            assert np.array_equal([value_of[places[token]] for token in tokens], row.side[NAME].values)
        offset += len(delivered.tree.ids)


def check_exports(data: Path, engine: Engine, rows: int) -> None:
    out = data.parent / "out.jsonl"
    choices: dict[str, Any] = {"side": (NAME,), "advantage": "none"}
    export(data, out, ExportChoices(format="rows", **choices))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == rows
    for record in records:
        engine.check(record["ids"], decode_columns(record["side"])[NAME])
    export(data, out, ExportChoices(format="tree", **choices))
    loaded = [row for tree in read_trees(out) for row in list_rows(tree)]
    assert len(loaded) == rows
    for row in loaded:
        engine.check(row.ids.tolist(), row.side[NAME])
