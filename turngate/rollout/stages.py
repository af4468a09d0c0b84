"""Run the stages of one rollout with their time limits (`LIMITS_S`), and report them in logs, progress, events and spans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Literal

from turngate.errors import TurngateError
from turngate.rollout.classify import timeout_error
from turngate.rollout.outcome import Outcome, ProgressCallback, RolloutProgress, Stage
from turngate.rollout.stage_events import StageEvents
from turngate.telemetry.spans import Span, current_tracer

log = logging.getLogger(__name__)
# Time limits in seconds. The limits of the remaining stages are set by the task (`setup`), the rollout (`agent`) and the grader (`grade`).
LIMITS_S: Mapping[Stage, float] = {
    "sandbox": 600,
    "files": 300,
    "session": 30,
    "relay": 120,
    "launch": 120,
    "seal": 60,
    "collect": 300,
    "clean": 120,
    "record": 60,
}


class Stages:
    """Runs the stages of one rollout. It reports the start of each stage, measures its duration, and sets a time limit for most stages."""

    def __init__(
        self, outcome: Outcome, progress: RolloutProgress, watch: ProgressCallback, events: StageEvents
    ) -> None:
        self.failed: Stage | None = None  # the first stage that failed
        self._outcome = outcome
        self._progress = progress
        self._watch = watch
        self._events = events
        self._rollout_span: Span | None = None
        self._agent_span: Span | None = None  # set while the agent is running

    @property
    def traceparent(self) -> str:
        """The W3C trace context of the agent's span. Empty outside `trace_agent`, or if tracing is disabled."""
        return "" if self._agent_span is None else self._agent_span.traceparent

    @asynccontextmanager
    async def enter(
        self, stage: Stage, limit_s: float | None = None, *, since: float | None = None
    ) -> AsyncIterator[None]:
        """Run the block as a stage, with a time limit if `limit_s` or the stage sets one.

        If `since` is set, the stage's duration is measured from that monotonic time. The time limit still starts now.
        """
        self.announce(stage)
        began = time.monotonic() if since is None else since
        limit = limit_s or LIMITS_S.get(stage)
        outer = self._agent_span or self._rollout_span
        span = None if outer is None else outer.start_child(f"stage {stage}", {"turngate.stage": stage})
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError:
            error = timeout_error(stage, limit or 0.0)
            self._fail(stage, span, error)
            raise error from None
        except TurngateError as error:
            self._fail(stage, span, error)
            raise
        finally:
            self._add_seconds(stage, time.monotonic() - began)
            if span is not None:
                span.end()

    def announce(self, stage: Stage | Literal["done"]) -> None:
        """Report that a stage is starting, or that the rollout is done."""
        self._progress.stage = stage
        log.info("stage %s", stage)
        self._watch(self._progress)
        self._events.send(stage, self._outcome)

    @contextmanager
    def trace_rollout(self) -> Iterator[None]:
        """Trace the block as the rollout's span, if tracing is enabled."""
        outcome, tracer = self._outcome, current_tracer()
        if tracer is None:
            yield
            return
        span = self._rollout_span = tracer.start_rollout(
            outcome.rollout, outcome.group, outcome.task, outcome.agent, outcome.sandbox, outcome.attempt
        )
        try:
            yield
        finally:
            span.set_attributes(
                {
                    "turngate.status": outcome.status,
                    "turngate.class": outcome.kind,
                    "turngate.reward": outcome.reward,
                    "turngate.turns": outcome.turns,
                    "gen_ai.usage.output_tokens": outcome.sampled_tokens,
                    "gen_ai.conversation.id": outcome.session or None,
                }
            )
            if outcome.fault is not None:
                span.set_error(outcome.fault.boundary)
            span.end()

    @contextmanager
    def trace_agent(self, session: str) -> Iterator[None]:
        """Trace the block as the agent's span, if tracing is enabled. The spans of the agent's turns become its children."""
        if self._rollout_span is None:
            yield
            return
        outcome = self._outcome
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.provider.name": "turngate",
            "gen_ai.agent.name": outcome.agent,
            "gen_ai.conversation.id": session,
            "gen_ai.request.model": outcome.model,
            "turngate.agent.version": outcome.version,
        }
        self._agent_span = self._rollout_span.start_child(f"invoke_agent {outcome.agent}", attributes)
        try:
            yield
        finally:
            self._agent_span.end()
            self._agent_span = None

    def _fail(self, stage: Stage, span: Span | None, error: TurngateError) -> None:
        self.failed = self.failed or stage
        if span is not None:
            span.set_error(error.kind)

    def _add_seconds(self, stage: Stage, seconds: float) -> None:
        spent = self._outcome.seconds.get(stage, 0.0) + seconds
        self._outcome.seconds = {**self._outcome.seconds, stage: round(spent, 3)}
