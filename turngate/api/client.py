"""Rollouts from Python: `run` for one, `group` and `batch` for many, `Client` for several on one gateway.

    result = await run("examples/tasks/fix-add", agent="pi", model="vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000")

    async with Client("vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000", agent="pi") as client:
        async for result in client.group(task, n=8): …

All of it goes through `service.Rollouts`, the one way to run a rollout. Unlike a service's callers, whoever awaits here owns the rollout:
being cancelled ends the agent and removes its sandbox before the cancellation goes on. `blocking.py` has the same without `await`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import msgspec

from turngate.api import models
from turngate.api import task as tasks
from turngate.api.arguments import Everything, Given, How, Place, Where, checked_n, read, split
from turngate.api.progress import OFTEN_S, Board, Screen
from turngate.api.result import Result, Results
from turngate.api.result_builder import Reader, made
from turngate.api.task import AnyTask
from turngate.common.aio import run_to_completion
from turngate.errors import BadRequest, TurngateError
from turngate.service.catalog import Endpoint
from turngate.service.config import Clamp, ServiceConfig
from turngate.service.request import TaskRolloutRequest
from turngate.service.rollouts import Rollouts
from turngate.tasks.task import Task
from turngate.types import Json

T = TypeVar("T")
AnyModel = str | Endpoint | ServiceConfig
_TIME_S = 1800.0  # an agent's, where neither the caller nor the task says
_LONGEST_S = 30 * 24 * 3600.0
# What is handed to other processes is cut short; here it may be large.
_CLAMP = Clamp(
    text=0, turns=0, logprobs=0, files=2_000, file=1_000_000, all_files=20_000_000, log=200_000, verifier=200_000
)


class _Job(msgspec.Struct, frozen=True):
    """One rollout that is wanted."""

    place: int  # in the order in which they were asked for
    task: Task
    group: str


class Client:
    """Several rollouts on one gateway, for as long as the block runs. What runs when it ends is ended.

    `model`: a key of the catalog (`config=`), KIND://MODEL@URL like vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000, an `Endpoint`, or the
    settings of a service with one endpoint. With `gateway=` it is the name of one of that gateway's models, and may be left out.
    The other arguments are those of `Where`.
    """

    def __init__(self, model: AnyModel = "", **where: Unpack[Where]) -> None:
        given = read(where, Place)
        if given.options and not given.agent:
            raise BadRequest("options: are those of an agent; give agent= too", param="options")
        self._tokenizer = given.tokenizer
        self._data = None if given.data is None else Path(given.data)
        self._settled = given.config is not None or isinstance(
            model, ServiceConfig
        )  # somebody has thought about all of it
        self._config, self._key = models.settled(
            model,
            models.Wanted(tokenizer=given.tokenizer, key_env=given.key_env, gateway=given.gateway),
            given.config,
            self._settings(given),
        )
        self._stack = AsyncExitStack()
        self._rollouts: Rollouts | None = None
        self._inputs = Path()
        self._reader: Reader | None = None

    def _settings(self, given: Place) -> dict[str, Any]:
        """Those of the service. Whoever calls from Python is at home: any image, any agent, large results."""
        agent = models.agent_named(given.agent)
        at_home = {"images": ["*"], "clamp": _CLAMP, "most_agent_timeout_s": _LONGEST_S}
        return {
            **({} if self._settled else at_home),
            "agent": agent or None,
            "agents": None if self._settled else models.agents_with(given.agent),
            "agent_options": {agent: given.options} if given.options else None,
            "sandbox": given.sandbox,
            "image": given.image,
            "network": given.network,
            "running": given.concurrency,
            "data": None if self._data is None else str(self._data),
        }

    async def __aenter__(self) -> Client:
        if self._rollouts is not None:
            raise BadRequest("client: is open already", param="client")
        await self._stack.__aenter__()
        try:
            folder = Path(tempfile.mkdtemp(prefix="turngate-"))
            self._stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
            self._inputs = folder / "inputs"
            config = self._config
            if self._data is None and not self._settled:
                config = msgspec.structs.replace(config, data=str(folder / "data"))
            await models.check(config.endpoints[self._key])
            self._reader = Reader(config.endpoints[self._key], self._tokenizer)
            self._rollouts = await self._stack.enter_async_context(Rollouts(config))
        except BaseException:
            await run_to_completion(self._stack.aclose())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollouts = None
        await run_to_completion(self._stack.aclose())

    async def run(self, task: AnyTask, **how: Unpack[How]) -> Result:
        """One rollout, to its end. What goes wrong with the task, the engine or the sandbox is told in the result's `error`; wrong
        arguments raise. Being cancelled ends it.

        `task`: a `Task`, a path (a task folder, a text file, `rows.jsonl#ID`), a row as a dict, or words. The other arguments are
        those of `How`.
        """
        given = read(how, Given)
        board = Board()
        async with self._shown(board, given.progress):
            return await self._one(_Job(0, await self._task(task, given), ""), given, board)

    def group(self, task: AnyTask, n: int = 8, **how: Unpack[How]) -> Running:
        """n rollouts of one task. `async for` gives their results as they come, `await` all of them."""
        return self.batch([task], n, **how)

    def batch(self, tasks: Iterable[AnyTask] | str | Path, n: int = 1, **how: Unpack[How]) -> Running:
        """n rollouts of each task: of a list, or of a place (a folder of tasks, a .jsonl file, hf://org/name). `async for` gives their
        results as they come, `await` all of them."""
        given = read(how, Given)
        count = checked_n(n)
        return Running(lambda: self.many(tasks, count, given, None))

    # ── for `blocking.py` too ───────────────────────────────────────────────────────────────────────────────────

    async def many(
        self, wanted: Iterable[AnyTask] | str | Path, n: int, given: Given, board: Board | None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Results as they come, each with its place. `board`: somebody else shows it."""
        jobs = deque(await self._jobs(wanted, n, given))
        shown = board or Board()
        shown.wanted = len(jobs)
        results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()

        async def work() -> None:
            while jobs:
                job = jobs.popleft()
                results.put_nowait((job.place, await self._one(job, given, shown)))

        async with self._shown(shown, given.progress if board is None else False):
            count = len(jobs)
            workers = [asyncio.create_task(work()) for _ in range(min(count, self._config.running))]
            try:
                for _ in range(count):
                    yield await _next(results, workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await run_to_completion(_over(workers))

    async def one(self, task: AnyTask, given: Given, board: Board) -> Result:
        async with self._shown(board, False):
            return await self._one(_Job(0, await self._task(task, given), ""), given, board)

    async def _jobs(self, wanted: Iterable[AnyTask] | str | Path, n: int, given: Given) -> list[_Job]:
        """Every task is read before the first rollout begins: what is wrong with one is told now."""
        jobs: list[_Job] = []
        for one in await asyncio.to_thread(lambda: list(tasks.many(wanted))):
            task = await self._task(one, given)
            group = f"{task.id}-{uuid.uuid4().hex[:8]}"
            jobs += [_Job(len(jobs) + index, task, group) for index in range(n)]
        if not jobs:
            raise BadRequest("tasks: there are none", param="tasks")
        return jobs

    async def _task(self, task: AnyTask, given: Given) -> Task:
        for name, data in given.files.items():
            if not isinstance(data, str | bytes):
                raise BadRequest(f"files[{name!r}]: has to be str or bytes, not {type(data).__name__}", param="files")
        return await asyncio.to_thread(
            tasks.one,
            task,
            test_script=given.test_script,
            setup=given.setup,
            files=given.files,
            task_id=given.task_id,
            config=self._config,
            inputs=self._inputs / uuid.uuid4().hex,
        )

    async def _one(self, job: _Job, given: Given, board: Board) -> Result:
        rollouts = self._open
        asked = TaskRolloutRequest(
            task=job.task,
            group=job.group,
            model_key=self._key,
            agent=given.agent and models.agent_named(given.agent),
            thinking=given.thinking,
            mode=given.mode,
            max_tokens_cap=given.max_tokens_cap,
            agent_timeout_s=(job.task.timeout_s or _TIME_S) if given.timeout_s is None else given.timeout_s,
            session={"limits": {"turns": given.max_turns}} if given.max_turns is not None else {},
        )
        with _in_our_words():
            rollout = rollouts.start(asked)
        board.follow(rollout)
        try:
            ended = await rollouts.finalize(rollout)
        except asyncio.CancelledError:
            await run_to_completion(rollouts.abort(rollout, "whoever waited for it was interrupted"))
            raise
        finally:
            board.put(rollouts.state(rollout))
        trace, rows, notes = await self._evidence(rollout, ended.session)
        assert self._reader is not None
        work = None if self._data is None else rollouts.artifacts_folder(rollout) / "work"
        return await asyncio.to_thread(made, ended, job.group, trace, rows, self._reader, work, notes)

    async def _evidence(self, rollout: str, session: str) -> tuple[Json, list[Json], list[str]]:
        """The whole trace and the rows, as the gateway has them. None where nothing was recorded."""
        if not session:
            return None, [], []
        try:
            async with self._open.gateway(rollout) as gateway:
                return await gateway.trace(session), await gateway.samples(session), []
        except TurngateError as error:
            return None, [], [f"the gateway could not be asked for turns and rows: {error.message}"]

    @property
    def _open(self) -> Rollouts:
        if self._rollouts is None:
            raise BadRequest("client: is not open; use it as `async with Client(…) as client`", param="client")
        return self._rollouts

    def _shown(self, board: Board, progress: bool | None) -> _Shown:
        return _Shown(self._open, board, progress)


class _Shown:
    """Looks at what runs every now and then, and shows it where that is wanted."""

    def __init__(self, rollouts: Rollouts, board: Board, progress: bool | None) -> None:
        self._rollouts = rollouts
        self._board = board
        self._screen = Screen(board, progress)
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._screen.__enter__()
        self._looking = asyncio.create_task(self._look())

    async def __aexit__(self, *_: object) -> None:
        assert self._looking is not None
        self._looking.cancel()
        await asyncio.wait([self._looking])
        self._screen.__exit__()

    async def _look(self) -> None:
        while True:
            for rollout in self._board.followed:
                self._board.put(self._rollouts.state(rollout))
            self._screen.refresh()
            await asyncio.sleep(OFTEN_S)


class Running:
    """Results that are under way: `async for` has them as they come, `await` has all of them in the order in which they were asked
    for. Leaving the loop early ends what still runs."""

    def __init__(self, begin: Callable[[], AsyncGenerator[tuple[int, Result], None]]) -> None:
        self.begin = begin

    async def __aiter__(self) -> AsyncIterator[Result]:
        async with aclosing(self.begin()) as results:
            async for _, result in results:
                yield result

    def __await__(self) -> Generator[Any, None, Results]:
        return self._all().__await__()

    async def _all(self) -> Results:
        async with aclosing(self.begin()) as results:
            return in_order([one async for one in results])


def in_order(results: Iterable[tuple[int, Result]]) -> Results:
    return Results(result for _, result in sorted(results, key=lambda one: one[0]))


async def run(task: AnyTask, *, model: AnyModel = "", **everything: Unpack[Everything]) -> Result:
    """One rollout, to its end: sandbox, agent, grade.

    `task`: a `Task`, a path (a task folder, a text file, `rows.jsonl#ID`), a row as a dict, or words. `model`: KIND://MODEL@URL like
    vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000, an `Endpoint`, a key of the catalog in `config=`. What else there is: `Where` and `How`.

    Being cancelled ends the agent and removes its sandbox. A gateway of its own is started for it, and stopped: for several rollouts
    `group`, `batch` or a `Client` do that once.
    """
    where, how = split(everything)
    async with Client(model, **where) as client:
        return await client.run(task, **how)


def group(task: AnyTask, n: int = 8, *, model: AnyModel = "", **everything: Unpack[Everything]) -> Running:
    """n rollouts of one task: `async for result in group(…)`, or `results = await group(…)`. The arguments are those of `run`."""
    return batch([task], n, model=model, **everything)


def batch(
    tasks: Iterable[AnyTask] | str | Path, n: int = 1, *, model: AnyModel = "", **everything: Unpack[Everything]
) -> Running:
    """n rollouts of each task of a list or of a place, `concurrency` at once. The arguments are those of `run`.

    For batches that go on after a crash there is `turngate batch`.
    """
    where, how = split(everything)
    client = Client(model, **where)
    wanted = client.batch(tasks, n, **how)

    async def begun() -> AsyncGenerator[tuple[int, Result], None]:
        async with client, aclosing(wanted.begin()) as results:
            async for one in results:
                yield one

    return Running(begun)


# What the service calls by other names.
_NAMES = {"model_key": "model", "agent_timeout_s": "timeout_s"}


@contextmanager
def _in_our_words() -> Iterator[None]:
    try:
        yield
    except BadRequest as error:
        ours = _NAMES.get(error.param or "")
        if ours is None:
            raise
        raise BadRequest(error.message.replace(f"{error.param}", ours), param=ours) from None


async def _next(results: asyncio.Queue[T], workers: list[asyncio.Task[None]]) -> T:
    """The next result. A worker that failed takes the others along: what it says is not about one rollout."""
    waiting = asyncio.ensure_future(results.get())
    try:
        while True:
            running = [worker for worker in workers if not worker.done()]
            for worker in workers:
                if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                    raise error
            if not results.empty() or not running:
                return await waiting
            await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()


async def _over(workers: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*workers, return_exceptions=True)
