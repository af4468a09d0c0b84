"""Record turns: first durably in the store with their events, then in the session's trace, then in metrics and logs.

The order matters: a trace that is ahead of the store could not be restored after a crash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from turngate.common import clock
from turngate.common.safe_text import make_encodable, sanitize_line
from turngate.errors import StoreError, TurngateError
from turngate.gateway.draft import TurnDraft
from turngate.gateway.events import Events
from turngate.gateway.prompt import Preamble, build_context_info
from turngate.gateway.refusals import MAX_CHARS, digest_request
from turngate.gateway.sampling import find_constraint_bias
from turngate.store.events import new_event
from turngate.store.journal import Journal
from turngate.store.store import NewTurn
from turngate.telemetry.metrics import Metrics
from turngate.trace.fork_cause import find_fork_cause
from turngate.trace.message_equality import argument_sizes, exact_digest, meaning_digest, reasoning_digest
from turngate.trace.quotes import find_quotes, take_excerpts
from turngate.trace.session import Session
from turngate.trace.side_data import describe_arrays
from turngate.trace.tree import Cause, Context, Sampled, SampledInfo
from turngate.types import ID_DTYPE, Finish, Json, Message, SideArray

log = logging.getLogger("turngate")


class TurnRecorder:
    def __init__(self, journal: Journal, events: Events, metrics: Metrics, *, log_turns: bool = False) -> None:
        self._journal = journal
        self._events = events
        self._metrics = metrics
        self._log_turns = log_turns

    def require_writable(self) -> None:
        """Raise `StoreError` if turns cannot be recorded at the moment."""
        self._journal.require_writable()

    async def commit(
        self, draft: TurnDraft, message: Message, finish: Finish, *, reasoning_open: bool = False, fault: str = ""
    ) -> int:
        """Record a turn and return the id of its node."""
        session, prompt = draft.session, draft.prompt
        trace, request = session.trace, prompt.location.request
        context = prompt.context or trace.find_same_context(prompt.parent, prompt.added, request, prompt.start)
        # A prompt that was rendered again has no parent, but in meaning it continues the located turn.
        location = prompt.location
        quotes = find_quotes(trace, location.node, request, location.start) if context is None else ()
        cause = _find_cause(draft, context, quotes)
        if context is None:
            context_info = build_context_info(prompt, cause, draft.call, quotes)
            context = Context(trace.reserve_id(), prompt.parent, prompt.added, context_info)
            context.stored = False
            # Add the context now, so that an identical call that ends in the meantime uses it too.
            trace.add_context(context)
        assert context.ids is prompt.added or np.array_equal(context.ids, prompt.added), "ids differ from those sent"
        side = draft.select_side()
        sampled = Sampled(
            trace.reserve_id(),
            context,
            np.array(draft.ids, ID_DTYPE),
            draft.build_logprobs(),
            _build_info(draft, message, finish, cause, reasoning_open, fault, side),
        )
        facts = _event_facts(sampled, prompt.refusal if cause == "template" else "")
        turn = NewTurn(
            session=session.key,
            context=None if context.stored else context,
            context_messages=b"[" + b",".join(request.raws[prompt.start :]) + b"]",
            sampled=sampled,
            message=msgspec.json.encode(message),
            preamble=None if context.stored or prompt.parent is not None else _encode_preamble(prompt.preamble),
            event=new_event(session.id, "turn", facts),
            side=side,
        )
        was_cancelled = False
        try:
            await self._journal.commit(turn)
        except asyncio.CancelledError:
            was_cancelled = True  # the turn is durable anyway, so the trace must include it
        except TurngateError:
            trace.drop_context(context)
            raise
        trace.confirm_context(context)
        trace.add_sampled(sampled)
        trace.remember_request(context, request)
        session.count_turn(sampled)
        draft.settle()
        self._record_answer(draft, sampled)
        if session.tokens_left == 0:
            self._note_stop(session, "sampled_tokens")  # the agent may never call again
        if was_cancelled:
            self.mark_undelivered(session, sampled.id)
        self._report(draft, message, sampled, facts)
        if was_cancelled:
            raise asyncio.CancelledError
        return sampled.id

    def _report(self, draft: TurnDraft, message: Message, sampled: Sampled, facts: dict[str, Json]) -> None:
        """Report a recorded turn in the metrics, the span and the log, and wake the followers of its events."""
        session, finish, prompt_size = draft.session, sampled.info.finish, sampled.parent.length
        self._metrics.count_turn(draft.call.dialect, session.config.mode, finish, prompt_size, sampled.size)
        if sampled.info.cached >= 0:
            self._metrics.count_cache(sampled.info.cached, prompt_size)
        if draft.timing.span is not None:
            draft.timing.span.set_result(sampled.id, finish, prompt_size, sampled.size, draft.version_end)
        self._events.wake(session.id)
        if self._log_turns:
            log.info(
                "session %s turn %s content=%d reasoning=%d calls=%d",
                session.id,
                facts,
                len(message.content),
                len(message.reasoning),
                len(message.tool_calls),
            )

    def mark_undelivered(self, session: Session, node_id: int) -> None:
        """Record that the last byte of a turn's answer did not reach the agent. The turn itself is already recorded."""
        if session.is_evicted:
            session.outdate_load()  # a load in progress may already have read the turn
        else:
            for node in reversed(session.trace.nodes):
                if node.id == node_id and isinstance(node, Sampled):
                    node.delivered = False
                    break
        self._journal.mark_undelivered(session.key, node_id)

    def record_refusal(self, session: Session, status: int, message: str, body: bytes) -> None:
        """Record that the gateway refused a model call. Call this before the agent receives the answer."""
        short = make_encodable(message)[:MAX_CHARS]
        refused = self._journal.add_refusal(session.key, session.id, status, short, digest_request(body))
        if session.is_evicted:
            session.outdate_load()
        else:
            session.trace.refused = refused
        if refused is not None and refused.count == 1:
            log.warning("session %s: a model call was refused (%d: %s)", session.id, status, sanitize_line(short))
        self._events.wake(session.id)

    def _record_answer(self, draft: TurnDraft, sampled: Sampled) -> None:
        """Mark refused calls as repeated if they have the same conversation as this turn. If that fails, they still count as refused."""
        session = draft.session
        if session.trace.refused is None or sampled.info.finish == "abort":
            return
        request = digest_request(draft.call.body)
        if request is None:
            return
        try:
            session.trace.refused = self._journal.mark_repeated(session.key, session.id, request)
        except StoreError as error:
            log.warning(
                "session %s: cannot record that a refused call was repeated and answered: %s", session.id, error.message
            )

    def record_limit(self, session: Session, limit: str) -> None:
        """Record the limit that stopped a session. Add a `limit` event, unless this process has already added one for this limit."""
        self._note_stop(session, limit)
        if limit not in session.limits_announced:
            session.limits_announced.add(limit)
            self._events.add(session.id, "limit", {"limit": limit})

    def _note_stop(self, session: Session, limit: str) -> None:
        if session.stop != limit:
            session.stop = limit
            self._journal.note_stop(session.key, limit)


def _find_cause(draft: TurnDraft, context: Context | None, quotes: tuple[int, ...]) -> Cause | None:
    """Return why the turn forks the trace, or None if it does not.

    The cause is determined when the turn is recorded. By then, the trace may also contain calls that were in flight when the turn began.
    """
    prompt, call = draft.prompt, draft.call
    if context is None and prompt.forced_cause is not None:
        return prompt.forced_cause
    cause = find_fork_cause(
        draft.session.trace,
        prompt.location,
        context=context,
        has_tools=bool(prompt.preamble.tools),
        retried=call.retried,
        idempotency_key=call.idempotency_key,
        signals=call.signals,
        started=draft.started,
        quotes=quotes,
    )
    return "template" if context is None and prompt.is_rerendered and cause in (None, "branch") else cause


def _build_info(
    draft: TurnDraft,
    message: Message,
    finish: Finish,
    cause: Cause | None,
    reasoning_open: bool,
    fault: str,
    side: Sequence[SideArray],
) -> SampledInfo:
    version_start, version_end, version_runs = draft.read_versions()
    sampled_from = len(draft.prompt.ids) if draft.cached > 0 else 0
    return SampledInfo(
        meaning=meaning_digest((message,), {}),
        reasoning=reasoning_digest(message.reasoning),
        exact=exact_digest(message),
        finish=finish,
        version_start=version_start,
        version_end=version_end,
        started=draft.started,
        ended=clock.now(),
        biases=draft.biases + draft.sampling.biases() + find_constraint_bias(draft.call),
        sampling=msgspec.json.encode(draft.sampling),
        reasoning_open=reasoning_open,
        cause=cause,
        idempotency_key=draft.call.idempotency_key,
        capture=draft.capture,
        fault=fault,
        engine=draft.engine,
        arguments=argument_sizes(message),
        lost=draft.lost,
        verbatim=draft.verbatim,
        excerpts=take_excerpts(message),
        text_size=len(message.content),
        cached=draft.cached if draft.cached <= sampled_from else -1,
        version_runs=version_runs,
        side=describe_arrays(side) if side else (),
    )


def _event_facts(sampled: Sampled, reason: str) -> dict[str, Json]:
    """Return the data of a turn's event. `reason` says why the template caused a fork, if it did."""
    facts: dict[str, Json] = {
        "node": sampled.id,
        "finish": sampled.info.finish,
        "prompt_tokens": sampled.parent.length,
        "sampled_tokens": sampled.size,
        "cause": sampled.info.cause,
    }
    if reason:
        facts["reason"] = reason
    return facts


def _encode_preamble(preamble: Preamble) -> tuple[bytes, bytes, bytes]:
    return preamble.digest, preamble.raw_tools, preamble.raw_kwargs
