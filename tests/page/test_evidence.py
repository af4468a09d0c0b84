"""What the page shows of recorded work: tokens, trees, groups, training, failures, two rollouts side by side. Makes its screenshots."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests import page_kit
from tests.kit import Running
from tests.page import scenes
from tests.page.browser import Web, browsing

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]

FIRST = "fix-slug-0"


@asynccontextmanager
async def looking(tmp_path: Path, shots: Path, *, dark: bool = False) -> AsyncIterator[tuple[Running, Web]]:
    data = tmp_path / "data"
    scenes.training(data)
    scenes.worked(data)
    async with page_kit.serve(data, model=page_kit.MODEL) as g:
        await g.resume(16)
        async with browsing(g.root, g.app.admin_key, shots=shots, dark=dark) as web:
            yield g, web


@pytest.mark.real
async def test_the_evidence_for_every_token(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots) as (g, web):
        turns = await g.turns(FIRST)
        turn = next(node for node in turns if "code and its tests" in node["message"]["content"])
        await web.go(f"#/rollout/{FIRST}/tokens?node={turn['id']}&token=3")  # a link to one token
        chosen = await web.sees(".t.is-selected")
        logprob = turn["logprobs"][3]
        await web.says(".token-one", f"{turn['ids'][3]}")
        await web.says(".token-one", str(float(f"{logprob:.5g}"))[:6])
        assert "is-sampled" in (await chosen.get_attribute("class") or "")
        await web.says(".token-one", "yes, in row")
        await web.says(".token-one", "v15")
        await web.press("ArrowRight")
        await web.says(".token-one", f"{turn['ids'][4]}")
        assert f"node={turn['id']}&token=4" in await web.asks("location.hash")
        await web.press("n")  # the next one that was unlikely
        shown = await web.page.locator(".token-one .pairs dd").nth(1).inner_text()
        assert float(shown.replace("−", "-")) < math.log(0.05)
        context = await web.sees(".token-line .t.is-context")
        await context.click()
        await web.says(".token-one", "it was not sampled")
        await web.press("n")
        await web.photograph("page-tokens")


async def test_the_tree_of_a_rollout_says_why_it_forked(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots) as (_, web):
        await web.go(f"#/rollout/{FIRST}")
        await web.sees(".turn", "I'll look at the code")
        await web.photograph("page-rollout")
        await web.go(f"#/rollout/{FIRST}/tree")
        for cause in ("subagent", "compaction"):
            await web.sees(".tree-row .badge", cause)
        await web.sees(".tree-row", "aborted")
        assert await web.find("svg.tree-lines path.tree-edge").count() >= 8
        await web.find(".tree-row", "compaction").click()
        await web.sees(".fork-detail", "shares")
        await web.photograph("page-tree")
        await web.find(".tree-side a.button", "Conversation").click()
        await web.sees(".turn:focus", "I run the tests.")  # of that branch, at that turn
        await web.sees(".fork", "compaction")
        await web.go(f"#/rollout/{FIRST}/details")
        await web.sees(".panel", "7 passed in 0.06s")
        await web.go(f"#/rollout/{FIRST}/events")
        await web.sees(".events td", "sealed")


async def test_a_group_and_two_of_its_rollouts_side_by_side(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots) as (_, web):
        await web.go("#/groups")
        await web.sees(".list-row .c-name", scenes.GROUP)
        await web.photograph("page-groups", for_docs=False)
        await web.find(".list-row", scenes.GROUP).filter(has_not_text="@").click()
        await web.sees("td", "+0.90")  # the advantages of rewards 1, 1, ½ and 0
        await web.sees("td", "−1.51")
        await web.sees(".panel", "compaction")  # drift by cause, from the traces
        await web.sees(".chart-title", "Entropy")
        await web.photograph("page-group")
        await web.press("j", "j", " ", "j", "j", " ", "c")  # by keys: choose the second and the last, compare
        await web.sees(".pair-mark.is-first", "Turn 2: the first difference")
        await web.sees("mark", "unicodedata.normalize")
        await web.sees("mark", "The regular expression")
        await web.photograph("page-compare")


async def test_how_training_goes_and_what_failed(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots) as (_, web):
        await web.sees(".list-row .badge.is-live", "running")
        await web.photograph("page-rollouts")
        await web.go("#/training")
        await web.sees(".chart-svg .chart-line")
        await web.photograph("page-training")
        await web.page.click("text=By version")
        await web.sees(".chart-title", "Reward by policy version")
        await web.page.click("text=By step")
        await web.sees(".chart-title", "Reward by step")
        await web.find(".chart summary").first.click()
        await web.sees(".chart-table td", "moving average")
        assert await web.find(".chart-table td").count() > 20  # the same numbers, for those who cannot see the picture
        await web.go("#/failures")
        await web.sees(".panel-head", "infrastructure fault")
        await web.find(".failure summary", "exit code 2").click()
        await web.sees(".log", "context window exceeded")
        await web.photograph("page-failures", for_docs=False)


async def test_dark_is_as_the_system_has_it_and_can_be_chosen(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots, dark=True) as (_, web):
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await web.asks(background)
        await web.go(f"#/rollout/{FIRST}/tokens")
        await web.sees(".token-line .t.is-trained")
        await web.photograph("page-tokens-dark")
        await web.page.click("#theme")
        assert await web.asks(background) != dark
        await web.page.reload()
        await web.sees(".token-line .t.is-trained")
        assert await web.asks(background) != dark  # the choice is kept
        await web.press("T")
        assert await web.asks(background) == dark


async def test_addresses_that_lead_nowhere_say_so(tmp_path: Path, shots: Path) -> None:
    async with looking(tmp_path, shots) as (_, web):
        await web.go("#/nowhere")
        await web.sees(".empty", "Page not found")
        await web.go("#/rollout/nobody")
        await web.sees(".empty", "unknown rollout 'nobody'")
        await web.go("#/compare/fix-slug-0")
        await web.sees(".empty", "Choose two rollouts")
        web.complaints.clear()  # the browser's own, about a 404
        await web.go(f"#/rollout/{FIRST}/tokens?node=999&token=99999&leaf=777")  # the nearest that there is
        await web.sees(".token-line .t.is-trained")
        await web.go(f"#/rollout/{FIRST}?node=999")
        await web.sees(".turn", "I'll look at the code")
        await web.page.context.clear_cookies()
        await web.press("1")
        await web.go("#/training")
        await web.sees(".login-trouble", "expired")  # and the address stays
        assert await web.asks("location.hash") == "#/training"
        web.complaints.clear()
