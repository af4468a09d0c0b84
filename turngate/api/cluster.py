"""Run a client's rollouts on a Ray cluster as one batch (`service/cluster_batch.py`), and convert the batch's results to `Result`s."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from turngate.api.progress import ProgressBoard
from turngate.api.result import Result
from turngate.api.result_builder import TokenReader, build_result, read_recording
from turngate.rollout.progress import BatchProgress
from turngate.service.cluster_batch import ClusterPlace, open_cluster_batch
from turngate.service.config import ServiceConfig
from turngate.service.request import TaskRolloutRequest
from turngate.tasks.task import Task


async def run_on_cluster(
    config: ServiceConfig,
    place: ClusterPlace,
    request: TaskRolloutRequest,
    tasks: Sequence[Task],
    n: int,
    timeout_s: float | None,
    folder: Path,
    reader: TokenReader,
    board: ProgressBoard,
    put: Callable[[tuple[int, Result]], None],
) -> None:
    """Run n rollouts of each task, calling `put` with each result and its index.

    If a rollout is retried on request, `put` is called again with the new result and the same index.
    """

    def watch(progress: BatchProgress) -> None:
        board.running_elsewhere = sum(progress.states.values())

    first_index = {task.id: number * n for number, task in enumerate(tasks)}
    opening = open_cluster_batch(config, place, request, tasks, n, folder, timeout_s=timeout_s)
    async with opening as batch, aclosing(batch.rollouts(watch)) as rollouts:
        async for finished in rollouts:
            result = await asyncio.to_thread(batch.build_result, finished)
            board.put(await asyncio.to_thread(batch.build_state, finished))
            trace, rows, notes = await read_recording(batch.gateway, result.session)
            group = finished.rollout.rpartition(".")[0]
            built = await asyncio.to_thread(build_result, result, group, trace, rows, reader, None, notes)
            put((first_index[finished.task] + finished.index, built))
