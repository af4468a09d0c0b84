"""The source files of the page: small, self-contained, and without markup from text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

UI = Path(__file__).parents[2] / "turngate" / "ui"
FILES = sorted(file for file in UI.rglob("*") if file.is_file())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MARKUP = (
    "innerHTML",
    "outerHTML",
    "insertAdjacentHTML",
    "document.write",
    "DOMParser",
    "createContextualFragment",
    "setHTMLUnsafe",
    "srcdoc =",
    "eval(",
    "new Function",
    "javascript:",
)


def name(file: Path) -> str:
    return file.relative_to(UI).as_posix()


@pytest.mark.parametrize("file", SCRIPTS, ids=name)
def test_no_script_turns_text_into_markup(file: Path) -> None:
    text = file.read_text()
    assert [word for word in MARKUP if word in text] == []


@pytest.mark.parametrize("file", SCRIPTS, ids=name)
def test_script_is_short_and_documented(file: Path) -> None:
    lines = file.read_text().splitlines()
    assert len(lines) <= 300
    assert lines[0].startswith("/**"), "no comment at the top"
    assert [line for line in lines if len(line) > 140] == []


@pytest.mark.parametrize("file", FILES, ids=name)
def test_no_external_urls(file: Path) -> None:
    found = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"')]*", file.read_text())
    assert [address for address in found if not address.startswith("http://www.w3.org/")] == []


def test_every_import_leads_to_a_file() -> None:
    for file in SCRIPTS:
        for target in re.findall(r'from "(\.[^"]+)"', file.read_text()):
            assert (file.parent / target).is_file(), f"{name(file)} imports {target}"


def test_the_page_has_no_scripts_or_styles_of_its_own() -> None:
    html = (UI / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)", html) == []
    assert "<style" not in html and "style=" not in html and not re.search(r"\son\w+=", html)


def test_the_key_is_kept_nowhere() -> None:
    kept = [
        name(file) for file in SCRIPTS if re.search(r"localStorage|sessionStorage|document\.cookie", file.read_text())
    ]
    assert kept == ["js/theme.js"], "the theme is all that a browser keeps"
