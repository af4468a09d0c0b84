"""The blocking version of `client.py`, for scripts and notebooks.

    result = run_sync("examples/tasks/fix-add", agent="pi", model="vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000")

    with open("vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000", agent="pi") as client:
        for result in client.group(task, n=8): …

Rollouts run on an event loop in a separate thread. This API therefore also works where an event loop is already running, as in a notebook,
and rollouts continue while the caller does other work. Ctrl-C, or interrupting the kernel, ends the rollouts that the caller is waiting for
and removes their sandboxes.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Unpack

from turngate.api.arguments import (
    AllArguments,
    ClientArguments,
    RunArguments,
    RunSettings,
    check_n,
    parse_arguments,
    split_arguments,
)
from turngate.api.client import AnyModel, Client, results_already_read, sort_results
from turngate.api.progress import ProgressBoard, ProgressScreen
from turngate.api.result import Result, Results
from turngate.api.task import AnyTask
from turngate.common.loop_thread import LoopThread

_OPEN: set[BlockingClient] = set()  # clients to close when Python exits


class BlockingClient:
    """The blocking version of `Client`. Create it with `open`, and use it from one thread only."""

    def __init__(self, model: AnyModel = "", **where: Unpack[ClientArguments]) -> None:
        """Open the client. The arguments are the same as for `Client`."""
        self._client = Client(model, **where)
        self._loop = LoopThread("turngate", param="client")
        self._loop.start()
        _register_at_exit()
        _OPEN.add(self)
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self.close()  # the client may already be open when an interrupt arrives
            raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the rollouts that are still running, and release all resources. This method may be called more than once.

        In a forked child process, such as one started by `multiprocessing`, it does nothing, because the client belongs to the parent
        process.
        """
        _OPEN.discard(self)
        try:
            if self._loop.is_running:
                self._loop.run(self._client.__aexit__(None, None, None))
        finally:
            self._loop.stop()

    def run(self, task: AnyTask, **how: Unpack[RunArguments]) -> Result:
        """Run one rollout to completion, and return its result. The arguments are the same as for `Client.run`."""
        given = parse_arguments(how, RunSettings)
        board = ProgressBoard()
        with ProgressScreen(board, given.progress) as screen:
            return self._loop.run(self._client.run_with_board(task, given, board), screen.refresh)

    def group(self, task: AnyTask, n: int = 8, **how: Unpack[RunArguments]) -> BlockingResultStream:
        """Run n rollouts of one task. Iterate over the returned stream to get results as they finish, or call `all()` on it."""
        return self.batch([task], n, **how)

    def batch(
        self, tasks: Iterable[AnyTask] | str | Path, n: int = 1, **how: Unpack[RunArguments]
    ) -> BlockingResultStream:
        """Run n rollouts of each task. The arguments are the same as for `Client.batch`."""
        return BlockingResultStream(self, tasks, check_n(n), parse_arguments(how, RunSettings), ProgressBoard())

    @contextmanager
    def results(
        self, tasks: Iterable[AnyTask] | str | Path, n: int, given: RunSettings, board: ProgressBoard
    ) -> Iterator[Iterator[tuple[int, Result]]]:
        """Provide an iterator that runs the rollouts and yields each result, with its index, when its rollout finishes.

        Leaving the block ends the rollouts that are still running.
        """
        stream = self._client.stream(tasks, n, given, board)
        with ProgressScreen(board, given.progress) as screen:
            try:
                yield self._iterate(stream, screen)
            finally:
                if self._loop.is_running:
                    self._loop.run(stream.aclose())

    def _iterate(
        self, stream: AsyncGenerator[tuple[int, Result], None], screen: ProgressScreen
    ) -> Iterator[tuple[int, Result]]:
        while True:
            result = self._loop.run(_next_result(stream), screen.refresh)
            if result is None:
                return
            yield result


@cache
def _register_at_exit() -> None:
    """Add a hook that closes all clients when Python exits.

    `atexit` would be too late: by then, thread pools no longer accept work, and removing a sandbox needs a thread. The hooks
    of `threading` run earlier, in reverse order of registration. The import makes sure that the hook that shuts
    down thread pools is already registered, and therefore runs after this one.
    """
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    for client in list(_OPEN):
        client.close()


class BlockingResultStream:
    """A stream of results. The rollouts start when it is iterated over, or when `all()` is called.

    Iterating yields results as they finish, and `all()` returns all of them in the order of the tasks. Leaving the loop early ends the
    rollouts that are still running. The results can be read only once.
    """

    def __init__(
        self,
        client: BlockingClient,
        tasks: Iterable[AnyTask] | str | Path,
        n: int,
        given: RunSettings,
        board: ProgressBoard,
    ) -> None:
        self._client = client
        self._arguments = tasks, n, given, board
        self._is_open = False

    def __iter__(self) -> Iterator[Result]:
        with self._open() as results:
            for _, result in results:
                yield result

    def all(self) -> Results:
        """Wait for all results, and return them in the order of the tasks."""
        with self._open() as results:
            return sort_results(results)

    def _open(self) -> AbstractContextManager[Iterator[tuple[int, Result]]]:
        if self._is_open:
            raise results_already_read()
        self._is_open = True
        return self._client.results(*self._arguments)


async def _next_result(stream: AsyncGenerator[tuple[int, Result], None]) -> tuple[int, Result] | None:
    """Return the next result with its index, or None if there are no more."""
    return await anext(stream, None)


def open(model: AnyModel = "", **where: Unpack[ClientArguments]) -> BlockingClient:
    """Open a client that runs several rollouts. Use it in a `with` block, or call `close()` when done."""
    return BlockingClient(model, **where)


def run_sync(task: AnyTask, *, model: AnyModel = "", **everything: Unpack[AllArguments]) -> Result:
    """Run one rollout to completion, and return its result. This is the blocking version of `run`, with the same arguments."""
    where, how = split_arguments(everything)
    with open(model, **where) as client:
        return client.run(task, **how)


def group_sync(
    task: AnyTask, n: int = 8, *, model: AnyModel = "", **everything: Unpack[AllArguments]
) -> Iterator[Result]:
    """Run n rollouts of one task, and yield results as they finish. To collect them in a list, write `Results(group_sync(…))`."""
    return batch_sync([task], n, model=model, **everything)


def batch_sync(
    tasks: Iterable[AnyTask] | str | Path, n: int = 1, *, model: AnyModel = "", **everything: Unpack[AllArguments]
) -> Iterator[Result]:
    """Run n rollouts of each task, and yield results as they finish. This is the blocking version of `batch`."""
    where, how = split_arguments(everything)
    check_n(n)
    parse_arguments(how, RunSettings)
    return _stream(tasks, n, model, where, how)


def _stream(
    tasks: Iterable[AnyTask] | str | Path, n: int, model: AnyModel, where: ClientArguments, how: RunArguments
) -> Iterator[Result]:
    with open(model, **where) as client:
        yield from client.batch(tasks, n, **how)
