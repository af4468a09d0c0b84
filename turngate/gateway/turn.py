"""THE pipeline of one model call. Read this file first.

    admit → locate → render → generate → parse → commit → reply

    admit     is the session open, within its limits, and is there room to record? wait at the fence
    locate    the deepest point of the session's tree that this request extends          (trace)
    render    the stored ids down to there, plus the bridge for only the new messages    (render)
    generate  ids in, ids with log-probabilities out; aborted when the agent hangs up    (engines)
    parse     reasoning, text and tool calls, as they come                               (render)
    commit    context and sampled node, durable, before the last event                   (store, trace)
    reply     events: text as it is sampled, a call when it is whole, `Done` when stored

`Turns.take` tells those events, batch by batch, to whoever called it. It knows no wire format; a reply that is not streamed is one
that the server collected. Whatever way it ends, what was sampled is recorded: a call that was cut short becomes an aborted turn.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

import msgspec
import numpy as np

from turngate.engines.base import Chunk, Engine, Generate, Relay, RelayChunk, RelayRequest
from turngate.errors import (
    BadRequest,
    Conflict,
    ContextOverflow,
    EngineError,
    EngineUnavailable,
    NotFound,
    TurngateError,
)
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.prompt import Preamble, Prompt, PromptBuilder, context_info, observed_prompt
from turngate.render import Renderer, ReplyReader
from turngate.store.events import new_event
from turngate.store.journal import Journal
from turngate.store.sqlite import NewTurn
from turngate.telemetry.metrics import CallTiming, EngineTimer, Metrics
from turngate.trace import fork_cause
from turngate.trace.message_equality import argument_sizes, exact_digest, meaning_digest, reasoning_digest
from turngate.trace.session import CallError, LimitReached, Session, limit_message
from turngate.trace.signals import is_model_alias
from turngate.trace.tree import Cause, Context, Location, Sampled, SampledInfo, Trace, path_to
from turngate.types import (
    ID_DTYPE,
    LOGPROB_DTYPE,
    LOGPROB_TOLERANCE,
    NEUTRAL,
    Call,
    CallDelta,
    Capture,
    Delta,
    Done,
    Finish,
    Ids,
    Logprobs,
    Message,
    Mode,
    ReplyEvent,
    Sampling,
    Usage,
)

log = logging.getLogger("turngate")

T = TypeVar("T")
# Tokens that come with the end of a turn and are told together with it: one write less. More of them are told before, so that the end waits
# until the agent has taken them: else it would count as delivered while it is still on the wire.
_SHORT_END = 256
# Takes a batch of events that came at once; returns when they are on their way to the agent. What it raises ends the turn.
Tell = Callable[[Sequence[ReplyEvent]], Awaitable[None]]


class PipelineSettings(msgspec.Struct, frozen=True):
    """What of the configuration a turn needs."""

    models: tuple[str, ...] = ()  # names that agents may ask for; empty: any
    max_context: int | None = None  # the model's; None: the engine judges
    echo_prompt: bool = False  # have the engine repeat the prompt it saw and compare
    vocabulary: str = ""  # digest of the tokenizer; a session goes on only with the one it began with
    mode: Mode = "exact"  # of the sessions that the engine serves; "gate" where the engine is the trainer
    log_turns: bool = False


class Draft:
    """The turn while it is being sampled."""

    def __init__(self, version: int, measured: CallTiming) -> None:
        self.measured = measured
        self.ids: list[int] = []
        self.logprobs: list[float | None] | None = []
        self.started = time.time()
        self.begun = version
        self.version_start = version
        self.version_end = version
        self.capture: Capture = "tokens"
        self.biases: tuple[str, ...] = ()  # besides those of the sampling itself
        self.engine = ""  # the endpoint, when it is observed
        self.lost: tuple[str, ...] = ()
        self.verbatim = b""
        self.counted = False  # its tokens are in the session's count, no longer in its live ones

    def take(
        self, ids: Sequence[int], logprobs: Sequence[float | None] | None, first: int, last: int | None = None
    ) -> None:
        """Sampled at these versions of the policy."""
        if not self.ids:
            self.version_start = first
        self.version_end = first if last is None else last
        self.ids.extend(ids)
        if logprobs is None or self.logprobs is None:
            self.logprobs = None  # one chunk without them: the turn has none, rather than some that look whole
        else:
            self.logprobs.extend(logprobs)

    def scores(self) -> Logprobs | None:
        """The log-probabilities as they are kept: not a number where the engine gave none, or one that none can be."""
        given = self.logprobs
        if given is None:
            return None
        if None in given:
            given = [np.nan if value is None else value for value in given]
        with np.errstate(over="ignore"):  # too large for 32 bits: infinite
            scores = np.array(given, LOGPROB_DTYPE)
        wrong = np.isinf(scores) | (scores > LOGPROB_TOLERANCE)
        if wrong.any():
            said = given[int(wrong.argmax())]
            log.warning("the engine gave %r, which is no log-probability; the turn is not trained", said)
            scores[wrong] = np.nan
        return scores


class TurnPipeline:
    """Runs model calls. One instance per gateway; its only state is what it was given."""

    def __init__(
        self,
        *,
        settings: PipelineSettings,
        journal: Journal,
        fence: Fence,
        renderer: Renderer | None = None,
        engine: Engine | None = None,
        relay: Relay | None = None,
        events: Events,
        metrics: Metrics | None = None,
    ) -> None:
        self._settings = settings
        self._journal = journal
        self._fence = fence
        self._renderer = renderer
        self._engine = engine
        self._relay = relay
        self._events = events
        self._metrics = metrics or Metrics()
        self._prompts = PromptBuilder()

    async def take(self, session: Session, call: Call, tell: Tell, measured: CallTiming) -> None:
        """One turn, from request to `Done`, told in batches of events that came at once.

        Told, and not given as an async generator: several of those, one in the other, cost more than all the rest of a turn's
        bookkeeping. Cancelling the task that runs it aborts the turn, which is recorded; so does whatever `tell` raises.
        `measured` is told what the call waited for.
        """
        self._admit(session, call)
        try:
            await self._admitted(session, call, tell, measured)
        except LimitReached as met:
            await tell(self._at_limit(session, met.limit))
        except TurngateError as error:
            session.engine_silence.reset()
            if error.boundary != "client" or isinstance(error, ContextOverflow):
                session.last_error = CallError(error.boundary, error.kind, error.message)
            raise

    async def _admitted(self, session: Session, call: Call, tell: Tell, measured: CallTiming) -> None:
        session.require_within_limits(time.time(), session.in_flight)
        task = asyncio.current_task()
        assert task is not None
        session.begin_call(task)
        try:
            await self._pass_fence(session, measured)
            try:
                session.require_open()
                session.require_within_limits(time.time(), session.in_flight - 1)
                run = self._relayed if session.config.mode == "observe" else self._exact
                await run(session, call, tell, measured)
            finally:
                self._fence.leave()
        finally:
            session.end_call(task, time.time())

    async def _pass_fence(self, session: Session, measured: CallTiming) -> None:
        """Wait while weights are loaded; the session's own clock goes on."""
        if not self._fence.paused:
            await self._fence.enter()  # at once
            return
        began = time.perf_counter()
        try:
            async with asyncio.timeout_at(_loop_time(session.deadline())):
                await self._fence.enter()
        except TimeoutError:
            raise LimitReached("seconds") from None
        finally:
            measured.held_s = time.perf_counter() - began

    def _admit(self, session: Session, call: Call) -> None:
        session.require_open()
        if session.vocabulary != self._settings.vocabulary:
            raise Conflict(
                "this session was recorded with another tokenizer; go on with that one, or open a new session"
            )
        session.last_used = time.time()
        names = (session.config.model,) if session.config.model else self._settings.models
        if names and call.model and call.model not in names and not is_model_alias(session.config.signals, call.model):
            raise NotFound(
                f"model: {call.model[:200]!r} does not exist here; this session serves {', '.join(names)}",
                param="model",
            )
        self._journal.require_writable()

    def serves(self, session: Session, call: Call) -> str:
        """The model, as the session or the gateway calls it; where neither says which, as the agent does."""
        served = self._settings.models
        return session.config.model or (served[0] if len(served) == 1 else call.model)

    async def count(self, session: Session, call: Call) -> int:
        """How many tokens the prompt of this call has. Nothing is sampled or recorded."""
        self._admit(session, call)
        if session.config.mode == "observe":
            if self._relay is None:
                raise Conflict("this gateway has no endpoint to observe; open the session with mode 'exact'")
            return await self._relay.count(self._relay_request(session, call, None))
        if self._renderer is None:
            raise Conflict("this gateway has no engine for exact sessions; open the session with mode 'observe'")
        return len((await self._prompts.render(session, call, self._renderer)).ids)

    def _at_limit(self, session: Session, limit: str) -> list[ReplyEvent]:
        """The end of a session reads as a normal last answer: an empty or failed one would be retried."""
        self._note_stop(session, limit)
        if session.config.at_limit == "conflict":
            raise Conflict(f"this session is completed (limit {limit}); open a new one")
        if limit not in session.limits_announced:  # an agent may come again and again
            session.limits_announced.add(limit)
            self._events.add(session.id, "limit", {"limit": limit})
        text = limit_message(limit)
        return [Delta("content", text), Done("stop", Message("assistant", text), Usage(0, 0))]

    def mark_undelivered(self, session: Session, node_id: int) -> None:
        """Record that the agent was gone when the last byte of a stored turn was to be sent."""
        for node in () if session.is_evicted else reversed(session.trace.nodes):
            if node.id == node_id and isinstance(node, Sampled):
                node.delivered = False
                break
        self._journal.mark_undelivered(session.key, node_id)

    def _note_stop(self, session: Session, limit: str) -> None:
        if session.stop != limit:
            session.stop = limit
            self._journal.note_stop(session.key, limit)

    # ── exact mode ──────────────────────────────────────────────────────────────────────────────────────────────

    async def _exact(self, session: Session, call: Call, tell: Tell, measured: CallTiming) -> None:
        renderer, engine = self._renderer, self._engine
        if renderer is None or engine is None:
            raise Conflict("this gateway has no engine for exact sessions; open the session with mode 'observe'")
        if session.config.mode != self._settings.mode:
            raise Conflict(
                f"this session has mode {session.config.mode!r}, and this gateway's engine serves {self._settings.mode!r}"
            )
        prompt = await self._prompts.render(session, call, renderer)
        room = self._room(session, call, len(prompt.ids))
        sampling = resolve_sampling(session, call)
        request = self._request(session, call, prompt, sampling, room)
        reader = renderer.reader(
            prompt.added, prompt.preamble.tools, call.stop, call.constraint, not call.parallel_tool_calls
        )
        draft = Draft(self._fence.version, measured)
        try:
            await self._generated(session, call, prompt, request, reader, draft, engine, sampling, tell)
        finally:
            if not draft.counted:
                session.live_tokens -= len(draft.ids)

    async def _generated(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        request: Generate,
        reader: ReplyReader,
        draft: Draft,
        engine: Engine,
        sampling: Sampling,
        tell: Tell,
    ) -> None:
        finish: Finish = "abort"
        whole = (
            False  # the engine was left in order; it can still be cancelled while what is left of a reply is drained
        )
        fault = ""
        last: list[Delta | CallDelta] = []  # what came with the end and goes out with it
        timer = EngineTimer(self._metrics, draft.measured)
        if draft.measured.span is not None:
            timer.span = draft.measured.span.start_engine_call(engine.name, sampling, request.max_tokens)
        try:
            async with engine.generate(request) as chunks:
                async for chunk in _until(session.deadline(), chunks):
                    timer.mark_received()
                    session.engine_silence.reset()
                    _check(chunk, request)
                    events = self._sampled(session, draft, chunk, reader, call)
                    over = reader.satisfied or session.tokens_left == 0 or chunk.finish is not None
                    if over and chunk.finish != "abort" and len(chunk.ids) <= _SHORT_END:
                        last = events
                    elif events:
                        await tell(events)
                    if chunk.finish == "abort":
                        raise EngineUnavailable("the engine gave this generation up")
                    if over:
                        finish = "stop" if reader.satisfied else chunk.finish or "length"
                        break
                    timer.mark_waiting()
            whole = finish != "abort"
        except TimeoutError:
            finish, whole = "length", True  # the session's wall clock ran out: what was sampled stands
        except TurngateError as error:
            fault = error.message
            timer.fail(error.kind)
            raise
        finally:
            timer.finish(finish, len(request.prompt), len(draft.ids))
            # An engine that failed before its first token sampled nothing that could be recorded.
            if not whole and (draft.ids or not fault):
                message = reader.finish()[1].message
                await self._commit(session, call, prompt, draft, message, "abort", sampling, fault=fault or "aborted")
        if finish == "length" and not draft.ids:
            raise LimitReached("sampled_tokens" if session.tokens_left == 0 else "seconds")
        rest, parsed = reader.finish()
        if parsed.message.tool_calls and finish == "stop":
            finish = "tool_calls"
        node = await self._commit(
            session, call, prompt, draft, parsed.message, finish, sampling, reasoning_open=parsed.reasoning_open
        )
        session.last_error = None
        usage = Usage(len(prompt.ids), len(draft.ids))
        await tell([*last, *rest, Done(finish, parsed.message, usage, node, reader.stopped_by)])

    def _room(self, session: Session, call: Call, size: int) -> int:
        """How many tokens may be sampled after a prompt of `size`."""
        limit, most = session.config.limits.context_tokens, self._settings.max_context
        if limit is not None and size >= limit:
            session.truncated = True
            self._note_stop(session, "context_tokens")
            if session.config.at_limit == "conflict":
                raise _overflow(limit, size)
            raise LimitReached("context_tokens")
        if most is not None and size >= most:
            raise _overflow(most, size)
        asked = call.max_tokens if session.config.max_tokens is None else session.config.max_tokens
        room = [
            asked,
            session.tokens_left,
            None if most is None else most - size,
            None if limit is None else limit - size,
        ]
        return min((n for n in room if n is not None), default=4096)

    def _request(self, session: Session, call: Call, prompt: Prompt, sampling: Sampling, room: int) -> Generate:
        assert self._renderer is not None
        return Generate(
            prompt=prompt.ids,
            max_tokens=room,
            sampling=sampling,
            stop=call.stop,
            stop_ids=self._renderer.stop_ids,
            constraint=call.constraint,
            stream=call.stream,
            session=session.id,
            request_id=f"turngate-{os.urandom(16).hex()}",
            cache_salt=f"v{self._fence.version}",
            version=self._fence.version,
            model=self._fence.model,
            echo_prompt=self._settings.echo_prompt,
        )

    def _sampled(
        self, session: Session, draft: Draft, chunk: Chunk, reader: ReplyReader, call: Call
    ) -> list[Delta | CallDelta]:
        """Take a chunk into the turn. The turn may end inside it: what was sampled past its end was never part of it."""
        ids, logprobs = chunk.ids, chunk.logprobs
        # Calls at once share what the session may still sample, so it may run out in the middle of one.
        end = len(ids) if session.tokens_left is None else min(len(ids), session.tokens_left)
        events: list[Delta | CallDelta] = []
        by_token = bool(call.stop) or not call.parallel_tool_calls
        if by_token:
            for n in range(end):
                events += reader.feed(ids[n : n + 1])
                if reader.satisfied:
                    end = n + 1
                    break
        now = self._fence.version_now(draft.begun)
        versions = chunk.versions or (now, now)
        draft.take(ids[:end], None if logprobs is None else logprobs[:end], *versions)
        session.live_tokens += end
        return events if by_token else reader.feed(ids[:end])

    # ── observe mode ────────────────────────────────────────────────────────────────────────────────────────────

    async def _relayed(self, session: Session, call: Call, tell: Tell, measured: CallTiming) -> None:
        relay = self._relay
        if relay is None:
            raise Conflict("this gateway has no endpoint to observe; open the session with mode 'exact'")
        located, preamble, cause = self._prompts.locate(session, call)
        sampling = resolve_sampling(session, call, neutral=False)
        pinned = sampling if session.config.sampling else None
        request = self._relay_request(session, call, pinned, _verbatim(located.node, relay.name))
        draft = Draft(self._fence.version, measured)
        draft.capture = "text"
        draft.engine = relay.name
        draft.biases = () if pinned is not None else ("the endpoint's own sampling",)
        try:
            place = (located, preamble, cause)
            await self._overheard(session, call, relay.relay(request), draft, place, sampling, tell)
        finally:
            if not draft.counted:
                session.live_tokens -= len(draft.ids)

    async def _overheard(
        self,
        session: Session,
        call: Call,
        reply: AbstractAsyncContextManager[AsyncIterator[RelayChunk]],
        draft: Draft,
        place: tuple[Location, Preamble, Cause | None],
        sampling: Sampling,
        tell: Tell,
    ) -> None:
        located, preamble, cause = place
        heard = Heard()
        finish: Finish = "abort"
        whole = False
        fault = ""
        timer = EngineTimer(self._metrics, draft.measured)
        if draft.measured.span is not None:
            timer.span = draft.measured.span.start_engine_call(draft.engine, sampling, call.max_tokens)
        try:
            async with reply as chunks:
                async for chunk in _until(session.deadline(), chunks):
                    timer.mark_received()
                    session.engine_silence.reset()
                    heard.add(chunk)
                    self._tokens(session, draft, chunk)
                    if chunk.events:
                        await tell(chunk.events)
                    if chunk.finish == "abort":
                        raise EngineUnavailable("the endpoint gave this generation up")
                    finish = chunk.finish or finish
                    timer.mark_waiting()
            whole = finish != "abort"
        except TimeoutError:
            finish, whole = "length", True
        except TurngateError as error:
            fault = error.message
            timer.fail(error.kind)
            raise
        finally:
            usage = heard.usage or Usage(0, len(draft.ids))
            timer.finish(finish, usage.prompt_tokens, usage.completion_tokens)
            message = heard.message()
            prompt = observed_prompt(located, heard.prompt, preamble, cause)
            if draft.capture == "tokens" and not heard.accounts_for(draft.ids):
                draft.capture = "logprobs"  # ids that hang in the air, or not all of them: evidence, but no row
            if not whole and (not heard.empty or not fault):
                await self._commit(session, call, prompt, draft, message, "abort", sampling, fault=fault or "aborted")
        node = await self._commit(session, call, prompt, draft, message, finish, sampling, fault=heard.fault)
        session.last_error = None
        await tell([Done(finish, message, heard.usage, node, heard.stopped_by)])

    def _relay_request(
        self, session: Session, call: Call, pinned: Sampling | None, said: dict[int, bytes] | None = None
    ) -> RelayRequest:
        served = self._settings.models
        return RelayRequest(
            call=call,
            model=session.config.model or (served[0] if len(served) == 1 else ""),
            sampling=pinned,
            max_tokens=call.max_tokens if session.config.max_tokens is None else session.config.max_tokens,
            session=session.id,
            verbatim=said or {},
        )

    def _tokens(self, session: Session, draft: Draft, chunk: RelayChunk) -> None:
        """Take what a chunk tells of tokens into the turn."""
        if chunk.ids:
            draft.capture = "tokens"
            draft.take(chunk.ids, chunk.logprobs, self._fence.version_now(draft.begun))
            session.live_tokens += len(chunk.ids)
        elif chunk.logprobs:
            draft.capture = "logprobs"
        draft.lost += chunk.lost
        draft.biases += chunk.biases
        draft.verbatim = chunk.verbatim or draft.verbatim

    # ── commit ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _commit(
        self,
        session: Session,
        call: Call,
        prompt: Prompt,
        draft: Draft,
        message: Message,
        finish: Finish,
        sampling: Sampling,
        *,
        reasoning_open: bool = False,
        fault: str = "",
    ) -> int:
        """Store the turn, then let it be seen. In this order: a tree that knew more than the store could not be resumed."""
        trace = session.trace
        reading = prompt.located.reading
        context = prompt.located.context or trace.same_context(prompt.parent, prompt.added, reading, prompt.start)
        cause = self._cause(trace, prompt, context, call, draft.started)
        if context is None:
            context = Context(trace.reserve(), prompt.parent, prompt.added, context_info(prompt, cause, call))
            context.stored = False
            # Known from now on, so that an equal call that ends meanwhile hangs itself there too.
            trace.add_context(context)
        assert context.ids is prompt.added or np.array_equal(context.ids, prompt.added), (
            "it hangs on the ids that were sent"
        )
        info = SampledInfo(
            meaning=meaning_digest((message,), {}),
            reasoning=reasoning_digest(message.reasoning),
            exact=exact_digest(message),
            finish=finish,
            version_start=draft.version_start,
            version_end=draft.version_end,
            started=draft.started,
            ended=time.time(),
            biases=draft.biases + sampling.biases() + _constrained(call),
            sampling=msgspec.json.encode(sampling),
            reasoning_open=reasoning_open,
            cause=cause,
            idempotency_key=call.idempotency_key,
            capture=draft.capture,
            fault=fault,
            engine=draft.engine,
            arguments=argument_sizes(message),
            lost=draft.lost,
            verbatim=draft.verbatim,
        )
        sampled = Sampled(trace.reserve(), context, np.array(draft.ids, ID_DTYPE), draft.scores(), info)
        facts = {
            "node": sampled.id,
            "finish": finish,
            "prompt_tokens": context.length,
            "sampled_tokens": sampled.size,
            "cause": cause,
        }
        turn = NewTurn(
            session=session.key,
            context=None if context.stored else context,
            context_messages=b"[" + b",".join(reading.raws[prompt.start :]) + b"]",
            sampled=sampled,
            message=msgspec.json.encode(message),
            preamble=None if context.stored or prompt.parent is not None else _stored(prompt.preamble),
            event=new_event(session.id, "turn", facts),
        )
        cancelled: asyncio.CancelledError | None = None
        try:
            await self._journal.commit(turn)
        except asyncio.CancelledError as error:
            cancelled = error  # durable all the same, so the tree has to know it
        except TurngateError:
            trace.drop_context(context)
            raise
        trace.keep_context(context)
        trace.add_sampled(sampled)
        trace.remember(context, reading)
        session.count(sampled)
        session.live_tokens -= len(draft.ids)
        draft.counted = True
        if session.tokens_left == 0:
            self._note_stop(session, "sampled_tokens")  # it may never call again
        if cancelled is not None:
            self.mark_undelivered(session, sampled.id)
        self._metrics.count_turn(call.dialect, session.config.mode, finish, context.length, sampled.size)
        if draft.measured.span is not None:
            draft.measured.span.set_result(sampled.id, finish, context.length, sampled.size, draft.version_end)
        self._events.wake(session.id)
        if self._settings.log_turns:
            log.info(
                "session %s turn %s content=%d reasoning=%d calls=%d",
                session.id,
                facts,
                len(message.content),
                len(message.reasoning),
                len(message.tool_calls),
            )
        if cancelled is not None:
            raise cancelled
        return sampled.id

    def _cause(self, trace: Trace, prompt: Prompt, context: Context | None, call: Call, started: float) -> Cause | None:
        """Why this turn forks, as of now: what had begun and not ended when it was located was not known of then."""
        if prompt.cause in ("retry", "resample") or (context is None and prompt.cause is not None):
            return prompt.cause
        return fork_cause.find_fork_cause(
            trace,
            Location(prompt.parent, prompt.start, context, prompt.located.reading),
            has_tools=bool(prompt.preamble.tools),
            retried=call.retried,
            idempotency_key=call.idempotency_key,
            told=call.signals,
            started=started,
        )


class Heard:
    """A relayed reply, gathered from what came of it."""

    def __init__(self) -> None:
        self.prompt: Ids | None = None  # as the endpoint saw it
        self.usage: Usage | None = None
        self.stopped_by = ""
        self.fault = ""
        self._text: dict[str, list[str]] = {"content": [], "reasoning": [], "signature": []}
        self._calls: list[CallDelta] = []
        self._holes = False  # something was said without its ids

    def add(self, chunk: RelayChunk) -> None:
        for event in chunk.events:
            if isinstance(event, Delta):
                self._text[event.kind].append(event.text)
            else:
                self._calls.append(event)
        if chunk.prompt is not None:
            self.prompt = np.asarray(chunk.prompt, ID_DTYPE)
        self._holes = self._holes or bool(chunk.events and chunk.ids is None)
        self.usage = chunk.usage or self.usage
        self.stopped_by = chunk.stopped_by or self.stopped_by
        self.fault = chunk.fault or self.fault

    @property
    def empty(self) -> bool:
        return not (self._calls or self._text["content"] or self._text["reasoning"])

    def message(self) -> Message:
        calls = tuple(event.call for event in self._calls)
        content, reasoning, signature = ("".join(self._text[kind]) for kind in ("content", "reasoning", "signature"))
        return Message("assistant", content, reasoning, calls, signature=signature)

    def accounts_for(self, ids: Sequence[int]) -> bool:
        """Whether these are all the ids that were sampled, after a prompt that is known."""
        counted = self.usage is None or self.usage.completion_tokens == len(ids)
        return self.prompt is not None and not self._holes and counted


def _until(deadline: float | None, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same, until the session's wall clock runs out: then TimeoutError."""
    return items if deadline is None else _Timed(items, deadline)


class _Timed(Generic[T]):
    """Only the waiting is timed, never the consumer, which may be busy writing to a slow agent when the time comes."""

    def __init__(self, items: AsyncIterator[T], deadline: float) -> None:
        self._items = items
        self._end = _loop_time(deadline)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        async with asyncio.timeout_at(self._end):
            return await anext(self._items)


def resolve_sampling(session: Session, call: Call, *, neutral: bool | None = None) -> Sampling:
    """The session's pinned values over the agent's over neutral ones.

    A neutral session takes only temperature and seed of the agent's.
    """
    only = session.config.bias == "neutral" if neutral is None else neutral
    asked = {k: v for k, v in call.sampling.items() if not only or k in ("temperature", "seed")}
    wanted = {**asked, **session.config.sampling}
    if not wanted:
        return NEUTRAL
    try:
        return msgspec.convert(wanted, Sampling)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling: {error}", param="sampling") from None


def _check(chunk: Chunk, request: Generate) -> None:
    """What the engine says must fit what it was asked, or the turn fails loudly."""
    if chunk.prompt is not None and not np.array_equal(np.asarray(chunk.prompt, ID_DTYPE), request.prompt):
        raise EngineError("the engine says that it saw another prompt than the one it was sent; the turn is refused")
    if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.ids):
        raise EngineError(f"the engine gave {len(chunk.logprobs)} log-probabilities for {len(chunk.ids)} tokens")


def _verbatim(node: Sampled | None, endpoint: str) -> dict[int, bytes]:
    """The turns on the way to `node` that this endpoint wants back in its own words, by index of their raw piece."""
    turns = [turn for turn in path_to(node) if isinstance(turn, Sampled)]
    return {t.count - 1: t.info.verbatim for t in turns if t.info.verbatim and t.info.engine == endpoint}


def _constrained(call: Call) -> tuple[str, ...]:
    return (f"constrained: {call.constraint.kind}",) if call.constraint is not None else ()


def _stored(preamble: Preamble) -> tuple[bytes, bytes, bytes]:
    return preamble.digest, preamble.raw_tools, preamble.raw_kwargs


def _loop_time(moment: float | None) -> float | None:
    """A wall-clock moment on the event loop's own clock."""
    return None if moment is None else moment - time.time() + asyncio.get_running_loop().time()


def _overflow(most: int, size: int) -> ContextOverflow:
    """In the words that agents look for."""
    return ContextOverflow(
        f"This model's maximum context length is {most} tokens. However, your messages resulted in {size} tokens. "
        "Please reduce the length of the messages.",
        param="messages",
        limit=most,
        size=size,
    )
