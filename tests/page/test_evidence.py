"""What the page shows of recorded work: tokens, trees, groups, training, failures, comparisons. Takes the screenshots of the docs."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import page_kit
from tests.kit import Running
from tests.page import scenes
from tests.page.browser import Chromium, Web, open_browser
from turngate.client.protocol import FeedConfig

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

FIRST = "fix-slug-0"


@asynccontextmanager
async def open_page(tmp_path: Path, chromium: Chromium, *, dark: bool = False) -> AsyncIterator[tuple[Running, Web]]:
    data = tmp_path / "data"
    scenes.add_training_run(data)
    scenes.add_task_group(data)
    async with page_kit.serve(data, model=page_kit.MODEL) as g:
        await g.resume(16)
        async with open_browser(g.root, g.app.admin_key, chromium=chromium, dark=dark) as web:
            yield g, web


@pytest.mark.real
async def test_token_view_shows_id_logprob_and_row(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (g, web):
        turns = await g.turns(FIRST)
        turn = next(node for node in turns if "code and its tests" in node["message"]["content"])
        await web.go(f"#/rollout/{FIRST}/tokens?node={turn['id']}&token=3")  # a link to one token
        chosen = await web.wait_for(".t.is-selected")
        logprob = turn["logprobs"][3]
        await web.wait_for_text(".token-one", f"{turn['ids'][3]}")
        await web.wait_for_text(".token-one", str(float(f"{logprob:.5g}"))[:6])
        assert "is-sampled" in (await chosen.get_attribute("class") or "")
        await web.wait_for_text(".token-one", "yes, in row")
        await web.wait_for_text(".token-one", "v15")
        await web.press("ArrowRight")
        await web.wait_for_text(".token-one", f"{turn['ids'][4]}")
        assert f"node={turn['id']}&token=4" in await web.evaluate("location.hash")
        await web.press("n")  # the next unlikely token
        shown = await web.page.locator(".token-one .pairs dd").nth(1).inner_text()
        assert float(shown.replace("−", "-")) < math.log(0.05)
        context = await web.wait_for(".token-line .t.is-context")
        await context.click()
        await web.wait_for_text(".token-one", "it was not sampled")
        await web.press("n")
        await web.screenshot("page-tokens")


async def test_tree_shows_fork_causes(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (_, web):
        await web.go(f"#/rollout/{FIRST}")
        await web.wait_for(".turn", "I'll look at the code")
        await web.screenshot("page-rollout")
        await web.go(f"#/rollout/{FIRST}/tree")
        for cause in ("subagent", "compaction"):
            await web.wait_for(".tree-row .badge", cause)
        await web.wait_for(".tree-row", "aborted")
        assert await web.find("svg.tree-lines path.tree-edge").count() >= 8
        await web.find(".tree-row", "compaction").click()
        await web.wait_for(".fork-detail", "shares")
        await web.screenshot("page-tree")
        await web.find(".tree-side a.button", "Conversation").click()
        await web.wait_for(".turn:focus", "I run the tests.")  # at the turn in that branch
        await web.wait_for(".fork", "compaction")
        await web.go(f"#/rollout/{FIRST}/details")
        await web.wait_for(".panel", "7 passed in 0.06s")
        await web.go(f"#/rollout/{FIRST}/events")
        await web.wait_for(".events td", "sealed")


async def test_group_and_comparison_of_two_rollouts(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (_, web):
        await web.go("#/groups")
        await web.wait_for(".list-row .c-name", scenes.GROUP)
        await web.screenshot("page-groups", for_docs=False)
        await web.find(".list-row", scenes.GROUP).filter(has_not_text="@").click()
        await web.wait_for("td", "+0.90")  # the advantages of rewards 1, 1, ½ and 0
        await web.wait_for("td", "−1.51")
        await web.wait_for(".panel", "compaction")  # drift by cause, from the traces
        await web.wait_for(".chart-title", "Entropy")
        await web.screenshot("page-group")
        await web.press("j", "j", " ", "j", "j", " ", "c")  # select the second and the last with keys, and compare
        await web.wait_for(".pair-mark.is-first", "Turn 2: the first difference")
        await web.wait_for("mark", "unicodedata.normalize")
        await web.wait_for("mark", "The regular expression")
        await web.screenshot("page-compare")


async def test_training_shows_mismatch_and_alarms(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (g, web):
        counts = [0] * 21
        counts[9:12] = [10, 70, 10]
        counts[16] = 10
        same = {"lag": 0, "tokens": 100, "counts": counts, "mean": 0.05, "largest": 0.4, "k1": -0.04, "k3": 0.004}
        data = {"feed": "grpo", "number": 12, "version": 16, "lags": [same, {**same, "lag": 1}]}
        await g.app.feeds.open("grpo", FeedConfig(n=1))
        await web.go("#/training")
        await web.wait_for(".chart-svg .chart-line")
        assert not await web.find(".banner").count()
        alarm = {"kind": "difference", "message": "10 of 100 tokens differ; check the data type"}
        g.app.events.add("", "mismatch", {**data, "alarms": [alarm]})
        await web.wait_for(".banner.is-bad", "Alarm (grpo, delivery 12): 10 of 100 tokens differ; check the data type")
        await web.wait_for(".chart-title", "Log-probabilities: trainer − engine, same weights")
        await web.wait_for(".chart-title", "Importance ratios by version lag")
        await web.wait_for(".chart-legend li", "1 version behind")
        await web.wait_for(".chart-title", "Mismatch by update, same weights")
        g.app.events.add("", "mismatch", {**data, "number": 13, "alarms": []})
        await web.wait_until_gone(".banner")


async def test_training_shows_improvement_and_entropy(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (_, web):
        found = (await web.fetch_json("/page/api/training"))["improvement"]
        example = found["example"]
        await web.go("#/training")
        await web.wait_for(".chart-title", "Entropy by policy version")
        await web.wait_for(".kinds th", f"versions {found['after']['first']}–{found['after']['last']}")
        assert await web.find(".kinds tbody tr").count() == len(found["kinds"]) > 3
        await web.wait_for(".improvement h2", f"Before and after: {example['task']}")
        await web.wait_for(".improvement p", "The task whose mean reward rose most")
        for place, side in enumerate(("before", "after")):
            column = web.find(".improvement .side").nth(place)
            await web.wait_for(".improvement .side h3", side.capitalize())
            assert f"{example[side]['reward']:.2f}" in await column.inner_text()
            assert await column.locator(".message").count() >= 2
            address = await column.locator("h3 a").get_attribute("href")
            assert address == f"#/rollout/{example[side]['rollout']}"
        await web.find(".improvement a", "Compare them turn by turn").click()
        await web.wait_for("h1", "Side by side")
        await web.go("#/training?group=no-such-group")
        await web.wait_until_gone(".improvement")


async def test_training_and_failures(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (_, web):
        await web.wait_for(".list-row .badge.is-live", "running")
        await web.screenshot("page-rollouts")
        await web.go("#/training")
        await web.wait_for(".chart-svg .chart-line")
        await web.screenshot("page-training", for_docs=False)  # the docs show a real run
        await web.page.click("text=By version")
        await web.wait_for(".chart-title", "Reward by policy version")
        await web.page.click("text=By step")
        await web.wait_for(".chart-title", "Reward by step")
        await web.find(".chart summary").first.click()
        await web.wait_for(".chart-table td", "moving average")
        assert await web.find(".chart-table td").count() > 20  # the numbers as a table, for screen readers
        await web.go("#/failures")
        await web.wait_for(".panel-head", "infrastructure fault")
        await web.find(".failure summary", "exit code 2").click()
        await web.wait_for(".log", "context window exceeded")
        await web.screenshot("page-failures", for_docs=False)


async def test_dark_mode_follows_system_and_can_be_changed(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium, dark=True) as (_, web):
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await web.evaluate(background)
        await web.go(f"#/rollout/{FIRST}/tokens")
        await web.wait_for(".token-line .t.is-trained")
        await web.screenshot("page-tokens-dark")
        await web.page.click("#theme")
        assert await web.evaluate(background) != dark
        await web.page.reload()
        await web.wait_for(".token-line .t.is-trained")
        assert await web.evaluate(background) != dark  # the choice is kept
        await web.press("T")
        assert await web.evaluate(background) == dark


async def test_unknown_addresses_show_errors(tmp_path: Path, chromium: Chromium) -> None:
    async with open_page(tmp_path, chromium) as (_, web):
        await web.go("#/nowhere")
        await web.wait_for(".empty", "Page not found")
        await web.go("#/rollout/nobody")
        await web.wait_for(".empty", "unknown rollout 'nobody'")
        await web.go("#/compare/fix-slug-0")
        await web.wait_for(".empty", "Choose two rollouts")
        web.problems.clear()  # the browser reports the 404
        await web.go(f"#/rollout/{FIRST}/tokens?node=999&token=99999&leaf=777")  # falls back to the nearest
        await web.wait_for(".token-line .t.is-trained")
        await web.go(f"#/rollout/{FIRST}?node=999")
        await web.wait_for(".turn", "I'll look at the code")
        await web.page.context.clear_cookies()
        await web.press("1")
        await web.go("#/training")
        await web.wait_for(".login-trouble", "expired")  # the address stays
        assert await web.evaluate("location.hash") == "#/training"
        web.problems.clear()
