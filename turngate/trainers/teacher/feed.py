"""Score the deliveries of a feed.

with FeedTeacher(TeacherConfig(engine="vllm", url=…, model=…), policy_tokenizer=folder) as teacher:
    async with await Feed.open(gateway, "math", FeedConfig(n=8), teacher=teacher) as feed:
        …                                       # row.side["teacher_logprobs"], or row.unscored, the reason why there are none
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from turngate.client.feed import DeliveredRollout, Delivery, Row
from turngate.engines.scoring import ScoringEngine
from turngate.render import Tokenizer
from turngate.trainers.teacher.config import TeacherConfig
from turngate.trainers.teacher.scoring import Teacher, TeacherSummary


class FeedTeacher:
    """Adds a teacher's scores to deliveries. Scores are computed in threads, never on the event loop.

    `policy_tokenizer` is the policy's tokenizer folder. `cache` is a file for scores. If it is `teacher-scores.db` in the data folder,
    `turngate export` reuses the scores. If `cache` is None, scores are forgotten after each delivery.
    """

    def __init__(
        self,
        config: TeacherConfig,
        policy_tokenizer: str | Path,
        cache: Path | None = None,
        *,
        engine: ScoringEngine | None = None,
    ) -> None:
        self._teacher = Teacher(config, cache, engine=engine)
        self._policy = Tokenizer(Path(policy_tokenizer))
        self._keeps = cache is not None
        self._thread = ThreadPoolExecutor(1, "turngate-feed-teacher")
        self._pending: tuple[Delivery, Future[Delivery]] | None = None  # kept if the call of `score` is cancelled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._teacher.__exit__(kind, error, trace)
        self._thread.shutdown(cancel_futures=True)

    @property
    def summary(self) -> TeacherSummary:
        return self._teacher.summary

    async def score(self, delivery: Delivery) -> Delivery:
        """Return the delivery with the teacher's scores.

        If the teacher fails, raise `TeacherUnavailable`. The call can then be repeated. Raise `ConfigError` if the teacher's vocabulary
        differs from that of the delivery or cannot be compared.

        If a call is cancelled, its scoring continues, and the next call with the same delivery waits for it.
        """
        if self._pending is None or self._pending[0] is not delivery:
            self._pending = delivery, self._thread.submit(self._score, delivery)
        try:
            scored = await asyncio.shield(asyncio.wrap_future(self._pending[1]))
        except Exception:
            self._pending = None
            raise
        self._pending = None
        return scored

    def _score(self, delivery: Delivery) -> Delivery:
        self._teacher.reset()
        for rollout in delivery.rollouts:
            self._teacher.submit(rollout.session, rollout.rows, self._policy)
        self._teacher.wait()
        scored = tuple(self._add_scores(rollout) for rollout in delivery.rollouts)
        if not self._keeps:
            for rollout in delivery.rollouts:
                self._teacher.forget(rollout.session)
        return msgspec.structs.replace(delivery, rollouts=scored)

    def _add_scores(self, rollout: DeliveredRollout) -> DeliveredRollout:
        return msgspec.structs.replace(rollout, rows=tuple(map(self._add_row_scores, rollout.rows)))

    def _add_row_scores(self, row: Row) -> Row:
        found = self._teacher.columns(row)
        if isinstance(found, str):
            return msgspec.structs.replace(row, unscored=found)
        return msgspec.structs.replace(row, side={**row.side, **found})
