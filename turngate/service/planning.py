"""Build the task and the rollout spec for a request.

A test script becomes the grader. It runs in a fresh sandbox with a copy of the agent's work, and the agent never sees it. If the script's
text names a reward file (`reward.txt` or `reward.json`, in $TURNGATE_LOGS/verifier), that file determines the reward. Otherwise, the exit
code does: 0 means reward 1.0, and 1 means reward 0.0. The choice between the two depends only on the script's text, so the agent cannot
influence it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec
from turngate.errors import BadRequest, StoreError, TaskError
from turngate.rollout.sampling import parse_sampling
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend
from turngate.service.catalog import EndpointChoice
from turngate.service.config import ServiceConfig
from turngate.service.request import AnyRequest, RolloutRequest, SweRolloutRequest, TaskRolloutRequest, decode_content
from turngate.tasks.loaders import swe
from turngate.tasks.task import Rubric, Script, Swe, Task, to_task_id
from turngate.types import Json

_REWARD_FILE = re.compile(r"reward\.(txt|json)")


def build_task(request: AnyRequest, config: ServiceConfig, inputs: Path) -> Task:
    """Build the task of a request. `inputs` is the folder that `write_inputs` fills.

    Raise `BadRequest` if a SWE row is invalid or needs an image that is not allowed.
    """
    if isinstance(request, TaskRolloutRequest):
        return request.task
    if isinstance(request, SweRolloutRequest):
        return _build_swe_task(request, config)
    return Task(
        id=to_task_id(request.task_id) if request.task_id else f"task-{_digest(request.instruction)}",
        instruction=request.instruction,
        files=inputs / "files" if request.upload_files else None,
        setup=request.setup_shell,
        setup_timeout_s=config.setup_timeout_s,
        grader=_build_grader(request, config, inputs) if request.test_script.strip() else None,
        source="a caller",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _build_grader(request: RolloutRequest, config: ServiceConfig, inputs: Path) -> Script:
    return Script(
        files=inputs / "tests",
        decides="reward file" if _REWARD_FILE.search(request.test_script) else "exit code",
        timeout_s=config.test_timeout_s,
    )


def _build_swe_task(request: SweRolloutRequest, config: ServiceConfig) -> Task:
    try:
        task = swe.build_task(request.task, "task")
    except TaskError as error:
        raise BadRequest(error.message, param=f"task.{error.param}" if error.param else "task") from None
    if not config.allows_image(task.image):
        raise BadRequest(
            f"the task uses the image {task.image[:200]!r}, which this server does not allow (allowed: "
            f"{', '.join(config.images) or 'none'})",
            param="task",
        )
    return msgspec.structs.replace(task, setup_timeout_s=config.setup_timeout_s)


def write_inputs(request: AnyRequest, inputs: Path) -> None:
    """Write the caller's files and test script to disk. This blocks. Raise `StoreError` if it fails."""
    if not isinstance(request, RolloutRequest):
        return
    try:
        for path, content in request.files_by_path().items():
            target = inputs / "files" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(decode_content(content))
        if request.test_script.strip():
            target = inputs / "tests" / "test.sh"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(request.test_script, encoding="utf-8")
            target.chmod(0o755)
    except OSError as error:
        raise StoreError(
            f"the task's files or the test script cannot be written ({error.strerror}); check the disk and the permissions of the "
            "service's data folder or, in the Python API, of the temporary folder"
        ) from None


def initial_files(request: AnyRequest, inputs: Path) -> Path | None:
    """Return the folder with the files that the agent started with, or None for a SWE task, which starts with a whole repository.

    If the request contains no files, the folder does not exist.
    """
    if isinstance(request, SweRolloutRequest):
        return None
    if isinstance(request, RolloutRequest):
        return inputs / "files"
    if request.task.files is not None:
        return request.task.files
    grader = request.task.grader
    graders = [part.grader for part in grader.parts] if isinstance(grader, Rubric) else [grader]
    return None if any(isinstance(one, Swe) for one in graders) else inputs / "files"


def build_rollout_spec(
    rollout: str,
    request: AnyRequest,
    task: Task,
    choice: EndpointChoice,
    config: ServiceConfig,
    *,
    backend: Backend,
    agent: AgentSpec,
    installed: Installation,
    options: Mapping[str, str],
    model: str,
    folder: Path,
) -> RolloutSpec:
    """Build the spec of a rollout from its request, its task, the chosen endpoint and the service's settings."""
    if choice.mode == "direct" and agent.transcript is not None:
        # Without a trace to compare it with, the transcript is only a log.
        logs = (agent.transcript.path, agent.transcript.subagents)
        agent = msgspec.structs.replace(agent, transcript=None, logs=(*agent.logs, *filter(None, logs)))
    return RolloutSpec(
        task=task,
        agent=agent,
        installed=installed,
        backend=backend,
        model=model,
        timeout_s=request.agent_timeout_s,
        image="" if task.image or task.dockerfile is not None else config.image,
        network=config.network,
        resources=config.resources,
        session=combine_session_settings(request, choice),
        endpoint_sampling=choice.endpoint.session.get("sampling", {}),
        model_limits=choose_model_limits(request, choice),
        options=options,
        folder=folder,
        keep_work=True,
        rollout=rollout,
        group=request.group if isinstance(request, TaskRolloutRequest) else "",
    )


def combine_session_settings(request: AnyRequest, choice: EndpointChoice) -> dict[str, Json]:
    """Combine the session settings of the endpoint with those of the request, which take precedence.

    The endpoint's sampling settings are left out, because the rollout spec contains them separately (`endpoint_sampling`).
    """
    of_endpoint = {name: value for name, value in choice.endpoint.session.items() if name != "sampling"}
    of_caller = request.session if isinstance(request, TaskRolloutRequest) else {}
    settings = {**of_endpoint, **of_caller, **parse_sampling(request.sampling)}
    settings["mode"] = choice.mode
    if request.max_tokens_cap is not None:
        settings["max_tokens"] = request.max_tokens_cap
    if request.thinking is not None:
        settings["template_kwargs"] = {**settings.get("template_kwargs", {}), "enable_thinking": request.thinking}
    settings["metadata"] = {**settings.get("metadata", {}), "model_key": choice.endpoint.key}
    return settings


def choose_model_limits(request: AnyRequest, choice: EndpointChoice) -> ModelLimits:
    """Return the model's context and output limits, which become part of the agent's configuration."""
    context = choice.endpoint.context_tokens or choice.endpoint.max_context or ModelLimits().context_tokens
    max_output = min(request.max_tokens_cap or ModelLimits().max_output_tokens, context)
    return ModelLimits(context_tokens=context, max_output_tokens=max_output)
