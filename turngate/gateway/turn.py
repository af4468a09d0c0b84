"""The pipeline of one model call, from the limits and the fence to the commit. Read this file first.

    admit → locate → render → generate → parse → commit → reply

    admit     check status, limits and quota, and that turns can be recorded; wait for a share of the engines, and at the fence (fence.py)
    locate    find the deepest point of the session's trace that this request extends    (trace, prompt.py)
    render    extend the stored ids up to that point with only the new messages          (render, prompt.py)
    generate  send ids, receive ids with log-probabilities; abort if the agent hangs up  (engines)
    parse     split the ids into reasoning, text and tool calls as they arrive           (render)
    commit    make the context and the sampled node durable before the last event        (recording.py)
    reply     emit text as it is sampled, each tool call when it is complete, and `Done` when the turn is recorded

`TurnPipeline.run` emits the events of a reply in batches. It does not depend on the wire format, and it always streams: for a
non-streaming reply, the server collects the events. If the agent hangs up or the engine fails during generation, the tokens sampled so far
are recorded as an aborted turn.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec

from turngate.common import clock
from turngate.engines.base import Chunk, Engine, Generate, Relay, RelayChunk, RelayRequest, check_echo
from turngate.engines.routed_experts import ROUTED_EXPERTS
from turngate.errors import Conflict, ContextOverflow, EngineError, EngineUnavailable, NotFound, TurngateError
from turngate.gateway.draft import Emit, ObservedReply, TurnDraft
from turngate.gateway.fair_shares import FairShares
from turngate.gateway.fence import Fence
from turngate.gateway.loading import TimeSlicer
from turngate.gateway.prompt import Prompt, PromptBuilder, build_observed_prompt
from turngate.gateway.quotas import ProjectQuota
from turngate.gateway.recording import TurnRecorder
from turngate.gateway.sampling import context_overflow, count_room, resolve_sampling
from turngate.gateway.token_scores import require_shown_logprobs, score_tokens
from turngate.render import Renderer, ReplyReader
from turngate.store.projects import DEFAULT_PROJECT
from turngate.telemetry.metrics import CallTiming, EngineTimer, Metrics
from turngate.trace.session import CallError, LimitReached, Session, limit_message
from turngate.trace.side_data import find_first_missing
from turngate.trace.signals import is_model_alias
from turngate.trace.tree import Sampled, path_to
from turngate.types import (
    Call,
    CallDelta,
    Delta,
    Done,
    Finish,
    Ids,
    Message,
    Mode,
    ReasoningTokens,
    ReplyEvent,
    Sampling,
    Usage,
)

T = TypeVar("T")
# A final chunk of at most this many tokens is sent together with `Done`, which saves a write. A longer one is sent first, so that `Done`
# waits while a slow agent is still receiving it. Otherwise the turn would count as delivered too early.
_SHORT_END = 256


class PipelineSettings(msgspec.Struct, frozen=True):
    """The settings of the gateway that affect turns."""

    models: tuple[str, ...] = ()  # names that agents may request; empty: any
    max_context: int | None = None  # of the model, in tokens; None: the engine checks it
    echo_prompt: bool = (
        False  # ask the engine to echo the prompt it received, and compare it with the prompt that was sent
    )
    vocabulary: str = ""  # digest of the tokenizer; a session can continue only with the same tokenizer
    mode: Mode = "exact"  # the mode of the sessions that the engine serves; "gate" if the trainer is the engine
    project: str = DEFAULT_PROJECT
    routed_experts: bool = False  # ask the engine for the routed experts of tokens for which none are recorded yet
    sampling_masks: bool = False  # ask the engine for the sampling masks of calls with top-p, top-k or min-p


class TurnPipeline:
    """Runs model calls. One instance serves all sessions of a project and keeps no state about them."""

    def __init__(
        self,
        *,
        settings: PipelineSettings,
        recorder: TurnRecorder,
        fence: Fence,
        metrics: Metrics,
        renderer: Renderer | None = None,
        engine: Engine | None = None,
        relay: Relay | None = None,
        quota: ProjectQuota | None = None,
        shares: FairShares | None = None,
        slicer: TimeSlicer | None = None,
    ) -> None:
        self._settings = settings
        self._recorder = recorder
        self._fence = fence
        self._metrics = metrics
        self._renderer = renderer
        self._engine = engine
        self._relay = relay
        self._quota = quota
        self._shares = shares
        self._prompts = PromptBuilder(slicer)

    async def run(self, session: Session, call: Call, emit: Emit, timing: CallTiming) -> None:
        """Run one turn, from request to `Done`, and emit its events in batches.

        `emit` is a callback because nested async generators are slower. If the task is cancelled or `emit` raises an exception while tokens
        are being generated, the turn is recorded as aborted. `timing` receives the times that the call spends waiting.
        """
        self.admit(session, call)
        try:
            await self._run_admitted(session, call, emit, timing)
        except LimitReached as reached:
            await emit(self._end_at_limit(session, reached.limit))
        except TurngateError as error:
            session.engine_silence.reset()
            if error.boundary != "client" or isinstance(error, ContextOverflow):
                session.last_error = CallError(error.boundary, error.kind, error.message)
            raise

    async def count(self, session: Session, call: Call) -> int:
        """Count the prompt tokens of a call without sampling or recording anything."""
        self.admit(session, call)
        if session.config.mode == "observe":
            return await self._require_relay().count(self._build_relay_request(session, call, None, {}))
        renderer, _ = self._require_engine(session)
        return len((await self._prompts.build(session, call, renderer)).ids)

    def model_name(self, session: Session, call: Call) -> str:
        """Return the first that exists: the session's model name, the name of the gateway's only model, or the name that the agent sent."""
        served = self._settings.models
        return session.config.model or (served[0] if len(served) == 1 else call.model)

    # ── admit ───────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, session: Session, call: Call) -> None:
        """Raise an error if the session or the gateway cannot serve this call. Limits are checked later, when the turn starts."""
        session.require_open()
        if session.config.mode == "observe":
            self._require_relay()
        else:
            self._require_engine(session)
        if session.vocabulary != self._settings.vocabulary:
            raise Conflict(
                "the gateway's tokenizer has changed since this session was opened; restart the gateway with "
                "the earlier tokenizer, or open a new session"
            )
        session.last_used = clock.now()
        names = (session.config.model,) if session.config.model else self._settings.models
        if names and call.model and call.model not in names and not is_model_alias(session.config.signals, call.model):
            raise NotFound(
                f"model {call.model[:200]!r} does not exist; this session serves {', '.join(names)}; to accept the requested name "
                "too, add it to models in [signals] of the agent's file, or to signals.models in the session's settings",
                param="model",
            )
        require_shown_logprobs(session, call)
        self._recorder.require_writable()

    async def _run_admitted(self, session: Session, call: Call, emit: Emit, timing: CallTiming) -> None:
        session.require_within_limits(clock.now(), session.in_flight)
        if self._quota is not None and not self._quota.has_tokens:
            await self._quota.require_tokens()
        task = asyncio.current_task()
        assert task is not None
        size = len(call.body)
        session.begin_call(task, size)
        try:
            if self._shares is None or not self._shares.is_active or session.config.mode == "observe":
                await self._run_behind_fence(session, call, emit, timing)
            else:
                await self._run_in_turn(self._shares, session, call, emit, timing)
        finally:
            session.end_call(task, size, clock.now())

    async def _run_in_turn(
        self, shares: FairShares, session: Session, call: Call, emit: Emit, timing: CallTiming
    ) -> None:
        """Run a turn when its project may use the engines. The turn waits outside the fence, so that weight updates do not wait for it."""
        group = session.config.metadata.get("group")
        owner = (self._settings.project, group if isinstance(group, str) else "")
        if shares.must_wait(owner[0]):
            began = time.perf_counter()
            try:
                async with asyncio.timeout_at(_to_loop_time(session.deadline())):
                    await shares.enter(*owner)
            except TimeoutError:
                raise LimitReached("seconds") from None
            finally:
                timing.held_s = time.perf_counter() - began
        else:
            await shares.enter(*owner)  # without waiting
        try:
            await self._run_behind_fence(session, call, emit, timing)
        finally:
            shares.leave(*owner)

    async def _run_behind_fence(self, session: Session, call: Call, emit: Emit, timing: CallTiming) -> None:
        await self._pass_fence(session, timing)
        try:
            session.require_open()
            session.require_within_limits(clock.now(), session.in_flight - 1)
            run = self._run_observed if session.config.mode == "observe" else self._run_exact
            await run(session, call, emit, timing)
        finally:
            self._fence.leave()

    async def _pass_fence(self, session: Session, timing: CallTiming) -> None:
        """Wait until the fence admits the call. Raise `LimitReached` if the session reaches its time limit first."""
        if self._fence.admits:
            await self._fence.enter()  # without waiting
            return
        began = time.perf_counter()
        try:
            async with asyncio.timeout_at(_to_loop_time(session.deadline())):
                await self._fence.enter()
        except TimeoutError:
            raise LimitReached("seconds") from None
        finally:
            timing.held_s += time.perf_counter() - began

    def _end_at_limit(self, session: Session, limit: str) -> list[ReplyEvent]:
        """Record which limit was reached, and return a final reply that looks normal, since agents would retry an empty or failed reply.

        If the session is configured with `at_limit="conflict"`, raise `Conflict` instead of returning a reply.
        """
        self._recorder.record_limit(session, limit)
        if session.config.at_limit == "conflict":
            raise Conflict(f"this session has reached its limit ({limit}); open a new session")
        text = limit_message(limit)
        return [Delta("content", text), Done("stop", Message("assistant", text), Usage(0, 0))]

    # ── exact mode ──────────────────────────────────────────────────────────────────────────────────────────────

    def _require_engine(self, session: Session) -> tuple[Renderer, Engine]:
        """Return the renderer and the engine. Raise `Conflict` if the gateway has none for the session's mode."""
        mode = session.config.mode
        if self._renderer is None or self._engine is None:
            raise Conflict(
                f"this gateway has no engine for {mode} sessions; open a session with a mode that it serves, such as 'observe'"
            )
        if mode != self._settings.mode:
            raise Conflict(
                f"this session has mode {mode!r}, but this gateway's engine serves mode {self._settings.mode!r}; open a session "
                f"with mode {self._settings.mode!r}"
            )
        return self._renderer, self._engine

    async def _run_exact(self, session: Session, call: Call, emit: Emit, timing: CallTiming) -> None:
        renderer, engine = self._require_engine(session)
        prompt = await self._prompts.build(session, call, renderer)
        self._require_room(session, len(prompt.ids))
        timing.prompt_usage = Usage(len(prompt.ids), 0)
        sampling = resolve_sampling(session, call)
        call, reasoning = _let_reason_first(call, renderer, prompt.added)
        request = self._build_request(session, call, prompt, sampling, renderer, reasoning)
        reader = renderer.reader(
            prompt.added, prompt.preamble.tools, call.stop, call.constraint, not call.parallel_tool_calls
        )
        draft = TurnDraft(session, call, prompt, sampling, self._fence.version, emit, timing)
        try:
            await self._generate(draft, engine, request, reader)
        finally:
            draft.settle()

    async def _generate(self, draft: TurnDraft, engine: Engine, request: Generate, reader: ReplyReader) -> None:
        session = draft.session
        finish: Finish = "abort"
        is_complete = False  # a call can still be cancelled after the engine has finished, while its reply is drained
        fault = ""
        last: list[Delta | CallDelta] = []  # events of the final chunk, to be sent with `Done`
        timer = self._start_timer(draft, engine.name, request.max_tokens)
        try:
            async with engine.generate(request) as chunks:
                async for chunk in _until(session.deadline(), chunks):
                    timer.mark_received()
                    session.engine_silence.reset()
                    _check(chunk, request)
                    events = self._add_chunk(draft, chunk, reader)
                    is_over = reader.satisfied or session.tokens_left == 0 or chunk.finish is not None
                    if is_over and chunk.finish != "abort" and len(chunk.ids) <= _SHORT_END:
                        last = events
                    elif events:
                        await draft.emit(events)
                    if chunk.finish == "abort":
                        raise EngineUnavailable("the engine aborted this generation")
                    if is_over:
                        finish = "stop" if reader.satisfied else chunk.finish or "length"
                        break
                    timer.mark_waiting()
            if finish == "abort":
                raise EngineUnavailable(f"{engine.name} ended its reply before the generation finished")
            is_complete = True
        except TimeoutError:
            finish, is_complete = "length", True  # the session's time is up: keep the tokens sampled so far
        except TurngateError as error:
            fault = error.message
            timer.fail(error.kind)
            raise
        finally:
            timer.finish(finish, len(request.prompt), len(draft.ids))
            # If the engine failed before its first token, there is nothing to record.
            if not is_complete and (draft.ids or not fault):
                await self._recorder.commit(draft, reader.finish()[1].message, "abort", fault=fault or "aborted")
        if finish == "length" and not draft.ids:
            raise LimitReached("sampled_tokens" if session.tokens_left == 0 else "seconds")
        rest, parsed = reader.finish()
        if parsed.message.tool_calls and finish == "stop":
            finish = "tool_calls"
        node = await self._recorder.commit(draft, parsed.message, finish, reasoning_open=parsed.reasoning_open)
        session.last_error = None
        usage = Usage(len(draft.prompt.ids), len(draft.ids))
        await draft.emit(
            [*last, *rest, Done(finish, parsed.message, usage, node, reader.stopped_by, tuple(draft.scores))]
        )

    def _require_room(self, session: Session, size: int) -> None:
        """Raise an error if the limits of the session or of the model allow no token to be sampled after a prompt of `size` tokens."""
        if session.tokens_left == 0:  # parallel calls may have sampled the rest while the prompt was built
            raise LimitReached("sampled_tokens")
        limit, max_context = session.config.limits.context_tokens, self._settings.max_context
        if limit is not None and size >= limit:
            session.truncated = True
            if session.config.at_limit == "conflict":
                self._recorder.record_limit(session, "context_tokens")
                raise context_overflow(limit, size)
            raise LimitReached("context_tokens")
        if max_context is not None and size >= max_context:
            raise context_overflow(max_context, size)

    def _build_request(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        sampling: Sampling,
        renderer: Renderer,
        reasoning: ReasoningTokens | None,
    ) -> Generate:
        return Generate(
            prompt=prompt.ids,
            max_tokens=count_room(session, call, len(prompt.ids), self._settings.max_context),
            sampling=sampling,
            stop=call.stop,
            stop_ids=renderer.stop_ids,
            constraint=call.constraint,
            reasoning=reasoning,
            top_logprobs=call.top_logprobs or 0,
            stream=call.stream,
            session=session.id,
            request_id=f"turngate-{os.urandom(16).hex()}",
            cache_salt=f"v{self._fence.version}",
            version=self._fence.version,
            model=self._fence.model,
            echo_prompt=self._settings.echo_prompt,
            routed_experts=_find_unrouted(prompt) if self._settings.routed_experts else None,
            sampling_mask=self._settings.sampling_masks and sampling.is_truncated and call.constraint is None,
        )

    def _add_chunk(self, draft: TurnDraft, chunk: Chunk, reader: ReplyReader) -> list[Delta | CallDelta]:
        """Add a chunk to the draft, and return the events parsed from it. Tokens past the end of the turn are dropped."""
        ids, logprobs, call = chunk.ids, chunk.logprobs, draft.call
        # Parallel calls share the session's limit, so the limit can be reached in the middle of a chunk.
        left = draft.session.tokens_left
        end = len(ids) if left is None else min(len(ids), left)
        events: list[Delta | CallDelta] = []
        if reader.may_stop_early:
            for n in range(end):
                events += reader.feed(ids[n : n + 1])
                if reader.satisfied:
                    end = n + 1
                    break
        now = self._fence.version_now(draft.begun_at)
        versions = chunk.versions or (now, now)
        draft.add(ids[:end], None if logprobs is None else logprobs[:end], *versions)
        draft.note_report(chunk.cached, chunk.version_runs)
        if not reader.may_stop_early:
            events = reader.feed(ids[:end])
        if chunk.side:
            draft.add_side(
                chunk.side
            )  # after the reader has the same ids as the draft: invalid side data ends the call
        if call.top_logprobs is not None and self._renderer is not None:
            scores = score_tokens(self._renderer.tokenizer, ids, logprobs, chunk.alternatives)[:end]
            draft.scores += scores
            events.append(Delta("content", "", scores))
        return events

    def _start_timer(self, draft: TurnDraft, engine: str, max_tokens: int | None) -> EngineTimer:
        timer = EngineTimer(self._metrics, draft.timing)
        if draft.timing.span is not None:
            timer.span = draft.timing.span.start_engine_call(engine, draft.sampling, max_tokens)
        return timer

    # ── observe mode ────────────────────────────────────────────────────────────────────────────────────────────

    def _require_relay(self) -> Relay:
        if self._relay is None:
            raise Conflict(f"this gateway has no endpoint to observe; open a session with mode {self._settings.mode!r}")
        return self._relay

    async def _run_observed(self, session: Session, call: Call, emit: Emit, timing: CallTiming) -> None:
        relay = self._require_relay()
        location, preamble = self._prompts.locate(session, call)
        sampling = resolve_sampling(session, call, neutral=False)
        pinned = sampling if session.config.sampling else None
        request = self._build_relay_request(session, call, pinned, _find_verbatim(location.node, relay.name))
        prompt = build_observed_prompt(location, None, preamble)  # its ids are known only if the reply contains them
        draft = TurnDraft(session, call, prompt, sampling, self._fence.version, emit, timing)
        draft.capture = "text"
        draft.engine = relay.name
        draft.biases = () if pinned is not None else ("the endpoint's own sampling",)
        try:
            await self._observe(draft, relay, request)
        finally:
            draft.settle()

    async def _observe(self, draft: TurnDraft, relay: Relay, request: RelayRequest) -> None:
        session, prompt = draft.session, draft.prompt
        reply = ObservedReply()
        finish: Finish = "abort"
        is_complete = False
        fault = ""
        timer = self._start_timer(draft, draft.engine, draft.call.max_tokens)
        try:
            async with relay.relay(request) as chunks:
                async for chunk in _until(session.deadline(), chunks):
                    timer.mark_received()
                    session.engine_silence.reset()
                    reply.add(chunk)
                    self._add_observed(draft, chunk)
                    draft.timing.prompt_usage = reply.usage
                    if chunk.events:
                        await draft.emit(chunk.events)
                    if chunk.finish == "abort":
                        raise EngineUnavailable("the endpoint aborted this generation")
                    finish = chunk.finish or finish
                    timer.mark_waiting()
            if finish == "abort":
                raise EngineUnavailable(f"{relay.name} ended its reply before the generation finished")
            is_complete = True
        except TimeoutError:
            finish, is_complete = "length", True
        except TurngateError as error:
            fault = error.message
            timer.fail(error.kind)
            raise
        finally:
            usage = reply.usage or Usage(0, len(draft.ids))
            timer.finish(finish, usage.prompt_tokens, usage.completion_tokens)
            message = reply.build_message()
            draft.prompt = build_observed_prompt(prompt.location, reply.prompt, prompt.preamble)
            if draft.capture == "tokens" and not reply.is_complete(draft.ids):
                draft.capture = "logprobs"  # prompt ids or some sampled ids are missing, so the turn cannot be trained
            if not is_complete and (not reply.is_empty or not fault):
                await self._recorder.commit(draft, message, "abort", fault=fault or "aborted")
        node = await self._recorder.commit(draft, message, finish, fault=reply.fault)
        session.last_error = None
        await draft.emit([Done(finish, message, reply.usage, node, reply.stopped_by)])

    def _build_relay_request(
        self, session: Session, call: Call, pinned: Sampling | None, verbatim: dict[int, bytes]
    ) -> RelayRequest:
        served = self._settings.models
        return RelayRequest(
            call=call,
            model=session.config.model or (served[0] if len(served) == 1 else ""),
            sampling=pinned,
            max_tokens=call.max_tokens if session.config.max_tokens is None else session.config.max_tokens,
            session=session.id,
            verbatim=verbatim,
        )

    def _add_observed(self, draft: TurnDraft, chunk: RelayChunk) -> None:
        if chunk.ids:
            draft.capture = "tokens"
            draft.add(chunk.ids, chunk.logprobs, self._fence.version_now(draft.begun_at))
        elif chunk.logprobs:
            draft.capture = "logprobs"
        draft.lost += chunk.lost
        draft.biases += chunk.biases
        draft.verbatim = chunk.verbatim or draft.verbatim


def _until(deadline: float | None, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Return an iterator over `items` that raises `TimeoutError` at the deadline."""
    return items if deadline is None else _TimedIterator(items, deadline)


class _TimedIterator(Generic[T]):
    """An iterator that raises `TimeoutError` at a deadline, but only while it waits for the next item, never in the consumer's code."""

    def __init__(self, items: AsyncIterator[T], deadline: float) -> None:
        self._items = items
        self._end = _to_loop_time(deadline)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        async with asyncio.timeout_at(self._end):
            return await anext(self._items)


def _let_reason_first(call: Call, renderer: Renderer, context: Ids) -> tuple[Call, ReasoningTokens | None]:
    """If the call has a constraint and a reply to `context` may start with reasoning, apply the constraint only after the reasoning.

    Return the call, and the tokens that open and close the reasoning. If the call is unchanged, return None for these tokens.
    """
    if call.constraint is None:
        return call, None
    reasoning = renderer.find_reasoning_tokens(context)
    if reasoning is None:
        return call, None
    late = msgspec.structs.replace(call.constraint, after_reasoning=True)
    return msgspec.structs.replace(call, constraint=late), reasoning


def _check(chunk: Chunk, request: Generate) -> None:
    """Raise `EngineError` if the chunk echoes a different prompt or has the wrong number of log-probabilities."""
    check_echo(chunk, request)
    if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.ids):
        raise EngineError(
            f"the engine returned different numbers of log-probabilities ({len(chunk.logprobs)}) and tokens ({len(chunk.ids)})"
        )


def _find_unrouted(prompt: Prompt) -> int:
    """Return the first position in the prompt whose routed experts are not recorded, or the last position if all are recorded."""
    return min(find_first_missing(prompt.parent, ROUTED_EXPERTS), len(prompt.ids) - 1)


def _find_verbatim(node: Sampled | None, endpoint: str) -> dict[int, bytes]:
    """Return the earlier turns that must be sent back to `endpoint` unchanged (see `RelayChunk.verbatim`).

    Each key is the index of the turn's message on the path to `node`.
    """
    turns = [turn for turn in path_to(node) if isinstance(turn, Sampled)]
    return {t.count - 1: t.info.verbatim for t in turns if t.info.verbatim and t.info.engine == endpoint}


def _to_loop_time(moment: float | None) -> float | None:
    """Convert a wall-clock time to the event loop's clock."""
    return None if moment is None else moment - clock.now() + asyncio.get_running_loop().time()
