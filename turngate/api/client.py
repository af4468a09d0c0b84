"""The async API: `run` runs one rollout, `group` and `batch` run many, and `Client` keeps a gateway open for several calls.

    result = await run("examples/tasks/fix-add", agent="pi", model="vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000")

    async with Client("vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000", agent="pi") as client:
        async for result in client.group(task, n=8): …

Rollouts run through `service.rollouts.Rollouts`, or on a Ray cluster. Unlike in the HTTP service, a rollout belongs to the asyncio task
that awaits it: cancelling the task ends the agent and removes its sandbox before the cancellation propagates. `blocking.py` is the blocking
version.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

import msgspec

from turngate.api import models
from turngate.api import task as tasks
from turngate.api.arguments import (
    AllArguments,
    ClientArguments,
    ClientSettings,
    RunArguments,
    RunSettings,
    check_n,
    parse_arguments,
    split_arguments,
)
from turngate.api.cluster import run_on_cluster
from turngate.api.progress import REFRESH_S, ProgressBoard, ProgressScreen
from turngate.api.result import Result, Results
from turngate.api.result_builder import TokenReader, build_result, read_recording
from turngate.api.task import AnyTask
from turngate.client.protocol import DecodedTrace, SampleRow
from turngate.common.aio import run_to_completion
from turngate.common.database_url import is_database_url
from turngate.errors import BadRequest, ConfigError, TurngateError
from turngate.service.catalog import Endpoint
from turngate.service.cluster_batch import ClusterPlace
from turngate.service.config import Clamp, ServiceConfig
from turngate.service.request import TaskRolloutRequest
from turngate.service.rollouts import Rollouts
from turngate.tasks.task import Task

T = TypeVar("T")
AnyModel = str | Endpoint | ServiceConfig
_DEFAULT_TIMEOUT_S = 1800.0  # how long an agent may run if neither the caller nor the task sets a limit
_MAX_TIMEOUT_S = 30 * 24 * 3600.0
# Results that stay in this process may be larger than those that the service returns over HTTP.
_CLAMP = Clamp(
    text=0, turns=0, logprobs=0, files=2_000, file=1_000_000, all_files=20_000_000, log=200_000, verifier=200_000
)


class _Job(msgspec.Struct, frozen=True):
    """One rollout to run."""

    index: int  # position in the order of the tasks
    task: Task
    group: str


class Client:
    """A client that runs several rollouts on one gateway or, with `cluster=`, on a Ray cluster.

    Leaving its `async with` block ends the rollouts that are still running.

    `model` is a key of the catalog in `config=`, a string KIND://MODEL@URL (such as vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000), an
    `Endpoint`, or a `ServiceConfig` with one endpoint. If `gateway=` is set, `model` is the name of one of that gateway's models and may be
    omitted. `ClientArguments` lists the other arguments.
    """

    def __init__(self, model: AnyModel = "", **where: Unpack[ClientArguments]) -> None:
        given = parse_arguments(where, ClientSettings)
        if given.options and not given.agent:
            raise BadRequest("options= needs an agent; also pass agent=", param="options")
        self._tokenizer = given.tokenizer
        self._cluster = _choose_cluster(given)
        self._data = None if given.data is None or self._cluster is not None else Path(given.data)
        # If the caller passed service settings, those that they omit keep the service's own defaults.
        self._is_configured = given.config is not None or isinstance(model, ServiceConfig)
        self._config, self._key = models.resolve_model(
            model,
            models.ModelOptions(tokenizer=given.tokenizer, key_env=given.key_env, gateway=given.gateway),
            given.config,
            self._settings(given),
        )
        self._stack = AsyncExitStack()
        self._is_open = False
        self._rollouts: Rollouts | None = None  # None if rollouts run on a cluster
        self._inputs = Path()
        self._reader: TokenReader | None = None

    def _settings(self, given: ClientSettings) -> dict[str, Any]:
        """Return the client's arguments as service settings. None leaves a setting unchanged.

        If the caller passed no service settings, all images and the client's agent are allowed, and the limits are higher than a service's
        defaults.
        """
        agent = models.find_agent_name(given.agent)
        trusted = {"images": ["*"], "clamp": _CLAMP, "most_agent_timeout_s": _MAX_TIMEOUT_S}
        return {
            **({} if self._is_configured else trusted),
            "agent": agent or None,
            "agents": None if self._is_configured else models.list_agents_with(given.agent),
            "agent_options": {agent: given.options} if given.options else None,
            "sandbox": given.sandbox,
            "image": given.image,
            "network": given.network,
            "running": given.concurrency,
            "data": None if self._data is None else str(self._data),
        }

    async def __aenter__(self) -> Client:
        if self._is_open:
            raise BadRequest("the client is already open; to open a second one, create another Client", param="client")
        await self._stack.__aenter__()
        try:
            folder = Path(tempfile.mkdtemp(prefix="turngate-"))
            self._stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
            self._inputs = folder / "inputs"
            config = self._config
            if self._data is None and not self._is_configured:
                config = msgspec.structs.replace(config, data=str(folder / "data"))
            await models.check_endpoint(config.endpoints[self._key])
            self._reader = TokenReader(config.endpoints[self._key], self._tokenizer)
            if self._cluster is None:
                self._rollouts = await self._stack.enter_async_context(Rollouts(config))
            self._is_open = True
        except BaseException:
            await run_to_completion(self._stack.aclose())
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rollouts = None
        self._is_open = False
        await run_to_completion(self._stack.aclose())

    async def run(self, task: AnyTask, **how: Unpack[RunArguments]) -> Result:
        """Run one rollout to completion, and return its result. Cancelling the call ends the rollout.

        An invalid argument raises an exception. A failure of the task, the engine or the sandbox is reported in the result's `error`.

        `task` is a `Task`, a path (a task folder, a text file or `rows.jsonl#ID`), a row as a dict, or an instruction. `RunArguments`
        lists the other arguments.
        """
        given = parse_arguments(how, RunSettings)
        board = ProgressBoard()
        async with self._show_progress(board, given.progress):
            return await self._run_one(task, given, board)

    def group(self, task: AnyTask, n: int = 8, **how: Unpack[RunArguments]) -> ResultStream:
        """Run n rollouts of one task. Use `async for` on the returned stream to get results as they finish, or `await` to get them all."""
        return self.batch([task], n, **how)

    def batch(self, tasks: Iterable[AnyTask] | str | Path, n: int = 1, **how: Unpack[RunArguments]) -> ResultStream:
        """Run n rollouts of each task. `tasks` is a list, or a source: a folder of tasks, a .jsonl file or hf://org/name.

        Use `async for` on the returned stream to get results as they finish, or `await` to get all of them.
        """
        given = parse_arguments(how, RunSettings)
        count = check_n(n)
        return ResultStream(lambda: self.stream(tasks, count, given, None))

    # ── also used by `blocking.py` ─────────────────────────────────────────────────────────────────────────────────

    async def stream(
        self, source: Iterable[AnyTask] | str | Path, n: int, given: RunSettings, board: ProgressBoard | None
    ) -> AsyncGenerator[tuple[int, Result], None]:
        """Run the rollouts, and yield results as they finish, each with its index. If `board` is passed, the caller displays it."""
        jobs = await self._build_jobs(source, n, given)
        progress = board or ProgressBoard()
        progress.total = len(jobs)
        results: asyncio.Queue[tuple[int, Result]] = asyncio.Queue()
        async with self._show_progress(progress, given.progress if board is None else False):
            workers = [asyncio.create_task(work) for work in self._plan_work(jobs, given, progress, results.put_nowait)]
            try:
                while (one := await _next_result(results, workers)) is not None:
                    yield one
            finally:
                for worker in workers:
                    worker.cancel()
                await run_to_completion(_wait_all(workers))

    async def run_with_board(self, task: AnyTask, given: RunSettings, board: ProgressBoard) -> Result:
        """Run one rollout to completion, and return its result. Its progress is written to `board`, which the caller displays."""
        async with self._show_progress(board, False):
            return await self._run_one(task, given, board)

    async def _run_one(self, task: AnyTask, given: RunSettings, board: ProgressBoard) -> Result:
        job = _Job(0, await self._load_task(task, given), "")
        if self._cluster is None:
            return await self._run_job(job, given, board)
        results: list[tuple[int, Result]] = []
        await self._run_jobs_on_cluster([job], given, board, results.append)
        return results[-1][1]

    def _plan_work(
        self, jobs: Sequence[_Job], given: RunSettings, board: ProgressBoard, put: Callable[[tuple[int, Result]], None]
    ) -> list[Coroutine[Any, Any, None]]:
        """Return coroutines that together run all jobs. `put` is called with each result and its index."""
        if self._cluster is not None:
            return [self._run_jobs_on_cluster(jobs, given, board, put)]
        waiting = deque(jobs)

        async def work() -> None:
            while waiting:
                job = waiting.popleft()
                put((job.index, await self._run_job(job, given, board)))

        return [work() for _ in range(min(len(jobs), self._config.running))]

    async def _run_jobs_on_cluster(
        self, jobs: Sequence[_Job], given: RunSettings, board: ProgressBoard, put: Callable[[tuple[int, Result]], None]
    ) -> None:
        assert self._cluster is not None and self._reader is not None
        tasks = {job.group: job.task for job in jobs}
        request = self._build_request(jobs[0], given)
        folder = self._inputs.parent / "batches" / uuid.uuid4().hex
        with _rename_arguments():
            await run_on_cluster(
                self._config,
                self._cluster,
                request,
                [*tasks.values()],
                len(jobs) // len(tasks),
                given.timeout_s,
                folder,
                self._reader,
                board,
                put,
            )

    async def _build_jobs(self, source: Iterable[AnyTask] | str | Path, n: int, given: RunSettings) -> list[_Job]:
        """Load all tasks, and return n jobs for each. An invalid task is therefore reported before the first rollout starts."""
        jobs: list[_Job] = []
        for one in await asyncio.to_thread(lambda: list(tasks.iter_tasks(source))):
            task = await self._load_task(one, given)
            group = f"{task.id}-{uuid.uuid4().hex[:8]}"
            jobs += [_Job(len(jobs) + index, task, group) for index in range(n)]
        if not jobs:
            raise BadRequest("tasks must not be empty; pass at least one task", param="tasks")
        return jobs

    async def _load_task(self, task: AnyTask, given: RunSettings) -> Task:
        for name, data in given.files.items():
            if not isinstance(data, str | bytes):
                raise BadRequest(f"files[{name!r}] must be str or bytes, not {type(data).__name__}", param="files")
        return await asyncio.to_thread(
            tasks.load_task,
            task,
            test_script=given.test_script,
            setup=given.setup,
            files=given.files,
            task_id=given.task_id,
            config=self._config,
            inputs=self._inputs / uuid.uuid4().hex,
        )

    async def _run_job(self, job: _Job, given: RunSettings, board: ProgressBoard) -> Result:
        rollouts = self._service
        request = self._build_request(job, given)
        with _rename_arguments():
            rollout = rollouts.start(request)
        board.follow(rollout)
        try:
            result = await rollouts.finalize(rollout)
        except asyncio.CancelledError:
            await run_to_completion(rollouts.abort(rollout, "its caller was cancelled"))
            raise
        finally:
            board.put(rollouts.state(rollout))
        trace, rows, notes = await self._read_recording(rollout, result.session)
        assert self._reader is not None
        work = None if self._data is None else rollouts.artifacts_folder(rollout) / "work"
        return await asyncio.to_thread(build_result, result, job.group, trace, rows, self._reader, work, notes)

    def _build_request(self, job: _Job, given: RunSettings) -> TaskRolloutRequest:
        return TaskRolloutRequest(
            task=job.task,
            group=job.group,
            model_key=self._key,
            agent=given.agent and models.find_agent_name(given.agent),
            thinking=given.thinking,
            mode=given.mode,
            sampling=given.sampling,
            max_tokens_cap=given.max_tokens_cap,
            agent_timeout_s=(job.task.timeout_s or _DEFAULT_TIMEOUT_S) if given.timeout_s is None else given.timeout_s,
            session={"limits": {"turns": given.max_turns}} if given.max_turns is not None else {},
        )

    async def _read_recording(
        self, rollout: str, session: str
    ) -> tuple[DecodedTrace | None, list[SampleRow], list[str]]:
        """Return the trace and the rows of a rollout, and a list of notes.

        The trace is None if the rollout has no session or if reading fails. In the second case, a note says why.
        """
        if not session:
            return None, [], []
        try:
            async with self._service.gateway(rollout) as gateway:
                return await read_recording(gateway, session)
        except TurngateError as error:
            return None, [], [f"turns and rows could not be read from the gateway: {error.message}"]

    @property
    def _service(self) -> Rollouts:
        if self._rollouts is None:
            raise _not_open()
        return self._rollouts

    def _show_progress(self, board: ProgressBoard, progress: bool | None) -> _ProgressDisplay:
        if not self._is_open:
            raise _not_open()
        return _ProgressDisplay(self._rollouts, board, progress)


class _ProgressDisplay:
    """A context manager that keeps a progress board up to date and, if enabled, displays it."""

    def __init__(self, rollouts: Rollouts | None, board: ProgressBoard, progress: bool | None) -> None:
        """Prepare the display. `rollouts` is None if the rollouts run on a cluster, which updates the board itself."""
        self._rollouts = rollouts
        self._board = board
        self._screen = ProgressScreen(board, progress)
        self._updating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._screen.__enter__()
        self._updating = asyncio.create_task(self._update())

    async def __aexit__(self, *_: object) -> None:
        assert self._updating is not None
        self._updating.cancel()
        await asyncio.wait([self._updating])
        self._screen.__exit__()

    async def _update(self) -> None:
        while True:
            if self._rollouts is not None:
                for rollout in self._board.active:
                    self._board.put(self._rollouts.state(rollout))
            self._screen.refresh()
            await asyncio.sleep(REFRESH_S)


class ResultStream:
    """A stream of results. `async for` yields results as they finish, and `await` returns all of them in the order of the tasks.

    Leaving the loop early ends the rollouts that are still running. The results can be read only once.
    """

    def __init__(self, open_stream: Callable[[], AsyncGenerator[tuple[int, Result], None]]) -> None:
        self._open_stream = open_stream
        self._is_open = False

    def open(self) -> AsyncGenerator[tuple[int, Result], None]:
        if self._is_open:
            raise results_already_read()
        self._is_open = True
        return self._open_stream()

    async def __aiter__(self) -> AsyncIterator[Result]:
        async with aclosing(self.open()) as results:
            async for _, result in results:
                yield result

    def __await__(self) -> Generator[Any, None, Results]:
        return self._all().__await__()

    async def _all(self) -> Results:
        async with aclosing(self.open()) as results:
            return sort_results([one async for one in results])


def results_already_read() -> ConfigError:
    return ConfigError(
        "tasks: the results of these rollouts can be read only once; keep the results, for example in a list, or call `batch` or `group` "
        "again to run the rollouts again",
        param="tasks",
    )


def sort_results(results: Iterable[tuple[int, Result]]) -> Results:
    """Return the results in the order of their indexes. If a rollout was retried on request, only its last result is included."""
    return Results(result for _, result in sorted(dict(results).items()))


async def run(task: AnyTask, *, model: AnyModel = "", **everything: Unpack[AllArguments]) -> Result:
    """Run one rollout to completion (create a sandbox, run the agent and grade its work), and return its result.

    `task` is a `Task`, a path (a task folder, a text file or `rows.jsonl#ID`), a row as a dict, or an instruction. `model` is
    KIND://MODEL@URL (such as vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000), or another value that `Client` accepts.
    `ClientArguments` and `RunArguments` list the other arguments.

    Cancelling the call ends the agent and removes its sandbox. Unless `gateway=` is set, each call starts and stops its own gateway. For
    several rollouts, use `group`, `batch` or a `Client`, which start the gateway only once.
    """
    where, how = split_arguments(everything)
    async with Client(model, **where) as client:
        return await client.run(task, **how)


def group(task: AnyTask, n: int = 8, *, model: AnyModel = "", **everything: Unpack[AllArguments]) -> ResultStream:
    """Run n rollouts of one task, and return a stream of results.

    Write `async for result in group(…)` or `results = await group(…)`. The other arguments are the same as for `run`.
    """
    return batch([task], n, model=model, **everything)


def batch(
    tasks: Iterable[AnyTask] | str | Path, n: int = 1, *, model: AnyModel = "", **everything: Unpack[AllArguments]
) -> ResultStream:
    """Run n rollouts of each task, `concurrency` at a time, and return a stream of results.

    `tasks` is a list, or a source: a folder of tasks, a .jsonl file or hf://org/name. The other arguments are the same as for `run`. If
    `cluster=` and `data=postgresql://…` are set, the rollouts run on a Ray cluster. For batches that resume after a crash, use the command
    `turngate batch`.
    """
    where, how = split_arguments(everything)
    client = Client(model, **where)
    stream = client.batch(tasks, n, **how)

    async def open_stream() -> AsyncGenerator[tuple[int, Result], None]:
        async with client, aclosing(stream.open()) as results:
            async for one in results:
                yield one

    return ResultStream(open_stream)


def _choose_cluster(given: ClientSettings) -> ClusterPlace | None:
    """Return the cluster to run on, or None if rollouts run in this process. Raise `BadRequest` if arguments conflict."""
    data = "" if given.data is None else str(given.data)
    if not given.cluster:
        if is_database_url(data):
            raise BadRequest(
                "without cluster=, data= must be a folder; to record in PostgreSQL, also pass cluster=, such as cluster='auto'",
                param="data",
            )
        return None
    if given.gateway:
        raise BadRequest(
            "gateway= cannot be set with cluster=, because each node has its own gateway; remove gateway= or cluster=",
            param="gateway",
        )
    place = ClusterPlace(address=given.cluster, shared=data)
    place.check()
    return place


def _not_open() -> BadRequest:
    return BadRequest("the client is not open; use `async with Client(…) as client`", param="client")


# Service argument name → name in this API.
_ARGUMENT_NAMES = {"model_key": "model", "agent_timeout_s": "timeout_s"}


@contextmanager
def _rename_arguments() -> Iterator[None]:
    """In errors that the block raises, replace the service's argument names with those of this API."""
    try:
        yield
    except BadRequest as error:
        ours = _ARGUMENT_NAMES.get(error.param or "")
        if ours is None:
            raise
        raise BadRequest(error.message.replace(f"{error.param}", ours), param=ours) from None


async def _next_result(results: asyncio.Queue[T], workers: list[asyncio.Task[None]]) -> T | None:
    """Return the next result, or None if there are no more. If a worker has failed, raise its error, even if results are waiting."""
    waiting = asyncio.ensure_future(results.get())
    try:
        while True:
            running = [worker for worker in workers if not worker.done()]
            for worker in workers:
                if worker.done() and not worker.cancelled() and (error := worker.exception()) is not None:
                    raise error
            if waiting.done() or not results.empty():
                return await waiting
            if not running:
                return None
            await asyncio.wait([waiting, *running], return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
    finally:
        waiting.cancel()


async def _wait_all(workers: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*workers, return_exceptions=True)
