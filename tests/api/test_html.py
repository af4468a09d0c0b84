"""How results are displayed: all text is escaped, and large results are truncated."""

from __future__ import annotations

import io
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import turngate as tg
from tests.api.kit import make_result, make_row, make_turn
from turngate.api import display
from turngate.errors import BadRequest
from turngate.service.result import ErrorInfo
from turngate.types import ToolCall

HOSTILE = (
    "</div></details></style><script>alert(1)</script><img src=x onerror=alert(2)><svg/onload=alert(3)> "
    "\" onmouseover=\"alert(4)\" ' <a href='javascript:alert(5)'>x</a> &lt;b&gt; ]]>--> $\\href{javascript:alert(6)}{x}$ "
    "\x1b]0;title\x07\x1b[2J\x00\u202egnp.exe\ud83d"
)
TAGS = {"div", "style", "b", "i", "span", "table", "tr", "td", "th", "details", "summary"}
ATTRIBUTES = {"class", "style", "title", "open"}


class Page(HTMLParser):
    """Collects the tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.depth = 0
        self.closed_early = False
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.closed_early |= self.depth == 0 and bool(self.tags)
        self.tags.append(tag)
        self.attributes += attrs
        self.depth += 1

    def handle_endtag(self, tag: str) -> None:
        self.depth -= 1

    def handle_data(self, data: str) -> None:
        self.text += data


def result_with(text: str) -> tg.Result:
    """A result with a text in every text field."""
    message: Any = {
        "role": text,
        "content": [{"type": "text", "text": text}],
        "tool_calls": [{"function": {"name": text, "arguments": text}}],
    }
    first_turn = make_turn(
        1,
        heard=(message, {"role": "user", "content": text}),
        pieces=(text,) * 4,
        text=text,
        reasoning=text,
        tool_calls=(ToolCall(text, text, text),),
        finish=text,
        untrained=text,
        cause=text,
    )
    return make_result(
        task_id=text,
        group=text,
        session=text,
        agent=text,
        model=text,
        mode=text,
        status=text,
        stop=text,
        seconds={text: 1.0},
        turns=(
            first_turn,
            make_turn(2, ids=np.empty(0, np.int32), logprobs=None, pieces=(), text=text, heard=(message,)),
        ),
        files={text: text},
        logs={text: text},
        verifier=text,
        error=ErrorInfo(boundary="engine", stage=text, message=text),
        notes=(text,),
        clamped=(text,),
    )


@pytest.mark.parametrize("shape", ["page", "words", "full", "table", "live"])
def test_html_escapes_all_text(shape: str) -> None:
    hostile = result_with(HOSTILE)
    pages = {
        "page": lambda: hostile._repr_html_(),
        "words": lambda: display.render_html(hostile, tokens=False),
        "full": lambda: display.render_html(hostile, full=True),
        "table": lambda: tg.Results([hostile, hostile])._repr_html_(),
        "live": lambda: display._render_lines([HOSTILE]),
    }
    found = pages[shape]()
    page = Page(found)
    assert set(page.tags) <= TAGS and {name for name, _ in page.attributes} <= ATTRIBUTES
    assert page.depth == 0 and not page.closed_early and page.tags.count("style") == 1
    assert "<script>alert(1)</script>" in page.text  # shown as text
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in found) and "\u202e" not in found
    assert found.startswith('<div class="tg tex2jax_ignore mathjax_ignore">')  # no formulas, which can contain links
    found.encode()


def test_text_output_escapes_control_characters() -> None:
    hostile = result_with(HOSTILE)
    for value in (hostile, tg.Results([hostile]), display.render_text(hostile, turns=None, tokens=True, full=True)):
        output = io.StringIO()
        Console(file=output, width=200, color_system=None).print(value)
        assert "\x1b" not in output.getvalue() and "\x07" not in output.getvalue() and "\u202e" not in output.getvalue()
        assert "alert(1)" in output.getvalue()
    assert "\x1b" not in repr(hostile) and "\x1b" not in repr(tg.Results([hostile]))


def test_tokens_are_coloured_and_unknown_logprobs_marked() -> None:
    logprobs = np.array([-0.01, -9.0, np.nan], np.float32)
    page = make_result(turns=(make_turn(tokens=3, logprobs=logprobs, pieces=("sure", "odd", "")),))._repr_html_()
    assert '<i class="tg-p9" title="0: -0.010, p 0.990">sure</i>' in page
    assert '<i class="tg-p0" title="1: -9.000, p 0.000">odd</i>' in page
    assert '<i class="tg-u" title="2: log-probability unknown">⟨2⟩</i>' in page
    unknown = make_result(turns=(make_turn(tokens=2, logprobs=None),))._repr_html_()
    assert unknown.count('class="tg-u"') == 2


def test_unknown_reward_is_not_shown_as_zero() -> None:
    page = Page(make_result(reward=None, kind="infrastructure fault", status="error")._repr_html_())
    assert "reward unknown" in page.text and "reward 0" not in page.text
    assert "reward 0" in Page(make_result(reward=0.0)._repr_html_()).text


def test_large_result_is_truncated() -> None:
    long = "x" * 300_000
    many = tuple(
        make_turn(n, tokens=2_000, text=long, heard=({"role": "user", "content": long},)) for n in range(1, 201)
    )
    large = make_result(turns=many, files={f"f{n}": long for n in range(500)}, logs={"stdout": long})
    page = large._repr_html_()
    assert len(page) < 2_000_000
    text = Page(page).text
    assert "200 turns, 400,000 sampled tokens" in text and "turns not shown: 160" in text
    assert "characters not shown" in text and "470 more not shown" in text
    hostile = Page(display.render_html(make_result(turns=many), turns=[7], tokens=False, full=True)).text
    assert "turn 7 ·" in hostile and "turn 8 ·" not in hostile and long in hostile
    assert "4,800 more not shown" in Page(tg.Results([make_result()] * 5_000)._repr_html_()).text


def test_page_counts_rows_that_it_does_not_show() -> None:
    assert "1,300 more not shown" in Page(make_result(rows=(make_row(),) * 1_500)._repr_html_()).text
    assert "not shown" not in Page(make_result(rows=(make_row(),) * 200)._repr_html_()).text


def test_terminal_output_counts_what_it_does_not_show(capsys: pytest.CaptureFixture[str]) -> None:
    tg.Results([make_result()] * 5_000).show()
    assert "4,800 more not shown" in capsys.readouterr().out
    long = make_result(turns=(make_turn(1, tokens=5_500),))
    long.show()
    assert "tokens not shown: 1,500; use result.show(turns=[1], full=True)" in capsys.readouterr().out
    long.show(full=True)
    assert "not shown" not in capsys.readouterr().out


def test_missing_turn_is_named() -> None:
    with pytest.raises(BadRequest, match="turns: turn 5 not found; the result has 1 turn, numbered from 1"):
        make_result().show(turns=[5])
    with pytest.raises(BadRequest, match="turns: turn 1 not found; the result has no turns"):
        make_result(turns=()).show(turns=[1])


def test_show_prints_outside_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    make_result(files={"main.py": "x"}).show(tokens=False)
    out = capsys.readouterr().out
    assert "fix-add  finished  reward 1" in out and "main.py" in out and "turn 1 · main · 4 tokens" in out
    tg.Results([make_result(), make_result(reward=None)]).show()
    assert "2, mean reward 1, 1 without a reward" in capsys.readouterr().out


def test_statistics_ignore_unknown_rewards() -> None:
    results = tg.Results(
        [make_result(), make_result(reward=0.0), make_result(reward=None, rows=()), make_result(group="g", task_id="t")]
    )
    assert results.rewards == [1.0, 0.0, None, 1.0] and results.mean_reward == pytest.approx(2 / 3)
    assert results.pass_at(1) == pytest.approx(0.75) and results.pass_at(2) == 1.0 and results.pass_at(3) is None
    first, second, third, alone = results.advantages()
    assert (
        first == pytest.approx(1, abs=1e-4) and second == pytest.approx(-1, abs=1e-4) and (third, alone) == (None, 0.0)
    )
    assert [row.advantage for row in results.rows("none")] == [1.0, 0.0, 1.0]
    with pytest.raises(BadRequest, match="k must be at least 1, not 0"):
        results.pass_at(0)


def test_package_has_py_typed() -> None:
    assert (Path(tg.__file__).parent / "py.typed").is_file()
