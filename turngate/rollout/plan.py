"""The plan of a batch: its tasks, agent, sandbox and limits. To resume a batch, most of these settings must be unchanged."""

from __future__ import annotations

import hashlib
import random
import re
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.errors import ConfigError
from turngate.rollout.concurrency import Bounds
from turngate.rollout.ledger import LedgerHeader
from turngate.rollout.order import RolloutOrder, SandboxChoice
from turngate.rollout.spec import EndPolicy
from turngate.sandboxes.base import Backend, Network, Resources
from turngate.tasks import staging
from turngate.tasks.archive import PackedTask
from turngate.tasks.task import Task
from turngate.types import BATCH_STREAM, Json

_AGENT_TERM = "agent's description"
_RUN_DIGEST = "run:"  # prefix of a digest that covers only the agent's fields that affect a rollout
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DEFAULT_TIMEOUT_S = 1800.0  # if neither the plan nor the task sets a timeout


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a batch: what to run, how often, and with which limits."""

    tasks: tuple[Task, ...]
    agent: AgentSpec
    installed: Installation
    backend: Backend
    model: str
    folder: Path  # for the ledger and the agents' files
    name: str = ""  # prefix of the group names: a feed with `groups="NAME."` accepts only these groups
    n: int = 1  # rollouts per task and round
    rounds: int = 1  # how many times all tasks are run; can be raised when the batch is resumed
    bounds: Bounds = Bounds()
    retries: int = 2  # after infrastructure faults
    stale_retries: int = 2  # how often a stale rollout is retried; with 0, it is excluded
    back_off_s: float = 2.0  # pause before the first retry after a fault; it doubles before each further retry
    seed: int | None = None  # determines the order of the tasks and the sampling seed of each rollout
    timeout_s: float | None = None  # None: the task's timeout, or `DEFAULT_TIMEOUT_S` if it has none
    image: str = ""
    network: Network = "none"
    resources: Resources = Resources()
    folders: tuple[str, ...] = ()  # additional writable folders inside the sandboxes
    env: Mapping[str, str] = {}
    session: Mapping[str, Json] = {}
    endpoint_sampling: Mapping[str, Json] = {}  # sampling settings that `session` and the agent's file override
    model_limits: ModelLimits = ModelLimits()
    options: Mapping[str, str] = {}
    policy: EndPolicy = EndPolicy()
    grade: bool = True
    reuse_grades: bool = False  # grade identical work in a group once, if repository tests decide
    keep_work: bool = False  # keep the agents' working folders after grading
    invalid_after: int = 3  # this many rollouts must find a task invalid before its remaining rollouts are skipped
    min_free_bytes: int = 64_000_000  # with less free disk space, no rollout starts

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("rounds", 1), ("retries", 0), ("stale_retries", 0), ("invalid_after", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}", param=name)
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name cannot be {self.name[:100]!r}; use 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
                param="name",
            )
        if not self.tasks:
            raise ConfigError("the list of tasks is empty; specify at least one task", param="tasks")
        duplicates = [task for task, count in Counter(task.id for task in self.tasks).items() if count > 1]
        if duplicates:
            raise ConfigError(
                f"tasks: task id {duplicates[0]!r} appears more than once; ids must be unique", param="tasks"
            )
        for task in self.tasks:
            staging.build_sandbox_spec(task, self.backend, image=self.image)  # report errors before the batch starts

    @property
    def total(self) -> int:
        return len(self.tasks) * self.n * self.rounds

    def terms(self) -> dict[str, str]:
        """Return the settings that must not change when the batch is resumed, by name."""
        return {
            "agent": f"{self.agent.name} {self.agent.install.version}".strip(),
            _AGENT_TERM: _RUN_DIGEST + _digest(_run_fields(self.agent)),
            **({"agent's sampling": _to_json(self.agent.sampling)} if self.agent.sampling else {}),
            "set": _digest(self.options),
            "model": self.model,
            "n": str(self.n),
            "seed": str(self.seed),
            "sandbox": self.backend.name,
            "image": self.image,
            "network": self.network,
            "cpus, memory": _to_json(self.resources),
            "environment": _digest(self.env),
            "session": _to_json(self.session),
            **({"endpoint's sampling": _to_json(self.endpoint_sampling)} if self.endpoint_sampling else {}),
            "context_tokens": _to_json(self.model_limits),
            "timeout": str(self.timeout_s),
            "on-timeout": self.policy.timed_out,
            "on-failure": self.policy.failed,
            "on-limit": self.policy.limit,
            "on-lost": self.policy.lost,
            "grade": str(self.grade),
            **({"name": self.name} if self.name else {}),
        }

    def new_id(self) -> str:
        """Create a unique id for a new batch. It begins with the name of the batch, if it has one."""
        return f"{self.name}.{uuid.uuid4().hex[:8]}" if self.name else uuid.uuid4().hex[:8]

    def digests(self) -> dict[str, str]:
        """Return a digest of each task, by task id."""
        return {task.id: _digest(_task_fields(task)) for task in self.tasks}

    def fingerprint(self) -> str:
        """Return a name that depends only on the batch's `terms` and tasks. The default folder of the batch has this name."""
        return _digest([self.terms(), self.digests()])[:12]

    def order_tasks(self, round: int = 0) -> tuple[Task, ...]:
        """Return the tasks in the order in which their groups run. If the plan has a seed, each round has a different random order."""
        if self.seed is None:
            return self.tasks
        generator = random.Random(f"{self.seed} {round}" if round else self.seed)
        return tuple(generator.sample(self.tasks, len(self.tasks)))

    def rollout_order(
        self, packed: PackedTask, index: int, batch: str, attempt: int, round: int = 0, *, session_id: str = ""
    ) -> RolloutOrder:
        """Make the order for one attempt. If `session_id` is empty, a new session id is generated."""
        task = packed.task
        group = group_name(batch, task.id, round)
        return RolloutOrder(
            rollout=f"{group}.{index}",
            attempt=attempt,
            group=group,
            session_id=session_id or uuid.uuid4().hex,
            task=packed,
            agent=self.agent,
            options=self.options,
            sandbox=SandboxChoice(name=self.backend.name, settings=self.backend.settings),
            image=self.image,
            network=self.network,
            resources=self.resources,
            folders=self.folders,
            env=tuple(self.env),
            model=self.model,
            model_limits=self.model_limits,
            timeout_s=self.timeout_s or task.timeout_s or DEFAULT_TIMEOUT_S,
            session=_with_batch_id(batch, self._build_session(task, index, round)),
            endpoint_sampling=self.endpoint_sampling,
            policy=self.policy,
            grade=self.grade,
            keep_work=self.keep_work,
            reuse_grades=self.reuse_grades,
        )

    def _build_session(self, task: Task, index: int, round: int) -> Mapping[str, Json]:
        """Return the session settings of a rollout. If the plan has a seed, they include a sampling seed that differs for each rollout.

        A seed in the plan's session settings takes precedence.
        """
        if self.seed is None:
            return self.session
        source = f"{self.seed} {task.id} {index}" + (f" {round}" if round else "")
        rollout_seed = int.from_bytes(hashlib.sha256(source.encode()).digest()[:6])
        return {**self.session, "sampling": {"seed": rollout_seed, **self.session.get("sampling", {})}}


def _with_batch_id(batch: str, session: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return the session settings with the batch id in the metadata, so that the web UI can send retry requests to the batch."""
    return {**session, "metadata": {"batch": batch, **session.get("metadata", {})}}


def batch_stream(batch: str) -> str:
    """Return the name of the event stream that carries a batch's retry requests and the replies to them."""
    return f"{BATCH_STREAM}{batch}"


def group_name(batch: str, task: str, round: int) -> str:
    """Return the name of a group. Task ids do not contain '@', so different groups have different names."""
    return f"{batch}.{task}" + (f"@{round}" if round else "")


def _task_fields(task: Task) -> dict[str, Json]:
    """Return the fields of a task that affect a rollout. Its source path and `host_env` are left out."""
    fields = msgspec.structs.asdict(msgspec.structs.replace(task, source=""))
    return {name: value for name, value in fields.items() if name != "host_env"}


def _run_fields(agent: AgentSpec) -> dict[str, Json]:
    """Return the fields of an agent that affect a rollout, except `sampling`, which is compared separately."""
    options = {name: msgspec.structs.replace(option, about="") for name, option in agent.options.items()}
    fields = msgspec.structs.asdict(
        msgspec.structs.replace(
            agent, title="", homepage="", limits=(), off={}, check=(), shell_call=None, options=options
        )
    )
    return {name: value for name, value in fields.items() if name != "sampling"}


def _digest(value: object) -> str:
    """Return a hash of a value. For a path, the names and contents of its files are hashed."""
    data = msgspec.json.encode(msgspec.to_builtins(value, enc_hook=_hash_path), order="deterministic")
    return hashlib.sha256(data).hexdigest()[:16]


def _hash_path(value: object) -> str:
    if not isinstance(value, Path):
        raise NotImplementedError(type(value))
    digest = hashlib.sha256()
    files = sorted(value.rglob("*")) if value.is_dir() else [value]
    for file in files:
        if file.is_file() or file.is_symlink():
            inside = str(file.readlink()).encode() if file.is_symlink() else file.read_bytes()
            name = str(file.relative_to(value))
            digest.update(f"{name}\0{len(inside)}\0".encode("utf-8", "surrogateescape") + inside)
    return digest.hexdigest()


def _to_json(value: object) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def describe_changes(before: LedgerHeader, terms: Mapping[str, str], tasks: Mapping[str, str]) -> list[str]:
    """Return the differences between a plan and the batch in a folder, each in the form "setting: change"."""
    return [*_describe_changed_terms(before.terms, terms), *_describe_changed_tasks(before.tasks, tasks)]


def _describe_changed_terms(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    return [
        f"{name}: was {before.get(name) or 'not set'}, is now {after.get(name) or 'not set'}"
        for name in {**before, **after}
        if before.get(name) != after.get(name)
        # Earlier versions also hashed the agent's documentation, so their digests cannot be compared.
        and not (name == _AGENT_TERM and not before.get(name, "").startswith(_RUN_DIGEST))
    ]


def _describe_changed_tasks(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    changed = [task for task, digest in before.items() if after.get(task, digest) != digest]
    changes = {
        "was removed": [task for task in before if task not in after],
        "was added": [task for task in after if task not in before],
        "has changed": changed,
    }
    return [
        f"tasks: {tasks[0]} {what}" + (f" (and {len(tasks) - 1} more)" if len(tasks) > 1 else "")
        for what, tasks in changes.items()
        if tasks
    ]
