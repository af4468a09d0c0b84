"""Test the engines of many cells: changes and weight updates at the gateway on the shared store reach every cell.

The engines are fakes that "sample" the name of their weights, so that every recorded turn shows which weights sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.kit import OpenSession, Running, gateway, until
from tests.postgres import CutOffProxy, PostgresServer
from tests.server.test_engines import change, refuse, states
from tests.server.test_weights import FakeVLLM, engines, events, load, load_error
from tests.speed import scaled
from tests.store.kit import open_shared
from tests.store.shared.test_totals import TO_VERSION_1
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.gateway.followers import find_busy
from turngate.gateway.shared_engines import apply_shared
from turngate.render import BUILTIN_TOKENIZER
from turngate.store.shared.engines import SharedEngine
from turngate.store.shared.fence import FenceFollowerRow

LEASE_S = min(scaled(1.5), 6.0)  # a longer one only makes the tests longer
ACTIVE, FAILED = SharedEngine("a", "active"), SharedEngine("a", "failed", "no weights")


@pytest.mark.parametrize(
    ("configured", "shared", "used", "failed"),
    [
        ([], [], {}, {}),
        (["a"], [], {"a": "active"}, {}),
        ([], [ACTIVE], {"a": "active"}, {}),
        (["b"], [ACTIVE], {"b": "active", "a": "active"}, {}),
        (["a"], [SharedEngine("a", "draining")], {"a": "draining"}, {}),
        (["a", "b"], [SharedEngine("a", "removed")], {"b": "active"}, {}),
        (["a", "b"], [FAILED], {"b": "active"}, {"a": "no weights"}),
        ([], [FAILED], {}, {"a": "no weights"}),
    ],
)
def test_shared_list_applies_to_configured_engines(configured: Any, shared: Any, used: Any, failed: Any) -> None:
    assert apply_shared(configured, shared) == (used, failed)


@pytest.mark.parametrize(
    ("busy", "now", "waits"),
    [("", 100, False), ("a", 100, True), ("b a", 100, True), ("ab", 100, False), ("a", 110, False)],
)
def test_removal_waits_for_cells_with_calls(busy: str, now: float, waits: bool) -> None:
    assert bool(find_busy([FenceFollowerRow("c", "", 10, seen=100, epoch=5, now=now, busy=busy)], "a")) is waits


def test_only_cells_and_gateways_on_the_shared_store_need_no_engine_url() -> None:
    settings: dict[str, Any] = {"engine": "vllm", "model": "m", "tokenizer": "t"}
    ServeConfig(**settings, shared="postgresql://u@h/d").check()
    ServeConfig(engine="vllm", data="postgresql://u@h/d").check()
    with pytest.raises(ConfigError, match="engine_url is not set"):
        ServeConfig(**settings).check()
    with pytest.raises(ConfigError, match="engine_url must be an http or https URL"):
        ServeConfig(engine="vllm", data="postgresql://u@h/d", engine_url=["x"]).check()


@pytest.fixture(autouse=True)
def scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway on the shared store keeps its key in the working folder."""
    monkeypatch.chdir(tmp_path)


@asynccontextmanager
async def controller(url: str, **config: Any) -> AsyncIterator[Running]:
    """The gateway on the shared store."""
    async with gateway(observe="vllm", data=url, **{"model": "m", **config}) as g:
        yield g


@asynccontextmanager
async def cell(url: str, name: str = "c", **config: Any) -> AsyncIterator[Running]:
    settings = {"model": "m", "tokenizer": str(BUILTIN_TOKENIZER), "lease_s": LEASE_S, "cell_name": name, **config}
    async with gateway(observe="vllm", shared=url, **settings) as g:
        yield g


@asynccontextmanager
async def cells(url: str, count: int = 2) -> AsyncIterator[list[Running]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(cell(url, f"c{n}")) for n in range(count)]


class Agents:
    """Agents at several cells that call the model all the time."""

    def __init__(self, used: list[Running]) -> None:
        self._cells = used
        self._sessions: list[tuple[Running, OpenSession]] = []
        self._done = asyncio.Event()

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        working = [asyncio.create_task(self._work(one)) for one in self._cells]
        try:
            yield
        finally:
            self._done.set()
            await asyncio.gather(*working)

    async def _work(self, g: Running) -> None:
        while not self._done.is_set():
            session = await g.open()
            self._sessions.append((g, session))
            await g.ask(session.key, "Hi", "async stream")
            await asyncio.sleep(0.02)

    async def turns(self) -> list[tuple[str, int, int, float]]:
        """The weights that sampled each turn, its recorded versions and its start."""
        return [
            (turn["message"]["content"], turn["version_start"], turn["version_end"], turn["started"])
            for g, session in self._sessions
            for turn in await g.turns(session.id)
        ]


def sampled_by(version: int) -> str:
    return f"[/w/{version}]" * 2 if version else "[base]" * 2


async def ask(g: Running) -> str:
    return (await g.ask((await g.open()).key, "Hi")).content


@pytest.mark.needs("postgres")
@pytest.mark.real
@pytest.mark.promise(1)
async def test_update_reaches_every_engine_of_every_cell(postgres_url: str) -> None:
    async with engines(2) as fakes, controller(postgres_url) as g, cells(postgres_url) as both:
        assert not (await both[0].admin.get("/admin/engines")).json()["engines"]
        for fake in fakes:
            await change(g, "add", url=fake.url)
        for one in (g, *both):
            assert set(states((await one.admin.get("/admin/engines")).json())) == {fake.url for fake in fakes}
        agents, returned = Agents(both), {}
        async with agents.work():
            for version in (1, 2):
                await asyncio.sleep(0.1)
                reply = await load(g, version=version, path=f"/w/{version}")
                returned[version] = time.time()
                assert [result["has"] for result in reply["replicas"]] == [version, version]
            await asyncio.sleep(0.1)
        turns = await agents.turns()
        assert {first for _, first, _, _ in turns} == {0, 1, 2}
        for text, first, last, started in turns:
            assert text == sampled_by(first) and first == last
            assert all(first >= version for version, at in returned.items() if started > at)


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_engine_that_cannot_load_weights_is_out_of_service(postgres_url: str) -> None:
    async with engines(2) as fakes, controller(postgres_url) as g, cells(postgres_url) as both:
        for fake in fakes:
            await change(g, "add", url=fake.url)
        fakes[1].failing_paths.add("/collective_rpc")
        agents = Agents(both)
        async with agents.work():
            reply = await load(g, version=1, path="/w/1")
            assert {result["url"]: result["ok"] for result in reply["replicas"]} == {
                fakes[0].url: True,
                fakes[1].url: False,
            }
            calls = len(fakes[1].salts)
            await asyncio.sleep(0.2)
        assert len(fakes[1].salts) == calls, "it got a call after the update"
        assert all(text == sampled_by(first) and first == last for text, first, last, _ in await agents.turns())
        for one in (g, *both):
            view = (await one.admin.get("/admin/engines")).json()
            assert states(view) == {fakes[0].url: "active", fakes[1].url: "failed"}
            assert "no /collective_rpc today" in view["engines"][1]["detail"]
        assert [(e["url"], e["state"]) for e in await events(g, "engine")][-1] == (fakes[1].url, "failed")
        status, message = await refuse(g, "drain", url=fakes[1].url)
        assert status == 409 and "has failed" in message
        fakes[1].failing_paths.clear()
        fakes[1].aborted = False
        await load(g, version=2, path="/w/2")  # only for the engines in service
        assert fakes[1].weights == "base"
        await change(g, "add", url=fakes[1].url)
        assert fakes[1].weights == "/w/2"
        await change(g, "drain", url=fakes[0].url)
        assert [await ask(one) for one in both] == [sampled_by(2)] * 2
        assert len(fakes[1].salts) == calls + 2


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_bad_weights_leave_all_cells_at_the_old_version(postgres_url: str) -> None:
    async with engines(2) as fakes, controller(postgres_url) as g, cells(postgres_url) as both:
        for fake in fakes:
            await change(g, "add", url=fake.url)
        await load(g, version=1, lora_path="/w/1")
        status, message = await load_error(g, version=2, lora_path="/w/missing")
        assert status == 502 and "version 1 remains active" in message
        assert set(states((await g.admin.get("/admin/engines")).json()).values()) == {"active"}
        assert [await ask(one) for one in both] == [sampled_by(1)] * 2
        assert (await refuse(both[0], "add", url=fakes[0].url))[0] == 409
        assert (await load_error(both[0], version=2, lora_path="/w/2"))[0] == 409


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_removal_waits_for_the_calls_of_all_cells(postgres_url: str) -> None:
    async with engines(2) as fakes, controller(postgres_url) as g, cells(postgres_url) as both:
        for fake in fakes:
            await change(g, "add", url=fake.url)
        fakes[0].pace.clear()
        asking = [one.start(ask(one)) for one in both for _ in range(2)]
        await until(lambda: fakes[0].half_sampled >= 1 and fakes[0].half_sampled + fakes[1].half_sampled == 4)
        removing = g.start(g.admin.post("/admin/engines/remove", json={"url": fakes[0].url}))
        await until(lambda: all(_find(one, fakes[0]).is_draining for one in both))
        await asyncio.sleep(LEASE_S / 2)
        assert not removing.done()
        assert [await ask(one) for one in both] == [sampled_by(0)] * 2  # elsewhere
        fakes[0].pace.set()
        assert [await each for each in asking] == [sampled_by(0)] * 4
        assert list(states((await removing).json())) == [fakes[1].url]
        assert all(len(one.app.engine.replicas) == 1 for one in both)


def _find(g: Running, fake: FakeVLLM) -> Any:
    return next(replica for replica in g.app.engine.replicas if replica.address == fake.url)  # type: ignore[attr-defined]


@pytest.mark.needs("postgres")
@pytest.mark.full
async def test_list_and_version_survive_restarts_and_reach_other_gateways(postgres_url: str) -> None:
    async with engines(2) as fakes:
        async with controller(postgres_url) as g, controller(postgres_url) as other:
            await change(g, "add", url=fakes[0].url)
            await change(other, "add", url=fakes[1].url)
            await load(g, version=3, path="/w/3")
            assert (await other.admin.get("/admin/fence")).json()["version"] == 3
            assert (await load_error(other, version=2, path="/w/2"))[0] == 409
            await load(other, version=4, path="/w/4")
        async with cell(postgres_url) as one, controller(postgres_url) as g:
            assert await ask(one) == sampled_by(4)
            view = (await g.admin.get("/admin/weights")).json()
            assert view["version"] == 4 and [replica["ok"] for replica in view["replicas"]] == [True, True]
        # An engine that only the cell is configured with does not get the weights, so it gets no calls.
        async with engines(1) as own, cell(postgres_url, engine_url=[own[0].url]) as one:
            assert await ask(one) == sampled_by(4) and not own[0].salts


@pytest.mark.needs("postgres")
@pytest.mark.full
@pytest.mark.promise(1)
async def test_lease_that_lapses_during_an_update_ends_old_weights(
    postgres_url: str, cut_off_proxy: CutOffProxy
) -> None:
    """A cell is cut off while it has a call. The update loads new weights only when that call has ended."""
    async with (
        engines(1) as fakes,
        controller(postgres_url) as g,
        cell(postgres_url, "near") as near,
        cell(cut_off_proxy.url, "far") as far,
    ):
        await change(g, "add", url=fakes[0].url)
        assert await ask(near) == await ask(far) == sampled_by(0)
        fakes[0].pace.clear()
        session = await far.open()
        hanging = far.start(far.ask(session.key, "Hi", "async stream"))
        await until(lambda: far.app.fence.in_flight == 1)
        cut_off_proxy.cut()
        fakes[0].load_gate.clear()
        loading = g.start(load(g, version=1, path="/w/1"))
        await until(lambda: "/collective_rpc" in fakes[0].control_paths, LEASE_S + 10)
        # The engine begins to load. The cell cannot know of it, and has stopped by its own clock.
        assert far.app.fence.in_flight == 0 and not far.app.fence.admits
        with pytest.raises(openai.APIError):
            await hanging
        fakes[0].pace.set()
        fakes[0].load_gate.set()
        await loading
        assert await ask(near) == sampled_by(1)
        late = far.start(far.ask(session.key, "Hi again"))  # a session that the agent has open
        await asyncio.sleep(LEASE_S / 2)
        assert not late.done() and len(far.app.sessions._live) > 0
        calls = len(fakes[0].salts)
        cut_off_proxy.mend()
        assert (await late).content == sampled_by(1) and len(fakes[0].salts) == calls + 1
        turns = [turn for turn in await far.turns(session.id) if turn["finish"] == "stop"]
        assert [(t["version_start"], t["version_end"]) for t in turns] == [(1, 1)]


@pytest.mark.needs("postgres")
@pytest.mark.full
def test_store_without_engines_is_migrated(postgres_server: PostgresServer, postgres_url: str) -> None:
    open_shared(postgres_url).close()
    before = "DROP TABLE engines; ALTER TABLE fence_followers DROP COLUMN busy;"
    postgres_server.query(TO_VERSION_1 + before, postgres_url.rpartition("/")[2])
    store = open_shared(postgres_url)
    store.fence.report("c", "c", 10, 0, "a b")
    assert [row.busy for row in store.fence.list_followers()] == ["a b"]
    assert store.engines.write(ACTIVE) == store.fence.read().epoch and store.engines.list_engines() == [ACTIVE]
    store.close()
