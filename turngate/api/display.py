"""How results look: a page in a notebook, text in a terminal. `api/result.py` calls it when somebody looks at one.

A page is one piece of HTML with its own styles, no script, nothing that is fetched. Whatever an agent, a model or a test wrote goes
through `_said` and nothing else: it can never be markup, and the notebook's typesetting of formulas is told to leave it alone.
Colours are laid thinly over whatever is behind, so that light and dark themes both read well.
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

from turngate.api.result import Result, Results, Turn
from turngate.common.safe_text import sanitize, sanitize_line
from turngate.errors import BadRequest
from turngate.trace.sample import Sample
from turngate.types import Json

_TURNS = 40  # that are shown, half of them from the beginning and half from the end
_TOKENS = 4_000  # that are shown, of all turns together
_LONG = 4_000  # characters of a text
_FILES = 30
_LINES = 200  # of a table
_SHADES = 10  # from unlikely to likely

# Nothing here is taken from a result. The names begin so that no other output on the page is touched.
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


def _shades() -> Iterator[str]:
    """Red where the model was surprised by itself, through yellow, to a breath of green."""
    for shade in range(_SHADES):
        likely = shade / (_SHADES - 1)
        red, green = int(230 - 190 * likely), int(50 + 110 * likely)
        yield f".tg-p{shade}{{background:rgba({red},{green},40,{0.6 - 0.42 * likely:.2f})}}"


def page(result: Result, *, turns: Sequence[int] | None = None, tokens: bool = True, full: bool = False) -> str:
    """One result as HTML."""
    shown = _chosen(result, turns)
    parts = [
        f'<div class="tg-head"><b>{_said(result.task_id)}</b>{_chips(result)}</div>',
        _facts(result),
        *_error(result),
        _turns(result, shown, tokens, full),
        _rows(result.rows),
        _texts("files left", result.files, full),
        _texts("logs", {**result.logs, **({"verifier": result.verifier} if result.verifier else {})}, full),
        *(f'<div class="tg-dim">{_said(note)}</div>' for note in (*result.notes, *result.clamped)),
    ]
    return _framed("".join(parts))


def table(results: Results) -> str:
    """Several as HTML."""
    mean, first = results.mean_reward, results.pass_at(1)
    told = [f"{len(results)} results"]
    told += [] if mean is None else [f"mean reward {mean:.3g}"]
    told += [] if first is None else [f"pass@1 {first:.3g}"]
    lines = [
        f"<tr><td>{place}</td><td>{_said(one.task_id)}</td><td>{_reward(one)}</td><td>{_said(one.status)}</td>"
        f"<td>{len(one.turns)}</td><td>{one.sampled_tokens:,}</td><td>{one.wall_s:.1f}</td><td>{_said(_why(one)[:200])}</td></tr>"
        for place, one in enumerate(islice(results, _LINES))
    ]
    heads = "".join(f"<th>{name}</th>" for name in _HEADS)
    left = len(results) - len(lines)
    more = f'<div class="tg-dim">{left:,} more are not shown</div>' if left > 0 else ""
    return _framed(
        f'<div class="tg-head">{" · ".join(told)}</div><table><tr>{heads}</tr>{"".join(lines)}</table>{more}'
    )


def _plain_lines(lines: Iterable[str]) -> str:
    return _framed("".join(f"<div>{_said(line)}</div>" for line in lines))


_HEADS = ("", "task", "reward", "status", "turns", "tokens", "seconds", "why")


def _framed(inside: str) -> str:
    # The last two names keep the typesetting of formulas out: it makes links of what it finds.
    style = _STYLE + "".join(_shades())
    return f'<div class="tg tex2jax_ignore mathjax_ignore"><style>{style}</style>{inside}</div>'


def _said(text: str) -> str:
    """Text of others, for HTML. The only way in."""
    return html.escape(sanitize(text), quote=True)


def _cut(text: str, full: bool) -> str:
    """The beginning and the end of what is long."""
    if full or len(text) <= _LONG:
        return text
    head, tail = _LONG * 3 // 4, _LONG // 4
    return f"{text[:head]}\n… {len(text) - _LONG:,} characters are not shown …\n{text[-tail:]}"


def _chosen(result: Result, turns: Sequence[int] | None) -> list[Turn]:
    if turns is None:
        return list(result.turns)
    by_number = {turn.number: turn for turn in result.turns}
    for number in turns:
        if number not in by_number:
            raise BadRequest(f"turns: there is no turn {number}; they are 1 to {len(by_number)}", param="turns")
    return [by_number[number] for number in turns]


def _chips(result: Result) -> str:
    how = {"finished": "", "error": " tg-bad"}.get(result.status, " tg-odd")
    return f'{_reward(result)}<span class="tg-chip{how}">{_said(result.status)}</span>'


def _reward(result: Result) -> str:
    if result.reward is None:
        return '<span class="tg-chip">reward not known</span>'
    how = "tg-good" if result.passed else "tg-bad" if not result.reward else "tg-odd"
    return f'<span class="tg-chip {how}">reward {result.reward:g}</span>'


def _facts(result: Result) -> str:
    stages = ", ".join(f"{stage} {spent:.1f}" for stage, spent in result.seconds.items() if spent >= 0.05)
    told = {
        "agent": result.agent,
        "model": f"{result.model} ({result.mode})" if result.mode else result.model,
        "took": f"{result.wall_s:.1f} s" + (f" ({stages})" if stages else ""),
        "session": result.session,
        "stopped by": result.stop,
    }
    lines = (f"<tr><th>{name}</th><td>{_said(text)}</td></tr>" for name, text in told.items() if text)
    return f"<table>{''.join(lines)}</table>"


def _error(result: Result) -> list[str]:
    if result.error is None:
        return []
    error = result.error
    where = " · ".join(word for word in (error.boundary, f"in stage {error.stage}" if error.stage else "") if word)
    return [f'<div class="tg-error"><b>{_said(where or "error")}</b>: {_said(_cut(error.message, False))}</div>']


def _why(result: Result) -> str:
    if result.error is not None:
        return sanitize_line(f"{result.error.boundary}: {result.error.message}")
    return sanitize_line(result.stop)


# ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _turns(result: Result, chosen: list[Turn], tokens: bool, full: bool) -> str:
    if not result.turns:
        return '<div class="tg-dim">no turn was recorded</div>'
    shown, left = _fitting(chosen, full)
    room = sys.maxsize if full else _TOKENS
    parts = []
    for place, turn in enumerate(shown):
        if left and place == len(shown) // 2:
            parts.append(f'<div class="tg-dim">… {left} turns are not shown: result.show(turns=[…]) …</div>')
        parts.append(_turn(turn, room, tokens, full, opened=len(shown) <= 6))
        room -= min(room, len(turn.ids))
    count = "1 turn" if len(result.turns) == 1 else f"{len(result.turns)} turns"
    legend = "".join(f'<i class="tg-p{shade}">&nbsp;&nbsp;</i>' for shade in range(_SHADES))
    seen = f' <span class="tg-text" style="padding:0">unlikely {legend} likely</span>' if tokens else ""
    return (
        f"<details open><summary>{count}, {result.sampled_tokens:,} sampled tokens{seen}</summary>"
        f"{''.join(parts)}</details>"
    )


def _fitting(turns: list[Turn], full: bool) -> tuple[list[Turn], int]:
    """Those that are shown, and how many in their middle are not."""
    if full or len(turns) <= _TURNS:
        return turns, 0
    return [*turns[: _TURNS // 2], *turns[-_TURNS // 2 :]], len(turns) - _TURNS


def _turn(turn: Turn, room: int, tokens: bool, full: bool, *, opened: bool) -> str:
    heard = (
        f'<div class="tg-text tg-heard"><b>{_said(str(message.get("role", "")))}</b> {_said(_cut(_words(message), full))}</div>'
        for message in turn.heard
    )
    said = (
        _coloured(turn, room)
        if tokens and len(turn.ids)
        else f'<div class="tg-text">{_said(_cut(_spoken(turn), full))}</div>'
    )
    return (
        f'<details class="tg-turn"{" open" if opened else ""}><summary>{_said(_headline(turn))}</summary>'
        f"{''.join(heard)}{said}</details>"
    )


def _headline(turn: Turn) -> str:
    facts = [f"turn {turn.number}", turn.role, f"{len(turn.ids):,} tokens", turn.finish]
    if (mean := turn.mean_logprob) is not None:
        facts.append(f"mean log-probability {mean:.2f}")
    if turn.version_end:
        moved = f"–{turn.version_end}" if turn.version_end != turn.version_start else ""
        facts.append(f"policy {turn.version_start}{moved}")
    facts += [turn.cause] if turn.cause else []
    facts += [f"not trained: {turn.untrained}"] if turn.untrained else []
    return sanitize_line(" · ".join(fact for fact in facts if fact))


def _coloured(turn: Turn, room: int) -> str:
    pieces = []
    for token, piece, logprob in islice(_tokens(turn), room):
        shade = "tg-u" if logprob is None else f"tg-p{_shade(logprob)}"
        chance = "log-probability not known" if logprob is None else f"{logprob:.3f}, p {math.exp(logprob):.3f}"
        pieces.append(f'<i class="{shade}" title="{token}: {chance}">{_said(piece)}</i>')
    left = len(turn.ids) - room
    more = f'<div class="tg-dim">{left:,} tokens are not shown: result.show(turns=[{turn.number}], full=True)</div>'
    return f'<div class="tg-text">{"".join(pieces)}</div>{more if left > 0 else ""}'


def _tokens(turn: Turn) -> Iterator[tuple[int, str, float | None]]:
    """Id, text, log-probability. A token that completes no character shows its id."""
    for place, token in enumerate(turn.ids.tolist()):
        piece = turn.pieces[place] if turn.pieces else ""
        logprob = None if turn.logprobs is None else float(turn.logprobs[place])
        yield token, piece or f"⟨{token}⟩", None if logprob is None or math.isnan(logprob) else logprob


def _shade(logprob: float) -> int:
    return min(_SHADES - 1, int(math.exp(max(-50.0, min(0.0, logprob))) * _SHADES))


def _words(message: Json) -> str:
    """The text of a message in OpenAI's form."""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", part.get("type", ""))) for part in content if isinstance(part, dict))
    called = (call.get("function", {}) for call in message.get("tool_calls") or ())
    return "\n".join([str(content), *(f"→ {call.get('name')} {call.get('arguments')}" for call in called)]).strip()


def _spoken(turn: Turn) -> str:
    calls = (f"→ {call.name} {call.arguments}" for call in turn.tool_calls)
    return "\n".join(part for part in (turn.reasoning, turn.text, *calls) if part)


def _rows(rows: Sequence[Sample]) -> str:
    if not rows:
        return '<div class="tg-dim">no row: nothing of it may be trained</div>'
    lines = "".join(
        f"<tr><td>{place}</td><td>{len(row.ids):,}</td><td>{row.trained_tokens:,}</td><td>{len(row.spans)}</td></tr>"
        for place, row in enumerate(islice(rows, _LINES))
    )
    count = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    heads = "".join(f"<th>{name}</th>" for name in ("row", "tokens", "trained", "turns"))
    return f"<details><summary>{count} for training</summary><table><tr>{heads}</tr>{lines}</table></details>"


def _texts(title: str, texts: Mapping[str, str], full: bool) -> str:
    if not texts:
        return ""
    most = None if full else _FILES
    parts = [
        f'<details class="tg-turn"><summary>{_said(sanitize_line(name))}</summary>'
        f'<div class="tg-text">{_said(_cut(text, full))}</div></details>'
        for name, text in islice(texts.items(), most)
    ]
    left = len(texts) - len(parts)
    more = f'<div class="tg-dim">{left:,} more are not shown</div>' if left else ""
    return f"<details><summary>{title}: {len(texts):,}</summary>{''.join(parts)}{more}</details>"


# ── in a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


def text(
    result: Result, *, turns: Sequence[int] | None = (), tokens: bool = False, full: bool = False
) -> RenderableType:
    """One result for a terminal: how it ended, and those turns that are asked for."""
    chosen = _chosen(result, turns)
    style = {"finished": "green", "error": "red"}.get(result.status, "yellow")
    reward = "reward not known" if result.reward is None else f"reward {result.reward:g}"
    lines = [
        Text.assemble(
            (sanitize_line(result.task_id), "bold"),
            "  ",
            (sanitize_line(result.status), f"bold {style}"),
            f"  {reward}  {result.wall_s:.1f} s",
        ),
        _line("ran", sanitize_line(" · ".join(word for word in (result.agent, result.model, result.mode) if word))),
        _line(
            "turns",
            f"{len(result.turns)}, {result.sampled_tokens:,} sampled tokens, "
            + ("1 row" if len(result.rows) == 1 else f"{len(result.rows)} rows"),
        ),
    ]
    if result.error is not None:
        where = f"{result.error.boundary}, in stage {result.error.stage}: " if result.error.stage else ""
        lines.append(_line("error", sanitize(where + _cut(result.error.message, False)), "red"))
    if result.files:
        names = [sanitize_line(name) for name in islice(result.files, 8)]
        left = len(result.files) - len(names)
        lines.append(_line("files", ", ".join(names) + (f" and {left} more" if left else "")))
    if result.session:
        lines.append(_line("session", sanitize_line(result.session), "dim"))
    lines += [_line("note", sanitize_line(note), "yellow") for note in result.notes]
    shown, left = _fitting(chosen, full)
    for place, turn in enumerate(shown):
        if left and place == len(shown) // 2:
            lines.append(Text(f"… {left} turns are not shown …", style="dim"))
        lines += _spelled(turn, tokens, full)
    return Group(*lines)


def _spelled(turn: Turn, tokens: bool, full: bool) -> list[Text]:
    lines = [
        Text.assemble(
            (sanitize_line(str(message.get("role", ""))), "bold blue"), f" {sanitize(_cut(_words(message), full))}"
        )
        for message in turn.heard
    ]
    lines.append(Text(_headline(turn), style="bold green"))
    if not tokens or not len(turn.ids):
        return [*lines, Text(sanitize(_cut(_spoken(turn), full)))]
    said = Text()
    most = None if full else _TOKENS
    for _, piece, logprob in islice(_tokens(turn), most):
        said.append(sanitize(piece), style="underline" if logprob is None else _ink(logprob))
    return [*lines, said]


def _ink(logprob: float) -> str:
    likely = _shade(logprob) / (_SHADES - 1)
    return f"white on rgb({int(220 * (1 - likely) + 20)},{int(160 * likely + 20)},30)"


def _line(name: str, told: str, style: str = "") -> Text:
    return Text.assemble((f"  {name:8}", "dim"), (told, style))


def text_table(results: Results) -> RenderableType:
    """Several for a terminal."""
    shown = Table(title=repr(results), title_justify="left")
    for head in _HEADS:
        shown.add_column(head, overflow="fold")
    for place, one in enumerate(islice(results, _LINES)):
        reward = "?" if one.reward is None else f"{one.reward:g}"
        counts = (f"{len(one.turns)}", f"{one.sampled_tokens:,}", f"{one.wall_s:.1f}")
        cells = (str(place), sanitize_line(one.task_id), reward, sanitize_line(one.status), *counts, _why(one)[:200])
        shown.add_row(*map(Text, cells))
    return shown


def plain(what: RenderableType) -> str:
    """As it would be in a terminal without colours."""
    written = io.StringIO()
    Console(
        file=written, width=120, highlight=False, markup=False, emoji=False, color_system=None, force_jupyter=False
    ).print(what, soft_wrap=True)
    return written.getvalue().rstrip("\n")


# ── here ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_notebook() -> bool:
    """Whether this runs in the kernel of a notebook. Nothing is imported to find out."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def show(result: Result, *, turns: Sequence[int] | None, tokens: bool, full: bool) -> None:
    if in_notebook():
        _display(page(result, turns=turns, tokens=tokens, full=full))
    else:
        _print(text(result, turns=turns, tokens=tokens, full=full))


def show_all(results: Results) -> None:
    if in_notebook():
        _display(table(results))
    else:
        _print(text_table(results))


def changing(lines: Iterable[str]) -> Callable[[Iterable[str]], None]:
    """Plain lines in the output of a notebook's cell, and what puts others in their place."""
    from IPython.display import HTML, display

    handle = display(HTML(_plain_lines(lines)), display_id=True)
    return lambda others: handle.update(HTML(_plain_lines(others)))


def _display(page: str) -> None:
    from IPython.display import HTML, display

    display(HTML(page))


def _print(what: RenderableType) -> None:
    Console(highlight=False, markup=False, emoji=False).print(what, soft_wrap=True)
