"""Display results: as a page in a notebook, and as text in a terminal.

A page is a single block of HTML with its own styles, without scripts or external resources. All text from agents, models and tests passes
through `_escape`, so it is never interpreted as markup. The page also tells the notebook not to typeset formulas in this text. Colors are
translucent, so they work in light and dark themes.
"""

from __future__ import annotations

import html
import io
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turngate.api.result_data import ResultData, Turn
from turngate.common.safe_text import sanitize, sanitize_line
from turngate.errors import BadRequest
from turngate.trace.sample import Sample
from turngate.types import Json

_MAX_TURNS = 40  # half of them from the beginning, half from the end
_MAX_TOKENS = 4_000  # over all turns on a page, per turn in a terminal
_MAX_TEXT = 4_000  # characters
_MAX_FILES = 30
_MAX_LINES = 200  # per table
_SHADES = 10  # from unlikely to likely

# Contains no data from results. The prefix keeps the styles from affecting other output in the notebook.
_STYLE = """
.tg{font:13px/1.5 system-ui,sans-serif;max-width:1000px;text-align:left}
.tg *{box-sizing:border-box}
.tg-head{font-size:15px;margin:2px 0 6px}
.tg-chip{display:inline-block;padding:0 7px;margin-left:6px;border-radius:9px;background:rgba(127,127,127,.18);font-size:12px}
.tg-good{background:rgba(40,160,70,.35)}.tg-bad{background:rgba(215,60,40,.35)}.tg-odd{background:rgba(215,160,30,.35)}
.tg-dim{opacity:.7}
.tg table,.tg td,.tg th{color:inherit}
.tg table{border-collapse:collapse;margin:4px 0;font-size:12px}
.tg td,.tg th{padding:1px 10px 1px 0;text-align:left;vertical-align:top;background:none!important;border:0}
.tg th{font-weight:600;opacity:.7}
.tg-error{border-left:3px solid rgba(215,60,40,.8);padding:2px 8px;margin:4px 0;background:rgba(215,60,40,.12)}
.tg details{margin:3px 0}.tg summary{cursor:pointer}
.tg-turn{border-left:2px solid rgba(127,127,127,.35);padding-left:8px}
.tg-text{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0;padding:3px 6px;background:rgba(127,127,127,.1);
border-radius:3px;font:12px/1.6 ui-monospace,monospace;max-height:420px;overflow:auto}
.tg-heard{background:rgba(60,120,215,.12);max-height:150px}
.tg-text i{font-style:normal;border-radius:2px}
.tg-u{outline:1px dotted rgba(127,127,127,.9)}
"""


def _shade_styles() -> Iterator[str]:
    """Yield one CSS rule for each shade: from red for unlikely tokens to faint green for likely ones."""
    for shade in range(_SHADES):
        likely = shade / (_SHADES - 1)
        red, green = int(230 - 190 * likely), int(50 + 110 * likely)
        yield f".tg-p{shade}{{background:rgba({red},{green},40,{0.6 - 0.42 * likely:.2f})}}"


def render_html(
    result: ResultData, *, turns: Sequence[int] | None = None, tokens: bool = True, full: bool = False
) -> str:
    """Render one result as an HTML page. The arguments are those of `Result.show`."""
    shown = _select_turns(result, turns)
    parts = [
        f'<div class="tg-head"><b>{_escape(result.task_id)}</b>{_render_chips(result)}</div>',
        _render_facts(result),
        *_render_error(result),
        _render_turns(result, shown, tokens, full),
        _render_rows(result.rows),
        _render_texts("files", result.files, full),
        _render_texts("logs", {**result.logs, **({"verifier": result.verifier} if result.verifier else {})}, full),
        *(f'<div class="tg-dim">{_escape(note)}</div>' for note in (*result.notes, *result.clamped)),
    ]
    return _wrap_page("".join(parts))


def render_html_table(results: Sequence[ResultData], facts: Sequence[str]) -> str:
    """Render the first `_MAX_LINES` results as an HTML table, with `facts` as its heading."""
    lines = [
        f"<tr><td>{index}</td><td>{_escape(one.task_id)}</td><td>{_render_reward(one)}</td><td>{_escape(one.status)}</td>"
        f"<td>{len(one.turns)}</td><td>{one.sampled_tokens:,}</td><td>{one.wall_s:.1f}</td><td>{_escape(_failure_reason(one)[:200])}</td></tr>"
        for index, one in enumerate(islice(results, _MAX_LINES))
    ]
    heads = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    more = _render_hidden(len(results) - len(lines))
    return _wrap_page(
        f'<div class="tg-head">{_escape(" · ".join(facts))}</div><table><tr>{heads}</tr>{"".join(lines)}</table>{more}'
    )


def _render_hidden(count: int) -> str:
    """Render the number of lines or files that are not shown. Return an empty string if the number is 0."""
    return f'<div class="tg-dim">{count:,} more not shown</div>' if count else ""


def _render_lines(lines: Iterable[str]) -> str:
    return _wrap_page("".join(f"<div>{_escape(line)}</div>" for line in lines))


_COLUMNS = ("", "task", "reward", "status", "turns", "tokens", "seconds", "why")


def _wrap_page(inside: str) -> str:
    # The last two classes disable formula typesetting, which can turn text into links.
    style = _STYLE + "".join(_shade_styles())
    return f'<div class="tg tex2jax_ignore mathjax_ignore"><style>{style}</style>{inside}</div>'


def _escape(text: str) -> str:
    """Escape untrusted text for HTML. All untrusted text must pass through this function."""
    return html.escape(sanitize(text), quote=True)


def _shorten(text: str, full: bool) -> str:
    """Cut the middle out of a long text, unless `full` is set."""
    if full or len(text) <= _MAX_TEXT:
        return text
    head, tail = _MAX_TEXT * 3 // 4, _MAX_TEXT // 4
    return f"{text[:head]}\n… characters not shown: {len(text) - _MAX_TEXT:,} …\n{text[-tail:]}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _select_turns(result: ResultData, turns: Sequence[int] | None) -> list[Turn]:
    if turns is None:
        return list(result.turns)
    by_number = {turn.number: turn for turn in result.turns}
    for number in turns:
        if number not in by_number:
            count = _count(len(by_number), "turn")
            hint = f"the result has {count}, numbered from 1" if by_number else "the result has no turns"
            raise BadRequest(f"turns: turn {number} not found; {hint}", param="turns")
    return [by_number[number] for number in turns]


def _render_chips(result: ResultData) -> str:
    style = {"finished": "", "error": " tg-bad"}.get(result.status, " tg-odd")
    return f'{_render_reward(result)}<span class="tg-chip{style}">{_escape(result.status)}</span>'


def _render_reward(result: ResultData) -> str:
    if result.reward is None:
        return '<span class="tg-chip">reward unknown</span>'
    style = "tg-good" if result.passed else "tg-bad" if not result.reward else "tg-odd"
    return f'<span class="tg-chip {style}">reward {result.reward:g}</span>'


def _render_facts(result: ResultData) -> str:
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in result.seconds.items() if spent >= 0.05)
    facts = {
        "agent": result.agent,
        "model": f"{result.model} ({result.mode})" if result.mode else result.model,
        "took": f"{result.wall_s:.1f} s" + (f" ({stages})" if stages else ""),
        "session": result.session,
        "stopped by": result.stop,
    }
    lines = (f"<tr><th>{name}</th><td>{_escape(text)}</td></tr>" for name, text in facts.items() if text)
    return f"<table>{''.join(lines)}</table>"


def _render_error(result: ResultData) -> list[str]:
    if result.error is None:
        return []
    error = result.error
    where = " · ".join(word for word in (error.boundary, f"in stage {error.stage}" if error.stage else "") if word)
    return [
        f'<div class="tg-error"><b>{_escape(where or "error")}</b>: {_escape(_shorten(error.message, False))}</div>'
    ]


def _failure_reason(result: ResultData) -> str:
    if result.error is not None:
        return sanitize_line(f"{result.error.boundary}: {result.error.message}")
    return sanitize_line(result.stop)


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _render_turns(result: ResultData, chosen: list[Turn], tokens: bool, full: bool) -> str:
    if not result.turns:
        return '<div class="tg-dim">no turns were recorded</div>'
    shown, hidden = _fit_turns(chosen, full)
    remaining = sys.maxsize if full else _MAX_TOKENS
    parts = []
    for index, turn in enumerate(shown):
        if hidden and index == len(shown) // 2:
            parts.append(f'<div class="tg-dim">… turns not shown: {hidden}; use result.show(turns=[…]) …</div>')
        parts.append(_render_turn(turn, remaining, tokens, full, is_open=len(shown) <= 6))
        remaining -= min(remaining, len(turn.ids))
    counts = f"{_count(len(result.turns), 'turn')}, {_count(result.sampled_tokens, 'sampled token')}"
    legend = "".join(f'<i class="tg-p{shade}">&nbsp;&nbsp;</i>' for shade in range(_SHADES))
    scale = f' <span class="tg-text" style="padding:0">unlikely {legend} likely</span>' if tokens else ""
    return f"<details open><summary>{counts}{scale}</summary>{''.join(parts)}</details>"


def _fit_turns(turns: list[Turn], full: bool) -> tuple[list[Turn], int]:
    """Return the turns to show, and how many turns in the middle are left out."""
    if full or len(turns) <= _MAX_TURNS:
        return turns, 0
    return [*turns[: _MAX_TURNS // 2], *turns[-_MAX_TURNS // 2 :]], len(turns) - _MAX_TURNS


def _render_turn(turn: Turn, max_tokens: int, tokens: bool, full: bool, *, is_open: bool) -> str:
    messages = (
        f'<div class="tg-text tg-heard"><b>{_escape(str(message.get("role", "")))}</b> '
        f"{_escape(_shorten(_message_text(message), full))}</div>"
        for message in turn.heard
    )
    sampled = (
        _color_tokens(turn, max_tokens)
        if tokens and len(turn.ids)
        else f'<div class="tg-text">{_escape(_shorten(_turn_text(turn), full))}</div>'
    )
    return (
        f'<details class="tg-turn"{" open" if is_open else ""}><summary>{_escape(_headline(turn))}</summary>'
        f"{''.join(messages)}{sampled}</details>"
    )


def _headline(turn: Turn) -> str:
    facts = [f"turn {turn.number}", turn.role, _count(len(turn.ids), "token"), turn.finish]
    if (mean := turn.mean_logprob) is not None:
        facts.append(f"mean log-probability {mean:.2f}")
    if turn.version_end:
        end = f"–{turn.version_end}" if turn.version_end != turn.version_start else ""
        facts.append(f"policy {turn.version_start}{end}")
    facts += [turn.cause] if turn.cause else []
    facts += [f"not trained: {turn.untrained}"] if turn.untrained else []
    return sanitize_line(" · ".join(fact for fact in facts if fact))


def _color_tokens(turn: Turn, limit: int) -> str:
    pieces = []
    for token, piece, logprob in islice(_iter_tokens(turn), limit):
        shade = "tg-u" if logprob is None else f"tg-p{_shade(logprob)}"
        chance = "log-probability unknown" if logprob is None else f"{logprob:.3f}, p {math.exp(logprob):.3f}"
        pieces.append(f'<i class="{shade}" title="{token}: {chance}">{_escape(piece)}</i>')
    hidden = len(turn.ids) - limit
    more = f'<div class="tg-dim">{_describe_hidden_tokens(turn, hidden)}</div>'
    return f'<div class="tg-text">{"".join(pieces)}</div>{more if hidden > 0 else ""}'


def _describe_hidden_tokens(turn: Turn, count: int) -> str:
    return f"tokens not shown: {count:,}; use result.show(turns=[{turn.number}], full=True)"


def _iter_tokens(turn: Turn) -> Iterator[tuple[int, str, float | None]]:
    """Yield the id, text and log-probability of each token.

    The text is the id in brackets if the token adds no complete character, or if the tokenizer is not available.
    """
    for index, token in enumerate(turn.ids.tolist()):
        piece = turn.pieces[index] if turn.pieces else ""
        logprob = None if turn.logprobs is None else float(turn.logprobs[index])
        yield token, piece or f"⟨{token}⟩", None if logprob is None or math.isnan(logprob) else logprob


def _shade(logprob: float) -> int:
    return min(_SHADES - 1, int(math.exp(max(-50.0, min(0.0, logprob))) * _SHADES))


def _message_text(message: Json) -> str:
    """Return the text of a message in OpenAI's format, including its tool calls."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part.get("type", ""))) for part in content if isinstance(part, dict))
    calls = (call.get("function", {}) for call in message.get("tool_calls") or ())
    return "\n".join([str(content), *(f"→ {call.get('name')} {call.get('arguments')}" for call in calls)]).strip()


def _turn_text(turn: Turn) -> str:
    calls = (f"→ {call.name} {call.arguments}" for call in turn.tool_calls)
    return "\n".join(part for part in (turn.reasoning, turn.text, *calls) if part)


def _render_rows(rows: Sequence[Sample]) -> str:
    if not rows:
        return '<div class="tg-dim">no rows to train on</div>'
    lines = [
        f"<tr><td>{index}</td><td>{len(row.ids):,}</td><td>{row.trained_tokens:,}</td><td>{len(row.spans)}</td></tr>"
        for index, row in enumerate(islice(rows, _MAX_LINES))
    ]
    heads = "".join(f"<th>{name}</th>" for name in ("row", "tokens", "trained", "turns"))
    title = f"{_count(len(rows), 'row')} for training"
    more = _render_hidden(len(rows) - len(lines))
    return f"<details><summary>{title}</summary><table><tr>{heads}</tr>{''.join(lines)}</table>{more}</details>"


def _render_texts(title: str, texts: Mapping[str, str], full: bool) -> str:
    if not texts:
        return ""
    limit = None if full else _MAX_FILES
    parts = [
        f'<details class="tg-turn"><summary>{_escape(sanitize_line(name))}</summary>'
        f'<div class="tg-text">{_escape(_shorten(text, full))}</div></details>'
        for name, text in islice(texts.items(), limit)
    ]
    more = _render_hidden(len(texts) - len(parts))
    return f"<details><summary>{title}: {len(texts):,}</summary>{''.join(parts)}{more}</details>"


# ── in a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


def render_text(
    result: ResultData, *, turns: Sequence[int] | None = (), tokens: bool = False, full: bool = False
) -> RenderableType:
    """Render one result as text for a terminal: its outcome and the selected turns.

    The arguments are those of `Result.show`, with different defaults: no turns, and text instead of tokens.
    """
    chosen = _select_turns(result, turns)
    style = {"finished": "green", "error": "red"}.get(result.status, "yellow")
    reward = "reward unknown" if result.reward is None else f"reward {result.reward:g}"
    lines = [
        Text.assemble(
            (sanitize_line(result.task_id), "bold"),
            "  ",
            (sanitize_line(result.status), f"bold {style}"),
            f"  {reward}  {result.wall_s:.1f} s",
        ),
        _format_line(
            "ran", sanitize_line(" · ".join(word for word in (result.agent, result.model, result.mode) if word))
        ),
        _format_line(
            "turns",
            f"{len(result.turns):,}, {_count(result.sampled_tokens, 'sampled token')}, {_count(len(result.rows), 'row')}",
        ),
    ]
    if result.error is not None:
        where = f"{result.error.boundary}, in stage {result.error.stage}: " if result.error.stage else ""
        lines.append(_format_line("error", sanitize(where + _shorten(result.error.message, False)), "red"))
    if result.files:
        names = [sanitize_line(name) for name in islice(result.files, 8)]
        hidden = len(result.files) - len(names)
        lines.append(_format_line("files", ", ".join(names) + (f" and {hidden} more" if hidden else "")))
    if result.session:
        lines.append(_format_line("session", sanitize_line(result.session), "dim"))
    lines += [_format_line("note", sanitize_line(note), "yellow") for note in result.notes]
    shown, hidden_turns = _fit_turns(chosen, full)
    for index, turn in enumerate(shown):
        if hidden_turns and index == len(shown) // 2:
            lines.append(Text(f"… turns not shown: {hidden_turns} …", style="dim"))
        lines += _render_turn_text(turn, tokens, full)
    return Group(*lines)


def _render_turn_text(turn: Turn, tokens: bool, full: bool) -> list[Text]:
    lines = [
        Text.assemble(
            (sanitize_line(str(message.get("role", ""))), "bold blue"),
            f" {sanitize(_shorten(_message_text(message), full))}",
        )
        for message in turn.heard
    ]
    lines.append(Text(_headline(turn), style="bold green"))
    if not tokens or not len(turn.ids):
        return [*lines, Text(sanitize(_shorten(_turn_text(turn), full)))]
    sampled = Text()
    limit = None if full else _MAX_TOKENS
    for _, piece, logprob in islice(_iter_tokens(turn), limit):
        sampled.append(sanitize(piece), style="underline" if logprob is None else _terminal_style(logprob))
    lines.append(sampled)
    if limit is not None and len(turn.ids) > limit:
        lines.append(Text(f"… {_describe_hidden_tokens(turn, len(turn.ids) - limit)} …", style="dim"))
    return lines


def _terminal_style(logprob: float) -> str:
    likely = _shade(logprob) / (_SHADES - 1)
    return f"white on rgb({int(220 * (1 - likely) + 20)},{int(160 * likely + 20)},30)"


def _format_line(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"  {label:8}", "dim"), (text, style))


def render_text_table(results: Sequence[ResultData], title: str) -> RenderableType:
    """Render a list of results as a table for a terminal."""
    table = Table(title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for index, one in enumerate(islice(results, _MAX_LINES)):
        reward = "?" if one.reward is None else f"{one.reward:g}"
        counts = (f"{len(one.turns)}", f"{one.sampled_tokens:,}", f"{one.wall_s:.1f}")
        cells = (
            str(index),
            sanitize_line(one.task_id),
            reward,
            sanitize_line(one.status),
            *counts,
            _failure_reason(one)[:200],
        )
        table.add_row(*map(Text, cells))
    hidden = len(results) - table.row_count
    return Group(table, Text(f"{hidden:,} more not shown", style="dim")) if hidden else table


def to_plain_text(what: RenderableType) -> str:
    """Convert rendered output to plain text, without colors."""
    output = io.StringIO()
    Console(
        file=output, width=120, highlight=False, markup=False, emoji=False, color_system=None, force_jupyter=False
    ).print(what, soft_wrap=True)
    return output.getvalue().rstrip("\n")


# ── output ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_notebook() -> bool:
    """Return whether this process is a notebook kernel. This does not load IPython."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def show(result: ResultData, *, turns: Sequence[int] | None, tokens: bool, full: bool) -> None:
    """Display one result, in a notebook or on a terminal."""
    if in_notebook():
        _display(render_html(result, turns=turns, tokens=tokens, full=full))
    else:
        _print(render_text(result, turns=turns, tokens=tokens, full=full))


def show_table(results: Sequence[ResultData], *, title: str, facts: Sequence[str]) -> None:
    """Display a list of results, in a notebook or on a terminal."""
    if in_notebook():
        _display(render_html_table(results, facts))
    else:
        _print(render_text_table(results, title))


def open_live_lines(lines: Iterable[str]) -> Callable[[Iterable[str]], None]:
    """Show lines in the output of a notebook cell, and return a function that replaces them."""
    from IPython.display import HTML, display

    handle = display(HTML(_render_lines(lines)), display_id=True)
    return lambda new_lines: handle.update(HTML(_render_lines(new_lines)))


def _display(page: str) -> None:
    from IPython.display import HTML, display

    display(HTML(page))


def _print(what: RenderableType) -> None:
    Console(highlight=False, markup=False, emoji=False).print(what, soft_wrap=True)
