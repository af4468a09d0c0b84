"""Random conversations with side data: every value is at its own token, in the store, feeds, exports and verify."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import kit
from tests.exact.agent import Agent, World, reformat
from tests.exact.side_engine import EXPERTS, LISTS, SCORES, Report, SideEngine, hash_prefixes, make_experts, make_lists
from tests.exact.test_property import REPLIES, STEPS, TEXTS, follow, make_turn, step
from turngate.client.delivery import Row, decode_delivery
from turngate.client.protocol import DeliveryPage, FeedConfig, FeedForm
from turngate.engines.base import Chunk, Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.side_data import SideColumn
from turngate.trace.tree import Sampled, Trace, path_ids, path_to
from turngate.trainers.export import ExportChoices, RolloutFilter, export
from turngate.trainers.export.files import encode_json
from turngate.trainers.export.side_data import decode_columns
from turngate.trainers.export.tree import rebuild_rows
from turngate.trainers.tree_batch import read_trees
from turngate.types import RaggedArray, SideArray
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import load_session_view, open_row_source

NAMES = (EXPERTS, SCORES, LISTS)
ALL_STEPS = st.one_of(STEPS, st.tuples(st.just("aborted"), REPLIES, TEXTS), st.tuples(st.just("cut"), REPLIES, TEXTS))


class Expected:
    """What the engine reported, and so what each row must have."""

    def __init__(self, trace: Trace, reports: Sequence[Report]) -> None:
        self._turns = {turn.id: turn for turn in trace.turns()}
        self._reports = reports

    def has_scores(self) -> bool:
        """Whether any turn has the side data that only this test's engine reports."""
        return any(found[0].scores for turn in self._turns.values() if (found := self._find(turn)))

    def check(self, branch: int, ids: np.ndarray, side: Mapping[str, SideColumn]) -> None:
        path = [node for node in path_to(self._turns[branch]) if isinstance(node, Sampled)]
        hashes = hash_prefixes(ids.tolist())
        for name in NAMES:
            due: dict[int, list[int]] = {}  # by token: the calls whose value it may have
            for turn in path:
                found = self._find(turn)
                for token in found[0].experts if name == EXPERTS else found[0].scores:
                    if token < turn.length:
                        due.setdefault(token, [report.call for report in found])
            assert (name in side) == bool(due), (name, side)
            if not due:
                continue
            column = side[name]
            tokens = [token for start, end in column.spans for token in range(start, end)]
            assert tokens == sorted(due)
            values = column.values.lists() if isinstance(column.values, RaggedArray) else column.values
            for token, value in zip(tokens, values, strict=True):
                if name == LISTS:
                    assert np.array_equal(value, make_lists(hashes[token : token + 1]).items)
                elif name == SCORES:
                    assert value == hashes[token]
                else:
                    call = int(value[1, 0]) + 256 * int(value[1, 1])
                    assert call in due[token], "the first call that reported a value wins"
                    assert np.array_equal(value, make_experts(hashes[token : token + 1], call)[0])

    def _find(self, turn: Sampled) -> list[Report]:
        """The calls that may have sampled a turn: several if the same ids were sampled twice."""
        prompt, reply = path_ids(turn.parent).tobytes(), turn.ids.tobytes()
        found = [r for r in self._reports if r.prompt == prompt and r.reply[: len(reply)] == reply]
        assert found, "no call sampled this turn"
        exact = [report for report in found if report.reply == reply]
        return exact or found


async def play(folder: Path, steps: list[tuple[str, str, str]], seed: int, evicts: bool) -> None:
    rng, renderer = random.Random(seed), kit.renderer()
    async with World.of(folder, renderer, engine=SideEngine) as world:
        agent = world.agent(metadata={"group": "g"})
        agent.messages = [{"role": "system", "content": "You work."}, {"role": "user", "content": "Begin."}]
        follow(agent, await agent.call(make_turn(renderer, "text", "ok", rng)), "next")
        for kind, reply_kind, text in steps:
            if evicts:
                assert await world.gateway.evictor.sweep(time.time() + 1e6) == 1
            turn = make_turn(renderer, reply_kind, text, rng)
            if kind == "aborted":
                await abort(agent, turn, rng)
            elif kind.startswith("go on"):  # after "aborted" or "back", it may be a retry
                messages = reformat(agent.messages, rng) if "respelled" in kind else None
                follow(agent, await agent.call(turn, stream="streamed" in kind, messages=messages), text)
            elif kind == "cut":
                follow(agent, await agent.call(turn, stream=True, stop=[text[:1]]), text)
            else:
                await step(agent, kind, turn, text, rng, len(agent.session.trace.nodes))
        session = agent.session_id
        reports = world.engine.reports
        assert isinstance(world.engine, SideEngine)
        await world.gateway.sessions.seal(session)
        outcome = RecordedOutcome(kind="graded", reward=1.0, group="g", task="t")
        world.gateway.outcomes.record(session, outcome)
        view = load_session_view(world.gateway.store, session)
        expected = Expected(view.session.trace, reports)
        arrays = world.gateway.store.side_data.load(view.session)
        for sample in view.samples(keep_empty=True, side=arrays):
            expected.check(sample.branch, sample.ids, sample.side)
        for row in await read_feed(world):
            expected.check(row.branch, row.ids, row.side)
    check_export(folder, expected)
    with SessionReader(folder) as reader, open_row_source(folder) as rows:
        verdict = verify(reader, session, VerifyOptions(rows=rows, renderers=Renderers(given=renderer)))
    assert verdict.ok, verdict.wrong


async def abort(agent: Agent, turn: ScriptedTurn, rng: random.Random) -> None:
    """A call whose engine fails after some tokens. The agent calls again with the same history."""
    cut = msgspec.structs.replace(turn, cut_after=rng.randrange(1, len(turn.ids) + 1), chunk=2)
    reply = await agent.call(cut)
    assert reply.status >= 500


async def read_feed(world: World) -> list[Row]:
    """Read the rows of a feed as they are, and rebuilt from trees."""
    feeds = world.gateway.feeds
    await feeds.open("train", FeedConfig(n=1, advantage="none", from_start=True, side=NAMES))
    _, reader = feeds.take_over("train")
    rows: list[list[Row]] = []
    for form in get_args(FeedForm):
        page = msgspec.msgpack.decode(await feeds.page("train", reader, after=0, form=form), type=DeliveryPage)
        [delivery] = map(decode_delivery, page.deliveries)
        rows.append(delivery.rows())
    flat, rebuilt = rows
    assert sorted(row.branch for row in flat) == sorted(row.branch for row in rebuilt)
    return flat + rebuilt


def check_export(folder: Path, expected: Expected) -> None:
    out = folder / "rows.jsonl"
    try:
        export(folder, out, ExportChoices(format="rows", side=NAMES, wanted=RolloutFilter()))
    except Exception as error:
        unrecorded = "--side must be one of" in str(error) and not expected.has_scores()
        assert unrecorded or "a rollout with nothing to train on" in str(error) or "refused" in str(error)
        return
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    for record in rows:
        expected.check(record["branch"], np.array(record["ids"]), decode_columns(record["side"]))
    export(folder, out, ExportChoices(format="tree", side=NAMES))
    [tree] = map(json.loads, out.read_text().splitlines())
    assert [json.loads(encode_json(row)) for row in rebuild_rows(tree)] == rows
    [loaded] = read_trees(out)
    for row in loaded.tree.rebuild_rows():
        expected.check(row.branch, row.ids, row.side)


@pytest.mark.parametrize("examples", [12, pytest.param(200, marks=pytest.mark.full)])
def test_every_value_is_at_its_own_token(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.lists(ALL_STEPS, min_size=1, max_size=8), st.integers(0, 2**32), st.booleans())
    def run(steps: list[tuple[str, str, str]], seed: int, evicts: bool) -> None:
        with tempfile.TemporaryDirectory(dir=kit.MEMORY_FOLDER) as folder:
            asyncio.run(play(Path(folder), steps, seed, evicts))

    run()


class Invalid(SideEngine):
    """An engine whose second call reports values for tokens that do not exist."""

    def _add_side_data(self, request: Generate, call: int, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        reported = super()._add_side_data(request, call, chunks)
        return _spoil(reported, len(request.prompt)) if call == 2 else reported


async def _spoil(chunks: AsyncIterator[Chunk], prompt: int) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        array = SideArray(EXPERTS, -prompt - 1, np.zeros((1, 2, 3), np.uint8))
        yield msgspec.structs.replace(chunk, side=(array,))


async def test_call_with_invalid_side_data_fails_and_is_recorded(tmp_path: Path) -> None:
    async with World.of(tmp_path, kit.renderer(), engine=Invalid) as world:
        agent = world.agent()
        agent.messages = [kit.user("Begin.")]
        follow(agent, await agent.call(kit.say("One.")), "Go on.")
        failed = await agent.call(kit.say("Two."))
        assert failed.status == 502 and failed.error is not None
        assert "invalid side data: routed_experts starts" in failed.error["message"]
        assert (await agent.call(kit.say("Three."))).status == 200
        turns = list(agent.session.trace.turns())
        assert [bool(turn.info.fault) for turn in turns] == [False, True, False]
        assert not turns[1].info.side
