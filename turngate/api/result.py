"""What a rollout gives back in Python: how it ended, its turns token by token, its training rows, what the agent left.

`client.py` makes these; `notebook.py` shows them. They are plain values: they outlive the gateway, and can be pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from turngate.client.feed import Row
from turngate.common.safe_text import sanitize_line
from turngate.errors import BadRequest
from turngate.rollout.summary import pass_at_k
from turngate.service.result import ErrorInfo
from turngate.trace.advantage import Choice, compute_advantages, row_weight
from turngate.trace.roles import TurnRole
from turngate.trace.sample import Sample
from turngate.types import ID_DTYPE, Ids, Json, Logprobs, ToolCall

if TYPE_CHECKING:
    from rich.console import RenderableType


class Turn(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """One model call: what was new for the model, and what it sampled, token by token."""

    number: int  # from 1, in the order in which they were recorded
    node: int  # its id in the trace
    after: int | None  # the turn that it goes on from; None: it begins a conversation
    role: TurnRole
    heard: tuple[Json, ...]  # the messages that were new, in OpenAI's form
    heard_ids: Ids  # and their tokens
    ids: Ids  # what was sampled; empty where the endpoint told no ids
    logprobs: Logprobs | None  # one for each of them; None: not known. Never filled in
    pieces: tuple[str, ...]  # the text that each id adds; empty: no tokenizer was at hand
    message: Json  # what the model said, in OpenAI's form
    text: str  # and apart
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish: str
    untrained: str  # why it may not be trained; empty if it may
    version_start: int  # of the policy, at its first and last token
    version_end: int
    capture: str
    cause: str | None  # why it does not go on from the last turn
    seconds: float

    @property
    def mean_logprob(self) -> float | None:
        """None: not known."""
        if self.logprobs is None or not len(self.logprobs) or bool(np.isnan(self.logprobs).any()):
            return None
        return float(self.logprobs.mean())

    def __repr__(self) -> str:
        return sanitize_line(f"Turn({self.number}, {self.role}, {len(self.ids)} tokens, {self.finish})")


class Result(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """How one rollout ended. In a notebook it shows itself; `show()` shows more of it, in a terminal too."""

    rollout_id: str
    session: str  # at the gateway; empty: it never had one
    task_id: str
    group: str
    agent: str
    model: str
    mode: str
    status: str  # finished, failed, timed out, limit, cancelled, error, lost
    kind: str | None  # graded, agent failed, invalid task, infrastructure fault; None: nobody was asked for a grade
    reward: float | None  # None: not known, which is not 0
    resolved: bool | None
    exit_code: int | None  # of the agent; None: it did not end by itself
    stop: str  # the limit that was met, or who ended it
    wall_s: float
    seconds: Mapping[str, float]  # by stage
    turns: tuple[Turn, ...]  # oldest first
    rows: tuple[Sample, ...]  # of what may be trained: ids, mask, log-probabilities, as numpy arrays
    files: Mapping[str, str]  # what the agent left in its working folder, by path; text, and cut where it is long
    work: Path | None  # the folder where all of it lies
    logs: Mapping[str, str]  # the ends of what the agent printed and of its own logs
    verifier: str  # what the grading printed
    error: ErrorInfo | None
    notes: tuple[str, ...]  # what else is worth knowing
    clamped: tuple[str, ...]  # what was cut, each with how much

    @property
    def passed(self) -> bool | None:
        """None: nobody knows."""
        if self.reward is None:
            return None
        return self.resolved if self.resolved is not None else self.reward >= 1.0

    @property
    def sampled_tokens(self) -> int:
        return sum(len(turn.ids) for turn in self.turns)

    @property
    def messages(self) -> list[Json]:
        """The conversation of the main line to its end, in OpenAI's form."""
        mine = [turn for turn in self.turns if turn.role == "main"]
        found: list[Json] = []
        for turn in self.path(mine[-1]) if mine else ():
            found += [*turn.heard, turn.message]
        return found

    def path(self, turn: Turn) -> list[Turn]:
        """The turns of one conversation, up to and with this one."""
        by_number = {known.number: known for known in self.turns}
        found = [turn]
        while (before := found[-1].after) is not None:
            found.append(by_number[before])
        return found[::-1]

    def prompt_ids(self, turn: Turn) -> Ids:
        """The ids that were sent to the engine for a turn, all of them."""
        *before, last = self.path(turn)
        parts = [ids for known in before for ids in (known.heard_ids, known.ids)]
        return np.concatenate([*parts, last.heard_ids]).astype(ID_DTYPE, copy=False)

    def show(self, *, turns: Sequence[int] | None = None, tokens: bool = True, full: bool = False) -> None:
        """Show it, here: in a notebook as a page, elsewhere in the terminal.

        `turns`: the numbers of those to show; None: all, as far as there is room. `tokens`: each coloured by its log-probability, instead
        of the text. `full`: nothing is cut.
        """
        from turngate.api import display

        display.show(self, turns=turns, tokens=tokens, full=full)

    def __repr__(self) -> str:
        reward = "reward not known" if self.reward is None else f"reward {self.reward:g}"
        turns = "1 turn" if len(self.turns) == 1 else f"{len(self.turns)} turns"
        return sanitize_line(f"Result({self.task_id}: {self.status}, {reward}, {turns}, {self.wall_s:.1f} s)")

    def _repr_html_(self) -> str:
        from turngate.api import display

        return display.page(self)

    def __rich__(self) -> RenderableType:
        from turngate.api import display

        return display.text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython in a terminal."""
        from turngate.api import display

        printer.text(display.plain(self.__rich__()))


class Results(list[Result]):
    """Several of them: of one group, or of many. A list, with what a trainer or an evaluation asks of it."""

    @property
    def rewards(self) -> list[float | None]:
        """None where one is not known: that is not 0."""
        return [one.reward for one in self]

    @property
    def mean_reward(self) -> float | None:
        """Of those that are known."""
        known = [one.reward for one in self if one.reward is not None]
        return fmean(known) if known else None

    @property
    def groups(self) -> dict[str, Results]:
        """By group, in the order in which they came."""
        found: dict[str, Results] = {}
        for one in self:
            found.setdefault(one.group, Results()).append(one)
        return found

    def pass_at(self, k: int) -> float | None:
        """The chance that at least one of k rollouts of a task passes: the unbiased estimate, and the mean over the tasks that have k
        known rewards. None where no task has."""
        if k < 1:
            raise BadRequest(f"k: {k} is not 1 or more", param="k")
        by_task: dict[str, list[bool]] = {}
        for one in self:
            if one.passed is not None:
                by_task.setdefault(one.task_id, []).append(one.passed)
        found = [pass_at_k(len(known), sum(known), k) for known in by_task.values() if len(known) >= k]
        return fmean(found) if found else None

    def advantages(self, choice: Choice = "normalised") -> list[float | None]:
        """One per result, each within its own group. None: it has no reward, or nothing that may be trained."""
        by_group: dict[str, list[int]] = {}
        for place, one in enumerate(self):
            by_group.setdefault(one.group, []).append(place)
        found: list[float | None] = [None] * len(self)
        for places in by_group.values():
            rewards = [self[place].reward if self[place].rows else None for place in places]
            for place, advantage in zip(places, compute_advantages(rewards, choice), strict=True):
                found[place] = advantage
        return found

    def rows(self, choice: Choice = "normalised") -> list[Row]:
        """Training rows with their advantages and weights: of every result that has a reward, as a feed hands them out."""
        found = []
        for one, advantage in zip(self, self.advantages(choice), strict=True):
            found += [] if advantage is None else [_row(row, advantage, len(one.rows)) for row in one.rows]
        return found

    def show(self) -> None:
        """Show them as a table, here."""
        from turngate.api import display

        display.show_all(self)

    def __repr__(self) -> str:
        return f"Results({_counted(self)})"

    def _repr_html_(self) -> str:
        from turngate.api import display

        return display.table(self)

    def __rich__(self) -> RenderableType:
        from turngate.api import display

        return display.text_table(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython in a terminal."""
        from turngate.api import display

        printer.text(display.plain(self.__rich__()))


def _row(row: Sample, advantage: float, rows: int) -> Row:
    return Row(
        ids=row.ids,
        mask=row.mask,
        logprobs=row.logprobs,
        spans=row.spans,
        branch=row.branch,
        weight=row_weight(rows),
        advantage=advantage,
    )


def _counted(results: Iterable[Result]) -> str:
    every = list(results)
    known = [one.reward for one in every if one.reward is not None]
    mean = f", mean reward {sum(one / len(known) for one in known):.3g}" if known else ""
    unknown = len(every) - len(known)
    return f"{len(every)}{mean}" + (f", {unknown} without a reward" if unknown else "")
