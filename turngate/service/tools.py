"""The tools: their arguments, what they give, and the verb of the service that each is. Read by `mcp/`, `environment/`
and the docs.

Schemas follow from the types. Keys, sandboxes and images are nobody's arguments: they are settings of the server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from turngate.errors import BadRequest
from turngate.service.catalog import EndpointView
from turngate.service.request import Asked, AskedSwe, read
from turngate.service.result import EventPage, Listing, Messages, RolloutResult, RolloutState
from turngate.types import Json

if TYPE_CHECKING:  # whoever reads the schemas needs nothing of what runs
    from turngate.service.rollouts import Rollouts

LONGEST_WAIT_S = 60.0  # of one call for events: clients have time limits

Wait = Callable[
    [str, float | None], Awaitable[RolloutResult]
]  # for a rollout's end, so many seconds; tells the caller how far it is
Arguments = Mapping[str, Json]

# What whoever calls a tool is told about an argument. One name means one thing, whichever tool has it.
ABOUT: Mapping[str, str] = {
    "model_key": "The endpoint that answers the agent: a key of list_endpoints, such as vllm://Qwen3-8B.",
    "instruction": "What the agent is to do, in words.",
    "test_script": "A bash script that grades the agent's work in a fresh sandbox, in a copy of the working folder: exit code 0 is "
    "reward 1, 1 is 0. Or it writes a number into $TURNGATE_LOGS/verifier/reward.txt. Without a script there is no reward.",
    "task_id": "Your name for the task. By default one that follows from the instruction.",
    "agent": "The agent that works on it: one that list_endpoints names. By default the first of them.",
    "setup_shell": "Shell commands that are run in the working folder before the agent starts.",
    "upload_files": 'Files for the working folder: path below it → text, or {"base64": "…"} for what is not text.',
    "thinking": "Whether the model thinks before it answers. By default as its chat template has it.",
    "mode": "How turns are recorded: exact (token ids and log-probabilities), observe (also transparent_proxy: a hosted endpoint is "
    "relayed), gate (also interception_gate: a trainer answers) or direct (also black_box: nothing but the agent's logs). By default "
    "the endpoint's own.",
    "max_tokens_cap": "The most tokens that the model may sample in one turn.",
    "agent_timeout_s": "Seconds that the agent has. The server has a limit of its own.",
    "endpoint_url": "The URL of an endpoint of your own, instead of the catalog's. Taken only where the server's policy lists its host.",
    "task": "A row of a SWE data set: instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS, PASS_TO_PASS …",
    "rollout_id": "The id that start_rollout gave. list_rollouts shows those that there are.",
    "after": "A cursor: what is past it comes. 0 is the beginning; then the cursor of the answer before.",
    "limit": "At most so many.",
    "wait_s": "Seconds to wait for it, at most. Give it where your tool calls have a time limit, and call again.",
    "reason": "Why, for whoever reads the result.",
    "status": "Only rollouts of this status: queued, running, done; or how they ended: finished, failed, timed out, limit, cancelled, "
    "error.",
    "logprobs": "false leaves the turns' log-probabilities out of the answer: for a caller that reads it with a model's context.",
    "before": "The id of the last rollout of the answer before, for the next page.",
}


class _Arguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class OfRollout(_Arguments, frozen=True, kw_only=True):
    rollout_id: str


class GetMessages(OfRollout, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class SubscribeEvents(OfRollout, frozen=True, kw_only=True):
    after: Annotated[int, msgspec.Meta(ge=0)] = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 200
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] = 0.0


class AbortRollout(OfRollout, frozen=True, kw_only=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)] = ""


class Shown(_Arguments, frozen=True, kw_only=True):
    """What the answer holds: of the tools that give a result, beside their own arguments."""

    logprobs: bool = True


class FinalizeRollout(OfRollout, frozen=True, kw_only=True):
    wait_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    logprobs: bool = True


class ListRollouts(_Arguments, frozen=True, kw_only=True):
    status: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=500)] = 50
    before: str = ""


class ListEndpoints(_Arguments, frozen=True, kw_only=True):
    pass


class Started(msgspec.Struct, frozen=True):
    """A rollout that has begun, or waits for its turn."""

    rollout_id: str


class Endpoints(msgspec.Struct, frozen=True):
    """The endpoints that a rollout can be asked for with, and the agents, the default first."""

    endpoints: list[EndpointView]
    agents: list[str]


class ServiceTool(msgspec.Struct, frozen=True, kw_only=True):
    """One tool. Hints are for clients that ask a person first."""

    name: str
    title: str
    about: str
    takes: tuple[type[msgspec.Struct], ...]  # more than one: either
    also: type[msgspec.Struct] = _Arguments  # arguments beside those
    gives: type[msgspec.Struct]
    call: Callable[[Rollouts, Arguments, Wait], Awaitable[msgspec.Struct]]
    reads: bool = False  # changes nothing
    destroys: bool = False
    again: bool = False  # a second call does no more than the first

    def input_schema(self) -> dict[str, Any]:
        """One object, with a description of every argument. Of several kinds only what each needs is needed."""
        schemas = [_schema(kind) for kind in self.takes]
        found = [*schemas, _schema(self.also)]
        properties = {name: value for schema in found for name, value in schema["properties"].items()}
        needed = [name for name in properties if all(name in schema.get("required", ()) for schema in schemas)]
        described = {name: {"description": ABOUT[name], **value} for name, value in properties.items()}
        return {"type": "object", "properties": described, "required": needed, "additionalProperties": False}

    def output_schema(self) -> dict[str, Any]:
        return _schema(self.gives)


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Without references, which not every client follows. None of our types holds itself."""
    (top,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def whole(schema: Any) -> Any:
        match schema:
            case {"$ref": name}:
                return whole(parts[name])
            case dict():
                return {key: whole(value) for key, value in schema.items()}
            case list():
                return [whole(value) for value in schema]
            case _:
                return schema

    found: dict[str, Any] = whole(top)
    return found


# ── what each does ──────────────────────────────────────────────────────────────────────────────────────────────────


def _asked(arguments: Arguments) -> Asked | AskedSwe:
    """Of start_rollout, which takes either."""
    if "task" not in arguments:
        return read(arguments, Asked)
    if "instruction" in arguments:
        raise BadRequest("task: give either an instruction or a task, not both", param="task")
    return read(arguments, AskedSwe)


async def _run(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    return await _ran(rollouts, arguments, Asked, wait)


async def _run_swe(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    return await _ran(rollouts, arguments, AskedSwe, wait)


async def _ran(rollouts: Rollouts, arguments: Arguments, kind: type[Asked | AskedSwe], wait: Wait) -> RolloutResult:
    shown = read({name: value for name, value in arguments.items() if name == "logprobs"}, Shown)
    asked = read({name: value for name, value in arguments.items() if name != "logprobs"}, kind)
    return _result(await wait(rollouts.start(asked), None), shown.logprobs)


def _result(result: RolloutResult, logprobs: bool) -> RolloutResult:
    """With the log-probabilities, or with a word that they were left out: null alone would say that they are not known."""
    if logprobs or not any(turn.logprobs for turn in result.turns):
        return result
    return msgspec.structs.replace(
        result,
        turns=[msgspec.structs.replace(turn, logprobs=None) for turn in result.turns],
        clamped=[*result.clamped, "turns[].logprobs: left out, as the call asked for"],
    )


async def _start(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> Started:
    return Started(rollouts.start(_asked(arguments)))


async def _state(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutState:
    return rollouts.state(read(arguments, OfRollout).rollout_id)


async def _messages(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> Messages:
    given = read(arguments, GetMessages)
    return await rollouts.messages(given.rollout_id, given.after, given.limit)


async def _events(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> EventPage:
    given = read(arguments, SubscribeEvents)
    return await rollouts.events(given.rollout_id, given.after, given.limit, given.wait_s)


async def _abort(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutState:
    given = read(arguments, AbortRollout)
    return await rollouts.abort(given.rollout_id, given.reason)


async def _finalize(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> RolloutResult:
    given = read(arguments, FinalizeRollout)
    rollouts.state(given.rollout_id)  # so that an unknown one is told at once
    return _result(await wait(given.rollout_id, given.wait_s), given.logprobs)


async def _list(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> Listing:
    given = read(arguments, ListRollouts)
    return rollouts.list(given.status, given.limit, given.before)


async def _endpoints(rollouts: Rollouts, arguments: Arguments, wait: Wait) -> Endpoints:
    read(arguments, ListEndpoints)
    return Endpoints(rollouts.catalog(), list(rollouts.agents()))


TOOLS: Mapping[str, ServiceTool] = {
    tool.name: tool
    for tool in (
        ServiceTool(
            name="run_rollout",
            title="Run a rollout",
            about="Let a coding agent work on an instruction in a sandbox, grade what it did, and give the result: reward, exit code, "
            "turns with their log-probabilities, files, logs. This takes as long as the agent does. Where your calls have a time limit, "
            "use start_rollout and finalize_rollout. A call that is cut off leaves its rollout running: list_rollouts shows it.",
            takes=(Asked,),
            also=Shown,
            gives=RolloutResult,
            call=_run,
        ),
        ServiceTool(
            name="run_swe_rollout",
            title="Run a rollout of a SWE task",
            about="The same for a row of a SWE data set: the agent gets the problem statement and the repository, and is graded by the "
            "row's tests.",
            takes=(AskedSwe,),
            also=Shown,
            gives=RolloutResult,
            call=_run_swe,
        ),
        ServiceTool(
            name="start_rollout",
            title="Start a rollout",
            about="Begin a rollout and give its id at once. Takes what run_rollout takes, or what run_swe_rollout takes: an instruction "
            "or a task.",
            takes=(Asked, AskedSwe),
            gives=Started,
            call=_start,
        ),
        ServiceTool(
            name="get_state",
            title="How far a rollout is",
            about="Status, stage, turns, tokens and seconds so far.",
            takes=(OfRollout,),
            gives=RolloutState,
            call=_state,
            reads=True,
        ),
        ServiceTool(
            name="get_messages",
            title="What was said in a rollout",
            about="The conversation of agent and model as it happens, from a cursor. Sub-agents and side calls are labelled.",
            takes=(GetMessages,),
            gives=Messages,
            call=_messages,
            reads=True,
        ),
        ServiceTool(
            name="subscribe_events",
            title="What happened in a rollout",
            about="Events from a cursor: none is lost, none comes twice. With wait_s the call waits until there is one.",
            takes=(SubscribeEvents,),
            gives=EventPage,
            call=_events,
            reads=True,
        ),
        ServiceTool(
            name="abort_rollout",
            title="Abort a rollout",
            about="Stop its generation and its sandbox; answers when both are gone. What was recorded stays. A rollout that has ended is "
            "left as it is.",
            takes=(AbortRollout,),
            gives=RolloutState,
            call=_abort,
            destroys=True,
            again=True,
        ),
        ServiceTool(
            name="finalize_rollout",
            title="Wait for a rollout's result",
            about="Wait until the rollout has ended and is graded, and give its result. With wait_s the answer may say done: false; call "
            "again then. As often as you like.",
            takes=(FinalizeRollout,),
            gives=RolloutResult,
            call=_finalize,
            reads=True,
        ),
        ServiceTool(
            name="list_rollouts",
            title="The rollouts that there are",
            about="Newest first, those of other clients and of earlier starts of the server too.",
            takes=(ListRollouts,),
            gives=Listing,
            call=_list,
            reads=True,
        ),
        ServiceTool(
            name="list_endpoints",
            title="The models that there are",
            about="The server's catalog: the keys for model_key, and what each endpoint supports. And the agents that may be used.",
            takes=(ListEndpoints,),
            gives=Endpoints,
            call=_endpoints,
            reads=True,
        ),
    )
}
