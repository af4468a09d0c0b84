"""Orders: the same spec on any machine, and neither paths nor secrets of the machine that made them."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.speed import scaled
from tests.tasks.test_archive import describe_folder, load_host_task, write_files
from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec, CatalogEntry, load_catalog
from turngate.errors import AgentError, BadRequest, ConfigError, SandboxUnavailable, TurngateError
from turngate.rollout.cluster.cell_actor import CellActor, CellUnusable
from turngate.rollout.cluster.messages import RunnerSettings
from turngate.rollout.executor import LocalExecutor, fail_attempt
from turngate.rollout.order import RolloutOrder, decode_order, encode_order
from turngate.rollout.outcome import Fault
from turngate.rollout.plan import BatchPlan
from turngate.rollout.resolve import MachineResolver, PlanResolver
from turngate.rollout.spec import EndPolicy, RolloutSpec
from turngate.sandboxes import BACKENDS, get_backend
from turngate.sandboxes.base import Backend, Resources
from turngate.tasks import read_tasks
from turngate.tasks.archive import PackedTask, pack_task
from turngate.tasks.archive_cache import ArchiveCache, ArchiveError
from turngate.tasks.task import Function, Script, Solution, Swe, Task, change_graders
from turngate.trace.tool_schema import HostTool

ROOT = Path(__file__).parents[2]
SECRET = "sesame-4711"
SETTINGS: Mapping[str, Mapping[str, Any]] = {  # of backends that have some
    "docker": {"image": "python:3.12"},
    "e2b": {"reachable": ["pypi.org"], "lease_s": 60.0},
    "huggingface": {"flavor": "cpu-upgrade", "namespace": "org", "threads": 1},
}


@functools.cache
def list_agents() -> dict[str, CatalogEntry]:
    return load_catalog()


def load_examples() -> list[Task]:
    """Load all tasks of the repository, and tasks with fields that none of them has."""
    sources = (
        "examples/tasks",
        "examples/train/errands.py:held_out",
        "examples/train/h200/tasks.py:held_out",
    )
    tasks = [task for source in sources for task in read_tasks(str(ROOT / source), limit=8)]
    swe = Swe(
        repo="org/x", base_commit="0" * 40, test_patch="…", fail_to_pass=("a",), pass_to_pass=(), test_cmd="pytest"
    )
    return [
        *tasks,
        Task(
            id="swe", instruction="ü \U0001f600", image="x:1", grader=swe, solution=Solution(patch="…"), env={"A": "b"}
        ),
        Task(
            id="full",
            instruction="x",
            setup="true",
            cpus=0.5,
            memory_mb=64,
            timeout_s=3.5,
            grader=Function(name="json:loads"),
            tools=(HostTool(name="say", description="d", schema={"type": "object"}, reply={"a": [None, 1.5]}),),
            metadata={"deep": [{"er": None}]},
        ),
    ]


def make_plan(folder: Path, tasks: list[Task], **fields: Any) -> BatchPlan:
    defaults: dict[str, Any] = {
        "tasks": tuple(tasks),
        "agent": list_agents()["shell"].spec,
        "installed": Installation(),
        "backend": get_backend("docker"),
        "model": "m",
        "folder": folder,
        "image": "x:1",
        "network": "open",
        "resources": Resources(cpus=0.5, memory_mb=64),
        "env": {"API_KEY": SECRET},
        "session": {"limits": {"turns": 3}, "sampling": {"temperature": 0.5}},
        "model_limits": ModelLimits(context_tokens=1000),
        "options": {"command": "true"},
        "policy": EndPolicy(timed_out="zero"),
        "keep_work": True,
        "seed": 7,
        **fields,
    }
    return BatchPlan(**defaults)


def install(agent: AgentSpec) -> Installation:
    """Stand in for an installation: where the machine keeps it."""
    return Installation(folder=f"/cache/{agent.name}")


class Machines:
    """A machine that makes orders and one that runs them, with a cache each."""

    def __init__(self, root: Path) -> None:
        self.own = ArchiveCache(root / "own")
        self.other = ArchiveCache(root / "other")
        self.fetched: list[str] = []
        environment = {"API_KEY": SECRET, "MY_KEY": SECRET}
        self.resolver = MachineResolver(
            root / "rollouts", self.other, self.fetch, environment=environment, install=install
        )

    async def fetch(self, digest: str) -> bytes:
        self.fetched.append(digest)
        return self.own.read(digest)


def to_data(spec: RolloutSpec) -> dict[str, Any]:
    """Describe a spec so that it can be compared with that of another machine: paths by their content, a backend by its settings."""

    def encode(value: object) -> object:
        assert isinstance(value, Path)
        return (
            {name: (kind, mode, content.hex()) for name, (kind, mode, content) in describe_folder(value).items()}
            if value.is_dir()
            else value.read_bytes().hex()
        )

    grader = change_graders(spec.task.grader, lambda script, name: script, _name_by_content)
    task = msgspec.structs.replace(spec.task, source="", grader=grader)
    fields = msgspec.structs.asdict(msgspec.structs.replace(spec, task=task))
    backend = fields.pop("backend")
    del fields["folder"]
    return {**msgspec.to_builtins(fields, enc_hook=encode), "backend": [backend.name, backend.settings]}


def _name_by_content(function: Function, _: str) -> Function:
    location, _, name = function.name.rpartition(":")
    is_file = location.endswith(".py")
    return msgspec.structs.replace(function, name=f"{Path(location).read_text()}:{name}") if is_file else function


async def compare(plan: BatchPlan, task: Task, machines: Machines) -> bytes:
    """Check that another machine builds the same spec as this one, and return the order's bytes."""
    order = plan.rollout_order(machines.own.store(task), 3, "b", 2, 1)
    data = encode_order(order)
    assert decode_order(data) == order and encode_order(decode_order(data)) == data
    here = await PlanResolver(plan).resolve(order)
    there = await machines.resolver.resolve(decode_order(data))
    assert to_data(there) == to_data(here)
    return data


async def test_every_task_resolves_to_the_same_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    tasks = [*load_examples(), load_host_task(tmp_path / "host-values")]
    assert {type(task.grader) for task in tasks} >= {Script, Function, Swe} and len(tasks) > 20
    machines, plan = Machines(tmp_path), make_plan(tmp_path / "out", tasks, installed=Installation("/cache/shell"))
    for task in tasks:
        data = await compare(plan, task, machines)
        for text in (str(tmp_path), str(ROOT), str(Path.home()), SECRET):
            assert text.encode() not in data, f"{task.id}: the order contains {text}"
    assert len(machines.fetched) == len(set(machines.fetched)), "an archive is fetched once"


def list_choices() -> list[tuple[str, str]]:
    """Return all agents with one sandbox each, and all sandboxes."""
    return list(zip(list_agents(), itertools.cycle(BACKENDS), strict=False))


async def test_every_agent_and_sandbox_resolves_to_the_same_spec(tmp_path: Path) -> None:
    [task] = read_tasks(str(ROOT / "turngate/tasks/bundled/fix-add"))
    choices = list_choices()
    assert {sandbox for _, sandbox in choices} == set(BACKENDS) and len(choices) > 8
    machines = Machines(tmp_path)
    for name, sandbox in choices:
        agent = list_agents()[name].spec
        plan = make_plan(
            tmp_path / "out",
            [task],
            agent=agent,
            installed=install(agent),
            backend=get_backend(sandbox, SETTINGS.get(sandbox, {})),
        )
        data = await compare(plan, task, machines)
        assert SECRET.encode() not in data and str(tmp_path).encode() not in data
    assert len(machines.resolver.backends) == len(BACKENDS)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT, lambda inner: st.lists(inner))


@settings(max_examples=60, deadline=None)
@given(
    instruction=TEXT,
    env=st.dictionaries(TEXT, TEXT, max_size=3),
    metadata=st.dictionaries(TEXT, JSON, max_size=3),
    session=st.dictionaries(TEXT, JSON, max_size=3),
    options=st.dictionaries(TEXT, TEXT, max_size=3),
    timeout_s=st.floats(0.001, 1e9),
)
def test_any_text_and_number_survives(
    instruction: str, env: Any, metadata: Any, session: Any, options: Any, timeout_s: float
) -> None:
    task = Task(id="t", instruction=instruction, env=env, metadata=metadata, timeout_s=timeout_s)
    plan = make_plan(Path("/x"), [task], session={"metadata": session}, options=options, seed=None)
    order = plan.rollout_order(pack_task(task), 0, "b", 1)
    assert decode_order(encode_order(order)) == order and order.timeout_s == timeout_s


def make_order(**fields: Any) -> RolloutOrder:
    task = Task(id="t", instruction="x", grader=Script(command=("true",)))
    plan = make_plan(Path("/x"), [task], **fields)
    return plan.rollout_order(PackedTask(task=task), 0, "b", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "the format is 2, but this machine reads format 1; install the same version"),
        ({"format": None}, "format"),
        ({"attempt": "one"}, "attempt"),
        ({"surprise": 1}, "surprise"),
        ({"task": {"task": {"id": "t", "instruction": "x", "files": "/etc"}}}, "not a path inside the task's archive"),
        ({"task": {"task": {"id": "t", "instruction": "x", "files": "a/../../b"}}}, "not a path inside"),
        ({"task": {"task": {"id": "t", "instruction": "x", "files": ""}}}, "not a path inside"),
        ({"sandbox": {"name": 3}}, "name"),
    ],
)
def test_invalid_orders_are_refused(change: dict[str, Any], message: str) -> None:
    fields = {**msgspec.json.decode(encode_order(make_order())), **change}
    with pytest.raises(BadRequest, match=message):
        decode_order(msgspec.json.encode(fields))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"format": 1}'])
def test_anything_but_an_order_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest, match="order: "):
        decode_order(data)


def test_live_objects_do_not_fit_into_an_order() -> None:
    with pytest.raises(BadRequest, match=r"b\.t\.0 contains a value that JSON cannot represent \(object is not plain"):
        encode_order(make_order(session={"metadata": {"x": object()}}))


# ── what a machine may lack ─────────────────────────────────────────────────────────────────────────────────────────


def fail_to_install(agent: AgentSpec) -> Installation:
    raise AgentError("no network")


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    [
        (
            {},
            {"environment": {}},
            "rollout b.t.0 needs the environment variable API_KEY, which is not set in the environment of the cell",
        ),
        ({"env": {"PGPASSWORD": "x"}}, {"environment": {"PGPASSWORD": "x"}}, "must not use the environment variable"),
        ({}, {"install": fail_to_install}, "agent shell cannot be installed on this machine: no network"),
    ],
)
async def test_machine_says_what_it_lacks(
    tmp_path: Path, fields: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    order = make_order(**fields)
    resolver = MachineResolver(tmp_path, ArchiveCache(tmp_path), **{"environment": {"API_KEY": "x"}, **options})
    with pytest.raises(ConfigError, match=message) as error:
        await resolver.resolve(order)
    verdict = fail_attempt(order, Fault("sandbox", error.value.boundary, error.value.message)).verdict
    assert (verdict.kind, verdict.retry, verdict.reward) == ("infrastructure fault", "fault", None)


async def test_machine_lacks_the_module_of_a_grader(tmp_path: Path) -> None:
    resolver = MachineResolver(tmp_path, ArchiveCache(tmp_path), environment={"API_KEY": "x"}, install=install)
    task = Task(id="t", instruction="x", grader=Function(name="no_such_package.grading:grade"))
    order = msgspec.structs.replace(make_order(), task=pack_task(task))
    with pytest.raises(ConfigError, match="the grader of task t needs the Python module no_such_package"):
        await resolver.resolve(order)


@pytest.mark.parametrize(
    ("sandbox", "message"),
    [
        ({"name": "vm"}, "sandbox must be one of"),
        (
            {"name": "docker", "settings": {"imag": "x"}},
            "sandbox docker has no setting 'imag'; available settings: image",
        ),
        ({"name": "local", "settings": {"root": "/"}}, "sandbox local has no setting 'root'; available settings: none"),
    ],
)
async def test_unknown_sandbox_is_refused(tmp_path: Path, sandbox: dict[str, Any], message: str) -> None:
    fields = {**msgspec.json.decode(encode_order(make_order())), "sandbox": sandbox}
    resolver = MachineResolver(tmp_path, ArchiveCache(tmp_path), environment={"API_KEY": "x"}, install=install)
    with pytest.raises(SandboxUnavailable, match=message):
        await resolver.resolve(decode_order(msgspec.json.encode(fields)))


async def test_archive_is_fetched_once_and_again_if_it_is_damaged(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    task = Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "a"}))
    order = msgspec.structs.replace(make_order(), task=machines.own.store(task))
    first, second = await asyncio.gather(machines.resolver.resolve(order), machines.resolver.resolve(order))
    assert first.task.files == second.task.files and machines.fetched == [order.task.archive]
    (tmp_path / "other" / f"{order.task.archive}.tar").write_bytes(b"damaged")
    await machines.resolver.resolve(order)
    assert machines.fetched == [order.task.archive] * 2
    alone = MachineResolver(tmp_path, ArchiveCache(tmp_path / "empty"), environment={"API_KEY": ""}, install=install)
    with pytest.raises(ArchiveError, match="is not on this machine, and there is no machine to fetch it from"):
        await alone.resolve(order)


async def test_repeated_call_fails_with_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "node"))
    packed = ArchiveCache(tmp_path / "own").store(
        Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"a": "x"}))
    )
    order = encode_order(msgspec.structs.replace(make_order(), task=packed))
    runner = RunnerSettings(shared="", name="node", folder=str(tmp_path / "cell"), sandbox="local")
    actor = CellActor(msgspec.json.encode(runner))
    sent = asyncio.get_running_loop().create_future()
    calls = [asyncio.create_task(actor.run(order, [sent])) for _ in range(2)]
    await asyncio.sleep(0)
    sent.set_exception(OSError("the archive was lost"))
    async with asyncio.timeout(scaled(5)):
        for call in calls:
            with pytest.raises(OSError, match="the archive was lost"):
                await call


async def test_orders_of_one_project_do_not_open_archives_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Project beta knows the SHA-256 of an archive of alpha, but not its content."""
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "node"))
    own = ArchiveCache(tmp_path / "own")
    packed = own.store(Task(id="t", instruction="x", files=write_files(tmp_path / "files", {"hidden": "answer"})))
    orders = {
        p: msgspec.structs.replace(make_order(), project=p, task=packed) for p in ("alpha", "beta", "", "default")
    }
    runner = RunnerSettings(shared="", name="node", folder=str(tmp_path / "cell"), sandbox="local")
    sent = asyncio.get_running_loop().create_future()
    sent.set_result(own.read(packed.archive))
    with pytest.raises(
        CellUnusable
    ):  # the archive has arrived, but this test starts no process that would run the order
        await CellActor(msgspec.json.encode(runner)).run(encode_order(orders["alpha"]), [sent])
    resolver = MachineResolver(tmp_path, ArchiveCache(), environment={"API_KEY": "x"}, install=install)
    files = (await resolver.resolve(orders["alpha"])).task.files
    assert files is not None and (files / "hidden").read_text() == "answer"
    for project in ("beta", "", "default"):
        with pytest.raises(ArchiveError, match="is not on this machine, and there is no machine to fetch it from"):
            await resolver.resolve(orders[project])
    with pytest.raises(BadRequest, match="project must be"):
        await resolver.resolve(msgspec.structs.replace(orders["alpha"], project="../../projects/alpha"))


class _Refuser:
    """A machine that cannot run any order."""

    backends: tuple[Backend, ...] = ()

    def hold_files(self, order: RolloutOrder) -> AbstractContextManager[None]:
        return nullcontext()

    async def resolve(self, order: RolloutOrder) -> RolloutSpec:
        raise TurngateError("no room")


async def test_unresolved_order_is_an_infrastructure_fault() -> None:
    order = make_order()
    executor = LocalExecutor(_Refuser(), None, None)  # type: ignore[arg-type]  # never used
    result = await executor.prepare(order).run()
    assert (result.verdict.kind, result.verdict.retry) == ("infrastructure fault", "fault")
    assert result.outcome.fault == Fault("sandbox", "gateway", "no room") and result.outcome.reward is None
    assert (result.outcome.rollout, result.outcome.attempt, result.outcome.task) == ("b.t.0", 1, "t")
    assert msgspec.json.decode(msgspec.json.encode(result), type=type(result)) == result, "a result is plain data"
