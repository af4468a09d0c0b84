"""Display the progress of running rollouts in a notebook's cell or on a terminal: stages, turns and tokens.

The client puts states on a `ProgressBoard`, and a `ProgressScreen` displays them. Use the screen only in the thread that waits for the
rollouts, because a notebook would show output from other threads in the wrong cell. Outside notebooks and terminals, nothing is displayed.
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

_MAX_LINES = 12  # how many running rollouts are shown, one per line
REFRESH_S = 0.2


class ProgressBoard:
    """The states of the rollouts that a caller is waiting for. One thread may write them while another reads them."""

    def __init__(self) -> None:
        self.total = 1  # number of rollouts; if it is 1, the line of counts is left out
        self._start = time.monotonic()
        self._states: dict[str, RolloutState] = {}
        self._updated: dict[str, float] = {}  # time of each rollout's last update
        self.active: list[str] = []  # ids of unfinished rollouts
        self.running_elsewhere = 0  # rollouts on other machines, of which only the number is known

    def follow(self, rollout: str) -> None:
        """Add a newly started rollout to `active`. The client updates the states of active rollouts until they are done."""
        self.active = [*self.active, rollout]

    def put(self, state: RolloutState) -> None:
        """Store a rollout's latest state."""
        if state.done:
            self.active = [rollout for rollout in self.active if rollout != state.rollout_id]
        self._states[state.rollout_id] = state
        self._updated[state.rollout_id] = time.monotonic()

    def lines(self) -> list[str]:
        """Return the lines to display: one for each running rollout, up to a limit, below a line of counts if there are several rollouts.

        If there is only one rollout, its line is also returned after it has finished.
        """
        states = list(self._states.values())
        running = [state for state in states if not state.done]
        lines = [self._line(state) for state in running[:_MAX_LINES]]
        if len(running) > _MAX_LINES:
            lines.append(f"and {len(running) - _MAX_LINES} more")
        if self.total == 1:
            return lines or [self._line(state) for state in states]
        return [self._count(states, len(running) + self.running_elsewhere), *lines]

    def _count(self, states: list[RolloutState], running: int) -> str:
        done = [state for state in states if state.done]
        known = [state.reward for state in done if state.reward is not None]
        facts = [
            f"{_format_clock(time.monotonic() - self._start)}  {len(done)} of {self.total} done",
            f"{running} running",
        ]
        facts += [f"mean reward {sum(known) / len(known):.3g}"] if known else []
        unknown = len(done) - len(known)
        return " · ".join([*facts, *([f"{unknown} without a reward"] if unknown else [])])

    def _line(self, state: RolloutState) -> str:
        since = 0.0 if state.done else time.monotonic() - self._updated[state.rollout_id]
        facts = [f"{_format_clock(state.wall_s + since)}  {state.status if state.done else state.stage}"]
        if state.turns:
            turns = "1 turn" if state.turns == 1 else f"{state.turns} turns"
            tokens = "1 token" if state.sampled_tokens == 1 else f"{state.sampled_tokens:,} tokens"
            facts.append(f"{turns} · {tokens}")
        if state.reward is not None:
            facts.append(f"reward {state.reward:g}")
        facts += [state.task_id] if self.total > 1 else []
        return sanitize_line("  ".join(facts))


def _format_clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class ProgressScreen:
    """A context manager that displays a board. Call `refresh` several times a second."""

    def __init__(self, board: ProgressBoard, progress: bool | None) -> None:
        """Create a screen. It displays the board in notebooks and terminals, unless `progress` is False."""
        self._board = board
        self._update: Callable[[list[str]], None] | None = None
        self._live: Live | None = None
        self._shown: list[str] = []
        self._progress = progress is not False

    def __enter__(self) -> ProgressScreen:
        if not self._progress:
            return self
        if display.in_notebook():
            self._update = display.open_live_lines(["starting …"])
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
        """Display the current state of the board."""
        lines = self._board.lines()
        if self._live is not None and self._live.is_started:
            self._live.refresh()
        elif self._update is not None and lines and lines != self._shown:
            self._shown = lines
            self._update(lines)

    def _text(self) -> Text:
        shown = Text("\n".join(self._board.lines()) or "starting …")
        shown.no_wrap, shown.overflow = True, "ellipsis"
        return shown
