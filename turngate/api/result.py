"""`Result`, the outcome of one rollout, and `Results`, a list of results with pass@k, advantages and training rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from rich.console import RenderableType

from turngate.api import display
from turngate.api.result_data import ResultData, Turn
from turngate.client.feed import Row
from turngate.common.safe_text import sanitize_line
from turngate.errors import BadRequest
from turngate.rollout.summary import pass_at_k
from turngate.trace.advantage import Choice, compute_advantages, row_weight
from turngate.trace.sample import Sample
from turngate.types import ID_DTYPE, Ids, Json

__all__ = ["Result", "Results", "Turn"]


class Result(ResultData, frozen=True, eq=False, kw_only=True):
    """The outcome of one rollout. Notebooks display it automatically. `show()` also works in a terminal, and takes options."""

    @property
    def messages(self) -> list[Json]:
        """The conversation of the last main turn, in OpenAI's format. If there is no main turn, the last turn of unknown role is used."""
        main = [turn for turn in self.turns if turn.role == "main"]
        main = main or [turn for turn in self.turns if turn.role == "unknown"]
        messages: list[Json] = []
        for turn in self.path(main[-1]) if main else ():
            messages += [*turn.heard, turn.message]
        return messages

    def path(self, turn: Turn) -> list[Turn]:
        """Return the turns of the conversation that `turn` belongs to, from its first turn up to and including `turn`."""
        by_number = {other.number: other for other in self.turns}
        path = [turn]
        while (before := path[-1].after) is not None:
            path.append(by_number[before])
        return path[::-1]

    def prompt_ids(self, turn: Turn) -> Ids:
        """Return all token ids that were sent to the engine for a turn."""
        *before, last = self.path(turn)
        parts = [ids for earlier in before for ids in (earlier.heard_ids, earlier.ids)]
        return np.concatenate([*parts, last.heard_ids]).astype(ID_DTYPE, copy=False)

    def show(self, *, turns: Sequence[int] | None = None, tokens: bool = True, full: bool = False) -> None:
        """Display the result, as a page in a notebook or as text in a terminal.

        `turns` lists the numbers of the turns to show; by default, all. If `tokens` is set, sampled text is shown as tokens, colored by
        their log-probability. Unless `full` is set, long texts and token lists are shortened and, if there are more than 40 turns, only
        the first 20 and the last 20 are shown. The contents of files and the logs are shown only in a notebook.
        """
        display.show(self, turns=turns, tokens=tokens, full=full)

    def __repr__(self) -> str:
        reward = "reward unknown" if self.reward is None else f"reward {self.reward:g}"
        turns = "1 turn" if len(self.turns) == 1 else f"{len(self.turns)} turns"
        return sanitize_line(f"Result({self.task_id}: {self.status}, {reward}, {turns}, {self.wall_s:.1f} s)")

    def _repr_html_(self) -> str:
        return display.render_html(self)

    def __rich__(self) -> RenderableType:
        return display.render_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the result as plain text when IPython runs in a terminal."""
        printer.text(display.to_plain_text(self.__rich__()))


class Results(list[Result]):
    """A list of results from one or more groups, with rewards, pass@k, advantages and training rows."""

    @property
    def rewards(self) -> list[float | None]:
        """The reward of each result. None means that it is unknown, which is not the same as 0."""
        return [one.reward for one in self]

    @property
    def mean_reward(self) -> float | None:
        """The mean of the known rewards, or None if no reward is known."""
        known = [one.reward for one in self if one.reward is not None]
        return fmean(known) if known else None

    @property
    def groups(self) -> dict[str, Results]:
        """The results of each group, by group name. Groups and results are in the order of this list."""
        groups: dict[str, Results] = {}
        for one in self:
            groups.setdefault(one.group, Results()).append(one)
        return groups

    def pass_at(self, k: int) -> float | None:
        """Return an unbiased estimate of pass@k, the probability that at least one of k rollouts of a task passes.

        The estimate is the mean over the tasks with at least k known rewards. It is None if no task has that many.
        """
        if k < 1:
            raise BadRequest(f"k must be at least 1, not {k}", param="k")
        by_task: dict[str, list[bool]] = {}
        for one in self:
            if one.passed is not None:
                by_task.setdefault(one.task_id, []).append(one.passed)
        estimates = [pass_at_k(len(passed), sum(passed), k) for passed in by_task.values() if len(passed) >= k]
        return fmean(estimates) if estimates else None

    def advantages(self, choice: Choice = "normalised") -> list[float | None]:
        """Return the advantage of each result within its group.

        `choice` is the formula: normalised, leave_one_out or none (see `turngate.trace.advantage`). The advantage is None if the
        reward is unknown or too large, if the result has no training rows, or if `choice` is leave_one_out and no other result of the group
        has a usable reward.
        """
        by_group: dict[str, list[int]] = {}
        for index, one in enumerate(self):
            by_group.setdefault(one.group, []).append(index)
        advantages: list[float | None] = [None] * len(self)
        for indexes in by_group.values():
            rewards = [self[index].reward if self[index].rows else None for index in indexes]
            for index, advantage in zip(indexes, compute_advantages(rewards, choice), strict=True):
                advantages[index] = advantage
        return advantages

    def rows(self, choice: Choice = "normalised") -> list[Row]:
        """Return the training rows of all results that have an advantage, each with its advantage and weight."""
        rows = []
        for one, advantage in zip(self, self.advantages(choice), strict=True):
            rows += [] if advantage is None else [_build_row(row, advantage, len(one.rows)) for row in one.rows]
        return rows

    def show(self) -> None:
        """Display the results as a table."""
        display.show_table(self, title=repr(self), facts=self._facts)

    @property
    def _facts(self) -> list[str]:
        mean, pass_at_1 = self.mean_reward, self.pass_at(1)
        facts = ["1 result" if len(self) == 1 else f"{len(self)} results"]
        facts += [] if mean is None else [f"mean reward {mean:.3g}"]
        facts += [] if pass_at_1 is None else [f"pass@1 {pass_at_1:.3g}"]
        return facts

    def __repr__(self) -> str:
        return f"Results({_summarize(self)})"

    def _repr_html_(self) -> str:
        return display.render_html_table(self, self._facts)

    def __rich__(self) -> RenderableType:
        return display.render_text_table(self, repr(self))

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the table as plain text when IPython runs in a terminal."""
        printer.text(display.to_plain_text(self.__rich__()))


def _build_row(row: Sample, advantage: float, rows: int) -> Row:
    return Row(
        ids=row.ids,
        mask=row.mask,
        logprobs=row.logprobs,
        spans=row.spans,
        branch=row.branch,
        weight=row_weight(rows),
        advantage=advantage,
    )


def _summarize(results: Iterable[Result]) -> str:
    rewards = [one.reward for one in results]
    known = [reward for reward in rewards if reward is not None]
    mean = f", mean reward {sum(reward / len(known) for reward in known):.3g}" if known else ""
    unknown = len(rewards) - len(known)
    return f"{len(rewards)}{mean}" + (f", {unknown} without a reward" if unknown else "")
