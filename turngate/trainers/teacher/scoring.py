"""Score the turns of rows with a teacher. Several calls run at a time, each with the ids of one row. Each turn is scored only once.

plan the calls of a rollout: one for each row with turns that are neither cached nor in another call
→ compare vocabularies → score, with retries → check the scores → cache them
→ columns of a row, if all of its turns are scored; otherwise the reason why it has none
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import msgspec
import numpy as np

from turngate.engines.scoring import ScoringEngine, Span, TokenScores
from turngate.errors import ContextOverflow, EngineBusy, EngineError, EngineUnavailable, TurngateError
from turngate.render import Tokenizer
from turngate.store.score_cache import CachedScores, ScoreCache, ScoreKey, digest_turns
from turngate.trace.sample import RowSpan
from turngate.trace.side_data import SideColumn
from turngate.trainers.teacher.config import TeacherConfig, find_version, open_engine
from turngate.trainers.teacher.vocabulary import VocabularyCheck
from turngate.types import Ids

TEACHER_LOGPROBS = "teacher_logprobs"
TEACHER_TOP_IDS = "teacher_top_ids"
TEACHER_TOP_LOGPROBS = "teacher_top_logprobs"
TEACHER_COLUMNS = (TEACHER_LOGPROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)
_RETRIES_S = (0.5, 1.0, 2.0, 4.0)  # pauses before the retries of a call
_NOT_SCORED = "the teacher has not scored all turns of the row"


class RowToScore(Protocol):
    """A row of an export or of a feed."""

    @property
    def ids(self) -> Ids: ...
    @property
    def spans(self) -> Sequence[RowSpan]: ...


class TeacherUnavailable(EngineUnavailable):
    """The teacher failed while rows were being scored. Scores that it returned before the failure are cached."""


class TeacherSummary(msgspec.Struct):
    """A summary of a teacher's work: its calls, the turns that they scored, and the rows without scores."""

    model: str
    version: str
    top_k: int
    calls: int = 0  # successful calls
    turns: int = 0  # turns scored in these calls
    cached: int = 0  # turns that were already cached or being scored by another call
    scored_rows: int = 0
    unscored: Counter[str] = msgspec.field(default_factory=Counter)  # rows without scores, by reason


class _TeacherCall(msgspec.Struct, frozen=True):
    """One call: the turns of a row that need scores, and the row's ids up to the end of the last such turn."""

    session: str
    ids: Ids
    spans: Sequence[Span]
    turns: Sequence[bytes]  # digests


class Teacher:
    """Scores rows. `submit` starts the calls for the rows of a rollout, `wait` waits for all calls, and `columns` returns the scores.

    `submit` and `wait` raise `TeacherUnavailable` if the teacher times out, or if it is still unreachable or busy after retries. They raise
    `ConfigError` if its vocabulary differs from that of the rows or cannot be compared. If the teacher rejects a call, or its reply is
    invalid, only the rows that contain turns of that call have no scores.
    """

    def __init__(
        self,
        config: TeacherConfig,
        cache: Path | None = None,
        *,
        engine: ScoringEngine | None = None,
        watch: Callable[[TeacherSummary], None] = lambda summary: None,
    ) -> None:
        """Connect to a teacher. Scores are cached in the file `cache`, or in memory if `cache` is None.

        `watch` is called after each successful call.
        """
        self._engine = open_engine(config) if engine is None else engine
        model = self._engine.find_model()
        tokenizer = Tokenizer(Path(config.tokenizer)) if config.tokenizer else None
        if tokenizer is None and config.engine == "local":
            tokenizer = Tokenizer(Path(config.model))
        self._vocabulary = VocabularyCheck(self._engine, model, tokenizer)
        self._key = ScoreKey(model, find_version(config), config.top_k)
        self.summary = TeacherSummary(model, self._key.version, config.top_k)
        self._cache = ScoreCache(cache)
        self._watch = watch
        self._threads = ThreadPoolExecutor(config.concurrency, "turngate-teacher")
        self._room = threading.BoundedSemaphore(2 * config.concurrency)  # limits the rows in memory
        self._lock = threading.Lock()
        self._running: list[Future[None]] = []
        self._in_flight: set[bytes] = set()  # turns of running and waiting calls
        self._refused: dict[bytes, str] = {}  # why turns have no scores
        self._failure: TurngateError | None = None  # the error that ended the scoring

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._cache.close()

    def has_vocabulary(self, digest: str) -> bool:
        """Return whether the teacher's tokenizer file is known to have this digest."""
        return self._vocabulary.is_same(digest)

    def submit(self, session: str, rows: Sequence[RowToScore], policy: Tokenizer | None) -> None:
        """Start scoring the rows of a rollout. Block while too many calls are pending.

        `policy` is the tokenizer of the rows, or None if the teacher is known to have the same tokenizer.
        """
        for call in self._plan(session, rows):
            self._running = [future for future in self._running if not future.done() or future.exception() is not None]
            self._room.acquire()
            try:
                self._raise_failure()
                self._running.append(self._threads.submit(self._run, call, policy))
            except BaseException:
                self._room.release()
                raise

    def refuse(self, rows: Sequence[RowToScore], reason: str) -> None:
        """Record why rows cannot be scored."""
        for row in rows:
            self._refused.update(dict.fromkeys(digest_turns(row.ids, _list_spans(row)), reason))

    def wait(self) -> None:
        """Wait until all calls have ended. Raise the error that ended the scoring, if any."""
        for future in self._running:
            future.result()
        self._running = []
        self._raise_failure()

    def reset(self) -> None:
        """Wait until all calls have ended, then forget failures and rejected turns, so that scoring can be tried again."""
        futures.wait(self._running)
        self._running = []
        self._failure = None
        self._refused.clear()
        self._in_flight.clear()

    def columns(self, row: RowToScore) -> Mapping[str, SideColumn] | str:
        """Return the scores of a row as side data, or the reason why it has none. Count the row in `summary`."""
        spans = _list_spans(row)
        found: list[CachedScores] = []
        for turn in digest_turns(row.ids, spans):
            scores = self._cache.read(self._key, turn)
            if scores is None:
                why = self._refused.get(turn, _NOT_SCORED)
                self.summary.unscored[why] += 1
                return why
            found.append(scores)
        self.summary.scored_rows += 1
        return _build_columns(spans, found, self._key.top_k)

    def forget(self, session: str) -> None:
        """Remove the scores of a session from the cache."""
        self._cache.remove([session])

    def _plan(self, session: str, rows: Sequence[RowToScore]) -> list[_TeacherCall]:
        calls = []
        planned: set[bytes] = set()
        for row in rows:
            spans = _list_spans(row)
            due: list[tuple[Span, bytes]] = []
            for span, turn in zip(spans, digest_turns(row.ids, spans), strict=True):
                if turn in planned:
                    continue
                planned.add(turn)
                if self._begin(turn):
                    due.append((span, turn))
                else:
                    self.summary.cached += 1
            if due:
                end = due[-1][0][1]
                calls.append(_TeacherCall(session, row.ids[:end], [s for s, _ in due], [t for _, t in due]))
        return calls

    def _begin(self, turn: bytes) -> bool:
        """Return False if a turn is cached or in another call. Otherwise, mark it as being scored and return True."""
        with self._lock:
            if turn in self._in_flight:
                return False
            if self._cache.read(self._key, turn) is not None:
                return False
            self._in_flight.add(turn)
            return True

    def _run(self, call: _TeacherCall, policy: Tokenizer | None) -> None:
        """Score the turns of one call and cache the scores. Runs in a thread."""
        try:
            if self._failure is None:
                self._score_call(call, policy)
        except (EngineError, ContextOverflow) as error:
            if error.retry_safe:
                self._failure = self._failure or error
            else:
                self._refused.update(dict.fromkeys(call.turns, error.message))
        except TurngateError as error:
            self._failure = self._failure or error
        finally:
            with self._lock:
                self._in_flight.difference_update(call.turns)
            self._room.release()

    def _score_call(self, call: _TeacherCall, policy: Tokenizer | None) -> None:
        self._vocabulary.check(policy, call.ids)
        scores = self._score(call)
        cached = [CachedScores(found.logprobs, found.top_ids, found.top_logprobs) for found in scores]
        self._cache.write(self._key, call.session, zip(call.turns, cached, strict=True))
        with self._lock:
            self.summary.calls += 1
            self.summary.turns += len(call.turns)
            self._watch(self.summary)

    def _score(self, call: _TeacherCall) -> list[TokenScores]:
        for pause_s in _RETRIES_S:
            try:
                return self._engine.score(call.ids, call.spans, self._key.top_k)
            except (EngineBusy, EngineUnavailable):
                if self._failure is not None:
                    raise
                time.sleep(pause_s)
        return self._engine.score(call.ids, call.spans, self._key.top_k)

    def _raise_failure(self) -> None:
        """Raise the error that ended the scoring, if any."""
        error = self._failure
        if error is None:
            return
        if not isinstance(error, EngineError):
            raise error
        done = f"turns scored and cached so far: {self.summary.turns}" if self.summary.turns else "no turn was scored"
        raise TeacherUnavailable(f"the teacher is not available: {error.message}; {done}; try again to continue")


def _list_spans(row: RowToScore) -> list[Span]:
    """Return the spans of the turns with tokens. Turns without tokens need no scores."""
    return [(span.start, span.end) for span in row.spans if span.end > span.start]


def _build_columns(spans: Sequence[Span], scores: Sequence[CachedScores], top_k: int) -> dict[str, SideColumn]:
    merged: list[Span] = []
    for start, end in spans:  # spans of side data are never adjacent
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    where = tuple(merged)
    columns = {TEACHER_LOGPROBS: SideColumn(where, np.concatenate([found.logprobs for found in scores]))}
    if top_k:
        columns[TEACHER_TOP_IDS] = SideColumn(where, np.concatenate([found.top_ids for found in scores]))
        columns[TEACHER_TOP_LOGPROBS] = SideColumn(where, np.concatenate([found.top_logprobs for found in scores]))
    return columns
