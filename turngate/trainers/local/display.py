"""Show the progress and the result of a training run on a terminal."""

from __future__ import annotations

import time
from functools import partial

from rich.console import Console, Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turngate.common.terminal import LiveDisplay, sanitize_line, say
from turngate.rollout.batch import BatchResult
from turngate.rollout.ledger import FinishedRollout
from turngate.rollout.progress import BatchProgress
from turngate.trainers.local import report
from turngate.trainers.local.grpo import Step
from turngate.trainers.local.run import RunCallbacks, TrainingResult
from turngate.trainers.local.training import StepTime, TrainingCallbacks, TrainingEnvironment
from turngate.types import Json
from turngate.views.trace import TraceView

_LINE_EVERY_S = 10.0  # interval between plain progress lines
_ESTIMATE_AFTER = 4  # number of finished rollouts


class TrainingDisplay(LiveDisplay):
    """Shows the progress of a training run: one line per step and, between steps, a live display on a terminal or plain lines elsewhere.

    `rollouts` is the number of rollouts in all phases. If it is given, the display estimates the remaining time.
    """

    def __init__(self, console: Console, steps: int, rollouts: int = 0) -> None:
        super().__init__(console)
        self._steps = steps
        self._clock = _RemainingTime(rollouts)
        self._done = 0
        self._phase, self._total = "starting", 1
        self._tally: BatchProgress | None = None
        self._began = self._printed = time.monotonic()

    def callbacks(self) -> RunCallbacks:
        """Return the functions that update this display."""
        note = partial(self.say, style="yellow")
        training = TrainingCallbacks(rollouts=self.update, step=self.print_step, note=note)
        return RunCallbacks(phase=self.start_phase, evaluation=self.print_evaluation, training=training)

    def start_phase(self, name: str, total: int) -> None:
        self._phase, self._total, self._tally = name, total, None
        self._clock.start_phase()

    def update(self, tally: BatchProgress) -> None:
        self._tally = tally
        self._clock.update(tally.done)
        if self._live is None and time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            self.say(self._line())

    def say(self, text: str, style: str = "") -> None:
        say(self._console, text, style)

    def print_step(self, step: Step, share: StepTime) -> None:
        self._done = step.step
        self._printed = time.monotonic()
        self.say(describe_step(step, share))
        for alarm in step.alarms:
            self.say(f"alarm  step {step.step}: {alarm.message}", style="yellow")

    def print_evaluation(self, name: str, result: BatchResult) -> None:
        self.say(f"{name + ':':24}{_describe_score(result)}")

    def _line(self) -> str:
        seconds = int(time.monotonic() - self._began)
        done = 0 if self._tally is None else self._tally.done
        stages = "" if self._tally is None else _describe_stages(self._tally)
        remaining = self._clock.describe()
        return (
            f"{seconds // 60}:{seconds % 60:02d}  {self._phase}: {done}/{self._total} rollouts"
            + (f" ({stages})" if stages else "")
            + (f", {remaining}" if remaining else "")
        )

    def _render(self) -> Group:
        head = Table.grid(padding=(0, 2))
        training = self._phase == "training"
        done = self._done if training else 0 if self._tally is None else self._tally.done
        total = self._steps if training else self._total
        head.add_row(ProgressBar(total=max(1, total), completed=done, width=40), Text(self._line()))
        return Group(head)


class _RemainingTime:
    """Estimates the remaining time of a run from the rollouts that this process has finished."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = time.monotonic()
        self._done = 0  # rollouts finished in all phases
        self._new = 0  # of these, rollouts finished by this process
        self._phase_done: int | None = None

    def start_phase(self) -> None:
        self._phase_done = None

    def update(self, done: int) -> None:
        """Set the number of rollouts that have finished in this phase.

        The first number of a phase may include rollouts of an earlier process.
        """
        if self._phase_done is None:
            self._done += done
        else:
            self._done += done - self._phase_done
            self._new += done - self._phase_done
        self._phase_done = done

    def describe(self) -> str:
        """Return text such as "about 5 min left", or an empty string until enough rollouts have finished."""
        if not self._total or self._new < _ESTIMATE_AFTER:
            return ""
        seconds = (time.monotonic() - self._began) / self._new * max(0, self._total - self._done)
        return f"about {max(1, round(seconds / 60))} min left"


def _describe_stages(tally: BatchProgress) -> str:
    counts = {"starting": tally.states["start"], "running": tally.states["run"], "grading": tally.states["grade"]}
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def describe_step(step: Step, share: StepTime) -> str:
    """Describe a step in one line."""
    measured = step.measured
    note = (
        "log-probabilities not compared"
        if measured.difference is None
        else f"log-probabilities differ by {measured.difference:.0e} on average"
    )
    bar = "█" * round(20 * (step.reward or 0.0))
    if step.reward is None:
        note = f"no rollout was graded: {'; '.join(step.why)[:300]}"
    elif not measured.signal:
        note = "no signal: all advantages of the accepted rows are 0"
    return (
        f"step {step.step:3}  reward {'unknown' if step.reward is None else f'{step.reward:.2f}'} {bar:20}  "
        f"passed {'unknown' if step.passed is None else f'{step.passed:4.0%}'}  entropy {measured.entropy:.2f}  {note}"
        + (f"  rows rejected: {len(measured.refused)}" if measured.refused else "")
        + f"  {share.whole:.0f} s (agents {share.agents:.0f}, sampling {share.sampling:.0f}, training {share.training:.0f}, "
        f"turngate {share.turngate:.1f})"
    )


def _describe_score(result: BatchResult) -> str:
    overall = result.summary.overall
    reward = "none" if overall.mean_reward is None else f"{overall.mean_reward:.2f}"
    return f"{overall.passed} of {overall.graded} passed, mean reward {reward}"


def print_result(result: TrainingResult, console: Console) -> None:
    """Print the reward curve, the rewards before and after training, warnings, and the share of time that each activity took."""
    console.print()
    head, *bars = report.draw_curve(result.rewards)
    say(console, head, "bold")
    for line in bars:
        say(console, line)
    console.print()
    for change in result.compare():
        style = "green" if change.after > change.before else "yellow"
        say(console, f"{change.name}: {change.before:.2f} → {change.after:.2f}", style)
    gaps = [step.measured.difference for step in result.steps if step.measured.difference is not None]
    rows = sum(step.measured.compared for step in result.steps)
    if gaps:
        rejected = sum(len(step.measured.refused) for step in result.steps)
        say(
            console,
            f"Rows recomputed with the weights that sampled them: {rows}; their log-probabilities differ from the "
            f"recorded ones by {sum(gaps) / len(gaps):.1e} on average. Rejected rows (of any policy version): {rejected}",
        )
    if alarmed := [step.step for step in result.steps if step.alarms]:
        count = f"{len(alarmed)} of {len(result.steps)} steps"
        say(console, f"Alarms about log-probabilities in {count}, last in step {alarmed[-1]}; see steps.json", "yellow")
    if not any(step.measured.signal for step in result.steps):
        say(
            console,
            "No step had a training signal, so the model learned nothing. If all rollouts of a task get the same reward, use other tasks.",
            "yellow",
        )
    whole = sum(share.whole for share in result.shares)
    if whole:
        split = ", ".join(
            f"{name} {sum(getattr(share, name) for share in result.shares) / whole:.0%}"
            for name in ("agents", "sampling", "training", "turngate")
        )
        tokens = sum(step.sampled_tokens for step in result.new_steps)
        say(console, f"step time: {split}; {tokens:,} sampled tokens, {tokens / whole:.0f} per second", "dim")


async def print_improvements(
    environment: TrainingEnvironment, result: TrainingResult, console: Console, count: int = 2
) -> None:
    """Print the transcripts of the held-out tasks that improved most, from before and after training, side by side."""
    if result.before is None or result.after is None:
        return
    after = {rollout.task: rollout for rollout in result.after.finished}
    pairs = [(rollout, after[rollout.task]) for rollout in result.before.finished if rollout.task in after]
    pairs.sort(key=lambda pair: (pair[0].reward or 0.0) - (pair[1].reward or 0.0))
    for old, new in pairs[:count]:
        table = Table(show_lines=False, expand=True)
        for heading in ("before", "after"):
            table.add_column(heading, ratio=1, overflow="fold")
        table.add_row(*[Text(await _load_transcript(environment, rollout)) for rollout in (old, new)])
        console.print(table)


async def _load_transcript(environment: TrainingEnvironment, rollout: FinishedRollout) -> str:
    """Return a rollout's transcript as text: all messages except system messages, and then the reward."""
    view = TraceView(await environment.gateway.trace(rollout.session))
    lines = []
    for turn in view.turns:
        heard = view.contexts[turn.parent].messages
        lines += [_text(message) for message in heard if message.get("role") != "system"]
        lines.append("$ " + _text(turn.message))
    return "\n".join([*lines, f"reward {rollout.reward}"])


def _text(message: Json) -> str:
    """Return the text of a message in OpenAI's format. Its content may be text, a list of parts, or missing."""
    content = message.get("content") or ""
    parts = content if isinstance(content, list) else [{"text": content}]
    return sanitize_line(" ".join(str(part.get("text", "")) for part in parts if isinstance(part, dict)).strip())
