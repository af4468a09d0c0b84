"""Quotas: parts taken ahead of need, exact in sum over many holders, and a clear 429 in every dialect."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import anthropic
import openai
import pytest

from tests.kit import Json, Running, gateway, say, until
from tests.projects.kit import create_project, project_client
from tests.store.kit import finish_rollout
from turngate.errors import QuotaExceeded, StoreError
from turngate.gateway.quotas import DAY_S, PARTS, ProjectQuota, QuotaKeeper, _Parts
from turngate.store.projects import Quotas
from turngate.store.quotas import QuotaTable
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store
from turngate.telemetry.metrics import Metrics


class Holder:
    """One process that uses a quota. The test sets its clock and its counter."""

    def __init__(self, table: QuotaTable, limits: Quotas) -> None:
        self.now = 10 * DAY_S + 1.0
        self.metrics, self.sessions, self.limits = Metrics(), 0, limits
        self.quota = ProjectQuota("p", self.metrics, lambda: self.sessions)
        self.keeper = QuotaKeeper(lambda project: self.limits, lambda: table, lambda: self.now)
        self.keeper.add(self.quota)
        self.parts = _Parts()

    def refresh(self) -> None:
        self.keeper.refresh(self.quota, self.parts)

    def sample(self) -> int:
        """Sample tokens, one call at a time, until there are none left. Return how many."""
        before = self.metrics.sampled_tokens
        while True:
            self.refresh()
            if not self.quota.has_tokens:
                return self.metrics.sampled_tokens - before
            self.metrics.count_turn("chat", "exact", "stop", 0, 1)


def test_holders_together_use_exactly_the_quota(store: Store) -> None:
    limit = 200
    holders = [Holder(store.quotas, Quotas(tokens_per_day=limit)) for _ in range(3)]
    for holder in holders:
        holder.refresh()
        assert holder.quota.max_tokens == limit // PARTS  # a part, not all of it
    assert sum(holder.sample() for holder in holders) == limit
    assert store.quotas.used("p", "tokens_per_day", 10) == limit
    holders[0].now += DAY_S  # a new day
    assert holders[0].sample() == limit


def test_a_raised_quota_applies_and_unused_parts_come_back(store: Store) -> None:
    first, second = (Holder(store.quotas, Quotas(tokens_per_day=100)) for _ in range(2))
    assert first.sample() == 100 and second.sample() == 0
    for holder in (first, second):
        holder.limits = Quotas(tokens_per_day=200)
    first.refresh()
    assert first.quota.has_tokens
    first.keeper._quotas["p"] = (first.quota, first.parts)
    first.keeper.stop()  # gives back what it did not use
    assert second.sample() == 100


def test_live_sessions_of_a_dead_holder_come_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 4
    first, second = (Holder(store.quotas, Quotas(live_sessions=limit)) for _ in range(2))
    now = first.now
    monkeypatch.setattr("turngate.store.quotas.time.time", lambda: now)
    for holder in (first, second):
        for _ in range(limit):
            holder.refresh()
            if holder.sessions < holder.quota.max_sessions:
                holder.sessions += 1
    assert (first.sessions, second.sessions) == (4, 0)
    now = second.now = first.now + 61  # the first has not renewed
    second.refresh()
    assert second.quota.max_sessions == 1


def test_a_holder_that_cannot_read_its_limits_keeps_them(store: Store) -> None:
    holder = Holder(store.quotas, Quotas(tokens_per_day=200))
    holder.refresh()

    def fail(project: str) -> Quotas:
        raise StoreError("the store cannot be read")

    read_limits, holder.keeper._read_limits = holder.keeper._read_limits, fail
    holder.refresh()  # an error would end the keeper's thread
    assert holder.quota.limits == Quotas(tokens_per_day=200) and holder.quota.has_tokens
    holder.keeper._read_limits, holder.limits = read_limits, Quotas(tokens_per_day=100)
    holder.refresh()
    assert holder.quota.limits == Quotas(tokens_per_day=100)


async def test_a_cut_off_holder_keeps_to_what_it_has(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(store.quotas, Quotas(tokens_per_day=200))
    holder.refresh()

    class Away(QuotaTable):
        def take(self, *args: Any, **options: Any) -> int:
            raise StoreError("away")

    holder.keeper._table = Away(store._writing, store._reading)
    assert holder.sample() == 200 // PARTS
    monkeypatch.setattr("turngate.gateway.quotas._WAIT_S", 0.0)
    with pytest.raises(
        QuotaExceeded, match=r"has used up its share .* and cannot get more \(away\); retry in a moment"
    ):
        await holder.quota.require_tokens()
    holder.keeper._table = store.quotas
    holder.refresh()
    await holder.quota.require_tokens()


def test_failing_project_is_named_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Other projects may have no quotas, so that their refresh does not need the store."""
    failing, healthy = Holder(store.quotas, Quotas()), ProjectQuota("free", Metrics(), lambda: 0)
    keeper, parts = failing.keeper, _Parts()

    def read_limits(project: str) -> Quotas:
        if project == "p":
            raise StoreError("away")
        return Quotas()

    def refresh_all() -> None:
        failing.refresh()
        keeper.refresh(healthy, parts)

    read_before = keeper._read_limits
    keeper._read_limits = read_limits
    with caplog.at_level(logging.WARNING, "turngate"):
        for _ in range(3):
            refresh_all()
        assert [record.getMessage() for record in caplog.records] == [
            "cannot refresh the quotas of project p: away; this gateway keeps the share that it already has"
        ]
        keeper._read_limits = read_before
        refresh_all()
        keeper._read_limits = read_limits
        refresh_all()
    assert len(caplog.records) == 2  # a new outage


async def use_up(g: Running, client: Json) -> str:
    """Open a session and sample until the tokens of the day are used up."""
    opened = (await client.post("/admin/sessions", json={})).json()
    quota = g.app.hosted.open("acme").quota
    await until(lambda: quota.max_tokens != float("inf"))
    while quota.metrics.sampled_tokens < 10:
        await g.ask(opened["api_key"], f"Hi {quota.metrics.sampled_tokens}")
    return str(opened["api_key"])


async def test_calls_over_quota_are_refused_in_the_callers_format() -> None:
    async with gateway(lambda request, n: say("Hello there.")) as g:
        await create_project(g, "acme", quotas={"tokens_per_day": 10})
        client = await project_client(g, "acme")
        key = await use_up(g, client)
        expected = "project 'acme' has used its quota of 10 sampled tokens for today (tokens_per_day)"
        with pytest.raises(openai.RateLimitError) as chat:
            await g.ask(key, "Hi again")
        assert expected in str(chat.value) and chat.value.code == "insufficient_quota"
        assert "turngate projects change acme --tokens-per-day N" in str(chat.value)
        http = anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)
        async with anthropic.AsyncAnthropic(api_key=key, base_url=g.root, max_retries=0, http_client=http) as claude:
            with pytest.raises(anthropic.RateLimitError, match="tokens_per_day"):
                await claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": "Hi"}])
        gemini = await g.http().post(
            "/v1beta/models/m:generateContent",
            json={"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]},
            headers={"x-goog-api-key": key},
        )
        assert gemini.status_code == 429 and gemini.json()["error"]["status"] == "RESOURCE_EXHAUSTED"
        # Nothing is lost: the session is open, its turns are recorded, and it continues when the quota is raised.
        changed = await g.admin.put("/admin/projects/acme", json={"quotas": {"tokens_per_day": 1000}})
        assert changed.is_success
        assert (await g.ask(key, "And now?")).content == "Hello there."
        # The project `default` is not affected.
        assert (await g.ask((await g.open()).key, "Hi")).content == "Hello there."


async def test_sessions_over_quota_are_refused_until_one_ends() -> None:
    async with gateway([say("Hello.")]) as g:
        await create_project(g, "acme", quotas={"live_sessions": 2})
        client = await project_client(g, "acme")
        await until(lambda: g.app.hosted.open("acme").quota.max_sessions != float("inf"))
        for name in ("a", "b"):
            assert (await client.post("/admin/sessions", json={"id": name})).status_code == 201
        refused = [
            await client.post("/admin/sessions", json={}),
            await client.post("/sessions", json={}),
            await client.post("/v1/rollouts/c/register", json={"model": "m"}),
        ]
        for response in refused:
            assert response.status_code == 429 and "quota of 2 live sessions (live_sessions)" in response.text
        await client.post("/admin/sessions/a/seal", json={})
        assert (await client.post("/admin/sessions", json={})).status_code == 201


async def test_sessions_are_refused_while_too_much_is_stored() -> None:
    async with gateway([say("Hello.")]) as g:
        await create_project(g, "acme", quotas={"stored_bytes": 1000})
        client = await project_client(g, "acme")
        quota = g.app.hosted.open("acme").quota
        await until(lambda: quota.stored_bytes)
        refused = await client.post("/admin/sessions", json={})
        assert refused.status_code == 429
        used = g.app.hosted.open("acme").store.database.used_bytes()
        assert f"stores {used:,} bytes and has used up its quota of 1,000 (stored_bytes)" in refused.text
        assert "turngate projects change acme --stored-bytes N" in refused.text
        assert (await g.admin.put("/admin/projects/acme", json={"quotas": {"stored_bytes": 10**9}})).is_success
        assert (await client.post("/admin/sessions", json={})).status_code == 201


def test_deleted_sessions_take_no_space(store: Store) -> None:
    store.set_setting("x", "y")
    before = store.database.used_bytes()
    key = finish_rollout(store, "s", "g")
    with store.database.writing() as db:
        db.execute("UPDATE nodes SET messages=? WHERE session=?", (b"x" * 1_000_000, key))
    if isinstance(store, SharedStore):  # counts what cells ship
        assert store.quotas.measure("default") == 0 and store.quotas.measure("acme") == 0
        return
    assert store.database.used_bytes() > before + 1_000_000 and store.quotas.measure("default") is None
    store.delete_session(key)
    assert store.database.used_bytes() < before + 100_000


async def test_waiting_calls_do_not_block_the_loop() -> None:
    quota = ProjectQuota("p", Metrics(), lambda: 0)
    quota.max_tokens = 0
    waiting = asyncio.create_task(quota.require_tokens())
    await asyncio.sleep(0)
    quota.max_tokens = 5
    await asyncio.to_thread(threading.Thread(target=quota.wake).run)
    await waiting
