"""What `turngate verify` prints: a verdict per session, with its forks and what they cost. Exit code 1 if anything is wrong."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.agents.spec import find as find_agent
from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import one_line, safe, say
from turngate.errors import ConfigError, TurngateError
from turngate.render import find
from turngate.rollout.agreement import differences
from turngate.types import Json
from turngate.verdicts import stored_rows
from turngate.verify import (
    TOLERANCE,
    VLLM,
    Derived,
    Folder,
    Means,
    Renderers,
    Scorer,
    Session,
    Transcript,
    Verdict,
    verify,
)

_LONG = 32  # characters of an excerpt


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command."""

    session: str = "last"
    every: bool = False
    data: str = "turngate-data"
    engine: str = ""
    engine_url: str = ""
    engine_key_env: str = ""
    model: str = ""
    version: int | None = None
    tolerance: float = TOLERANCE
    tokenizer: str = ""
    family: str = ""
    rollouts: str = ""
    as_json: bool = False


def report(asked: Asked) -> bool:
    """Print the verdicts; True if nothing is wrong."""
    data = Path(asked.data)
    scorer = _scorer(asked)
    with Folder(data) as folder, stored_rows(data) as rows:
        means = Means(
            rows=rows,
            renderers=Renderers(tokenizer=find(asked.tokenizer) if asked.tokenizer else None, family=asked.family),
            scorer=scorer,
            tolerance=asked.tolerance,
            version=asked.version,
            transcript=transcripts(Path(asked.rollouts) if asked.rollouts else data / "rollouts"),
        )
        wanted = folder.sessions() if asked.every else [folder.chosen(asked.session)]
        console = new_console()
        verdicts = []
        for session_id in wanted:
            verdict = verify(folder, session_id, means)
            verdicts.append(verdict)
            if not asked.as_json:
                show(verdict, console, brief=asked.every and verdict.ok)
    ok = all(verdict.ok for verdict in verdicts)
    if asked.as_json:
        print(msgspec.json.encode({"ok": ok, "sessions": verdicts}).decode())
    elif asked.every:
        wrong = sum(not verdict.ok for verdict in verdicts)
        say(console, f"{len(verdicts)} sessions, {wrong or 'none'} with something wrong", "red" if wrong else "green")
    return ok


def transcripts(folder: Path) -> Transcript:
    """Compares what the agent left in `folder` with a trace."""

    def compare(session: Session, trace: Json) -> tuple[list[str] | None, str]:
        left, name = folder / session.id, session.config.metadata.get("agent")
        if not left.is_dir() or not isinstance(name, str):
            return None, f"there is no {left}" if isinstance(name, str) else "no agent is recorded"
        try:
            transcript = find_agent(name).spec.transcript
            if transcript is None:
                return None, f"{name} keeps no transcript"
            return differences(transcript, left, trace)[1], ""
        except TurngateError as error:
            return None, error.message

    return compare


def _scorer(asked: Asked) -> Scorer | None:
    match asked.engine:
        case "":
            if asked.engine_url:
                raise ConfigError("engine: say which one it is: --engine vllm", param="engine")
            return None
        case "scripted":
            return Derived()
        case "vllm":
            if not asked.engine_url or not asked.model:
                raise ConfigError("engine: vllm needs --engine-url and --model", param="engine_url")
            key = os.environ.get(asked.engine_key_env, "") if asked.engine_key_env else ""
            return VLLM(asked.engine_url, asked.model, key=key)
        case other:
            raise ConfigError(f"engine: {other!r} cannot score a prompt; vllm and scripted can", param="engine")


def show(verdict: Verdict, console: Console, *, brief: bool = False) -> None:
    """`brief`: one line."""
    counts = verdict.counts
    facts = f"{counts.turns} turns, {counts.sampled_tokens} sampled tokens, {counts.rows} rows, {counts.trained_tokens} tokens to train"
    mark = ("✓ exact", "bold green") if verdict.ok else ("✗ wrong", "bold red")
    say(console, Text.assemble(mark, f"  {one_line(verdict.session)}  ", (f"{verdict.status}, {facts}", "dim")))
    if brief:
        return
    _parts(verdict, console)
    for finding in verdict.wrong:
        where = f" ({finding.where})" if finding.where else ""
        say(console, Text.assemble(("  ✗ ", "red"), (f"{finding.check}  ", "bold"), safe(finding.what), (where, "dim")))
    for note in verdict.notes:
        where = f" (node {note.node})" if note.node is not None else ""
        say(console, Text.assemble(("  ! ", "yellow"), (f"{note.check}  ", "bold"), safe(note.what), (where, "dim")))
    _forks(verdict, console)
    _differences(verdict, console)


def _parts(verdict: Verdict, console: Console) -> None:
    lines: dict[str, Text] = {}
    for (part, check), ok in _outcomes(verdict).items():
        line = lines.setdefault(part, Text(f"  {part:11}"))
        line.append(f" {check}", "dim" if ok is None else "green" if ok else "red")
    for line in lines.values():
        say(console, line)
    for why in dict.fromkeys((u.part, u.why) for u in verdict.unchecked):
        say(console, Text(f"    {why[0]} was not looked at: {one_line(why[1])}", "dim"))
    if verdict.replay is not None:
        r = verdict.replay
        say(
            console,
            f"    {r.tokens} tokens of {r.turns} turns scored again by {r.engine}: difference at most {r.largest:.2g}, "
            f"mean {r.mean:.2g}, {r.outliers} beyond {r.tolerance:g}",
        )


def _outcomes(verdict: Verdict) -> dict[tuple[str, str], bool | None]:
    """Of each check, whether it holds; None: it was not made."""
    found: dict[tuple[str, str], bool | None] = {(f.part, f.check): f.ok for f in verdict.findings}
    return found | {(missing.part, missing.check): None for missing in verdict.unchecked}


def _forks(verdict: Verdict, console: Console) -> None:
    if not verdict.forks:
        return
    table = Table(title="Forks", title_justify="left")
    for heading in ("node", "cause", "left", "at token", "was / now", "in two rows", "sent anew", "wasted"):
        table.add_column(heading, overflow="fold")
    for fork in verdict.forks:
        cause = fork.cause + (f" ({fork.detail})" if fork.detail else "")
        before = _short(fork.before, end=True)
        here = f"{before}▸{_short(fork.was)}\n{before}▸{_short(fork.now)}"
        left = "" if fork.left is None else str(fork.left)
        table.add_row(
            str(fork.node),
            one_line(cause),
            left,
            str(fork.token),
            here,
            str(fork.shared),
            str(fork.sent),
            str(fork.wasted),
        )
    console.print(table)
    causes = Counter(fork.cause for fork in verdict.forks)
    counted = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common())
    anew, twice, wasted = map(sum, zip(*((f.sent, f.shared, f.wasted) for f in verdict.forks), strict=True))
    price = f"{anew} prompt tokens read anew, {twice} in more than one row, {wasted} sampled for nothing"
    say(console, Text(f"  {counted}: {price}", "dim"))


def _differences(verdict: Verdict, console: Console) -> None:
    for found in verdict.differences:
        say(
            console,
            Text.assemble(
                ("  · ", "cyan"),
                f"the template would write branch {found.branch} otherwise from token {found.token} on (node {found.node}): ",
                (found.why, "bold"),
                (f"  sent {_short(found.sent)} · template {_short(found.template)}", "dim"),
            ),
        )


def _short(text: str, *, end: bool = False) -> str:
    text = one_line(text)
    return text if len(text) <= _LONG else (f"…{text[-_LONG:]}" if end else f"{text[:_LONG]}…")
