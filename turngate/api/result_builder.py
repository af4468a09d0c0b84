"""Build a `Result` from the service's result and the gateway's trace and rows.

`build_result` blocks for a while if the trace is long, so call it in a thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from turngate.api.result import Result
from turngate.api.result_data import Turn
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import DecodedTrace, SampleRow, TraceTurn
from turngate.errors import ConfigError, TurngateError
from turngate.render import BUILTIN_TOKENIZER, Tokenizer, find_tokenizer
from turngate.service.catalog import Endpoint
from turngate.service.result import RolloutResult
from turngate.trace.sample import Sample
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Message
from turngate.views.trace import TraceView, TurnView


class TokenReader:
    """Decodes token ids if their tokenizer is available on this machine. The tokenizer is loaded on first use."""

    def __init__(self, endpoint: Endpoint, tokenizer: str) -> None:
        self._name = tokenizer or endpoint.tokenizer or endpoint.model_folder
        self._builtin = endpoint.scheme == "scripted"
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._missing = not (self._name or self._builtin)

    def pieces(self, ids: Sequence[int], vocabulary: str) -> tuple[str, ...]:
        """Return the text that each id adds. A character that spans several ids is added by the last of them.

        The result is empty if no tokenizer with this vocabulary is available.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None or tokenizer.digest != vocabulary:
            return ()
        decoder = tokenizer.decoder()
        return tuple(decoder.feed([token]) for token in ids)

    def _tokenizer(self) -> Tokenizer | None:
        with self._lock:
            if self._loaded is None and not self._missing:
                try:
                    self._loaded = Tokenizer(find_tokenizer(self._name) if self._name else BUILTIN_TOKENIZER)
                except ConfigError:  # the tokenizer is only available at the remote gateway
                    self._missing = True
            return self._loaded


async def read_recording(
    gateway: GatewayClient, session: str
) -> tuple[DecodedTrace | None, list[SampleRow], list[str]]:
    """Return the trace and the rows of a session, and a list of notes.

    If `session` is empty or reading fails, the trace is None. If reading fails, a note says why.
    """
    if not session:
        return None, [], []
    try:
        return await gateway.trace(session), await gateway.samples(session), []
    except TurngateError as error:
        return None, [], [f"turns and rows could not be read from the gateway: {error.message}"]


def build_result(
    result: RolloutResult,
    group: str,
    trace: DecodedTrace | None,
    rows: list[SampleRow],
    reader: TokenReader,
    work: Path | None,
    notes: Sequence[str],
) -> Result:
    """Build a `Result`. `trace` is None if no trace is available. `work` is the folder with the agent's work, if it is kept."""
    return Result(
        rollout_id=result.rollout_id,
        session=result.session,
        task_id=result.task_id,
        group=group or result.task_id,
        agent=result.agent,
        model=result.model,
        mode=result.mode,
        status=result.status,
        kind=result.kind,
        reward=result.reward,
        resolved=result.resolved,
        exit_code=result.exit_code,
        stop=result.stop,
        wall_s=result.wall_s,
        seconds=result.seconds,
        turns=_turns(trace, reader) if trace is not None else (),
        rows=tuple(_sample(row) for row in rows),
        training=result.training,
        refused=result.refused,
        files=result.workdir_files,
        work=work if work is not None and work.is_dir() else None,
        logs=result.log_tails,
        verifier=result.verifier_output,
        error=result.error,
        notes=(*result.notes, *notes),
        clamped=tuple(result.clamped),
    )


def _turns(trace: DecodedTrace, reader: TokenReader) -> tuple[Turn, ...]:
    view = TraceView(trace)
    numbers = {turn.id: number for number, turn in enumerate(view.turns, 1)}
    messages = {node.id: node.decode_message() for node in trace.nodes if isinstance(node, TraceTurn)}
    return tuple(
        _turn(view, turn, numbers, messages[turn.id], reader.pieces(turn.ids, trace.vocabulary)) for turn in view.turns
    )


def _turn(view: TraceView, turn: TurnView, numbers: dict[int, int], message: Message, pieces: tuple[str, ...]) -> Turn:
    context = view.contexts[turn.parent]
    return Turn(
        number=numbers[turn.id],
        node=turn.id,
        after=None if context.parent is None else numbers[context.parent],
        role=turn.role,
        heard=tuple(context.messages),
        heard_ids=np.array(context.ids, ID_DTYPE),
        ids=np.array(turn.ids, ID_DTYPE),
        logprobs=None if turn.logprobs is None else np.array(turn.logprobs, LOGPROB_DTYPE),
        pieces=pieces,
        message=turn.message,
        text=message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        finish=turn.finish,
        untrained=turn.untrained,
        version_start=turn.version_start,
        version_end=turn.version_end,
        capture=turn.capture,
        cause=turn.cause or context.cause,
        seconds=max(0.0, turn.ended - turn.started),
    )


def _sample(row: SampleRow) -> Sample:
    logprobs = [np.nan if value is None else value for value in row.logprobs]
    return Sample(
        row.branch,
        np.array(row.ids, ID_DTYPE),
        np.array(row.mask, np.bool_),
        np.array(logprobs, LOGPROB_DTYPE),
        row.spans,
    )
