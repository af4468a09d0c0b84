"""The same as `client.py` without `await`: for scripts, and for cells of a notebook.

    result = run_sync("examples/tasks/fix-add", agent="pi", model="vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000")

    with open("vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000", agent="pi") as client:
        for result in client.group(task, n=8): …

Everything runs in an event loop of its own, in a thread of its own: it works where a loop runs already, as one does in a notebook, and
rollouts go on while the caller computes. Ctrl-C, or a kernel's interrupt, ends what is waited for; nothing of it is left.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Unpack

from turngate.api.arguments import Everything, Given, How, Where, checked_n, read, split
from turngate.api.client import AnyModel, Client, in_order
from turngate.api.progress import Board, Screen
from turngate.api.result import Result, Results
from turngate.api.task import AnyTask
from turngate.common.loop_thread import LoopThread

_OPEN: set[BlockingClient] = set()  # until they are closed, by whoever opened them or when Python ends


class BlockingClient:
    """Several rollouts on one gateway, until it is closed. Made by `open`, for one thread."""

    def __init__(self, model: AnyModel = "", **where: Unpack[Where]) -> None:
        """The arguments are those of `Client`."""
        self._client = Client(model, **where)
        self._loop = LoopThread("turngate", param="client")
        self._loop.start()
        _at_exit()
        _OPEN.add(self)
        try:
            self._loop.run(self._client.__aenter__())
        except BaseException:
            self.close()  # whole: an interrupt may have come when it had just been opened
            raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs, and everything else. As often as one likes. Only the process that opened it can: one that was forked
        meanwhile, as `multiprocessing` may do, leaves it as it is, also when it ends."""
        _OPEN.discard(self)
        try:
            if self._loop.is_running:
                self._loop.run(self._client.__aexit__(None, None, None))
        finally:
            self._loop.stop()

    def run(self, task: AnyTask, **how: Unpack[How]) -> Result:
        """One rollout, to its end. The arguments are those of `Client.run`."""
        given = read(how, Given)
        board = Board()
        with Screen(board, given.progress) as screen:
            return self._loop.run(self._client.one(task, given, board), screen.refresh)

    def group(self, task: AnyTask, n: int = 8, **how: Unpack[How]) -> BlockingRunning:
        """n rollouts of one task. `for` gives their results as they come, `all()` all of them."""
        return self.batch([task], n, **how)

    def batch(self, tasks: Iterable[AnyTask] | str | Path, n: int = 1, **how: Unpack[How]) -> BlockingRunning:
        """n rollouts of each task, as `Client.batch` has it."""
        return BlockingRunning(self, tasks, checked_n(n), read(how, Given), Board())

    @contextmanager
    def results(
        self, tasks: Iterable[AnyTask] | str | Path, n: int, given: Given, board: Board
    ) -> Iterator[Iterator[tuple[int, Result]]]:
        """Results as they come, each with its place; what still runs when the block ends is ended."""
        running = self._client.many(tasks, n, given, board)
        with Screen(board, given.progress) as screen:
            try:
                yield self._each(running, screen)
            finally:
                if self._loop.is_running:
                    self._loop.run(running.aclose())

    def _each(self, running: AsyncGenerator[tuple[int, Result], None], screen: Screen) -> Iterator[tuple[int, Result]]:
        while True:
            found = self._loop.run(_next(running), screen.refresh)
            if found is None:
                return
            yield found


@cache
def _at_exit() -> None:
    """Whatever is open when Python ends is closed: once. `atexit` would be too late: no thread pool takes work by then, and a sandbox
    is not removed without. So it is said where thread pools say it themselves, and after they have: last in, first out."""
    import concurrent.futures.thread  # noqa: F401

    threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def _close_all() -> None:
    for client in list(_OPEN):
        client.close()


class BlockingRunning:
    """Results that are under way: `for` has them as they come, `all()` has all of them in the order in which they were asked for.
    Leaving the loop early ends what still runs."""

    def __init__(
        self, client: BlockingClient, tasks: Iterable[AnyTask] | str | Path, n: int, given: Given, board: Board
    ) -> None:
        self._client = client
        self._wanted = tasks, n, given, board

    def __iter__(self) -> Iterator[Result]:
        with self._client.results(*self._wanted) as results:
            for _, result in results:
                yield result

    def all(self) -> Results:
        with self._client.results(*self._wanted) as results:
            return in_order(results)


async def _next(running: AsyncGenerator[tuple[int, Result], None]) -> tuple[int, Result] | None:
    """None: that was all."""
    return await anext(running, None)


def open(model: AnyModel = "", **where: Unpack[Where]) -> BlockingClient:
    """A client for several rollouts, with `run`, `group` and `batch`: in a `with` block, or until its `close()`."""
    return BlockingClient(model, **where)


def run_sync(task: AnyTask, *, model: AnyModel = "", **everything: Unpack[Everything]) -> Result:
    """`run`, without `await`. The arguments are the same."""
    where, how = split(everything)
    with open(model, **where) as client:
        return client.run(task, **how)


def group_sync(
    task: AnyTask, n: int = 8, *, model: AnyModel = "", **everything: Unpack[Everything]
) -> Iterator[Result]:
    """`group`, without `await`: results as they come. `Results(group_sync(…))` has all of them."""
    return batch_sync([task], n, model=model, **everything)


def batch_sync(
    tasks: Iterable[AnyTask] | str | Path, n: int = 1, *, model: AnyModel = "", **everything: Unpack[Everything]
) -> Iterator[Result]:
    """`batch`, without `await`: results as they come."""
    where, how = split(everything)
    checked_n(n)
    read(how, Given)
    return _each(tasks, n, model, where, how)


def _each(tasks: Iterable[AnyTask] | str | Path, n: int, model: AnyModel, where: Where, how: How) -> Iterator[Result]:
    with open(model, **where) as client:
        yield from client.batch(tasks, n, **how)
