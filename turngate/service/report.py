"""What is told of a rollout that has ended: its turns, what it said, what it left, how it was graded; each field within its bounds.

Pure but for reading what the agent left behind. Long traces take their time, so `Rollouts` calls it in a thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from turngate.errors import Boundary
from turngate.rollout.outcome import Outcome
from turngate.service.config import Clamp
from turngate.service.result import Captured, RolloutResult, RolloutState, RolloutTurn, Said, SaidCall, Trouble
from turngate.types import Json
from turngate.viewed import Viewed, ViewedTurn, read

DIRECT = "direct mode: the agent called the endpoint itself, and nothing was recorded but its own logs"
_LOOKED_AT = 20_000  # files of a working folder
_LOGS = 20  # of the agent's own
_NAMED = 10  # files that are told by name
_SKIPPED = {".git", "__pycache__", "node_modules", ".venv"}
_LEVELS: tuple[Captured, ...] = ("none", "text", "logprobs", "tokens")


class Cut:
    """Bounds fields, and notes what that cost."""

    def __init__(self, clamp: Clamp) -> None:
        self.clamp = clamp
        self.told: list[str] = []

    def middle(self, field: str, text: str, most: int) -> str:
        """The beginning and the end of a text."""
        if not most or len(text) <= most:
            return text
        left = len(text) - most
        self.told.append(f"{field}: {left:,} of {len(text):,} characters left out")
        return f"{text[: most // 2]}\n[… {left:,} characters left out …]\n{text[len(text) - (most - most // 2) :]}"

    def end(self, field: str, text: str, most: int) -> str:
        """The end of a log."""
        if not most or len(text) <= most:
            return text
        self.told.append(f"{field}: {len(text) - most:,} of {len(text):,} characters left out")
        return text[-most:]


# ── turns and messages ──────────────────────────────────────────────────────────────────────────────────────────────


def viewed(trace: Mapping[str, Json]) -> Viewed:
    return read(trace)


def turns(view: Viewed, cut: Cut) -> list[RolloutTurn]:
    """Every turn, oldest first; past the bounds the newest."""
    most = cut.clamp.turns
    chosen = view.turns if not most or len(view.turns) <= most else view.turns[-most:]
    if len(chosen) < len(view.turns):
        cut.told.append(f"turns: {len(view.turns) - len(chosen):,} of {len(view.turns):,} turns left out, the oldest")
    lengths = _lengths(view)
    room = cut.clamp.logprobs
    found = []
    for index, turn in enumerate(chosen):
        logprobs, room = _logprobs(index, turn, cut, room)
        whole = turn.capture == "tokens"
        message = msgspec.convert(turn.message, _Wire)
        found.append(
            RolloutTurn(
                node=turn.id,
                role=turn.role,
                finish_reason=turn.finish,
                prompt_tokens=lengths[turn.parent] if whole else None,
                sampled_tokens=len(turn.ids) if whole else None,
                logprobs=logprobs,
                capture=_captured(turn.capture),
                reasoning=cut.middle(f"turns[{index}].reasoning", message.thought, cut.clamp.text),
                text=cut.middle(f"turns[{index}].text", message.text, cut.clamp.text),
                tool_calls=_calls(f"turns[{index}]", message, cut),
                version_start=turn.version_start,
                version_end=turn.version_end,
            )
        )
    return found


def _lengths(view: Viewed) -> dict[int, int]:
    """Of each context: the ids of the prompt that ends with it."""
    sampled = {turn.id: turn for turn in view.turns}
    lengths: dict[int, int] = {}
    for context in view.contexts.values():  # a parent comes before its children
        before = 0
        if context.parent is not None:
            turn = sampled[context.parent]
            before = lengths[turn.parent] + len(turn.ids)
        lengths[context.id] = before + len(context.ids)
    return lengths


def _logprobs(index: int, turn: ViewedTurn, cut: Cut, room: int) -> tuple[list[float] | None, int]:
    if turn.logprobs is None or (turn.capture != "tokens" and not turn.ids):
        return None, room
    if not cut.clamp.logprobs:
        return turn.logprobs, room
    kept = turn.logprobs[: max(0, room)]
    if len(kept) < len(turn.logprobs):
        left = len(turn.logprobs) - len(kept)
        cut.told.append(f"turns[{index}].logprobs: {left:,} of {len(turn.logprobs):,} numbers left out, the last")
    return kept, room - len(kept)


class _Function(msgspec.Struct, frozen=True):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct, frozen=True):
    id: str = ""
    function: _Function = _Function()


class _Wire(msgspec.Struct, frozen=True):
    """A message in OpenAI's form, as far as it is shown."""

    role: str = ""
    content: str | list[Json] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @property
    def thought(self) -> str:
        return self.reasoning or self.reasoning_content or ""

    @property
    def text(self) -> str:
        """Parts are put together; what is no text is named."""
        if not isinstance(self.content, list):
            return self.content or ""
        parts = [part if isinstance(part, dict) else {"text": str(part)} for part in self.content]
        return "".join(str(part["text"]) if "text" in part else f"[{part.get('type', 'part')}]" for part in parts)


def _calls(field: str, message: _Wire, cut: Cut) -> list[SaidCall]:
    return [
        SaidCall(
            id=call.id,
            name=call.function.name,
            arguments=cut.middle(f"{field}.tool_calls[{n}].arguments", call.function.arguments, cut.clamp.text),
        )
        for n, call in enumerate(message.tool_calls or ())
    ]


def conversation(view: Viewed) -> list[Said]:
    """Every message of every branch, in the order in which it was recorded. A later trace of the same session begins with the same."""
    whole = Cut(Clamp(text=0))
    branches = _branches(view)
    answered: dict[int, ViewedTurn] = {}
    for turn in view.turns:
        answered.setdefault(turn.parent, turn)
    nodes: list[tuple[int, list[Json], ViewedTurn | None, bool]] = [
        *((context.id, context.messages, answered.get(context.id), False) for context in view.contexts.values()),
        *((turn.id, [turn.message], turn, True) for turn in view.turns),
    ]
    found: list[Said] = []
    for node, messages, whose, sampled in sorted(nodes, key=lambda one: one[0]):
        for wire in messages:
            message = msgspec.convert(wire, _Wire)
            found.append(
                Said(
                    cursor=len(found) + 1,
                    node=node,
                    branch=branches[node],
                    turn_role=whose.role if whose is not None else "main",
                    role="assistant" if sampled else message.role,
                    text=message.text,
                    reasoning=message.thought,
                    tool_calls=_calls("", message, whole),
                    tool_call_id=message.tool_call_id or "",
                    finish_reason=whose.finish if sampled and whose is not None else "",
                    sampled=sampled,
                )
            )
    return found


def _branches(view: Viewed) -> dict[int, int]:
    """A number for each path: who goes on from a node first keeps its number, who comes later begins another."""
    parents: dict[int, int | None] = {context.id: context.parent for context in view.contexts.values()}
    parents |= {turn.id: turn.parent for turn in view.turns}
    numbers: dict[int, int] = {}
    gone_on: set[int] = set()
    for node in sorted(parents):
        parent = parents[node]
        if parent is not None and parent not in gone_on:
            gone_on.add(parent)
            numbers[node] = numbers[parent]
        else:
            numbers[node] = 1 + max(numbers.values(), default=-1)
    return numbers


def page(said: Sequence[Said], after: int, limit: int, clamp: Clamp) -> tuple[list[Said], list[str]]:
    """Messages past a cursor, within bounds, and what that cost."""
    cut = Cut(clamp)
    found = []
    for one in said[after : after + limit]:
        where = f"messages[{one.cursor}]"
        calls = [
            msgspec.structs.replace(
                call, arguments=cut.middle(f"{where}.tool_calls[{n}].arguments", call.arguments, clamp.text)
            )
            for n, call in enumerate(one.tool_calls)
        ]
        text = cut.middle(f"{where}.text", one.text, clamp.text)
        reasoning = cut.middle(f"{where}.reasoning", one.reasoning, clamp.text)
        found.append(msgspec.structs.replace(one, text=text, reasoning=reasoning, tool_calls=calls))
    return found, cut.told


def _captured(told: str) -> Captured:
    return next(level for level in _LEVELS if level == told)


def _least(found: Sequence[RolloutTurn]) -> Captured:
    return min((turn.capture for turn in found), key=_LEVELS.index, default="none")


# ── what the agent left ─────────────────────────────────────────────────────────────────────────────────────────────


def workdir(folder: Path, since: float, cut: Cut) -> dict[str, str]:
    """Its working folder as text: what was changed last comes first, and what is no text is only named."""
    clamp = cut.clamp
    paths, more = _files(folder)
    paths.sort(key=lambda one: (one[1] < since - 1, one[0].count("/"), one[0]))
    found: dict[str, str] = {}
    odd: list[str] = []
    room = clamp.all_files
    left = 0
    for name, _ in paths:
        if (clamp.files and len(found) >= clamp.files) or (clamp.all_files and room <= 0):
            left += 1
            continue
        most = min(clamp.file or room, room) if clamp.all_files else clamp.file
        text = _text(folder / name, most)
        if text is None:
            odd.append(name)
            continue
        data, size = text
        if size > len(data.encode()):
            cut.told.append(f"workdir_files[{name!r}]: {size - len(data.encode()):,} of {size:,} bytes left out")
        room -= len(data)
        found[name] = data
    if odd:
        cut.told.append(f"workdir_files: {len(odd):,} files are no text, and left out: {_some(odd)}")
    if left or more:
        cut.told.append(f"workdir_files: {left:,}{' and more' if more else ''} of {len(paths):,} files left out")
    return found


def _files(folder: Path) -> tuple[list[tuple[str, float]], bool]:
    """Regular files below a folder with their times; and whether there are more than are looked at."""
    found: list[tuple[str, float]] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(names):
            path = Path(place, name)
            if path.is_symlink() or not path.is_file():
                continue
            if len(found) >= _LOOKED_AT:
                return found, True
            shown = str(path.relative_to(folder)).encode("utf-8", "backslashreplace").decode()
            if shown == str(path.relative_to(folder)):  # a name that is no text cannot be told
                found.append((shown, path.stat().st_mtime))
    return found, False


def _text(path: Path, most: int) -> tuple[str, int] | None:
    """The beginning of a file, and its size in bytes. None: it is no text."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            data = file.read(4 * most if most else -1)
    except OSError:
        return None
    if b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4 or len(data) == size:  # not only a character that was cut in two
            return None
        text = data[: error.start].decode()
    return (text[:most] if most else text), size


def logs(folder: Path, cut: Cut) -> dict[str, str]:
    """The ends of what it printed, and of its own logs and transcripts."""
    names = ["stdout", "stderr"]
    below = sorted(name for name, _ in _files(folder / "home")[0])
    if len(below) > _LOGS:
        cut.told.append(f"log_tails: {len(below) - _LOGS:,} of {len(below):,} log files left out")
    names += [f"home/{name}" for name in below[:_LOGS]]
    ends = {name: _tail(folder / name, f"log_tails[{name!r}]", cut, cut.clamp.log) for name in names}
    return {name: text for name, text in ends.items() if text}


def _tail(path: Path, field: str, cut: Cut, most: int) -> str:
    """The end of a file that somebody else wrote."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - 4 * most) if most else 0
            file.seek(start)
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    if start:
        text = text[-most:]
        cut.told.append(f"{field}: {size - len(text.encode()):,} of {size:,} bytes left out")
        return text
    return cut.end(field, text, most)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")


# ── the result ──────────────────────────────────────────────────────────────────────────────────────────────────────


def ended(
    state: RolloutState, outcome: Outcome | None, view: Viewed | None, folder: Path, clamp: Clamp, notes: Sequence[str]
) -> RolloutResult:
    """The result of a rollout: `state` says how it ended, `outcome` what came of it, if it came so far as to have one."""
    cut = Cut(clamp)
    shown = turns(view, cut) if view is not None else []
    found = RolloutResult(
        rollout_id=state.rollout_id,
        task_id=state.task_id,
        agent=state.agent,
        model_key=state.model_key,
        model=state.model,
        mode=state.mode,
        done=True,
        status=state.status,
        kind=state.kind,
        reward=state.reward,
        wall_s=state.wall_s,
        capture=_least(shown),
        turns=shown,
        turn_count=state.turns,
        sampled_tokens=state.sampled_tokens,
        error=state.error,
        session=state.session,
        notes=list(notes),
    )
    if outcome is not None:
        grade = outcome.grade
        found = msgspec.structs.replace(
            found,
            resolved=None if grade is None else grade.resolved,
            exit_code=outcome.exit_code,
            workdir_files=workdir(folder / "work", state.started, cut) if outcome.collected.work else {},
            log_tails=logs(folder, cut),
            verifier_output="" if grade is None else _verified(outcome, folder, cut),
            stop=outcome.stop,
            notes=[*notes, *_notes(outcome)],
        )
    return msgspec.structs.replace(found, clamped=cut.told)


def _verified(outcome: Outcome, folder: Path, cut: Cut) -> str:
    """What the grader printed; from its whole log where that is there."""
    assert outcome.grade is not None
    if (folder / "grade.log").is_file():
        return _tail(folder / "grade.log", "verifier_output", cut, cut.clamp.verifier)
    return cut.end("verifier_output", outcome.grade.log, cut.clamp.verifier)


def _notes(outcome: Outcome) -> list[str]:
    grade = outcome.grade
    return [
        *([grade.message] if grade is not None and grade.message else ()),
        *(grade.notes if grade is not None else ()),
        *outcome.collected.missing,
        *outcome.collected.differences,
        *(f"not closed off in the {outcome.sandbox} sandbox: {wish}" for wish in outcome.not_enforced),
        *outcome.notes,
    ]


def trouble(outcome: Outcome) -> Trouble | None:
    """What went wrong that was not the agent's doing. A grading that failed is told as one."""
    if outcome.fault is not None:
        return Trouble(boundary=outcome.fault.boundary, stage=outcome.fault.stage, message=outcome.fault.message)
    grade = outcome.grade
    if grade is not None and grade.kind in ("invalid task", "infrastructure fault"):
        boundary: Boundary = "task" if grade.kind == "invalid task" else "sandbox"
        return Trouble(boundary=boundary, stage="grade", message=grade.message)
    return None
