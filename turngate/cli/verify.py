"""What `turngate verify` prints: a verdict per session, with its forks and what they cost.

Exit code 1 if anything is wrong, 2 if something that was asked for could not be done.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from turngate.agents.spec import find_agent as find_agent
from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import sanitize, sanitize_line, say
from turngate.common.validation import reject_credentials
from turngate.errors import ConfigError, EngineError, NotFound, TurngateError
from turngate.render import find_tokenizer
from turngate.rollout.transcript_diff import compare_transcript
from turngate.types import Json
from turngate.verify import (
    TOLERANCE,
    Fork,
    Part,
    Renderers,
    Replay,
    Scorer,
    ScriptedScorer,
    SkippedCheck,
    StoredSession,
    StoreReader,
    TranscriptComparison,
    Verdict,
    VerifyOptions,
    VLLMScorer,
    unreadable_verdict,
    verify,
)
from turngate.views.verdict import open_row_source

_LONG = 30  # characters of an excerpt
_BEFORE = 12  # of them before the first difference
_UNDER = " " * 10  # what is said of a fork stands under its cause
_PARTS: tuple[Part, ...] = ("structure", "rows", "render", "replay", "transcript")
_BELOW = ("rollouts", "*/rollouts", "batches/*/rollouts")
_DONE = {  # what an option asked for, if it was not done at all
    "render": "nothing was rendered",
    "replay": "nothing was scored",
    "transcript": "nothing was compared with --rollouts",
}


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

    @property
    def requested(self) -> tuple[Part, ...]:
        """Parts that were asked for by an option."""
        asked: dict[Part, bool] = {
            "render": bool(self.tokenizer or self.family),
            "replay": bool(self.engine),
            "transcript": bool(self.rollouts),
        }
        return tuple(part for part in asked if asked[part])


def report(asked: Asked) -> bool:
    """Print the verdicts; True if nothing is wrong. Raises where something that was asked for could not be done at all."""
    console = None if asked.as_json else new_console()
    verdicts: list[Verdict] = []
    try:
        for verdict in _verdicts(asked):
            verdicts.append(verdict)
            if console is not None:
                show(verdict, console, brief=asked.every and verdict.ok, requested=asked.requested)
    except TurngateError as error:
        if _ended(verdicts, console, [error.message]):
            raise
        return False
    undone = [f"{_DONE[part]}: {why}" for part in asked.requested if (why := _undone(part, verdicts))]
    if console is not None and asked.every:
        _totals(verdicts, console)
    fine = _ended(verdicts, console, undone)
    if undone and fine:
        raise ConfigError("; ".join(undone))
    return fine


def _verdicts(asked: Asked) -> Iterator[Verdict]:
    data = Path(asked.data)
    _refuse(asked)
    scorer, renderers = _scorer(asked), _renderers(asked)
    with StoreReader(data) as folder, open_row_source(data) as rows:
        means = VerifyOptions(
            rows=rows,
            renderers=renderers,
            scorer=scorer,
            tolerance=asked.tolerance,
            version=asked.version,
            transcript=transcripts(Path(asked.rollouts) if asked.rollouts else data),
        )
        yield from _looked(folder, asked, means)


def _looked(folder: StoreReader, asked: Asked, means: VerifyOptions) -> Iterator[Verdict]:
    if not asked.every:
        yield verify(folder, folder.resolve_id(asked.session), means)
        return
    for session_id in folder.sessions():
        try:
            yield verify(folder, session_id, means)
        except NotFound as error:
            if session_id in folder.sessions():  # else it was deleted meanwhile
                yield unreadable_verdict(session_id, error.message)
        except EngineError:
            raise
        except Exception as error:  # what makes us fall over one session must not hide the others
            yield unreadable_verdict(session_id, f"verify falls over it: {type(error).__name__}: {error}")


def _ended(verdicts: list[Verdict], console: Console | None, undone: list[str]) -> bool:
    """What there is to say at the end of all; True if nothing is wrong. Whoever asked for JSON gets it, whatever came of it."""
    fine = all(verdict.ok for verdict in verdicts)
    if console is None:
        print(msgspec.json.encode({"ok": fine and not undone, "sessions": verdicts, "undone": undone}).decode())
    elif not fine:  # else it is the error
        for what in undone:
            say(console, what, "red")
    return fine


def _undone(part: str, verdicts: list[Verdict]) -> str:
    """Why a part was looked at in no session; empty if it was in one."""
    if any(finding.part == part for verdict in verdicts for finding in verdict.findings):
        return ""
    reasons = Counter(_why(u, verdict) for verdict in verdicts for u in verdict.unchecked if u.part == part)
    return _one_of(reasons) or "there is no session that can be read"


def _why(missing: SkippedCheck, verdict: Verdict) -> str:
    """A reason without the session's own name, so that sessions can share it."""
    return missing.why.replace(verdict.session, "…") if verdict.session else missing.why


def _one_of(reasons: Counter[str]) -> str:
    """The most common reason, and how many others there are."""
    if not reasons:
        return ""
    [(why, _)] = reasons.most_common(1)
    more = len(reasons) - 1
    return f"{sanitize_line(why)} (and {_n(more, 'other reason')})" if more else sanitize_line(why)


def _totals(verdicts: list[Verdict], console: Console) -> None:
    wrong = sum(not verdict.ok for verdict in verdicts)
    counted = f"{_n(len(verdicts), 'session')}, {wrong or 'none'} with something wrong"
    say(console, counted, "red" if wrong else "green")
    for part in _PARTS:
        reasons = [next(_why(u, v) for u in v.unchecked if u.part == part) for v in verdicts if part in _missing(v)]
        if reasons:
            say(console, f"  – {_n(len(reasons), 'session')} with {part} not looked at: {_one_of(Counter(reasons))}")
    scored = [verdict.replay for verdict in verdicts if verdict.replay is not None]
    if scored:
        turns, tokens, outliers = map(sum, zip(*((r.turns, r.tokens, r.outliers) for r in scored), strict=True))
        say(
            console,
            f"  {_n(tokens, 'token')} of {_n(turns, 'turn')} scored again by {scored[0].engine}: "
            f"difference at most {_largest(scored):.2g}, {outliers} beyond {scored[0].tolerance:g}",
        )


def _largest(scored: list[Replay]) -> float:
    """One that is no number is larger than all."""
    return float(np.max([replay.largest for replay in scored]))


def transcripts(folder: Path) -> TranscriptComparison:
    """Compares what the agent left in `folder`, or in a folder of rollouts below it, with a trace."""
    places = _places(folder)

    def compare(session: StoredSession, trace: Json) -> tuple[list[str] | None, str]:
        name = session.config.metadata.get("agent")
        if not isinstance(name, str):
            return None, "no agent is recorded"
        left = next((place / session.id for place in places if (place / session.id).is_dir()), None)
        if left is None:
            return None, f"there is no log of the agent below {folder}; say where it is with --rollouts FOLDER"
        try:
            transcript = find_agent(name).spec.transcript
            if transcript is None:
                return None, f"{name} keeps no transcript"
            return compare_transcript(transcript, left, trace)[1], ""
        except TurngateError as error:
            return None, error.message

    return compare


def _places(folder: Path) -> list[Path]:
    """Where runs, batches (`--out`, or in the data folder) and training leave a folder for each session."""
    below = [place for pattern in _BELOW for place in sorted(folder.glob(pattern)) if place.is_dir()]
    return [folder, *below]


def _refuse(asked: Asked) -> None:
    """Raise for options that do not go together, or mean nothing."""
    if asked.every and asked.session != "last":
        raise ConfigError("session: give an id or --all, not both", param="session")
    if not (math.isfinite(asked.tolerance) and asked.tolerance >= 0):
        raise ConfigError(f"tolerance: {asked.tolerance:g} must be 0 or more", param="tolerance")
    if asked.rollouts and not Path(asked.rollouts).is_dir():
        raise ConfigError(f"rollouts: there is no folder {asked.rollouts}", param="rollouts")
    scoring = {
        "engine_url": bool(asked.engine_url),
        "engine_key_env": bool(asked.engine_key_env),
        "model": bool(asked.model),
        "policy_version": asked.version is not None,
        "tolerance": asked.tolerance != TOLERANCE,
    }
    for name in scoring if not asked.engine else ():
        if scoring[name]:
            option = name.replace("_", "-")
            raise ConfigError(f"{name}: --{option} is for scoring; say with what: --engine vllm", param=name)


def _renderers(asked: Asked) -> Renderers:
    return Renderers(tokenizer=find_tokenizer(asked.tokenizer) if asked.tokenizer else None, family=asked.family)


def _scorer(asked: Asked) -> Scorer | None:
    match asked.engine:
        case "":
            return None
        case "scripted":
            return ScriptedScorer()
        case "vllm":
            if not asked.engine_url or not asked.model:
                raise ConfigError("engine: vllm needs --engine-url and --model", param="engine_url")
            reject_credentials(asked.engine_url, "engine_url", "name an environment variable with --engine-key-env")
            if not _is_url(asked.engine_url):
                raise ConfigError(f"engine_url: {asked.engine_url!r} is not an http(s) URL", param="engine_url")
            return VLLMScorer(asked.engine_url, asked.model, key=_key(asked.engine_key_env))
        case other:
            raise ConfigError(f"engine: {other!r} cannot score a prompt; vllm and scripted can", param="engine")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of a port or an address that is none
        return False


def _key(variable: str) -> str:
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ConfigError(f"engine_key_env: the environment variable {variable} is not set", param="engine_key_env")
    return key


def show(verdict: Verdict, console: Console, *, brief: bool = False, requested: Collection[str] = ()) -> None:
    """`brief`: one line. `requested`: parts that were asked for, besides those that every session has."""
    counts = verdict.counts
    facts = (
        f"{_n(counts.turns, 'turn')}, {_n(counts.sampled_tokens, 'sampled token')}, {_n(counts.rows, 'row')}, "
        f"{_n(counts.trained_tokens, 'token')} to train"
    )
    mark = (f"✓ {_word(verdict, requested)}", "bold green") if verdict.ok else ("✗ wrong", "bold red")
    say(
        console,
        Text.assemble(
            mark, f"  {sanitize_line(verdict.session)}  ", (f"{sanitize_line(verdict.status)}, {facts}", "dim")
        ),
    )
    if brief:
        return
    _parts(verdict, console)
    for finding in verdict.wrong:
        where = f" ({finding.where})" if finding.where else ""
        say(
            console,
            Text.assemble(("  ✗ ", "red"), (f"{finding.check}  ", "bold"), sanitize(finding.what), (where, "dim")),
        )
    for note in verdict.notes:
        where = f" (node {note.node})" if note.node is not None else ""
        say(
            console, Text.assemble(("  ! ", "yellow"), (f"{note.check}  ", "bold"), sanitize(note.what), (where, "dim"))
        )
    _forks(verdict, console)
    _differences(verdict, console)


def _word(verdict: Verdict, requested: Collection[str]) -> str:
    """What a session without fault may be called: exact only if all of it was looked at."""
    owed = [part for part in _missing(verdict) if part != "transcript" or part in requested]
    return f"sound ({', '.join(owed)} not looked at)" if owed else "exact"


def _missing(verdict: Verdict) -> list[str]:
    """Parts of which no check was made."""
    made = {finding.part for finding in verdict.findings}
    return list(dict.fromkeys(u.part for u in verdict.unchecked if u.part not in made))


def _n(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _parts(verdict: Verdict, console: Console) -> None:
    lines: dict[str, Text] = {}
    for (part, check), ok in _outcomes(verdict).items():
        line = lines.setdefault(part, Text(f"  {part:11}"))
        line.append(f" {check}" if ok else f" ✗{check}", "green" if ok else "red")
    for line in lines.values():
        say(console, line)
    whole = _missing(verdict)
    for name, why in dict.fromkeys((u.part if u.part in whole else u.check, u.why) for u in verdict.unchecked):
        say(console, Text(f"  – {name} was not looked at: {sanitize_line(why)}", "dim"))
    if verdict.replay is not None:
        r = verdict.replay
        say(
            console,
            f"    {_n(r.tokens, 'token')} of {r.turns} of {_n(verdict.counts.turns, 'turn')} scored again by {r.engine}: "
            f"difference at most {r.largest:.2g}, mean {r.mean:.2g}, {r.outliers} beyond {r.tolerance:g}",
        )


def _outcomes(verdict: Verdict) -> dict[tuple[str, str], bool]:
    """Of each check that was made, whether it holds."""
    return {(f.part, f.check): f.ok for f in verdict.findings}


def _forks(verdict: Verdict, console: Console) -> None:
    if not verdict.forks:
        return
    say(console, "  Forks")
    for fork in verdict.forks:
        cause = fork.cause + (f" ({fork.detail})" if fork.detail else "")
        left = "" if fork.left is None else f"left node {fork.left} "
        before = _short(fork.before, end=True)
        say(console, Text.assemble(f"  {f'node {fork.node}':<7} ", (sanitize_line(cause), "bold")))
        say(console, f"{_UNDER}{left}at token {fork.token} · {_price((fork,))}")
        say(console, Text.assemble(_UNDER, ("was ", "dim"), (before, "dim"), "▸", _short(fork.was)))
        say(console, Text.assemble(_UNDER, ("now ", "dim"), (before, "dim"), "▸", _short(fork.now)))
    causes = Counter(fork.cause for fork in verdict.forks)
    counted = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common())
    say(console, Text(f"  In all: {counted}: {_price(verdict.forks)}", "dim"))


def _price(forks: Sequence[Fork]) -> str:
    sent, shared, wasted = map(sum, zip(*((f.sent, f.shared, f.wasted) for f in forks), strict=True))
    return f"sent {sent} · shared {shared} · wasted {wasted}"


def _differences(verdict: Verdict, console: Console) -> None:
    for found in verdict.differences:
        say(
            console,
            Text.assemble(
                ("  · ", "cyan"),
                f"the template would write branch {found.branch} otherwise from token {found.token} on (node {found.node}): ",
                (found.why, "bold"),
                (f"  {_apart(found.sent, found.template)}", "dim"),
            ),
        )


def _apart(sent: str, template: str) -> str:
    """Both, cut around the first character in which they differ."""
    sent, template = sanitize_line(sent), sanitize_line(template)
    if sent == template:
        return f"both {_short(sent)}"  # other ids for the same words
    shorter = min(len(sent), len(template))
    at = next((n for n in range(shorter) if sent[n] != template[n]), shorter)
    before = f"…{sent[at - _BEFORE : at]}" if at > _BEFORE else sent[:at]
    return f"sent {before}▸{_short(sent[at:])} · template {before}▸{_short(template[at:])}"


def _short(text: str, *, end: bool = False) -> str:
    text = sanitize_line(text)
    return text if len(text) <= _LONG else (f"…{text[-_LONG:]}" if end else f"{text[:_LONG]}…")
