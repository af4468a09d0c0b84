"""Rare cases on the page: rollouts without a session, extreme rewards, late replies and double clicks."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.async_api import Route, expect

from tests import page_kit
from tests.page.browser import Chromium, open_browser
from tests.speed import scaled
from turngate.store.outcomes import RecordedOutcome

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]


async def test_damaged_outcome_is_explained(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    with page_kit.open_builder(data) as builder:
        builder._db.execute(
            "UPDATE outcomes SET outcome=? WHERE session=(SELECT key FROM sessions WHERE id='r00001')", (b"{",)
        )
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        await web.go("#/rollout/r00001")
        await web.wait_for(".banner.is-bad", "store: its outcome is damaged on disk")
        await web.go("#/failures")
        await web.wait_for(".panel-head", "cannot be read from the store")
        assert await web.page.locator(".panel-head", has_text="damaged").locator("a").count() == 0


async def test_rollout_without_session_can_be_opened(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    with page_kit.open_builder(data) as builder:
        about = {"rollout": "b.t.0", "attempt": 1, "task": "t", "group": "b.t", "batch": "b", "agent": "pi"}
        fault = {"stage": "sandbox", "boundary": "sandbox"}
        ended = {
            "class": "infrastructure fault",
            "message": "sandbox: no space left",
            "status": "error",
            "fault": fault,
        }
        builder.event("bare", "stage", {"stage": "sandbox", **about}, time.time() - 9)
        builder.event("bare", "stage", {"stage": "done", **about, **ended}, time.time() - 8)
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:

        async def check_views() -> None:
            await web.go("#/rollout/bare")
            await web.wait_for(".banner.is-bad", "no space left")
            assert await (await web.wait_for(".actions button", "Retry")).is_enabled()
            await web.find(".empty a", "stages and logs").click()
            await web.wait_for(".panel", "no space left")
            await web.wait_for(".bars dt", "sandbox")
            await web.press("2")
            await web.wait_for(".empty", "No tokens")
            await web.press("3")
            await web.wait_for(".empty", "No tree")
            await web.go("#/rollout/starting")
            await web.wait_for(".view-head .badge", "starting · setup")
            await web.wait_for(".empty", "No messages yet")
            await web.go("#/rollouts")
            await web.wait_for(".list-row")

        async def respond_not_found(route: Route) -> None:
            await route.fulfill(status=404, json={"error": {"message": "it has no session", "type": "not_found"}})

        await check_views()
        for part in ("tree", "messages*", "tokens*"):
            await web.page.route(f"**/page/api/rollouts/*/{part}", respond_not_found)
        await check_views()  # a 404 reply works like an empty one
        web.problems.clear()  # the browser reports the 404


async def test_extreme_rewards_are_drawn(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    groups = {"close": (1e17, 1e17 + 16), "wide": (-1.7e308, 1.7e308), "small": (0.0, 5e-324)}
    with page_kit.open_builder(data) as builder:
        for group, rewards in groups.items():
            for index, reward in enumerate(rewards):
                name, at = f"{group}{index}", time.time() - 100 + 40 * index
                key = builder.session(name, at, closed=at + 1, metadata={"group": group, "task": "t"})
                builder.outcome(key, name, RecordedOutcome(kind="graded", reward=reward, group=group, task="t"), at + 1)
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        for view in (*(f"#/group/{group}" for group in groups), "#/training?group=close", "#/training?group=small"):
            await web.go(view)
            await web.wait_for(".chart-svg .s0")
            assert await web.find(".chart-svg line.chart-grid").count() < 40
            assert await web.find_overflow() == [], view
        ticks = """async () => {
            const { nice, times } = await import("/page/js/axis.js");
            const ends = [
                [NaN, 1], [0, Infinity], [-Infinity, NaN], [5, 5], [-1e17 - 16, -1e17], [0, Number.MAX_VALUE], [1e20, 1e20 + 16384],
            ];
            const found = ends.flatMap(([low, high]) => [nice(low, high, 4), times(low, high, 4)]);
            return found.map(one => [one.length, one.every(Number.isFinite)]);
        }"""
        assert all(many <= 17 and finite for many, finite in await web.evaluate(ticks))
        draw = """async values => {
            const { chart } = await import("/page/js/chart.js");
            const points = values.map((value, i) => [i, value]);
            const shown = ["line", "bars"].map(kind => chart({ title: "", x: "", y: "", series: [{ name: "", points, kind }] }));
            document.querySelector("main").replaceChildren(...shown);
        }"""
        for values in ([-1.7e308, 1.7e308], [1.7e308, 1.7e308], [-1.7e308], [1.0, float("nan"), float("inf"), None]):
            await web.page.evaluate(draw, values)
            await web.wait_for(".chart-svg .s0")
            assert "NaN" not in await web.evaluate("document.querySelector('main').innerHTML"), values


async def test_changes_during_login_are_shown(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 20)
    async with page_kit.serve(data) as g, open_browser(g.root, chromium=chromium) as web:
        changed = asyncio.Event()

        async def cancel_before_reply(route: Route) -> None:  # the list is outdated when it arrives
            reply = await route.fetch()
            if not changed.is_set():
                assert (await g.admin.post("/admin/sessions/r00018/cancel", json={})).is_success
                changed.set()
            await route.fulfill(response=reply)

        async def delay(route: Route) -> None:  # reply after the list
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), scaled(1))
            await route.fulfill(response=await route.fetch())

        await web.page.route("**/page/api/rollouts?*", cancel_before_reply)
        await web.page.route("**/page/api/overview", delay)
        await web.login(g.app.admin_key)
        await web.wait_for(".list-row:has(a[title*=r00018])", "cancelled")


async def test_lists_that_are_being_filled_say_so(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 4)
    async with page_kit.serve(data) as g, open_browser(g.root, chromium=chromium) as web:
        complete = asyncio.Event()

        async def answer_as_shared_store(route: Route) -> None:
            reply = await route.fetch()
            await route.fulfill(response=reply, json={**await reply.json(), "incomplete": not complete.is_set()})

        await web.page.route("**/page/api/overview", answer_as_shared_store)
        await web.login(g.app.admin_key)
        note = web.page.locator(".notice", has_text="The lists are being rebuilt")
        await expect(note).to_contain_text("Some rollouts are still missing (5 rollouts listed so far).")
        complete.set()
        await expect(note).to_have_count(0, timeout=scaled(20) * 1000)
        await web.wait_for(".list-row:has(a[title*=r00002])", "")


async def test_lost_connection_retries_one_at_a_time(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    async with page_kit.serve(data) as g, open_browser(g.root, chromium=chromium) as web:
        requests: list[str] = []
        answer = asyncio.Event()

        async def hold(route: Route) -> None:
            requests.append("me")
            await answer.wait()
            await route.continue_()

        async def abort(route: Route) -> None:
            await route.abort()

        await web.page.goto(f"{g.root}/page/")
        await web.wait_for("#key")
        await web.page.route("**/page/api/events?*", abort)
        await web.page.route("**/page/api/me", hold)
        await web.page.fill("#key", g.app.admin_key)
        await web.press("Enter")
        await web.wait_for("#live[data-state=lost]", "disconnected")
        for _ in range(5):
            await web.page.click("#live")
        await web.page.unroute("**/page/api/events?*")
        web.page.on("request", lambda request: requests.append("events") if "/api/events" in request.url else None)
        answer.set()
        await web.wait_for("#live[data-state=live]", "live")
        await web.page.click("#live")  # nothing to do
        await web.go("#/groups")
        await web.wait_for(".list-row")
        assert requests == ["me", "events"]
        web.problems.clear()  # the browser reports the aborted stream

        loads = """async () => {
            const { Paced } = await import("/page/js/paced.js");
            const waiting = [];
            const paced = new Paced(() => new Promise(done => waiting.push(done)), 0);
            const turn = () => new Promise(done => setTimeout(done, 200));
            const counts = [];
            paced.now();
            const steps = [
                () => { paced.soon(); paced.soon(); paced.now() },
                () => waiting[0](),
                () => waiting[1](),
                () => paced.soon(),
                () => { paced.soon(); paced.leave(); waiting[2]() },
                () => paced.now(),
            ];
            for (const step of steps) {
                step();
                await turn();
                counts.push(waiting.length);
            }
            return counts;
        }"""
        assert await web.evaluate(loads) == [
            1,
            2,
            2,
            3,
            3,
            3,
        ]  # never two at once, one more after a change, none after leaving


async def test_identical_needs_complete_comparison(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    long = "a" * 15_000 + "{}" + "b" * 15_000  # its middle is omitted at first
    with page_kit.open_builder(data) as builder:
        for name, output in {
            "x": long.format("1"),
            "y": long.format("2"),
            "z": long.format("1"),
            "w": long + "!",
        }.items():
            key = builder.session(name, time.time() - 60, closed=time.time() - 9)
            trace = page_kit.TraceBuilder(builder, key, name, time.time() - 60)
            turn = trace.answer(trace.ask([{"role": "user", "content": "Look."}]), "I look.")
            trace.answer(trace.ask([{"role": "tool", "tool_call_id": "c", "content": output}], turn), "Seen.")
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        await web.go("#/compare/x/y")
        await web.wait_for(".view-head .warn", "No difference in the loaded parts")
        await web.wait_for(".message-note", "The middle is omitted (content: 30,001 characters in total).")
        await web.find("button", "Load everything and compare").click()
        await web.wait_for(".view-head button", "First difference: turn 1")
        await web.wait_until_gone(".banner")
        await web.go("#/compare/x/z")
        await web.wait_for(".banner", "They may differ.")
        await web.find("button", "Load everything and compare").click()
        await web.wait_for(".good", "The conversations are identical.")
        await web.go("#/compare/x/w")  # different lengths
        await web.wait_for(".view-head button", "First difference: turn 1")


async def test_unknown_pages_invisible_characters_and_new_events(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    blank = "\U000e0041\u3164\u2800\u034f\u180e\uffa0\ufe01"
    page_kit.add_rollouts(data, 8)
    with page_kit.open_builder(data) as builder:
        key = builder.session("blank", time.time() - 60, closed=time.time() - 9, metadata={"rollout": f"a{blank}b"})
        trace = page_kit.TraceBuilder(builder, key, "blank", time.time() - 60)
        trace.answer(trace.ask([{"role": "user", "content": f"a{blank}b"}]), "\u2764\ufe0f")
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        for name in ("constructor", "toString", "__proto__", "hasOwnProperty"):
            await web.go(f"#/{name}")
            await web.wait_for(".empty", f"There is no page “{name}”")
        await web.go("#/rollout/blank")
        signs = [f"U+{ord(character):04X}" for character in blank]
        await web.wait_for("h1", "".join(f"⟨{sign}⟩" for sign in signs))
        turn = await (await web.wait_for(".turn.is-context .said")).inner_text()
        assert turn == f"a{''.join(signs)}b"
        await web.wait_for(".turn.is-sampled .said", "\u2764\ufe0f")  # visible characters stay
        await web.press("4")
        await web.wait_for(".events tbody tr", "turn")
        seqs = "[...document.querySelectorAll('.events tbody tr')].map(row => Number(row.firstChild.textContent))"
        await web.wait_for(".events tbody tr", "opened")
        before = await web.evaluate(seqs)
        await web.press("5")
        await web.wait_for(".panel", "Stages")
        await web.press("4")
        assert (
            await g.admin.post("/admin/events", json={"session": "blank", "kind": "note", "data": {"text": "more"}})
        ).is_success
        await web.wait_for(".events tbody tr", "more")
        after = await web.evaluate(seqs)
        assert after[1:] == before and after[0] > before[0]  # no duplicates
