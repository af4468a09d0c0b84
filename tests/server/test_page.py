"""The web page's API: who is let in, what is sent under which headers, lists of ten thousand rollouts, what happens as it happens."""

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


async def entered(g: kit.Running) -> httpx.AsyncClient:
    client = g.http()
    response = await client.post("/page/login", json={"key": g.app.admin_key}, headers=OWN)
    assert response.status_code == 200, response.text
    return client


async def told(client: httpx.AsyncClient, path: str, **query: Any) -> Any:
    response = await client.get(f"/page/api/{path}", params=query)
    assert response.status_code == 200, f"{path}: {response.text}"
    return response.json()


async def events(client: httpx.AsyncClient, path: str, **query: Any) -> AsyncIterator[tuple[str, Any]]:
    """Kind and data, as they come."""
    async with client.stream("GET", f"/page/api/{path}", params=query, timeout=scaled(10)) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        kind = ""
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                kind = line[7:]
            elif line.startswith("data: "):
                yield kind, json.loads(line[6:])


# ── who is let in ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_admin_key_gives_a_cookie_that_opens_the_page_and_nothing_else() -> None:
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
        assert (await told(client, "me"))["expires"] == response.json()["expires"]
        for path in ("/admin/sessions", "/admin/fence", "/v1/models"):
            assert (await client.get(path)).status_code == 401, path
        token = client.cookies["turngate_page"]
        bearer = {"authorization": f"Bearer {token}"}
        assert (await g.http().get("/admin/sessions", headers=bearer)).status_code == 401
        behind = {**OWN, "x-forwarded-proto": "https"}
        secure = await client.post("/page/login", json={"key": g.app.admin_key}, headers=behind)
        assert "Secure" in secure.headers["set-cookie"]


async def test_a_cookie_ends_is_signed_and_can_be_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(data=tmp_path) as g:
        client = await entered(g)
        kept = client.cookies["turngate_page"]
        raw = bytearray(base64.urlsafe_b64decode(kept + "=" * (-len(kept) % 4)))
        for place in (0, 12, len(raw) - 1):  # its end, its random part, its signature
            forged = bytearray(raw)
            forged[place] ^= 1
            cookie = base64.urlsafe_b64encode(bytes(forged)).decode().rstrip("=")
            assert g.app.page.login.expiry_of(cookie) is None
        assert g.app.page.login.expiry_of("") is None and g.app.page.login.expiry_of("ä" * 86) is None
        with monkeypatch.context() as clock:
            late = time.time() + login.COOKIE_LIFETIME_S + 1
            clock.setattr(login.time, "time", lambda: late)
            assert g.app.page.login.expiry_of(kept) is None
    async with gateway(data=tmp_path) as g:  # a restart is no reason to log in again
        client = g.http()
        client.cookies.set("turngate_page", kept)
        assert (await client.get("/page/api/me")).status_code == 200
        assert (await client.post("/page/logout", headers=OWN)).status_code == 200
        again = g.http()
        again.cookies.set("turngate_page", kept)
        assert (await again.get("/page/api/me")).status_code == 401
        for other in _spellings(kept):
            assert g.app.page.login.expiry_of(other) is None, "another spelling of the same bytes"
        assert kept not in "".join(str(row) for row in g.app.store._reader.execute("SELECT * FROM settings"))


def _spellings(token: str) -> list[str]:
    """What a decoder takes for the same."""
    raw = base64.urlsafe_b64decode(token + "==")
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    alike = [token[:-1] + last for last in letters if base64.urlsafe_b64decode(token[:-1] + last + "==") == raw]
    assert len(alike) == 16
    return [*alike, token + "=", token + "==", token + "====", token[:5] + "!" + token[5:], token + "\n"]


async def test_wrong_keys_are_slowed_down() -> None:
    async with gateway() as g:
        client = g.http()
        codes = [(await client.post("/page/login", json={"key": "x" * 20}, headers=OWN)).status_code for _ in range(10)]
        assert codes == [401] * 8 + [429] * 2
        late = await client.post("/page/login", json={"key": "y" * 20}, headers=OWN)
        assert late.status_code == 429 and 0 < int(late.headers["retry-after"]) <= 61
        right = await client.post("/page/login", json={"key": g.app.admin_key}, headers=OWN)
        assert right.status_code == 200, "behind a proxy all have one address"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),  # a form of another site can send no header of ours
        ({**OWN, "sec-fetch-site": "cross-site"}, 403),
        ({**OWN, "sec-fetch-site": "same-site"}, 403),
        ({**OWN, "origin": "https://evil.example"}, 403),
        ({**OWN, "origin": "null"}, 403),
        ({**OWN, "sec-fetch-site": "same-origin"}, 200),
        (OWN, 200),
    ],
)
async def test_only_the_page_itself_changes_anything(headers: dict[str, str], status: int) -> None:
    async with gateway() as g:
        client = await entered(g)
        session = await g.open()
        response = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=headers)
        assert response.status_code == status
        assert (await g.show(session.id))["status"] == ("cancelled" if status == 200 else "open")
        assert (await g.http().post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)).status_code == 401
        stranger = await g.http().post("/page/login", json={"key": g.app.admin_key}, headers=headers)
        assert stranger.status_code == status


# ── what is sent, and how ───────────────────────────────────────────────────────────────────────────────────────────


async def test_everything_is_sent_behind_the_shield_and_no_data_as_html(tmp_path: Path) -> None:
    page_kit.add_hostile_rollouts(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
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


async def test_files_are_known_by_their_tag_and_browsers_are_led_to_them() -> None:
    async with gateway() as g:
        client = g.http()
        first = await client.get("/page/")
        assert first.status_code == 200 and first.headers["content-type"] == "text/html; charset=utf-8"
        same = await client.get("/page/", headers={"if-none-match": first.headers["etag"]})
        assert (same.status_code, same.content) == (304, b"")
        led = await client.get("/", headers={"accept": "text/html,application/xhtml+xml"})
        assert (led.status_code, led.headers["location"]) == (307, "/page/")
        for probe in (await client.get("/"), await client.head("/"), await client.get("/", headers={"accept": "*/*"})):
            assert probe.status_code == 200 and probe.headers["content-type"] == "application/json"


async def test_hostile_names_stay_names(tmp_path: Path) -> None:
    """They are data in JSON and in no header; whoever asks by one finds it."""
    page_kit.add_hostile_rollouts(tmp_path)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        [group] = (await told(client, "groups"))["groups"]
        assert group["group"] == f"evil.{page_kit.MARKUP}" and group["rollouts"] == 2
        whole = await told(client, "group", name=group["group"])
        assert [one["id"] for one in whole["rollouts"]] == ["hostile", "hostile-2"]
        assert (await told(client, "rollouts", q="ONERROR", task=page_kit.MARKUP))["total"] == 2
        header = await told(client, "rollouts/hostile")
        assert header["logs"]["stderr"] == page_kit.MARKUP and header["error"]["message"] == page_kit.MARKUP
        saved = await client.get("/page/api/export", params={"group": group["group"], "format": "messages"})
        assert saved.headers["content-disposition"].startswith('attachment; filename="')
        assert not set(saved.headers["content-disposition"][21:]) & set("<>'\\/\r\n;")
        assert saved.headers["content-type"] == "application/x-ndjson"
        assert page_kit.MARKUP in saved.json()["messages"][0]["content"] if saved.text.count("\n") == 1 else saved.text


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
async def test_what_is_wrong_is_named(path: str, param: str) -> None:
    async with gateway() as g:
        client = await entered(g)
        response = await client.get(f"/page/api/{path}")
        assert response.status_code == 400 and response.json()["error"]["param"] == param
        for missing in ("rollouts/none", "rollouts/none/tree", "group?name=none", "group?name=", "export?group=none"):
            assert (await client.get(f"/page/api/{missing}")).status_code == 404, missing


# ── ten thousand ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_ten_thousand_rollouts(tmp_path: Path) -> None:
    page_kit.add_rollouts(tmp_path, 10_000)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        sums = await told(client, "overview")
        assert (sums["rollouts"], sums["groups"]) == (10_001, 1251)
        assert sums["by_status"] == {"starting": 1, "running": 12, "finishing": 0, "done": 9220, "cancelled": 768}
        assert sums["agents"] == ["claude-code", "codex", "pi"]
        seen: list[str] = []
        for offset in range(0, 10_001, 500):
            page = await told(client, "rollouts", offset=offset, limit=500)
            assert page["total"] == 10_001
            seen += [row["id"] for row in page["rollouts"]]
        assert len(seen) == len(set(seen)) == 10_001 and seen[:2] == ["starting", "r09999"] and seen[-1] == "r00000"
        rewards = [row["reward"] for row in (await told(client, "rollouts", sort="reward", limit=500))["rollouts"]]
        assert rewards == [0.0] * 500
        last = await told(client, "rollouts", sort="-reward", offset=9990)
        assert [row["reward"] for row in last["rollouts"]] == [None] * 11, "what is not known comes last, whichever way"
        for query, total in (
            ({"status": ["running", "starting"]}, 13),
            ({"class": "none"}, 781),
            ({"group": f"{page_kit.BATCH}.task-0007"}, 8),
            ({"task": "task-0007", "agent": "pi"}, 3),
            ({"q": "TASK-0007"}, 8),
            ({"q": "no space left", "class": "infrastructure fault"}, 461),
            ({"model": "another"}, 0),
        ):
            assert (await told(client, "rollouts", **query))["total"] == total, query
        [row] = (await told(client, "rollouts", q="r00005"))["rollouts"]
        assert (row["turns"], row["status"], row["class"], row["version_start"], row["stage"]) == (
            1,
            "done",
            "graded",
            0,
            "done",
        )
        first, second = [(await told(client, "groups", sort="group", offset=n, limit=5))["groups"] for n in (0, 5)]
        assert [one["task"] for one in first + second] == [f"task-{n:04}" for n in range(10)]
        failures = {one["class"]: one for one in (await told(client, "failures"))["classes"]}
        assert failures["infrastructure fault"]["count"] == 461
        [message] = failures["infrastructure fault"]["messages"]
        assert message["count"] == 461, "numbers in it do not make two messages of one"
        header = await told(client, f"rollouts/{message['rollouts'][0]}")
        assert "no space left" in header["logs"]["stderr"] and header["error"]["stage"] == "setup"
        training = await told(client, "training", buckets=50)
        assert sum(one["count"] for one in training["version"]) == sums["by_class"]["graded"]
        assert [one["version"] for one in training["version"]] == list(range(20))
        assert training["staleness"] == [{"behind": 0, "rollouts": 9220}]
        assert len(training["throughput"]) <= 52 and len(training["versions"]) == 19


async def test_what_was_removed_from_the_events_is_counted_in_the_traces(tmp_path: Path) -> None:
    """`event_days` removes old events, and a folder of an older version has none from that time."""
    page_kit.add_rollouts(tmp_path, 40)
    page_kit.add_long_rollout(tmp_path, turns=12, tokens=600)
    async with page_kit.serve(tmp_path) as g:
        whole = (await told(await entered(g), "rollouts", sort="opened"))["rollouts"]
        assert {row["turns"] for row in whole} == {0, 1, 10}
    (tmp_path / "looked-at.db").rename(tmp_path / "turngate.db")
    with page_kit.open_builder(tmp_path) as builder:
        builder._db.execute("DELETE FROM events WHERE seq<=(SELECT max(seq) FROM events)")
    async with page_kit.serve(tmp_path, [say("One more.")]) as g:
        client = await entered(g)
        again = (await told(client, "rollouts", sort="opened"))["rollouts"]
        counted = {row["id"]: (row["turns"], row["sampled_tokens"], row["class"], row["reward"]) for row in whole}
        del counted["starting"]  # of which there were only events
        assert {
            row["id"]: (row["turns"], row["sampled_tokens"], row["class"], row["reward"]) for row in again
        } == counted
        session = await g.open()
        await g.ask(session.key, "Hi")
        [new] = (await told(client, "rollouts", q=session.id))["rollouts"]
        assert new["turns"] == 1
        assert (await told(client, "training"))["staleness"] == [], (
            "by how much it was behind then, nobody knows any more"
        )


async def test_training_is_told_by_version_and_how_far_behind_it_was() -> None:
    async with gateway([say("Hello.")] * 8) as g:
        client = await entered(g)
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
        told_all = await told(client, "training")
        assert told_all["version"] == [{"version": 0, "mean": 0.5, "count": 3}]
        assert told_all["staleness"] == [{"behind": 3, "rollouts": 3}]
        [delivery] = told_all["deliveries"]
        facts = {name: delivery[name] for name in ("feed", "number", "group", "version", "oldest", "behind", "mean")}
        wanted = {"feed": "main", "number": 1, "group": "run.a", "version": 3, "oldest": 0, "behind": 3, "mean": 0.5}
        assert facts == wanted
        assert [one["version"] for one in told_all["versions"]] == [3]
        assert told_all["feeds"][0]["newest"] == 1 and told_all["feeds"][0]["waiting"] == 0
        assert (
            sum(one["count"] for one in told_all["time"]) == 3 and sum(o["turns_s"] for o in told_all["throughput"]) > 0
        )
        mine = await told(client, "training", group="run.")
        assert mine["version"] == [{"version": 0, "mean": 0.5, "count": 2}]
        assert (await told(client, "group", name="run.a"))["deliveries"][0]["number"] == 1
        assert (await told(client, "overview"))["gateway"]["version"] == 3


# ── as it happens ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("no_signs_of_life")
async def test_what_changed_is_told_from_a_cursor() -> None:
    async with gateway([say("Hello."), say("Again.")]) as g:
        client = await entered(g)
        before = await told(client, "rollouts")
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
        async with aclosing(
            events(client, "events", after=second["cursor"])
        ) as again:  # as a browser that lost the line
            _, missed = await anext(again)
            assert missed["rollouts"][0]["reward"] == 0.5
        await g.admin.delete(f"/admin/sessions/{session.id}")
        async with aclosing(events(client, "events", after=missed["cursor"])) as again:
            assert (await anext(again))[1]["gone"] == [session.id]
        assert (await told(client, "rollouts"))["total"] == 0


@pytest.mark.usefixtures("no_signs_of_life")
async def test_one_rollout_is_followed_alone_and_a_late_follower_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_MAX_BEHIND", 2)
    async with gateway([say("Hello.")] * 2) as g:
        client = await entered(g)
        session, other = await g.open(), await g.open()
        async with aclosing(events(client, f"rollouts/{session.id}/events", after=0)) as following:
            await g.ask(other.key, "Hi")
            await g.ask(session.key, "Hi")
            assert [(await anext(following))[0] for _ in range(2)] == ["opened", "turn"]
        async with aclosing(events(client, "events", after=0)) as late:
            assert (await anext(late))[0] == "reload"


async def test_a_follower_who_logs_out_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "_KEEP_ALIVE_S", 0.05)
    async with gateway() as g:
        client = await entered(g)
        following = events(client, "events")
        waiting = asyncio.create_task(anext(following, None))
        await kit.until(lambda: g.app.events._followers)
        await client.post("/page/logout", headers=OWN)
        assert await asyncio.wait_for(waiting, scaled(5)) is None


@pytest.mark.usefixtures("no_signs_of_life")
@pytest.mark.parametrize("path", ["events", "rollouts/{}/events"])
async def test_nor_is_a_follower_of_whom_much_happens(path: str) -> None:
    """What is told is asked for at every event, not only where nothing happens for a while."""
    async with gateway() as g:
        client = await entered(g)
        session = await g.open()
        async with aclosing(events(client, path.format(session.id), after=0)) as following:
            await anext(following)
            await client.post("/page/logout", headers=OWN)
            for _ in range(3):
                g.app.events.announce(session.id, "note", {"secret": 1})
            assert await asyncio.wait_for(anext(following, None), scaled(5)) is None


# ── what can be done ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_cancel_ends_what_is_being_sampled() -> None:
    script = kit.Gated([say("word " * 50)])
    async with gateway(engine=script) as g:
        client = await entered(g)
        session = await g.open()
        asking = asyncio.create_task(g.ask(session.key, "Hi"))
        await kit.until(lambda: script.waiting)
        assert (await told(client, f"rollouts/{session.id}"))["live"]["in_flight"] == 1
        response = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)
        assert response.json()["rollout"]["status"] == "cancelled"
        with pytest.raises(Exception, match="cancelled"):
            await asking
        again = await client.post(f"/page/api/rollouts/{session.id}/cancel", headers=OWN)
        assert again.status_code == 409 and "already cancelled" in again.json()["error"]["message"]
        assert (await client.post("/page/api/rollouts/nobody/seal", headers=OWN)).status_code == 404
        retry = await client.post(f"/page/api/rollouts/{session.id}/retry", headers=OWN)
        assert retry.status_code == 409 and "does not belong to a batch" in retry.json()["error"]["message"]


async def test_nothing_of_it_is_done_where_turns_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and traces are made in the page's own thread."""
    import threading

    from turngate.store.sqlite import Store
    from turngate.views.overview import Overview
    from turngate.views.rollout import RolloutView

    page_kit.add_long_rollout(tmp_path, turns=10, tokens=1000)
    async with page_kit.serve(tmp_path) as g:
        client = await entered(g)
        seen: set[str] = set()
        for kind, name in (
            (Overview, "refresh"),
            (RolloutView, "tree"),
            (RolloutView, "tokens"),
            (RolloutView, "messages"),
            (Store, "load"),
        ):
            work = getattr(kind, name)

            def noted(*what: Any, work: Any = work, **how: Any) -> Any:
                seen.add(threading.current_thread().name)
                return work(*what, **how)

            monkeypatch.setattr(kind, name, noted)
        for path in ("overview", "rollouts", "groups", "training", "failures", "rollouts/long", "rollouts/long/tree"):
            await told(client, path)
        for path in ("rollouts/long/messages", "rollouts/long/tokens"):
            await told(client, path)
        await told(client, "group/evidence", name=f"{page_kit.BATCH}.long-task")
        assert seen == {"turngate-page_0"}


async def test_a_turn_is_seen_while_the_session_runs() -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        client = await entered(g)
        session = await g.open()
        messages = [user("Hi")]
        said = await g.ask(session.key, messages)
        first = await told(client, f"rollouts/{session.id}/messages")
        assert [m["content"] for node in first["nodes"] for m in node["messages"]] == ["Hi", "One."] and not first[
            "more"
        ]
        await g.ask(session.key, [*messages, said.message(), user("Go on")])
        second = await told(client, f"rollouts/{session.id}/messages", after=first["next"])
        assert [m["content"] for node in second["nodes"] for m in node["messages"]] == ["Go on", "Two."]
        assert [node["turn"] for node in second["nodes"]] == [None, 2] and second["nodes"][1]["role"] == "main"
