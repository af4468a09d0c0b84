"""From what the service and the gateway tell of a rollout to a `Result`. `client.py` calls it, in a thread: a long trace takes a while."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from turngate.api.result import Result, Turn
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, Tokenizer, find_tokenizer
from turngate.service.catalog import Endpoint
from turngate.service.result import RolloutResult
from turngate.trace.sample import Sample, Span
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Json, Message
from turngate.views.trace import TraceView, TurnView, parse_trace


class Reader:
    """Reads ids as text, where the tokenizer that they were recorded with is at hand. It is loaded when it is first needed."""

    def __init__(self, endpoint: Endpoint, tokenizer: str) -> None:
        self._name = tokenizer or endpoint.tokenizer or endpoint.model_folder
        self._builtin = endpoint.scheme == "scripted"
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._missing = not (self._name or self._builtin)

    def pieces(self, ids: Sequence[int], vocabulary: str) -> tuple[str, ...]:
        """The text that each adds; a character that several make up is at the last of them. None at all with another vocabulary."""
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
                except ConfigError:  # a gateway elsewhere has it, and this machine has not
                    self._missing = True
            return self._loaded


class _Row(msgspec.Struct):
    """One row of `GET /admin/sessions/{id}/samples`."""

    branch: int
    ids: list[int]
    mask: list[bool | int]
    logprobs: list[float | None]
    spans: tuple[Span, ...]


def made(
    ended: RolloutResult,
    group: str,
    trace: Json,
    rows: list[Json],
    reader: Reader,
    work: Path | None,
    notes: Sequence[str],
) -> Result:
    """`trace` and `rows`: as the gateway tells them; None where nothing was recorded."""
    return Result(
        rollout_id=ended.rollout_id,
        session=ended.session,
        task_id=ended.task_id,
        group=group or ended.task_id,
        agent=ended.agent,
        model=ended.model,
        mode=ended.mode,
        status=ended.status,
        kind=ended.kind,
        reward=ended.reward,
        resolved=ended.resolved,
        exit_code=ended.exit_code,
        stop=ended.stop,
        wall_s=ended.wall_s,
        seconds=ended.seconds,
        turns=_turns(trace, reader) if trace is not None else (),
        rows=tuple(_sample(msgspec.convert(row, _Row)) for row in rows),
        files=ended.workdir_files,
        work=work if work is not None and work.is_dir() else None,
        logs=ended.log_tails,
        verifier=ended.verifier_output,
        error=ended.error,
        notes=(*ended.notes, *notes),
        clamped=tuple(ended.clamped),
    )


def _turns(trace: Json, reader: Reader) -> tuple[Turn, ...]:
    view = parse_trace(trace)
    numbers = {turn.id: number for number, turn in enumerate(view.turns, 1)}
    said = {
        node["id"]: msgspec.convert(node["message"], Message) for node in trace["nodes"] if node["kind"] == "sampled"
    }
    return tuple(
        _turn(view, turn, numbers, said[turn.id], reader.pieces(turn.ids, trace["vocabulary"])) for turn in view.turns
    )


def _turn(view: TraceView, turn: TurnView, numbers: dict[int, int], said: Message, pieces: tuple[str, ...]) -> Turn:
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
        text=said.content,
        reasoning=said.reasoning,
        tool_calls=said.tool_calls,
        finish=turn.finish,
        untrained=turn.untrained,
        version_start=turn.version_start,
        version_end=turn.version_end,
        capture=turn.capture,
        cause=turn.cause or context.cause,
        seconds=max(0.0, turn.ended - turn.started),
    )


def _sample(row: _Row) -> Sample:
    logprobs = [np.nan if value is None else value for value in row.logprobs]
    return Sample(
        row.branch,
        np.array(row.ids, ID_DTYPE),
        np.array(row.mask, np.bool_),
        np.array(logprobs, LOGPROB_DTYPE),
        row.spans,
    )
