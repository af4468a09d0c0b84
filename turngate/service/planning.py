"""From what a caller asked to a task, and to the order of a rollout. `Rollouts` calls it.

A test script becomes the grader: it is laid into the fresh sandbox of the grading, where the agent's work is, and never into the
agent's. A script that names a reward file (`reward.txt` or `reward.json`, in $TURNGATE_LOGS/verifier) decides by it, any other by its
exit code: 0 is 1.0, 1 is 0.0. Which of the two is read off its text, so that no work can choose.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.agents.install import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.errors import BadRequest, StoreError, TaskError
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend
from turngate.service.catalog import Choice
from turngate.service.config import ServiceConfig
from turngate.service.request import AnyAsked, Asked, AskedSwe, AskedTask, decoded
from turngate.tasks.loaders import swe
from turngate.tasks.task import Script, Task, to_task_id
from turngate.types import Json

_REWARD_FILE = re.compile(r"reward\.(txt|json)")


def task_of(asked: AnyAsked, config: ServiceConfig, inputs: Path) -> Task:
    """The task that is asked for. `inputs`: where `lay` puts what the caller gave. `BadRequest` names the argument."""
    if isinstance(asked, AskedTask):
        return asked.task
    if isinstance(asked, AskedSwe):
        return _row(asked, config)
    return Task(
        id=to_task_id(asked.task_id) if asked.task_id else f"task-{_digest(asked.instruction)}",
        instruction=asked.instruction,
        files=inputs / "files" if asked.upload_files else None,
        setup=asked.setup_shell,
        setup_timeout_s=config.setup_timeout_s,
        grader=_script(asked, config, inputs) if asked.test_script.strip() else None,
        source="a caller",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _script(asked: Asked, config: ServiceConfig, inputs: Path) -> Script:
    return Script(
        files=inputs / "tests",
        decides="reward file" if _REWARD_FILE.search(asked.test_script) else "exit code",
        timeout_s=config.test_timeout_s,
    )


def _row(asked: AskedSwe, config: ServiceConfig) -> Task:
    try:
        task = swe.build_task(asked.task, "task")
    except TaskError as error:
        raise BadRequest(error.message, param=f"task.{error.param}" if error.param else "task") from None
    if not config.takes_image(task.image):
        raise BadRequest(
            f"task: its image {task.image[:200]!r} is not among those that this server takes ({', '.join(config.images)})",
            param="task",
        )
    return msgspec.structs.replace(task, setup_timeout_s=config.setup_timeout_s)


def lay(asked: AnyAsked, inputs: Path) -> None:
    """Write down what the caller gave. Blocks."""
    if not isinstance(asked, Asked):
        return
    try:
        for path, content in asked.places().items():
            place = inputs / "files" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            with place.open("wb") as file:
                file.writelines(decoded(content))
        if asked.test_script.strip():
            place = inputs / "tests" / "test.sh"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(asked.test_script, encoding="utf-8")
            place.chmod(0o755)
    except OSError as error:
        raise StoreError(f"what was given cannot be written down: {error.strerror}") from None


def given(asked: AnyAsked, inputs: Path) -> Path | None:
    """Where the files are that the working folder began with; there may be none. None: it is a whole repository."""
    return None if isinstance(asked, AskedSwe) else inputs / "files"


def order_of(
    rollout: str,
    asked: AnyAsked,
    task: Task,
    choice: Choice,
    config: ServiceConfig,
    *,
    backend: Backend,
    agent: AgentSpec,
    installed: Installation,
    options: Mapping[str, str],
    model: str,
    folder: Path,
) -> RolloutSpec:
    if (
        choice.mode == "direct" and agent.transcript is not None
    ):  # there is no trace to hold it against, but it is a log
        logs = (agent.transcript.path, agent.transcript.subagents)
        agent = msgspec.structs.replace(agent, transcript=None, logs=(*agent.logs, *filter(None, logs)))
    return RolloutSpec(
        task=task,
        agent=agent,
        installed=installed,
        backend=backend,
        model=model,
        timeout_s=asked.agent_timeout_s,
        image="" if task.image or task.dockerfile is not None else config.image,
        network=config.network,
        resources=config.resources,
        session=_session(asked, choice),
        model_limits=_told(asked, choice),
        options=options,
        folder=folder,
        keep_work=True,
        rollout=rollout,
        group=asked.group if isinstance(asked, AskedTask) else "",
    )


def _session(asked: AnyAsked, choice: Choice) -> dict[str, Json]:
    given = {**choice.endpoint.session, **(asked.session if isinstance(asked, AskedTask) else {})}
    given["mode"] = choice.mode
    if asked.max_tokens_cap is not None:
        given["max_tokens"] = asked.max_tokens_cap
    if asked.thinking is not None:
        given["template_kwargs"] = {**given.get("template_kwargs", {}), "enable_thinking": asked.thinking}
    given["metadata"] = {**given.get("metadata", {}), "model_key": choice.endpoint.key}
    return given


def _told(asked: AnyAsked, choice: Choice) -> ModelLimits:
    """What the agent is told of its model."""
    context = choice.endpoint.context_tokens or choice.endpoint.max_context or ModelLimits().context_tokens
    longest = min(asked.max_tokens_cap or ModelLimits().max_output_tokens, context)
    return ModelLimits(context_tokens=context, max_output_tokens=longest)
