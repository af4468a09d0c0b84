"""Test the web page's API: login, headers, lists of ten thousand rollouts, and live events."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import kit, page_kit
from tests.kit import gateway, say, user
from tests.speed import scaled
from turngate.server.web import event_streams, login
from turngate.server.web.files import SECURITY_HEADERS, StaticFiles
from turngate.store.outcomes import RecordedOutcome

OWN = {"x-turngate-page": "1"}
API = (
    "me",
    "overview",
    "rollouts",
    "groups",
    "group?name=x",
    "group/evidence?name=x",
    "training",
    "training/entropy",
    "failures",
    "events",
    "export?group=x",
    "rollouts/r",
    "rollouts/r/tree",
    "rollouts/r/messages",
    "rollouts/r/tokens",
    "rollouts/r/events",
    "rollouts/r/export",
)


async def log_in(g: kit.Running) -> httpx.AsyncClient:
    client = g.http()
    response = await client.post("/page/login", json={"key": g.app.admin_key}, headers=OWN)
    assert response.status_code == 200, response.text
    return client


async def fetch(client: httpx.AsyncClient, path: str, **query: Any) -> Any:
    response = await client.get(f"/page/api/{path}", params=query)
    assert response.status_code == 200, f"{path}: {response.text}"
    return response.json()


async def events(client: httpx.AsyncClient, path: str, **query: Any) -> AsyncIterator[tuple[str, Any]]:
    """Yield the kind and data of each event."""
    async with client.stream("GET", f"/page/api/{path}", params=query, timeout=scaled(10)) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        kind = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])


# ── login ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_login_cookie_opens_only_the_page() -> None:
    async with gateway() as g:
        client = g.http()
        for path in API:
            assert (await client.get(f"/page/api/{path}")).status_code == 401, path
        assert (
            await client.get("/page/api/me", headers={"authorization": f"Bearer {g.app.admin_key}"})
        ).status_code == 401
        wrong = await client.post("/page/login", json={"key": "not-the-admin-key"}, headers=OWN)
        assert wrong.status_code == 401 and "set-cookie" not in wrong.headers
        assert (await client.post(f"/page/login?key={g.app.admin_key}", headers=OWN)).status_code == 400
        response = await client.post("/page/login", json={"key": g.app.admin_key}, headers=OWN)
        cookie = response.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/page", "Max-Age=43200"))
        assert "Secure" not in cookie and g.app.admin_key not in cookie
        assert response.json()["expires"] > time.time() + 3600
        assert (await fetch(client, "me"))["expires"] == response.json()["expires"]
        for path in ("/admin/sessions", "/admin/fence", "/v1/models"):
            assert (await client.get(path)).status_code == 401, path
        token = client.cookies["turngate_page"]
        bearer = {"authorization": f"Bearer {token}"}
        assert (await g.http().get("/admin/sessions", headers=bearer)).status_code == 401
        proxied = {**OWN, "x-forwarded-proto": "https"}
        secure = await client.post("/page/login", json={"key": g.app.admin_key}, headers=proxied)
        assert "Secure" in secure.headers["set-cookie"]


async def test_cookie_is_signed_expires_and_can_be_revoked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(data=tmp_path) as g:
        client = await log_in(g)
        cookie_value = client.cookies["turngate_page"]
        raw = bytearray(base64.urlsafe_b64decode(cookie_value + "=" * (-len(cookie_value) % 4)))
        for place in (0, 12, len(raw) - 1):  # its expiry, its random part, its signature
            forged = bytearray(raw)
            forged[place] ^= 1
            cookie = base64.urlsafe_b64encode(bytes(forged)).decode().rstrip("=")
            assert g.app.page.login.expiry_of(cookie) is None
        assert g.app.page.login.expiry_of("") is None and g.app.page.login.expiry_of("ä" * 86) is None
        with monkeypatch.context() as clock:
            late = time.time() + login.COOKIE_LIFETIME_S + 1
            clock.setattr(login.time, "time", lambda: late)
            assert g.app.page.login.expiry_of(cookie_value) is None
    async with gateway(data=tmp_path) as g:  # the cookie survives a restart
        client = g.http()
        client.cookies.set("turngate_page", cookie_value)
        assert (await client.get("/page/api/me")).status_code == 200
        assert (await client.post("/page/logout", headers=OWN)).status_code == 200
        again = g.http()
        again.cookies.set("turngate_page", cookie_value)
        assert (await again.get("/page/api/me")).status_code == 401
        for other in _equivalent_encodings(cookie_value):
            assert g.app.page.login.expiry_of(other) is None, "another encoding of the same bytes"
        assert cookie_value not in "".join(
            str(row) for row in g.app.store.database._db.execute("SELECT * FROM settings")
        )


def _equivalent_encodings(token: str) -> list[str]:
    """Return other base64 strings that decode to the same bytes."""
    raw = base64.urlsafe_b64decode(token + "==")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    equivalent = [token[:-1] + last for last in letters if base64.urlsafe_b64decode(token[:-1] + last + "==") == raw]
    assert len(equivalent) == 16
    return [*equivalent, token + "=", token + "==", token + "====", token[:5] + "!" + token[5:], token + "\n"]


async def test_wrong_keys_are_rate_limited() -> None:
    async with gateway() as g:
        client = g.http()
        codes = [(await client.post("/page/login", json={"key": "x" * 20}, headers=OWN)).status_code for _ in range(10)]
        assert codes == [401] * 8 + [429] * 2
        late = await client.post("/page/login", json={"key": "y" * 20}, headers=OWN)
        assert late.status_code == 429 and 0 < int(late.headers["retry-after"]) <= 61
        right = await client.post("/page/login", json={"key": g.app.admin_key}, headers=OWN)
        assert right.status_code == 200, "behind a proxy all clients share one address"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),  # a form on another site cannot send our header
        ({**OWN, "sec-fetch-site": "cross-site"}, 403),
        ({**OWN, "sec-fetch-site": "same-site"}, 403),
        ({**OWN, "origin": "https://evil.example"}, 403),
        ({**OWN, "origin": "null"}, 403),
        ({**OWN, "sec-fetch-site": "same-origin"}, 200),
        (OWN, 200),
    ],
)
async def test_cross_site_requests_are_forbidden(headers: dict[str, str], status: int) -> None:
    async with gateway() as g:
        client = await log_in(g)
        session = await g.open()
        response = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=headers)
        assert response.status_code == status
        assert (await g.show(session.id))["status"] == ("cancelled" if status == 200 else "open")
        assert (await g.http().post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)).status_code == 401
        stranger = await g.http().post("/page/login", json={"key": g.app.admin_key}, headers=headers)
        assert stranger.status_code == status


# ── headers and content ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_security_headers_are_sent_and_data_is_never_html(tmp_path: Path) -> None:
    page_kit.add_hostile_rollouts(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        paths = [f"/page/api/{path.replace('/r/', '/hostile/')}" for path in API if not path.endswith("events")]
        paths += [
            "/page/api/rollouts/hostile",
            "/page/api/nothing",
            "/page/nothing.html",
            "/page/login",
            "/page",
            "/page/",
        ]
        paths += [f"/page/{name}" for name in StaticFiles()]
        paths += [
            "/page/%2e%2e/app.py",
            "/page/..%2fserver/app.py",
            "/page//etc/passwd",
            "/page/js/..%2f..%2fapp.py",
        ]
        for path in paths:
            response = await client.get(path)
            for name, value in SECURITY_HEADERS.items():
                assert response.headers.get_list(name) == [value], (path, name)
            if not (path in ("/page", "/page/") or path.endswith(".html")) or response.status_code >= 400:
                assert "html" not in response.headers.get("content-type", ""), path
            if path.startswith("/page/api") and response.status_code == 200:
                assert response.headers["cache-control"] == "no-store", path
        assert (await client.get("/page/%2e%2e/app.py")).status_code == 404
        assert (await client.post("/page/login", content=b"{", headers=OWN)).headers[
            "x-content-type-options"
        ] == "nosniff"


async def test_files_have_etags_and_browsers_are_redirected() -> None:
    async with gateway() as g:
        client = g.http()
        first = await client.get("/page/")
        assert first.status_code == 200 and first.headers["content-type"] == "text/html; charset=utf-8"
        cached = await client.get("/page/", headers={"if-none-match": first.headers["etag"]})
        assert (cached.status_code, cached.content) == (304, b"")
        redirect = await client.get("/", headers={"accept": "text/html,application/xhtml+xml"})
        assert (redirect.status_code, redirect.headers["location"]) == (307, "/page/")
        for probe in (await client.get("/"), await client.head("/"), await client.get("/", headers={"accept": "*/*"})):
            assert probe.status_code == 200 and probe.headers["content-type"] == "application/json"


async def test_hostile_names_are_escaped_and_searchable(tmp_path: Path) -> None:
    """Names with markup stay data in JSON, never reach a header, and can be searched for."""
    page_kit.add_hostile_rollouts(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        [group] = (await fetch(client, "groups"))["groups"]
        assert group["group"] == f"evil.{page_kit.MARKUP}" and group["rollouts"] == 2
        whole = await fetch(client, "group", name=group["group"])
        assert [row["id"] for row in whole["rollouts"]] == ["hostile", "hostile-2"]
        assert (await fetch(client, "rollouts", q="ONERROR", task=page_kit.MARKUP))["total"] == 2
        header = await fetch(client, "rollouts/hostile")
        assert header["logs"]["stderr"] == page_kit.MARKUP and header["error"]["message"] == page_kit.MARKUP
        saved = await client.get("/page/api/export", params={"group": group["group"], "format": "messages"})
        assert saved.headers["content-disposition"].startswith('attachment; filename="')
        assert not set(saved.headers["content-disposition"][21:]) & set("<>'\\/\r\n;")
        assert saved.headers["content-type"] == "application/x-ndjson"
        exported = [json.loads(line) for line in saved.text.splitlines()]
        assert exported and all(page_kit.MARKUP in one["messages"][0]["content"] for one in exported)


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("rollouts?status=sleeping", "status"),
        ("rollouts?class=unknown", "class"),
        ("rollouts?sort=secret", "sort"),
        ("rollouts?offset=-1", "offset"),
        ("rollouts?limit=many", "limit"),
        ("groups?sort=reward", "sort"),
        ("rollouts/r/export?format=pickle", "format"),
    ],
)
async def test_invalid_query_names_its_parameter(path: str, param: str) -> None:
    async with gateway() as g:
        client = await log_in(g)
        response = await client.get(f"/page/api/{path}")
        assert response.status_code == 400 and response.json()["error"]["param"] == param
        for missing in ("rollouts/none", "rollouts/none/tree", "group?name=none", "group?name=", "export?group=none"):
            assert (await client.get(f"/page/api/{missing}")).status_code == 404, missing


# ── large lists ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.full
async def test_lists_of_ten_thousand_rollouts(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 10_000)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        overview = await fetch(client, "overview")
        assert (overview["rollouts"], overview["groups"]) == (10_001, 1251)
        assert overview["by_status"] == {"starting": 1, "running": 12, "finishing": 0, "done": 9220, "cancelled": 768}
        assert overview["agents"] == ["claude-code", "codex", "pi"]
        seen: list[str] = []
        for offset in range(0, 10_001, 500):
            page = await fetch(client, "rollouts", offset=offset, limit=500)
            assert page["total"] == 10_001
            seen += [row["id"] for row in page["rollouts"]]
        assert len(seen) == len(set(seen)) == 10_001 and seen[:2] == ["starting", "r09999"] and seen[-1] == "r00000"
        rewards = [row["reward"] for row in (await fetch(client, "rollouts", sort="reward", limit=500))["rollouts"]]
        assert rewards == [0.0] * 500
        last = await fetch(client, "rollouts", sort="-reward", offset=9990)
        assert [row["reward"] for row in last["rollouts"]] == [None] * 11, "unknown rewards come last in either order"
        for query, total in (
            ({"status": ["running", "starting"]}, 13),
            ({"class": "none"}, 781),
            ({"group": f"{page_kit.BATCH}.task-0007"}, 8),
            ({"task": "task-0007", "agent": "pi"}, 3),
            ({"q": "TASK-0007"}, 8),
            ({"q": "no space left", "class": "infrastructure fault"}, 461),
            ({"model": "another"}, 0),
        ):
            assert (await fetch(client, "rollouts", **query))["total"] == total, query
        [row] = (await fetch(client, "rollouts", q="r00005"))["rollouts"]
        assert (row["turns"], row["status"], row["class"], row["version_start"], row["stage"]) == (
            1,
            "done",
            "graded",
            0,
            "done",
        )
        first, second = [(await fetch(client, "groups", sort="group", offset=n, limit=5))["groups"] for n in (0, 5)]
        assert [row["task"] for row in first + second] == [f"task-{n:04}" for n in range(10)]
        failures = {row["class"]: row for row in (await fetch(client, "failures"))["classes"]}
        assert failures["infrastructure fault"]["count"] == 461
        [message] = failures["infrastructure fault"]["messages"]
        assert message["count"] == 461, "messages that differ only in numbers are merged"
        header = await fetch(client, f"rollouts/{message['rollouts'][0]}")
        assert "no space left" in header["logs"]["stderr"] and header["error"]["stage"] == "setup"
        training = await fetch(client, "training", buckets=50)
        assert sum(row["count"] for row in training["version"]) == overview["by_class"]["graded"]
        assert [row["version"] for row in training["version"]] == list(range(20))
        assert training["staleness"] == [{"behind": 0, "rollouts": 9220}]
        assert len(training["throughput"]) <= 52 and len(training["versions"]) == 19


async def test_removed_events_are_counted_from_traces(tmp_path: Path) -> None:
    """`event_days` removes old events, and data folders of older versions have none."""
    page_kit.add_rollouts(tmp_path, 40)
    page_kit.add_long_rollout(tmp_path, turns=12, tokens=600)
    async with page_kit.serve(tmp_path) as g:
        whole = (await fetch(await log_in(g), "rollouts", sort="opened"))["rollouts"]
        assert {row["turns"] for row in whole} == {0, 1, 10}
    (tmp_path / "looked-at.db").rename(tmp_path / "turngate.db")
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute("DELETE FROM events WHERE seq<=(SELECT max(seq) FROM events)")
    async with page_kit.serve(tmp_path, [say("One more.")]) as g:
        client = await log_in(g)
        again = (await fetch(client, "rollouts", sort="opened"))["rollouts"]
        counted = {row["id"]: (row["turns"], row["sampled_tokens"], row["class"], row["reward"]) for row in whole}
        del counted["starting"]  # known only from events
        assert {
            row["id"]: (row["turns"], row["sampled_tokens"], row["class"], row["reward"]) for row in again
        } == counted
        session = await g.open()
        await g.ask(session.key, "Hi")
        [new] = (await fetch(client, "rollouts", q=session.id))["rollouts"]
        assert new["turns"] == 1
        assert (await fetch(client, "training"))["staleness"] == [], "staleness is unknown without events"


async def test_training_view_shows_improvement_and_entropy() -> None:
    async with gateway([say("Hello.")] * 8) as g:
        client = await log_in(g)
        for version in (0, 1):
            await g.resume(version)
            for number, reward in enumerate((0.0, 1.0 * version, 0.0)):
                kind = {"task_kind": "rename"} if number < 2 else {}
                metadata = {"group": f"run.{number}", "task": f"t{number}", **kind}
                session = await g.open(id=f"v{version}-{number}", metadata=metadata)
                await g.ask(session.key, "Hi")
                await g.seal(session.id)
                outcome = RecordedOutcome(kind="graded", reward=reward, group=f"run.{number}", task=f"t{number}")
                g.app.outcomes.record(session.id, outcome)
        found = (await fetch(client, "training"))["improvement"]
        assert (found["before"], found["after"]) == ({"first": 0, "last": 0}, {"first": 1, "last": 1})
        assert found["kinds"] == [
            {"kind": "rename", "before": {"mean": 0.0, "graded": 2}, "after": {"mean": 0.5, "graded": 2}},
            {"kind": "", "before": {"mean": 0.0, "graded": 1}, "after": {"mean": 0.0, "graded": 1}},
        ]
        example = found["example"]
        assert example["task"] == "t1"
        assert (example["before"]["rollout"], example["after"]["rollout"]) == ("v0-1", "v1-1")
        assert (await fetch(client, "training", group="run.0"))["improvement"]["example"] is None
        entropy = await fetch(client, "training/entropy")
        for point, version in zip(entropy["versions"], (0, 1), strict=True):
            turns = [turn for n in range(3) for turn in await g.turns(f"v{version}-{n}")]
            known = [logprob for turn in turns for logprob in turn["logprobs"]]
            assert point == {
                "version": version,
                "entropy": pytest.approx(-sum(known) / len(known)),
                "tokens": len(known),
                "rollouts": 3,
            }
        assert (await fetch(client, "training/entropy", group="none"))["versions"] == []


async def test_training_view_by_version_and_staleness() -> None:
    async with gateway([say("Hello.")] * 8) as g:
        client = await log_in(g)
        await g.admin.put("/admin/feeds/main", json={"n": 2, "groups": "run."})
        opened = [await g.open(metadata={"group": "run.a", "task": "a"}) for _ in range(2)]
        other = await g.open(metadata={"group": "else", "task": "b"})
        for session in (*opened, other):
            await g.ask(session.key, "Hi")
        await g.resume(3)
        for session, reward in zip((*opened, other), (1.0, 0.0, 0.5), strict=True):
            await g.seal(session.id)
            group = "else" if session is other else "run.a"
            g.app.outcomes.record(session.id, RecordedOutcome(kind="graded", reward=reward, group=group, task="a"))
        training = await fetch(client, "training")
        assert training["version"] == [{"version": 0, "mean": 0.5, "count": 3}]
        assert training["staleness"] == [{"behind": 3, "rollouts": 3}]
        [delivery] = training["deliveries"]
        actual = {name: delivery[name] for name in ("feed", "number", "group", "version", "oldest", "behind", "mean")}
        expected = {"feed": "main", "number": 1, "group": "run.a", "version": 3, "oldest": 0, "behind": 3, "mean": 0.5}
        assert actual == expected
        assert [row["version"] for row in training["versions"]] == [3]
        assert training["feeds"][0]["newest"] == 1 and training["feeds"][0]["waiting"] == 0
        assert (
            sum(row["count"] for row in training["time"]) == 3 and sum(o["turns_s"] for o in training["throughput"]) > 0
        )
        filtered = await fetch(client, "training", group="run.")
        assert filtered["version"] == [{"version": 0, "mean": 0.5, "count": 2}]
        assert (await fetch(client, "group", name="run.a"))["deliveries"][0]["number"] == 1
        assert (await fetch(client, "overview"))["gateway"]["version"] == 3


# ── live events ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_keep_alive")
async def test_changes_are_streamed_from_cursor() -> None:
    async with gateway([say("Hello."), say("Again.")]) as g:
        client = await log_in(g)
        before = await fetch(client, "rollouts")
        session = await g.open(metadata={"group": "g", "task": "t"})
        async with aclosing(events(client, "events", after=before["cursor"])) as following:
            kind, first = await anext(following)
            assert kind == "changed" and [row["status"] for row in first["rollouts"]] == ["running"]
            await g.ask(session.key, "Hi")
            _, second = await anext(following)
            assert [(row["id"], row["turns"]) for row in second["rollouts"]] == [(session.id, 1)]
            await g.seal(session.id)
            g.app.outcomes.record(session.id, RecordedOutcome(kind="graded", reward=0.5, group="g", task="t"))
            async with asyncio.timeout(scaled(10)):
                async for _, third in following:
                    if third["rollouts"][0]["reward"] == 0.5:
                        break
            assert third["rollouts"][0]["status"] == "done" and third["cursor"] > second["cursor"]
        async with aclosing(events(client, "events", after=second["cursor"])) as again:  # as a browser that reconnects
            _, missed = await anext(again)
            assert missed["rollouts"][0]["reward"] == 0.5
        await g.admin.delete(f"/admin/sessions/{session.id}")
        async with aclosing(events(client, "events", after=missed["cursor"])) as again:
            assert (await anext(again))[1]["gone"] == [session.id]
        assert (await fetch(client, "rollouts"))["total"] == 0


@pytest.mark.usefixtures("no_keep_alive")
async def test_rollout_events_and_reload_for_late_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_MAX_BEHIND", 2)
    async with gateway([say("Hello.")] * 2) as g:
        client = await log_in(g)
        session, other = await g.open(), await g.open()
        async with aclosing(events(client, f"rollouts/{session.id}/events", after=0)) as following:
            await g.ask(other.key, "Hi")
            await g.ask(session.key, "Hi")
            assert [(await anext(following))[0] for _ in range(2)] == ["opened", "turn"]
        async with aclosing(events(client, "events", after=0)) as late:
            assert (await anext(late))[0] == "reload"


async def test_logout_ends_idle_event_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)
    async with gateway() as g:
        client = await log_in(g)
        following = events(client, "events")
        waiting = asyncio.create_task(anext(following, None))
        await kit.until(lambda: g.app.events._followers)
        await client.post("/page/logout", headers=OWN)
        assert await asyncio.wait_for(waiting, scaled(5)) is None


@pytest.mark.usefixtures("no_keep_alive")
@pytest.mark.parametrize("path", ["events", "rollouts/{}/events"])
async def test_logout_ends_busy_event_stream(path: str) -> None:
    """The login is checked at every event, not only at keep-alives."""
    async with gateway() as g:
        client = await log_in(g)
        session = await g.open()
        async with aclosing(events(client, path.format(session.id), after=0)) as following:
            await anext(following)
            await client.post("/page/logout", headers=OWN)
            for _ in range(3):
                g.app.events.announce(session.id, "note", {"secret": 1})
            assert await asyncio.wait_for(anext(following, None), scaled(5)) is None


# ── actions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_cancel_aborts_running_call() -> None:
    script = kit.Gated([say("word " * 50)])
    async with gateway(engine=script) as g:
        client = await log_in(g)
        session = await g.open()
        asking = asyncio.create_task(g.ask(session.key, "Hi"))
        await kit.until(lambda: script.waiting)
        assert (await fetch(client, f"rollouts/{session.id}"))["live"]["in_flight"] == 1
        response = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)
        assert response.json()["rollout"]["status"] == "cancelled"
        with pytest.raises(Exception, match="cancelled"):
            await asking
        again = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)
        assert again.status_code == 409 and "already cancelled" in again.json()["error"]["message"]
        assert (await client.post("/page/api/rollouts/nobody/seal", headers=OWN)).status_code == 404
        retry = await client.post(f"/page/api/rollouts/{session.id}/retry", headers=OWN)
        assert retry.status_code == 409 and "does not belong to a batch" in retry.json()["error"]["message"]


async def test_page_views_run_in_page_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and traces are built in the page's own thread."""
    import threading

    from turngate.store.store import Store
    from turngate.views.overview import Overview
    from turngate.views.rollout import RolloutView

    page_kit.add_long_rollout(tmp_path, turns=10, tokens=1000)
    async with page_kit.serve(tmp_path) as g:
        client = await log_in(g)
        seen: set[str] = set()
        for kind, name in (
            (Overview, "refresh"),
            (RolloutView, "tree"),
            (RolloutView, "tokens"),
            (RolloutView, "messages"),
            (Store, "load"),
        ):
            work = getattr(kind, name)

            def record_thread(*args: Any, work: Any = work, **kwargs: Any) -> Any:
                seen.add(threading.current_thread().name)
                return work(*args, **kwargs)

            monkeypatch.setattr(kind, name, record_thread)
        for path in ("overview", "rollouts", "groups", "training", "failures", "rollouts/long", "rollouts/long/tree"):
            await fetch(client, path)
        for path in ("rollouts/long/messages", "rollouts/long/tokens"):
            await fetch(client, path)
        await fetch(client, "group/evidence", name=f"{page_kit.BATCH}.long-task")
        assert seen == {"turngate-page_0"}


async def test_messages_of_running_session() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        client = await log_in(g)
        session = await g.open()
        messages = [user("Hi")]
        reply = await g.ask(session.key, messages)
        first = await fetch(client, f"rollouts/{session.id}/messages")
        assert [m["content"] for node in first["nodes"] for m in node["messages"]] == ["Hi", "One."] and not first[
            "more"
        ]
        await g.ask(session.key, [*messages, reply.message(), user("Go on")])
        second = await fetch(client, f"rollouts/{session.id}/messages", after=first["next"])
        assert [m["content"] for node in second["nodes"] for m in node["messages"]] == ["Go on", "Two."]
        assert [node["turn"] for node in second["nodes"]] == [None, 2] and second["nodes"][1]["role"] == "main"
