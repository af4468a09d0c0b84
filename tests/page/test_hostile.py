"""Hostile text from agents, tasks and runners is shown as text: it runs nothing and hides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import page_kit
from tests.page.browser import Chromium, open_browser

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full, pytest.mark.asyncio(loop_scope="session")]

INVISIBLE = "\x1b[31mred\x07\x00 \u202egnp.exe\u202c \u2066hidden\u2069 \ufeff"
BROKEN = (
    '<svg/onload=alert(1)><a href="javascript:alert(2)">x</a><iframe srcdoc="<script>top.__ran=1</script>">'
    "<style>*{display:none}</style><!-- </pre></main>"
)


def add_evil_rollout(data: Path) -> None:
    """One more than `page_kit.add_hostile_rollouts` has: broken markup, signs that cannot be seen, and a line of a megabyte."""
    with page_kit.open_builder(data) as builder:
        key = builder.session("evil", 1794744000.0, status="open", metadata={"task": BROKEN, "rollout": BROKEN})
        trace = page_kit.TraceBuilder(builder, key, "evil", 1794744000.0)
        line = "<b>" + "A" * 1_000_000 + "</b>"
        turn = trace.answer(trace.ask([{"role": "user", "content": BROKEN}]), BROKEN + INVISIBLE)
        trace.answer(
            trace.ask([{"role": "tool", "tool_call_id": "c", "content": line}], turn, ids=[5, 6, 7]), INVISIBLE
        )


async def test_markup_is_shown_as_text_and_not_executed(tmp_path: Path, chromium: Chromium) -> None:
    data = tmp_path / "data"
    page_kit.add_hostile_rollouts(data)
    add_evil_rollout(data)
    group = f"evil.{page_kit.MARKUP}"
    async with page_kit.serve(data) as g, open_browser(g.root, g.app.admin_key, chromium=chromium) as web:
        urls: list[str] = []
        web.page.on("request", lambda request: urls.append(request.url))
        web.page.on("dialog", lambda dialog: web.problems.append(f"a dialog: {dialog.message}"))
        await web.evaluate(
            "document.addEventListener('securitypolicyviolation', e => { window.__broken = e.violatedDirective })"
        )
        await web.wait_for(".list-row", "<img src=x onerror=")
        await web.go("#/groups")
        await web.wait_for(".list-row", "<img src=x onerror=")
        await web.find(".list-row", "evil.<img").click()
        await web.wait_for("h1", group[:40])
        await web.wait_for(".chart-title", "Entropy")
        await web.go("#/failures")
        await web.find(".failure summary", "<img").click()
        await web.wait_for(".log", "<script>window.__ran=1</script>")
        await web.go("#/training")
        await web.wait_for(".chart")
        await web.go("#/compare/hostile/hostile-2")
        await web.wait_for(".pair", "<img src=x onerror=")
        for name in ("hostile", "evil"):
            for tab in ("", "/tokens", "/tree", "/events", "/details"):
                await web.go(f"#/rollout/{name}{tab}")
                await web.wait_for(".rollout-body > *")
                await web.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
        await web.go("#/rollout/evil")
        turn = await web.wait_for(".turn.is-sampled .said", BROKEN[:30])
        text = await turn.inner_text()
        assert BROKEN in text and "\u202e" not in text and "U+202E" in text and "␛" in text
        await web.page.click("text=Unfold all")
        await web.wait_for("button.more", "1,000,007 characters")
        await web.find("button.more", "Load everything").click()
        await web.wait_for("button.more", "Show more (994 KB of 1.0 MB left)")
        await web.screenshot("page-hostile", for_docs=False)
        assert await web.evaluate("[window.__ran ?? null, window.__broken ?? null]") == [None, None]
        assert await web.find("main img, main iframe, main script, main style, main a[href^=javascript]").count() == 0
        assert "\u202e" not in await web.evaluate("document.body.innerText + document.title")
        assert {url.split("/page/")[0] for url in urls} == {g.root}
