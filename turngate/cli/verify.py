"""`turngate verify`: verify sessions, and print the verdict on each session with its forks and their cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import numpy as np
from rich.console import Console
from rich.text import Text

from turngate.agents.spec import find_agent, read_description
from turngate.cli.options import VerifyCommandOptions
from turngate.client.keys import read_engine_key
from turngate.common.database_url import is_database_url, refuse_password_flag
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize, sanitize_line, say
from turngate.common.validation import reject_credentials
from turngate.errors import ConfigError, EngineError, NotFound, TurngateError
from turngate.render import find_tokenizer
from turngate.rollout.transcript_diff import compare_transcript
from turngate.types import DeliveredTurn
from turngate.verify import (
    TOLERANCE,
    ForkReport,
    Part,
    Renderers,
    Replay,
    Scorer,
    ScriptedScorer,
    SessionReader,
    SkippedCheck,
    StoredSession,
    TranscriptComparison,
    Verdict,
    VerifyOptions,
    VLLMScorer,
    open_session_reader,
    unreadable_verdict,
    verify,
)
from turngate.views.session import open_row_source

_LONG = 30  # maximum number of characters in an excerpt
_BEFORE = 12  # number of characters shown before the first difference
_INDENT = " " * 10  # indentation of the lines below the cause of a fork
_PARTS: tuple[Part, ...] = ("structure", "rows", "render", "replay", "transcript")
_ROLLOUT_FOLDERS = ("rollouts", "*/rollouts", "batches/*/rollouts")
_NOT_DONE = {  # error messages, by requested part
    "render": "nothing was rendered",
    "replay": "nothing was scored",
    "transcript": "no session was compared with the logs in --rollouts",
}


def list_requested_parts(options: VerifyCommandOptions) -> tuple[Part, ...]:
    """Return the parts of the verification that the options request explicitly."""
    requested: dict[Part, bool] = {
        "render": bool(options.tokenizer or options.family),
        "replay": bool(options.engine),
        "transcript": bool(options.rollouts),
    }
    return tuple(part for part in requested if requested[part])


def verify_sessions(options: VerifyCommandOptions) -> bool:
    """Print the verdicts. Return False if errors were found.

    Otherwise, return True, or raise an error if the verification stopped early or a requested part was not checked in any session.
    """
    requested = list_requested_parts(options)
    console = None if options.as_json else new_console()
    verdicts: list[Verdict] = []
    try:
        for verdict in _iterate_verdicts(options):
            verdicts.append(verdict)
            if console is not None:
                print_verdict(verdict, console, brief=options.every and verdict.ok, requested=requested)
    except TurngateError as error:
        if _finish(verdicts, console, [error.message]):
            raise
        return False
    undone = [f"{_NOT_DONE[part]}: {why}" for part in requested if (why := _reason_not_done(part, verdicts))]
    if console is not None and options.every:
        _print_totals(verdicts, console)
    fine = _finish(verdicts, console, undone)
    if undone and fine:
        raise ConfigError("; ".join(undone))
    return fine


def _iterate_verdicts(options: VerifyCommandOptions) -> Iterator[Verdict]:
    data = options.data
    refuse_password_flag(data)
    _check_options(options)
    scorer, renderers = _build_scorer(options), _build_renderers(options)
    with open_session_reader(data) as folder, open_row_source(data) as rows:
        means = VerifyOptions(
            rows=rows,
            renderers=renderers,
            scorer=scorer,
            tolerance=options.tolerance,
            version=options.policy_version,
            transcript=compare_transcripts(
                Path(options.rollouts or (options.data if not is_database_url(data) else "."))
            ),
        )
        yield from _verify_selected(folder, options, means)


def _verify_selected(folder: SessionReader, options: VerifyCommandOptions, means: VerifyOptions) -> Iterator[Verdict]:
    if not options.every:
        yield verify(folder, folder.resolve_id(options.session), means)
        return
    for session_id in folder.session_ids():
        try:
            yield verify(folder, session_id, means)
        except NotFound as error:
            if session_id in folder.session_ids():  # otherwise the session has just been deleted
                yield unreadable_verdict(session_id, error.message)
        except EngineError:
            raise
        except Exception as error:  # a bug that one session triggers must not hide the other verdicts
            yield unreadable_verdict(session_id, f"verification crashed: {type(error).__name__}: {error}")


def _finish(verdicts: list[Verdict], console: Console | None, undone: list[str]) -> bool:
    """Print the results as JSON or, on a console, the messages in `undone`. Return True if no errors were found.

    `undone` says what was not verified, and why. On a console, it is printed only if errors were found. Otherwise, the caller raises an
    error that contains it.
    """
    fine = all(verdict.ok for verdict in verdicts)
    if console is None:
        print(msgspec.json.encode({"ok": fine and not undone, "sessions": verdicts, "undone": undone}).decode())
    elif not fine:  # otherwise the caller raises an error that contains `undone`
        for what in undone:
            say(console, what, "red")
    return fine


def _reason_not_done(part: str, verdicts: list[Verdict]) -> str:
    """Return why a part was not checked in any session, or an empty string if it was checked in at least one."""
    if any(finding.part == part for verdict in verdicts for finding in verdict.findings):
        return ""
    reasons = Counter(
        _normalize_reason(u, verdict) for verdict in verdicts for u in verdict.unchecked if u.part == part
    )
    return _summarize_reasons(reasons) or "no readable session was found"


def _normalize_reason(missing: SkippedCheck, verdict: Verdict) -> str:
    """Replace the session's id in a reason with "…", so that the same reason can be counted over several sessions."""
    return missing.why.replace(verdict.session, "…") if verdict.session else missing.why


def _summarize_reasons(reasons: Counter[str]) -> str:
    """Return the most common reason and the number of other reasons."""
    if not reasons:
        return ""
    [(why, _)] = reasons.most_common(1)
    more = len(reasons) - 1
    return f"{sanitize_line(why)} (and {_count(more, 'other reason')})" if more else sanitize_line(why)


def _print_totals(verdicts: list[Verdict], console: Console) -> None:
    wrong = sum(not verdict.ok for verdict in verdicts)
    counted = f"{_count(len(verdicts), 'session')}, {wrong or 'none'} wrong"
    say(console, counted, "red" if wrong else "green")
    for part in _PARTS:
        reasons = [
            next(_normalize_reason(u, v) for u in v.unchecked if u.part == part)
            for v in verdicts
            if part in _list_unchecked_parts(v)
        ]
        if reasons:
            say(
                console,
                f"  – {_count(len(reasons), 'session')} with {part} not checked: {_summarize_reasons(Counter(reasons))}",
            )
    scored = [verdict.replay for verdict in verdicts if verdict.replay is not None]
    if scored:
        turns, tokens, outliers = map(sum, zip(*((r.turns, r.tokens, r.outliers) for r in scored), strict=True))
        say(
            console,
            f"  {_count(tokens, 'token')} in {_count(turns, 'turn')} rescored by {scored[0].engine}: "
            f"largest difference {_largest(scored):.2g}, {outliers} beyond {scored[0].tolerance:g}",
        )


def _largest(scored: list[Replay]) -> float:
    """Return the largest difference over all sessions, or NaN if any difference is NaN."""
    return float(np.max([replay.largest for replay in scored]))


def compare_transcripts(folder: Path) -> TranscriptComparison:
    """Return a function that compares a trace with the agent's logs in `folder` or in one of the `rollouts` folders below it."""
    places = _find_rollout_folders(folder)

    def compare(session: StoredSession, recorded: list[DeliveredTurn]) -> tuple[list[str] | None, str]:
        name = session.config.metadata.get("agent")
        if not isinstance(name, str):
            return None, "no agent is recorded"
        logs = next((place / session.id for place in places if (place / session.id).is_dir()), None)
        if logs is None:
            return (
                None,
                f"no logs of the agent were found in {folder}; pass the folder that contains them as --rollouts",
            )
        try:
            spec = read_description(logs) or find_agent(name).spec
            transcript = spec.transcript
            if transcript is None:
                return None, f"{name} does not keep a transcript"
            return compare_transcript(transcript, logs, recorded, session.stop)[1], ""
        except TurngateError as error:
            return None, error.message

    return compare


def _find_rollout_folders(folder: Path) -> list[Path]:
    """Return `folder` and the folders below it in which `run`, `batch` (with or without `--out`) and `train` create session folders."""
    below = [place for pattern in _ROLLOUT_FOLDERS for place in sorted(folder.glob(pattern)) if place.is_dir()]
    return [folder, *below]


def _check_options(options: VerifyCommandOptions) -> None:
    """Raise ConfigError for options that are invalid, contradict each other or have no effect."""
    if options.every and options.session != "last":
        raise ConfigError("pass a session id or --all, not both", param="session")
    if not (math.isfinite(options.tolerance) and options.tolerance >= 0):
        raise ConfigError(f"tolerance must be finite and 0 or greater, not {options.tolerance:g}", param="tolerance")
    if options.rollouts and not Path(options.rollouts).is_dir():
        raise ConfigError(f"rollouts must be an existing folder, not {options.rollouts!r}", param="rollouts")
    scoring = {
        "engine_url": bool(options.engine_url),
        "engine_key_env": bool(options.engine_key_env),
        "model": bool(options.model),
        "policy_version": options.policy_version is not None,
        "tolerance": options.tolerance != TOLERANCE,
    }
    for name in scoring if not options.engine else ():
        if scoring[name]:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} applies only to scoring; to score, pass --engine vllm with --engine-url and --model",
                param=name,
            )
    for name in ("engine_url", "engine_key_env", "model") if options.engine == "scripted" else ():
        if scoring[name]:
            option = name.replace("_", "-")
            raise ConfigError(
                f"--{option} has no effect with --engine scripted; remove --{option}, or pass --engine vllm", param=name
            )


def _build_renderers(options: VerifyCommandOptions) -> Renderers:
    return Renderers(tokenizer=find_tokenizer(options.tokenizer) if options.tokenizer else None, family=options.family)


def _build_scorer(options: VerifyCommandOptions) -> Scorer | None:
    match options.engine:
        case "":
            return None
        case "scripted":
            return ScriptedScorer()
        case "vllm":
            if not options.engine_url or not options.model:
                raise ConfigError("--engine vllm needs --engine-url and --model", param="engine_url")
            reject_credentials(
                options.engine_url,
                "engine_url",
                "set an environment variable to the engine's API key, and pass the variable's name as --engine-key-env",
            )
            if not _is_url(options.engine_url):
                raise ConfigError(f"engine_url must be an http(s) URL, not {options.engine_url!r}", param="engine_url")
            key = read_engine_key(options.engine_key_env) if options.engine_key_env else ""
            return VLLMScorer(options.engine_url, options.model, key=key)
        case other:
            raise ConfigError(f"engine must be vllm or scripted, not {other!r}", param="engine")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port or address
        return False


def print_verdict(verdict: Verdict, console: Console, *, brief: bool = False, requested: Collection[str] = ()) -> None:
    """Print a verdict, on one line if `brief` is set. `requested` contains the parts that were requested explicitly."""
    counts = verdict.counts
    facts = (
        f"{_count(counts.turns, 'turn')}, {_count(counts.sampled_tokens, 'sampled token')}, {_count(counts.rows, 'row')}, "
        f"{_count(counts.trained_tokens, 'token')} to train"
    )
    if counts.turns and not counts.trained_tokens:
        facts += " (`turngate show` explains why)"
    mark = (f"✓ {_verdict_word(verdict, requested)}", "bold green") if verdict.ok else ("✗ wrong", "bold red")
    say(
        console,
        Text.assemble(
            mark, f"  {sanitize_line(verdict.session)}  ", (f"{sanitize_line(verdict.status)}, {facts}", "dim")
        ),
    )
    if brief:
        return
    _print_parts(verdict, console)
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
    _print_forks(verdict, console)
    _print_differences(verdict, console)


def _verdict_word(verdict: Verdict, requested: Collection[str]) -> str:
    """Return the verdict on a session without errors: `exact` if every part was checked, otherwise `sound` and the unchecked parts.

    The transcript counts only if it was requested.
    """
    open_parts = [part for part in _list_unchecked_parts(verdict) if part != "transcript" or part in requested]
    return f"sound ({', '.join(open_parts)} not checked)" if open_parts else "exact"


def _list_unchecked_parts(verdict: Verdict) -> list[str]:
    """Return the parts in which no check was performed."""
    checked = {finding.part for finding in verdict.findings}
    return list(dict.fromkeys(u.part for u in verdict.unchecked if u.part not in checked))


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_parts(verdict: Verdict, console: Console) -> None:
    outcomes = _outcomes(verdict)
    for part in dict.fromkeys(part for part, _ in outcomes):
        failed = [check for (one, check), ok in outcomes.items() if one == part and not ok]
        passed = sum(ok for (one, _), ok in outcomes.items() if one == part)
        line = Text(f"  {part:12}")
        if passed:
            line.append(f"{_count(passed, 'check')} passed", "green")
        if failed:
            line.append(f"{', ' if passed else ''}✗ {', '.join(failed)}", "red")
        say(console, line)
    unchecked = _list_unchecked_parts(verdict)
    for name, why in dict.fromkeys((u.part if u.part in unchecked else u.check, u.why) for u in verdict.unchecked):
        say(console, Text(f"  – {name} was not checked: {sanitize_line(why)}", "dim"))
    if verdict.replay is not None:
        r = verdict.replay
        say(
            console,
            f"    {_count(r.tokens, 'token')} in {r.turns} of {_count(verdict.counts.turns, 'turn')} rescored by {r.engine}: "
            f"largest difference {r.largest:.2g}, mean {r.mean:.2g}, {r.outliers} beyond {r.tolerance:g}",
        )


def _outcomes(verdict: Verdict) -> dict[tuple[str, str], bool]:
    """Return whether each check passed, by part and name. Checks that were not performed are left out."""
    return {(f.part, f.check): f.ok for f in verdict.findings}


def _print_forks(verdict: Verdict, console: Console) -> None:
    if not verdict.forks:
        return
    say(console, "  Forks")
    for fork in verdict.forks:
        cause = fork.cause + (f" ({fork.detail})" if fork.detail else "")
        left = "" if fork.left is None else f"diverges from node {fork.left} "
        before = _shorten(fork.before, end=True)
        say(console, Text.assemble(f"  {f'node {fork.node}':<7} ", (sanitize_line(cause), "bold")))
        say(console, f"{_INDENT}{left}at token {fork.token} · {_describe_cost((fork,))}")
        say(console, Text.assemble(_INDENT, ("was ", "dim"), (before, "dim"), "▸", _shorten(fork.was)))
        say(console, Text.assemble(_INDENT, ("now ", "dim"), (before, "dim"), "▸", _shorten(fork.now)))
    causes = Counter(fork.cause for fork in verdict.forks)
    counted = ", ".join(f"{count} × {cause}" for cause, count in causes.most_common())
    say(console, Text(f"  Total: {counted}: {_describe_cost(verdict.forks)}", "dim"))


def _describe_cost(forks: Sequence[ForkReport]) -> str:
    sent, shared, wasted = map(sum, zip(*((f.sent, f.shared, f.wasted) for f in forks), strict=True))
    return f"sent {sent} · shared {shared} · wasted {wasted}"


def _print_differences(verdict: Verdict, console: Console) -> None:
    for difference in verdict.differences:
        say(
            console,
            Text.assemble(
                ("  · ", "cyan"),
                f"from token {difference.token} (node {difference.node}) on, the template renders branch {difference.branch} differently: ",
                (difference.why, "bold"),
                (f"  {_show_difference(difference.sent, difference.template)}", "dim"),
            ),
        )


def _show_difference(sent: str, template: str) -> str:
    """Return excerpts of both texts around the first character that differs."""
    sent, template = sanitize_line(sent), sanitize_line(template)
    if sent == template:
        return f"both {_shorten(sent)}"  # the texts are equal, so only the token ids differ
    shorter = min(len(sent), len(template))
    at = next((n for n in range(shorter) if sent[n] != template[n]), shorter)
    before = f"…{sent[at - _BEFORE : at]}" if at > _BEFORE else sent[:at]
    return f"sent {before}▸{_shorten(sent[at:])} · template {before}▸{_shorten(template[at:])}"


def _shorten(text: str, *, end: bool = False) -> str:
    text = sanitize_line(text)
    return text if len(text) <= _LONG else (f"…{text[-_LONG:]}" if end else f"{text[:_LONG]}…")
