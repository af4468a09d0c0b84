"""Everything that agents, tasks and runners can choose is markup here. It is shown as text, runs nothing, and hides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import page_kit
from tests.page.browser import browsing

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.full]

SIGNS = "\x1b[31mred\x07\x00 \u202egnp.exe\u202c \u2066hidden\u2069 \ufeff"
BROKEN = (
    '<svg/onload=alert(1)><a href="javascript:alert(2)">x</a><iframe srcdoc="<script>top.__ran=1</script>">'
    "<style>*{display:none}</style><!-- </pre></main>"
)


def evil(data: Path) -> None:
    """One more than `page_kit.add_hostile_rollouts` has: broken markup, signs that cannot be seen, and a line of a megabyte."""
    with page_kit.open_builder(data) as builder:
        key = builder.session("evil", 1794744000.0, status="open", metadata={"task": BROKEN, "rollout": BROKEN})
        talk = page_kit.TraceBuilder(builder, key, "evil", 1794744000.0)
        line = "<b>" + "A" * 1_000_000 + "</b>"
        said = talk.answer(talk.ask([{"role": "user", "content": BROKEN}]), BROKEN + SIGNS)
        talk.answer(talk.ask([{"role": "tool", "tool_call_id": "c", "content": line}], said, ids=[5, 6, 7]), SIGNS)


async def test_a_hostile_transcript_runs_nothing_and_shows_as_text(tmp_path: Path, shots: Path) -> None:
    data = tmp_path / "data"
    page_kit.add_hostile_rollouts(data)
    evil(data)
    group = f"evil.{page_kit.MARKUP}"
    async with page_kit.serve(data) as g, browsing(g.root, g.app.admin_key, shots=shots) as web:
        asked: list[str] = []
        web.page.on("request", lambda request: asked.append(request.url))
        web.page.on("dialog", lambda dialog: web.complaints.append(f"a dialog: {dialog.message}"))
        await web.asks(
            "document.addEventListener('securitypolicyviolation', e => { window.__broken = e.violatedDirective })"
        )
        await web.sees(".list-row", "<img src=x onerror=")
        await web.go("#/groups")
        await web.sees(".list-row", "<img src=x onerror=")
        await web.find(".list-row", "evil.<img").click()
        await web.sees("h1", group[:40])
        await web.sees(".chart-title", "Entropy")
        await web.go("#/failures")
        await web.find(".failure summary", "<img").click()
        await web.sees(".log", "<script>window.__ran=1</script>")
        await web.go("#/training")
        await web.sees(".chart")
        await web.go("#/compare/hostile/hostile-2")
        await web.sees(".pair", "<img src=x onerror=")
        for name in ("hostile", "evil"):
            for tab in ("", "/tokens", "/tree", "/events", "/details"):
                await web.go(f"#/rollout/{name}{tab}")
                await web.sees(".rollout-body > *")
                await web.asks("document.querySelectorAll('details').forEach(one => { one.open = true })")
        await web.go("#/rollout/evil")
        said = await web.sees(".turn.is-sampled .said", BROKEN[:30])
        text = await said.inner_text()
        assert BROKEN in text and "\u202e" not in text and "U+202E" in text and "␛" in text
        await web.page.click("text=Unfold all")
        await web.sees("button.more", "1,000,007 characters")
        await web.find("button.more", "Load everything").click()
        await web.sees("button.more", "Show more (994 KB of 1.0 MB left)")
        await web.photograph("page-hostile", for_docs=False)
        assert await web.asks("[window.__ran ?? null, window.__broken ?? null]") == [None, None]
        assert await web.find("main img, main iframe, main script, main style, main a[href^=javascript]").count() == 0
        assert "\u202e" not in await web.asks("document.body.innerText + document.title")
        assert {url.split("/page/")[0] for url in asked} == {g.root}
