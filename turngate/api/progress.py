"""What is seen while rollouts run: stages, turns and tokens, in a notebook's cell or on a terminal.

`Board` is what is known; the client puts states onto it. `Screen` shows it, always from the thread of whoever waits: a notebook takes
what another thread displays for another cell's. Where nobody looks (a pipe, a log) nothing is shown.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from turngate.api import display
from turngate.common.safe_text import sanitize_line
from turngate.service.result import RolloutState

_LINES = 12  # of rollouts that run, at most
OFTEN_S = 0.2  # between two looks


class Board:
    """The states of the rollouts that somebody waits for. Written by one thread, and read by another."""

    def __init__(self) -> None:
        self.wanted = 1  # rollouts; where there is one, nothing is counted
        self._began = time.monotonic()
        self._states: dict[str, RolloutState] = {}
        self._seen: dict[str, float] = {}  # when each was put
        self.followed: list[str] = []  # those that run: whoever keeps the board up to date asks for their states

    def follow(self, rollout: str) -> None:
        self.followed = [*self.followed, rollout]

    def put(self, state: RolloutState) -> None:
        if state.done:
            self.followed = [rollout for rollout in self.followed if rollout != state.rollout_id]
        self._states[state.rollout_id] = state
        self._seen[state.rollout_id] = time.monotonic()

    def lines(self) -> list[str]:
        """As text: one line for each that runs, and before those how many have ended."""
        states = list(self._states.values())
        running = [state for state in states if not state.done]
        found = [self._line(state) for state in running[:_LINES]]
        if len(running) > _LINES:
            found.append(f"and {len(running) - _LINES} more")
        if self.wanted == 1:
            return found or [self._line(state) for state in states]
        return [self._count(states, len(running)), *found]

    def _count(self, states: list[RolloutState], running: int) -> str:
        done = [state for state in states if state.done]
        known = [state.reward for state in done if state.reward is not None]
        facts = [f"{_clock(time.monotonic() - self._began)}  {len(done)} of {self.wanted} done", f"{running} running"]
        facts += [f"mean reward {sum(known) / len(known):.3g}"] if known else []
        unknown = len(done) - len(known)
        return " · ".join([*facts, *([f"{unknown} without a reward"] if unknown else [])])

    def _line(self, state: RolloutState) -> str:
        since = 0.0 if state.done else time.monotonic() - self._seen[state.rollout_id]
        facts = [f"{_clock(state.wall_s + since)}  {state.status if state.done else state.stage}"]
        if state.turns:
            turns = "1 turn" if state.turns == 1 else f"{state.turns} turns"
            facts.append(f"{turns} · {state.sampled_tokens:,} tokens")
        if state.reward is not None:
            facts.append(f"reward {state.reward:g}")
        facts += [state.task_id] if self.wanted > 1 else []
        return sanitize_line("  ".join(facts))


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Screen:
    """Shows a board for as long as the block runs. `refresh` is to be called every now and then."""

    def __init__(self, board: Board, progress: bool | None) -> None:
        """`progress`: None shows where somebody looks; False shows nothing."""
        self._board = board
        self._change: Callable[[list[str]], None] | None = None
        self._live: Live | None = None
        self._shown: list[str] = []
        self._progress = progress is not False

    def __enter__(self) -> Screen:
        if not self._progress:
            return self
        if display.in_notebook():
            self._change = display.changing(["starting …"])
        elif sys.stderr.isatty():
            console = Console(stderr=True, highlight=False, markup=False, emoji=False)
            self._live = Live(console=console, auto_refresh=False, transient=True, get_renderable=self._text)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        self.refresh()

    def refresh(self) -> None:
        lines = self._board.lines()
        if self._live is not None and self._live.is_started:
            self._live.refresh()
        elif self._change is not None and lines and lines != self._shown:
            self._shown = lines
            self._change(lines)

    def _text(self) -> Text:
        shown = Text("\n".join(self._board.lines()) or "starting …")
        shown.no_wrap, shown.overflow = True, "ellipsis"
        return shown
