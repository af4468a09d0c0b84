"""What is seldom, and has to work: rollouts that never had a session, rewards of any size, answers that come late, double clicks."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import pytest
from playwright.async_api import Route

from tests import page_kit
from tests.page.browser import browsing
from tests.speed import scaled
from turngate.store.outcomes import RecordedOutcome

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]


async def test_a_rollout_without_a_session_can_be_opened_and_run_again(tmp_path: Path, shots: Path) -> None:
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
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:

        async def looks_right() -> None:
            await web.go("#/rollout/bare")
            await web.sees(".banner.is-bad", "no space left")
            assert await (await web.sees(".actions button", "Retry")).is_enabled()
            await web.find(".empty a", "stages and logs").click()
            await web.sees(".panel", "no space left")
            await web.sees(".bars dt", "sandbox")
            await web.press("2")
            await web.sees(".empty", "No tokens")
            await web.press("3")
            await web.sees(".empty", "No tree")
            await web.go("#/rollout/starting")
            await web.sees(".view-head .badge", "starting · setup")
            await web.sees(".empty", "No messages yet")
            await web.go("#/rollouts")
            await web.sees(".list-row")

        async def nothing(route: Route) -> None:
            await route.fulfill(status=404, json={"error": {"message": "it has no session", "type": "not_found"}})

        await looks_right()
        for part in ("tree", "messages*", "tokens*"):
            await web.page.route(f"**/page/api/rollouts/*/{part}", nothing)
        await looks_right()  # an answer that says no is as good as an empty one
        web.complaints.clear()  # the browser's own, about a 404


async def test_rewards_of_any_size_are_drawn(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    groups = {"close": (1e17, 1e17 + 16), "wide": (-1.7e308, 1.7e308), "small": (0.0, 5e-324)}
    with page_kit.open_builder(data) as builder:
        for group, rewards in groups.items():
            for index, reward in enumerate(rewards):
                name, at = f"{group}{index}", time.time() - 100 + 40 * index
                key = builder.session(name, at, closed=at + 1, metadata={"group": group, "task": "t"})
                builder.outcome(key, name, RecordedOutcome(kind="graded", reward=reward, group=group, task="t"), at + 1)
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        for view in (*(f"#/group/{group}" for group in groups), "#/training?group=close", "#/training?group=small"):
            await web.go(view)
            await web.sees(".chart-svg .s0")
            assert await web.find(".chart-svg line.chart-grid").count() < 40
            assert await web.too_wide() == [], view
        ticks = """async () => {
            const { nice, times } = await import("/page/js/axis.js");
            const ends = [
                [NaN, 1], [0, Infinity], [-Infinity, NaN], [5, 5], [-1e17 - 16, -1e17], [0, Number.MAX_VALUE], [1e20, 1e20 + 16384],
            ];
            const found = ends.flatMap(([low, high]) => [nice(low, high, 4), times(low, high, 4)]);
            return found.map(one => [one.length, one.every(Number.isFinite)]);
        }"""
        assert all(many <= 17 and finite for many, finite in await web.asks(ticks))
        drawn = """async values => {
            const { chart } = await import("/page/js/chart.js");
            const points = values.map((value, i) => [i, value]);
            const shown = ["line", "bars"].map(kind => chart({ title: "", x: "", y: "", series: [{ name: "", points, kind }] }));
            document.querySelector("main").replaceChildren(...shown);
        }"""
        for values in ([-1.7e308, 1.7e308], [1.7e308, 1.7e308], [-1.7e308], [1.0, float("nan"), float("inf"), None]):
            await web.page.evaluate(drawn, values)
            await web.sees(".chart-svg .s0")
            assert "NaN" not in await web.asks("document.querySelector('main').innerHTML"), values


async def test_what_changes_while_somebody_logs_in_is_shown(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 20)
    async with page_kit.serve(data) as g, browsing(g.root, shots=shots) as web:
        changed = asyncio.Event()

        async def overtaken(route: Route) -> None:  # a list that is old when it arrives
            reply = await route.fetch()
            if not changed.is_set():
                assert (await g.admin.post("/admin/sessions/r00018/cancel", json={})).is_success
                changed.set()
            await route.fulfill(response=reply)

        async def late(route: Route) -> None:  # after the list, where the page asks for both at once
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), scaled(1))
            await route.fulfill(response=await route.fetch())

        await web.page.route("**/page/api/rollouts?*", overtaken)
        await web.page.route("**/page/api/overview", late)
        await web.login(g.app.admin_key)
        await web.sees(".list-row:has(a[title*=r00018])", "cancelled")


async def test_a_lost_connection_is_tried_once_at_a_time(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    async with page_kit.serve(data) as g, browsing(g.root, shots=shots) as web:
        asked: list[str] = []
        answer = asyncio.Event()

        async def held(route: Route) -> None:
            asked.append("me")
            await answer.wait()
            await route.continue_()

        async def refused(route: Route) -> None:
            await route.abort()

        await web.page.goto(f"{g.root}/page/")
        await web.sees("#key")
        await web.page.route("**/page/api/events?*", refused)
        await web.page.route("**/page/api/me", held)
        await web.page.fill("#key", g.app.admin_key)
        await web.press("Enter")
        await web.sees("#live[data-state=lost]", "disconnected")
        for _ in range(5):
            await web.page.click("#live")
        await web.page.unroute("**/page/api/events?*")
        web.page.on("request", lambda request: asked.append("events") if "/api/events" in request.url else None)
        answer.set()
        await web.sees("#live[data-state=live]", "live")
        await web.page.click("#live")  # nothing to do
        await web.go("#/groups")
        await web.sees(".list-row")
        assert asked == ["me", "events"]
        web.complaints.clear()  # the browser's own, about the stream that was refused

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
        assert await web.asks(loads) == [
            1,
            2,
            2,
            3,
            3,
            3,
        ]  # never two at once, once more where something changed, none after leaving


async def test_two_rollouts_are_called_the_same_only_where_all_was_compared(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_rollouts(data, 8)
    long = "a" * 15_000 + "{}" + "b" * 15_000  # the middle of it is left out at first
    with page_kit.open_builder(data) as builder:
        for name, output in {
            "x": long.format("1"),
            "y": long.format("2"),
            "z": long.format("1"),
            "w": long + "!",
        }.items():
            key = builder.session(name, time.time() - 60, closed=time.time() - 9)
            talk = page_kit.TraceBuilder(builder, key, name, time.time() - 60)
            said = talk.answer(talk.ask([{"role": "user", "content": "Look."}]), "I look.")
            talk.answer(talk.ask([{"role": "tool", "tool_call_id": "c", "content": output}], said), "Seen.")
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        await web.go("#/compare/x/y")
        await web.sees(".view-head .warn", "No difference in the loaded parts")
        await web.sees(".message-note", "The middle is omitted (content: 30,001 characters).")
        await web.find("button", "Load everything and compare").click()
        await web.sees(".view-head button", "First difference: turn 1")
        await web.misses(".banner")
        await web.go("#/compare/x/z")
        await web.sees(".banner", "They may differ.")
        await web.find("button", "Load everything and compare").click()
        await web.sees(".good", "The conversations are identical.")
        await web.go("#/compare/x/w")  # they are not equally long
        await web.sees(".view-head button", "First difference: turn 1")


async def test_small_things(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    blank = "\U000e0041\u3164\u2800\u034f\u180e\uffa0\ufe01"
    page_kit.add_rollouts(data, 8)
    with page_kit.open_builder(data) as builder:
        key = builder.session("blank", time.time() - 60, closed=time.time() - 9, metadata={"rollout": f"a{blank}b"})
        talk = page_kit.TraceBuilder(builder, key, "blank", time.time() - 60)
        talk.answer(talk.ask([{"role": "user", "content": f"a{blank}b"}]), "\u2764\ufe0f")
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        for name in ("constructor", "toString", "__proto__", "hasOwnProperty"):
            await web.go(f"#/{name}")
            await web.sees(".empty", f"There is no page “{name}”")
        await web.go("#/rollout/blank")
        signs = [f"U+{ord(character):04X}" for character in blank]
        await web.sees("h1", "".join(f"⟨{sign}⟩" for sign in signs))
        said = await (await web.sees(".turn.is-context .said")).inner_text()
        assert said == f"a{''.join(signs)}b"
        await web.sees(".turn.is-sampled .said", "\u2764\ufe0f")  # what can be seen is let be
        await web.press("4")
        await web.sees(".events tbody tr", "turn")
        seqs = "[...document.querySelectorAll('.events tbody tr')].map(row => Number(row.firstChild.textContent))"
        await web.sees(".events tbody tr", "opened")
        before = await web.asks(seqs)
        await web.press("5")
        await web.sees(".panel", "Stages")
        await web.press("4")
        assert (
            await g.admin.post("/admin/events", json={"session": "blank", "kind": "note", "data": {"text": "more"}})
        ).is_success
        await web.sees(".events tbody tr", "more")
        after = await web.asks(seqs)
        assert after[1:] == before and after[0] > before[0]  # each of them once
