"""`turngate export`: check the flags, export the rollouts, and print a summary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast, get_args

import msgspec
from rich.console import Console, RenderableType
from rich.text import Text

from turngate.cli.options import ExportOptions
from turngate.common.database_url import refuse_password_flag
from turngate.common.terminal import LiveDisplay, sanitize_line, say
from turngate.common.terminal import console as new_console
from turngate.errors import ConfigError
from turngate.trace.advantage import Choice
from turngate.trace.turn_advantage import Compare, TurnCredit
from turngate.trainers.export import ExportChoices, ExportResult, RolloutFilter, export
from turngate.trainers.teacher.config import TeacherConfig
from turngate.trainers.teacher.scoring import TeacherSummary

_LITERALS: Mapping[str, tuple[str, ...]] = {
    "unscored": ("keep", "drop"),
    "advantage": get_args(Choice),
    "keep": ("all", "best"),
}
_COMPARE: tuple[str, ...] = get_args(Compare)


def export_rollouts(options: ExportOptions) -> None:
    """Export the rollouts that the flags select, and print a summary."""
    choices = {"unscored": options.unscored, "advantage": options.advantage, "keep": options.keep}
    for name, value in choices.items():
        if value not in _LITERALS[name]:
            raise ConfigError(f"{name} must be one of {', '.join(_LITERALS[name])}, not {value!r}", param=name)
    for name, number in (("min_reward", options.min_reward), ("margin", options.margin)):
        if number is not None and not math.isfinite(number):
            raise ConfigError(f"{name} must be a finite number, not {number}", param=name)
    request = ExportChoices(
        format=options.format,
        wanted=RolloutFilter(
            groups=tuple(options.group or ()),
            tasks=tuple(options.task or ()),
            sessions=tuple(options.session or ()),
            min_reward=options.min_reward,
            resolved=options.resolved,
            unscored=cast(Any, options.unscored),
            unfinished=options.unfinished,
        ),
        form=cast(Any, options.form),
        advantage=cast(Any, options.advantage),
        imitate=options.imitate,
        keep=cast(Any, options.keep),
        margin=options.margin,
        pairs=options.pairs,
        prompt_ids=options.prompt_ids,
        side=tuple(options.side or ()),
        turn_rewards=options.turn_rewards,
        credit=_read_credit(options),
        teacher=_build_teacher(options),
        teacher_cache=options.teacher_cache,
        tokenizer=options.tokenizer,
    )
    refuse_password_flag(options.data)
    with _ScoringDisplay(new_console(stderr=True)) as display:
        done = export(options.data, options.out, request, display.watch)
    if options.as_json:
        print(msgspec.json.encode(done, enc_hook=str).decode())
    else:
        print_summary(done)


def _read_credit(options: ExportOptions) -> TurnCredit | None:
    """Return how to compute the advantages of turns, or None if they are not requested."""
    if not options.credit:
        if options.gamma != 1:
            raise ConfigError(
                "gamma applies only to turn advantages; also pass --credit turn_index or --credit all_turns (formats rows and tree only)",
                param="gamma",
            )
        return None
    if options.credit not in _COMPARE:
        raise ConfigError(f"credit must be one of {', '.join(_COMPARE)}, not {options.credit!r}", param="credit")
    return TurnCredit(compare=cast(Any, options.credit), gamma=options.gamma)


def _build_teacher(options: ExportOptions) -> TeacherConfig | None:
    if options.teacher:
        return TeacherConfig(
            engine=cast(Any, options.teacher),
            url=options.teacher_url,
            model=options.teacher_model,
            version=options.teacher_version,
            top_k=options.teacher_top_k,
            tokenizer=options.teacher_tokenizer,
            concurrency=options.teacher_concurrency,
        )
    for name in ("url", "model", "version", "top_k", "tokenizer", "concurrency"):
        flag = f"teacher_{name}"
        if getattr(options, flag) != getattr(ExportOptions, flag):
            raise ConfigError(
                f"{flag} applies only with a teacher; also pass --teacher (formats rows and tree only)", param=flag
            )
    return None


class _ScoringDisplay(LiveDisplay):
    """Shows on a terminal how many turns the teacher has scored."""

    def __init__(self, to: Console) -> None:
        super().__init__(to)
        self._text = ""

    def watch(self, summary: TeacherSummary) -> None:
        self._text = f"teacher: {_count(summary.turns, 'turn')} scored, {summary.cached:,} cached"

    def _render(self) -> RenderableType:
        return Text(self._text)


def print_summary(done: ExportResult) -> None:
    console = new_console()
    of = f"{_count(done.rollouts, 'rollout')} in {_count(done.groups, 'group')}"
    say(console, f"{_count(done.records, 'record')} of {of} → {done.out}{_describe_replaced(done)}")
    if done.teacher is not None:
        say(console, f"  teacher   {sanitize_line(_describe_teacher(done.teacher))}")
    for note in done.notes:
        say(console, f"  note      {note}", "yellow")
    for reason, count in done.left_out.items():
        say(console, f"  left out  {count} × {sanitize_line(reason)}", "yellow")
    for what in done.lost:
        say(console, f"  lost      {what}", "dim")


def _describe_teacher(teacher: TeacherSummary) -> str:
    version = f" version {teacher.version}" if teacher.version else ""
    return (
        f"{teacher.model}{version}: {_count(teacher.scored_rows, 'row')} with scores, {teacher.unscored.total():,} without; "
        f"{_count(teacher.turns, 'turn')} scored in {_count(teacher.calls, 'call')}, "
        f"{_count(teacher.cached, 'turn')} not sent (already scored, or part of another call)"
    )


def _describe_replaced(done: ExportResult) -> str:
    """Describe what happened to files that already existed: how many were replaced, and how many were kept."""
    if not done.out.is_dir():
        return " (replaced the existing file)" if done.replaced else ""
    facts = [f"{_count(done.replaced_files, 'file')} replaced"] if done.replaced_files else []
    facts += [f"{_count(done.other_files, 'other file')} kept"] if done.other_files else []
    return f" ({'; '.join(facts)})" if facts else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
