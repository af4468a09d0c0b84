"""The service's tools for MCP and OpenEnv: the name, description, arguments and result of each, and the method that it calls.

Schemas are derived from the types of arguments and results. Secret keys, sandboxes and allowed images are settings of the server, never
arguments.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from turngate.errors import BadRequest
from turngate.service.catalog import EndpointView
from turngate.service.request import RolloutRequest, SweRolloutRequest, parse_arguments
from turngate.service.result import EventPage, MessagePage, RolloutList, RolloutResult, RolloutState
from turngate.types import Json

if TYPE_CHECKING:  # so that reading the schemas does not import the service
    from turngate.service.rollouts import Rollouts

MAX_WAIT_S = 60.0  # longest wait for events, since clients limit how long a call may take

# Waits for a rollout to end, for at most the given number of seconds, and reports progress to the caller in the meantime.
Wait = Callable[[str, float | None], Awaitable[RolloutResult]]
Arguments = Mapping[str, Json]

# An argument has the same meaning in every tool.
ARGUMENT_DESCRIPTIONS: Mapping[str, str] = {
    "model_key": "The endpoint that answers the agent: a key that list_endpoints returns, such as vllm://Qwen3-8B.",
    "instruction": "What the agent should do.",
    "test_script": "A bash script that grades the agent's work. It runs in a fresh sandbox, in a copy of the working folder. Exit code 0 "
    "means reward 1, and exit code 1 means reward 0. If the script's text contains reward.txt or reward.json, the script must instead "
    "write the reward to that file in $TURNGATE_LOGS/verifier. Without a script, there is no reward.",
    "task_id": "Your name for the task. Default: derived from the instruction.",
    "agent": "The agent that works on the task: a name that list_endpoints returns. Default: the first of these names.",
    "setup_shell": "Shell commands to run in the working folder before the agent starts.",
    "upload_files": 'Files for the working folder: relative path → text, or {"base64": "…"} for binary content.',
    "thinking": "Whether the model thinks before it answers. Default: the chat template's default.",
    "mode": "Who answers the agent's calls, and what is recorded: exact (an engine; token ids and log-probabilities), observe (alias "
    "transparent_proxy: a hosted endpoint; what it returns), gate (alias interception_gate: a trainer; what it returns) or direct (alias "
    "black_box: the endpoint, without a gateway; only the agent's logs). Default: the endpoint's default mode.",
    "max_tokens_cap": "The maximum number of tokens that the model may sample in one turn.",
    "sampling": "How the model is sampled: neutral (temperature 1, so that the turns can be trained), agent "
    '(as the agent requests, for evaluations), or an object of settings to pin, such as {"temperature": 0.7}. Default: neutral.',
    "agent_timeout_s": "Seconds that the agent may run. The server sets an upper limit.",
    "endpoint_url": "The URL of your own endpoint, to use instead of the catalog's URL. The server must allow its host.",
    "task": "A row of a SWE data set: instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS, PASS_TO_PASS …",
    "rollout_id": "The id that start_rollout returned. list_rollouts lists all ids.",
    "after": "Return only entries after this cursor. Start with 0, then pass the cursor of the previous answer.",
    "limit": "The maximum number of entries to return.",
    "wait_s": "The maximum number of seconds to wait. If your tool calls have a time limit, choose a shorter time, and call again.",
    "reason": "Why the rollout is aborted. The result includes this text.",
    "status": "Return only rollouts with this status: queued, running, done (any rollout that has ended), finished, failed, timed out, "
    "limit, cancelled or error.",
    "logprobs": "Whether to include the turns' log-probabilities. Without them, the answer is shorter.",
    "before": "For the next page: the id of the last rollout of the previous answer.",
}


class _Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RolloutArguments(_Arguments, frozen=True, kw_only=True):
    rollout_id: str


class GetMessages(RolloutArguments, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class SubscribeEvents(RolloutArguments, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 0.0


class AbortRollout(RolloutArguments, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class ResultOptions(_Arguments, frozen=True, kw_only=True):
    """Additional arguments of the tools that run a rollout and return its result."""

    logprobs: bool = True


class FinalizeRollout(RolloutArguments, frozen=True, kw_only=True):
    wait_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    logprobs: bool = True


class ListRollouts(_Arguments, frozen=True, kw_only=True):
    status: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 50
    before: str = ""


class ListEndpoints(_Arguments, frozen=True, kw_only=True):
    pass


class StartedRollout(msgspec.Struct, frozen=True):
    """The id of a rollout that is now running or waiting in the queue."""

    rollout_id: str


class EndpointList(msgspec.Struct, frozen=True):
    """The endpoints and agents that a rollout can use. The default agent comes first."""

    endpoints: list[EndpointView]
    agents: list[str]


class ServiceTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. `is_read_only`, `is_destructive` and `is_idempotent` are hints for clients that ask the user for permission."""

    name: str
    title: str
    description: str
    arguments: tuple[type[msgspec.Struct], ...]  # alternatives; the caller sends the arguments of one
    options: type[msgspec.Struct] = _Arguments  # additional arguments
    result: type[msgspec.Struct]
    call: Callable[[Rollouts, Arguments, Wait], Awaitable[msgspec.Struct]]
    is_read_only: bool = False
    is_destructive: bool = False
    is_idempotent: bool = False

    def input_schema(self) -> dict[str, Any]:
        """Build one JSON schema for the arguments of all alternatives. An argument is required if every alternative requires it."""
        schemas = [_schema(kind) for kind in self.arguments]
        parts = [*schemas, _schema(self.options)]
        properties = {name: value for schema in parts for name, value in schema["properties"].items()}
        required = [name for name in properties if all(name in schema.get("required", ()) for schema in schemas)]
        described = {name: {"description": ARGUMENT_DESCRIPTIONS[name], **value} for name, value in properties.items()}
        return {"type": "object", "properties": described, "required": required, "additionalProperties": False}

    def output_schema(self) -> dict[str, Any]:
        return _schema(self.result)


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Build the JSON schema of a type. References are inlined, because some clients do not resolve them. The type must not be recursive."""
    (top,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def inline(schema: Any) -> Any:
        match schema:
            case {"$ref": name}:
                return inline(parts[name])
            case dict():
                return {key: inline(value) for key, value in schema.items()}
            case list():
                return [inline(value) for value in schema]
            case _:
                return schema

    schema: dict[str, Any] = inline(top)
    return schema


# ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _parse_request(arguments: Arguments) -> RolloutRequest | SweRolloutRequest:
    """Parse the arguments of `start_rollout`, which accepts either an instruction or a SWE row."""
    if "task" not in arguments:
        return parse_arguments(arguments, RolloutRequest)
    if "instruction" in arguments:
        raise BadRequest("send either an instruction or a task, not both", param="task")
    return parse_arguments(arguments, SweRolloutRequest)


async def _run(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    return await _run_and_wait(rollouts, arguments, RolloutRequest, wait)


async def _run_swe(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    return await _run_and_wait(rollouts, arguments, SweRolloutRequest, wait)


async def _run_and_wait(
    rollouts: Rollouts, arguments: Arguments, kind: type[RolloutRequest | SweRolloutRequest], wait: Wait
) -> RolloutResult:
    options = parse_arguments({name: value for name, value in arguments.items() if name == "logprobs"}, ResultOptions)
    request = parse_arguments({name: value for name, value in arguments.items() if name != "logprobs"}, kind)
    return _apply_options(await wait(rollouts.start(request), None), options.logprobs)


def _apply_options(result: RolloutResult, logprobs: bool) -> RolloutResult:
    """Return the result without log-probabilities if `logprobs` is false. A note is added, because null alone would mean "unknown"."""
    if logprobs or not any(turn.logprobs for turn in result.turns):
        return result
    return msgspec.structs.replace(
        result,
        turns=[msgspec.structs.replace(turn, logprobs=None) for turn in result.turns],
        clamped=[*result.clamped, "turns[].logprobs: left out, as requested"],
    )


async def _start(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> StartedRollout:
    return StartedRollout(rollouts.start(_parse_request(arguments)))


async def _state(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutState:
    return rollouts.state(parse_arguments(arguments, RolloutArguments).rollout_id)


async def _messages(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> MessagePage:
    parsed = parse_arguments(arguments, GetMessages)
    return await rollouts.messages(parsed.rollout_id, parsed.after, parsed.limit)


async def _events(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> EventPage:
    parsed = parse_arguments(arguments, SubscribeEvents)
    return await rollouts.events(parsed.rollout_id, parsed.after, parsed.limit, parsed.wait_s)


async def _abort(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutState:
    parsed = parse_arguments(arguments, AbortRollout)
    return await rollouts.abort(parsed.rollout_id, parsed.reason)


async def _finalize(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    parsed = parse_arguments(arguments, FinalizeRollout)
    rollouts.state(parsed.rollout_id)  # raises immediately for an unknown id
    return _apply_options(await wait(parsed.rollout_id, parsed.wait_s), parsed.logprobs)


async def _list(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutList:
    parsed = parse_arguments(arguments, ListRollouts)
    return rollouts.list(parsed.status, parsed.limit, parsed.before)


async def _endpoints(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> EndpointList:
    parse_arguments(arguments, ListEndpoints)
    return EndpointList(rollouts.catalog(), list(rollouts.agents()))


TOOLS: Mapping[str, ServiceTool] = {
    tool.name: tool
    for tool in (
        ServiceTool(
            name="run_rollout",
            title="Run a rollout",
            description="Run a coding agent on an instruction in a sandbox, grade its work, and return the result: reward, exit code, "
            "turns with their log-probabilities, files, logs. The call returns when the rollout has ended. If your calls have a time "
            "limit, use start_rollout and finalize_rollout. If a call is cut off, its rollout continues; list_rollouts lists it.",
            arguments=(RolloutRequest,),
            options=ResultOptions,
            result=RolloutResult,
            call=_run,
        ),
        ServiceTool(
            name="run_swe_rollout",
            title="Run a rollout of a SWE task",
            description="Like run_rollout, for a row of a SWE data set: the agent gets the problem statement and the repository, and the "
            "row's tests grade its work.",
            arguments=(SweRolloutRequest,),
            options=ResultOptions,
            result=RolloutResult,
            call=_run_swe,
        ),
        ServiceTool(
            name="start_rollout",
            title="Start a rollout",
            description="Start a rollout and return its id at once. Accepts the arguments of run_rollout (an instruction) or of "
            "run_swe_rollout (a task), except logprobs, which is an argument of finalize_rollout.",
            arguments=(RolloutRequest, SweRolloutRequest),
            result=StartedRollout,
            call=_start,
        ),
        ServiceTool(
            name="get_state",
            title="Get the state of a rollout",
            description="Return the status and stage of a rollout, and how many turns, tokens and seconds it has used so far.",
            arguments=(RolloutArguments,),
            result=RolloutState,
            call=_state,
            is_read_only=True,
        ),
        ServiceTool(
            name="get_messages",
            title="Read the conversation of a rollout",
            description="Return the messages between agent and model after a cursor. Those of sub-agents and side calls are labeled.",
            arguments=(GetMessages,),
            result=MessagePage,
            call=_messages,
            is_read_only=True,
        ),
        ServiceTool(
            name="subscribe_events",
            title="Read the events of a rollout",
            description="Return the events after a cursor, oldest first. If there are none, wait up to wait_s seconds for one.",
            arguments=(SubscribeEvents,),
            result=EventPage,
            call=_events,
            is_read_only=True,
        ),
        ServiceTool(
            name="abort_rollout",
            title="Abort a rollout",
            description="Stop a rollout, and return its state once its agent and sandbox are gone. Recorded data is kept. A rollout "
            "that has ended is left unchanged.",
            arguments=(AbortRollout,),
            result=RolloutState,
            call=_abort,
            is_destructive=True,
            is_idempotent=True,
        ),
        ServiceTool(
            name="finalize_rollout",
            title="Wait for a rollout's result",
            description="Wait until the rollout has ended and is graded, and return its result. If that takes longer than wait_s "
            'seconds, the result has "done": false, and you can call again.',
            arguments=(FinalizeRollout,),
            result=RolloutResult,
            call=_finalize,
            is_read_only=True,
        ),
        ServiceTool(
            name="list_rollouts",
            title="List rollouts",
            description="List rollouts, newest first, including those of other clients and those from before a restart of the server.",
            arguments=(ListRollouts,),
            result=RolloutList,
            call=_list,
            is_read_only=True,
        ),
        ServiceTool(
            name="list_endpoints",
            title="List endpoints and agents",
            description="Return the server's catalog: the keys for model_key, what each endpoint supports, and the available agents.",
            arguments=(ListEndpoints,),
            result=EndpointList,
            call=_endpoints,
            is_read_only=True,
        ),
    )
}
