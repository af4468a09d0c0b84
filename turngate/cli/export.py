"""What `turngate export` does around an export: what the flags mean, and what is told afterwards."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import sanitize_line, say
from turngate.errors import ConfigError
from turngate.trace.advantage import Choice
from turngate.trainers.export import Choices, Exported, Wanted, export

_LITERALS: Mapping[str, tuple[str, ...]] = {
    "unscored": ("keep", "drop"),
    "advantage": get_args(Choice),
    "keep": ("all", "best"),
}


def ordered(given: Mapping[str, Any]) -> None:
    """Write what the flags ask for."""
    for name, known in _LITERALS.items():
        if given[name] not in known:
            raise ConfigError(f"{name}: {given[name]!r} is none of {', '.join(known)}", param=name)
    for name in ("min_reward", "margin"):
        if given[name] is not None and not math.isfinite(given[name]):
            raise ConfigError(f"{name}: {given[name]} is no finite number", param=name)
    choices = Choices(
        format=given["format"],
        wanted=Wanted(
            groups=tuple(given["group"] or ()),
            tasks=tuple(given["task"] or ()),
            sessions=tuple(given["session"] or ()),
            min_reward=given["min_reward"],
            resolved=given["resolved"],
            unscored=given["unscored"],
            unfinished=given["unfinished"],
        ),
        form=given["form"],
        advantage=given["advantage"],
        imitate=given["imitate"],
        keep=given["keep"],
        margin=given["margin"],
        pairs=given["pairs"],
        prompt_ids=given["prompt_ids"],
    )
    done = export(given["data"], given["out"], choices)
    if given["as_json"]:
        print(msgspec.json.encode(done, enc_hook=str).decode())
    else:
        tell(done)


def tell(done: Exported) -> None:
    console = new_console()
    of = f"{_count(done.rollouts, 'rollout')} in {_count(done.groups, 'group')}"
    say(console, f"{_count(done.records, 'record')} of {of} → {done.out}{_before(done)}")
    for note in done.notes:
        say(console, f"  note      {note}", "yellow")
    for why, count in done.left_out.items():
        say(console, f"  left out  {count} × {sanitize_line(why)}", "yellow")
    for what in done.lost:
        say(console, f"  lost      {what}", "dim")


def _before(done: Exported) -> str:
    """What was there already."""
    if not done.out.is_dir():
        return " (what was there is replaced)" if done.replaced else ""
    facts = [f"{_count(done.replaced_files, 'file')} there replaced"] if done.replaced_files else []
    facts += [f"{_count(done.other_files, 'other file')} there before, and kept"] if done.other_files else []
    return f" ({'; '.join(facts)})" if facts else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
