"""The API of prime-rl's rollout gateway: `/v1/rollouts/{id}/register | chat/completions | trajectory | cancel | unregister`.

Requests and replies have the fields of prime-rl's API, and `register` also returns the session's secret (`api_key`). The behavior differs
in a few ways: `cancel` aborts the generation, `unregister` is idempotent, history is never tokenized again, replies are streamed as they
are sampled, idle rollouts expire, and the agent receives no token data.

The routes require the admin key or an API key with one of the route's scopes, unless `open_loopback` admits loopback clients without a
key. `chat/completions` also accepts the session's secret.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.common.validation import explain_error
from turngate.dialects import Chat, decode_stored_messages
from turngate.dialects.chat import message_to_wire
from turngate.engines.routed_experts import ROUTED_EXPERTS
from turngate.errors import BadRequest, TurngateError, Unprocessable
from turngate.gateway.quotas import ProjectQuota
from turngate.gateway.sampling import pin_for_training
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.http import bearer_key, error_response, json_response, raw_json_response
from turngate.server.operations import ApiRoute, Endpoint, JsonReply, describe_operation
from turngate.server.scopes import scopes_of
from turngate.trace.roles import OWN_ROLES, assign_roles
from turngate.trace.sample import find_untrained
from turngate.trace.session import Session, SessionConfig
from turngate.trace.side_data import encode_values
from turngate.trace.tree import Node, Sampled, path_ids, path_to
from turngate.types import Json, Limits, Message, Sampling, SideArray
from turngate.views.session import SessionView, SessionViews, encode_json, encode_piece

PREFIX = "/v1/rollouts/"
_chat = Chat()


class RegisterBody(msgspec.Struct, frozen=True):
    model: str
    sampling_params: dict[str, Any] = {}
    max_turns: int = -1
    max_seq_len: int | None = None


class RegisteredRollout(msgspec.Struct, frozen=True, kw_only=True):
    rollout_id: str
    status: str
    model: str
    max_turns: int
    max_seq_len: int | None
    api_key: str


class PrimeRolloutState(msgspec.Struct, frozen=True):
    rollout_id: str
    status: str


class PrimeRoutes:
    def __init__(self, sessions: Sessions, session_views: SessionViews, quota: ProjectQuota, auth: Auth) -> None:
        self._quota = quota
        self._sessions = sessions
        self._session_views = session_views
        self._auth = auth

    def routes(self) -> list[Route]:
        rollout = PREFIX + "{id}"
        return [
            self._route(f"{rollout}/register", "POST", self.register),
            self._route(f"{rollout}/trajectory", "GET", self.trajectory),
            self._route(f"{rollout}/cancel", "POST", self.cancel),
            self._route(f"{rollout}/unregister", "POST", self.unregister),
        ]

    def _route(self, path: str, method: str, endpoint: Endpoint) -> Route:
        scopes = scopes_of(method, path)
        operation = describe_operation(path, method, endpoint, "key", scopes=scopes, invalid=Unprocessable)

        async def serve(request: Request) -> Response:
            try:
                if not self._auth.trusts(request.scope):
                    self._auth.require(bearer_key(request), scopes)
                return await endpoint(request, **await operation.read_arguments(request))
            except TurngateError as error:
                return error_response(error)

        return ApiRoute(operation, serve)

    async def register(self, request: Request, body: RegisterBody) -> JsonReply[RegisteredRollout]:
        """Open a session for a rollout."""
        config = SessionConfig(
            model=body.model,
            mode=self._sessions.default_mode,
            limits=Limits(turns=None if body.max_turns < 0 else body.max_turns, context_tokens=body.max_seq_len),
            sampling=pin_for_training(_parse_sampling(body.sampling_params), self._sessions.default_mode),
            max_tokens=_parse_max_tokens(body.sampling_params),
            metadata={"prime": msgspec.to_builtins(body)},
            at_limit="conflict",
        )
        await self._quota.require_session()
        try:
            session, secret = self._sessions.open(config, request.path_params["id"])
        except BadRequest as error:
            raise Unprocessable(error.message, param=error.param) from None
        return json_response(
            RegisteredRollout(
                rollout_id=session.id,
                status="active",
                model=body.model,
                max_turns=body.max_turns,
                max_seq_len=body.max_seq_len,
                api_key=secret,
            )
        )

    async def trajectory(self, request: Request) -> Response:
        """Return the turns of a rollout with their tokens. Side calls and the like are included only if their roles are trained."""
        build, rollout = self._session_views.build, request.path_params["id"]
        return raw_json_response(await build(rollout, _encode_trajectory, (ROUTED_EXPERTS,)))

    async def cancel(self, request: Request) -> JsonReply[PrimeRolloutState]:
        """Abort a rollout."""
        session = await self._sessions.find(request.path_params["id"])
        # A completed rollout stays completed.
        end = self._sessions.seal if rollout_status(session) == "completed" else self._sessions.cancel
        session = await end(session.id)
        return json_response(PrimeRolloutState(session.id, rollout_status(session)))

    async def unregister(self, request: Request) -> JsonReply[PrimeRolloutState]:
        """End the rollout, and keep its trace until the session is deleted. Unregistering it again has no effect."""
        session = await self._sessions.seal(request.path_params["id"], "unregistered")
        return json_response(PrimeRolloutState(session.id, rollout_status(session)))


def rollout_status(session: Session) -> str:
    if session.status == "cancelled":
        return "cancelled"
    limits = session.config.limits
    done = session.status == "sealed" or (limits.turns is not None and session.turns >= limits.turns)
    return "completed" if done else "active"


def _encode_trajectory(view: SessionView) -> bytes:
    session = view.session
    messages = {node.id: _node_messages(node, view.texts[node.id]) for node in session.trace.nodes}
    role_of = assign_roles(session.trace)
    reasons = find_untrained(session.trace, role_of, session.config.policy, masked=())
    listed = {*OWN_ROLES, *session.config.policy.roles}
    turns = [turn for turn in session.trace.turns() if role_of[turn.id] in listed]
    first, last = (path_to(turns[0]), path_to(turns[-1])) if turns else ([], [])
    prompt = [message for node in first[:-1] for message in messages[node.id]]
    conversation = [message for node in last for message in messages[node.id]]
    return encode_json(
        {
            "rollout_id": session.id,
            "status": rollout_status(session),
            "num_turns": len(turns),
            "model": session.config.model,
            "prompt": prompt,
            "completion": conversation[len(prompt) :],
            "is_truncated": session.truncated,
            **({"refused": session.trace.refused} if session.trace.refused is not None else {}),
            "trajectory": [encode_piece(_step_json(turn, reasons[turn.id], messages, view)) for turn in turns],
        }
    )


def _parse_sampling(params: dict[str, Any]) -> dict[str, Json]:
    """Return the sampling parameters that replace the agent's. Unknown parameters are ignored."""
    known = {field.name for field in msgspec.structs.fields(Sampling)}
    sampling = {name: value for name, value in params.items() if name in known and value is not None}
    if isinstance(sampling.get("top_k"), int):
        sampling["top_k"] = max(0, sampling["top_k"])
    try:
        msgspec.convert(sampling, Sampling)
    except msgspec.ValidationError as error:
        raise Unprocessable(f"sampling_params.{explain_error(error, Sampling)[0]}", param="sampling_params") from None
    return sampling


def _parse_max_tokens(params: dict[str, Any]) -> int | None:
    value = params.get("max_completion_tokens") if params.get("max_tokens") is None else params["max_tokens"]
    if value is not None and (type(value) is not int or value < 1):
        raise Unprocessable(
            f"sampling_params.max_tokens (or max_completion_tokens) must be an integer greater than 0, not {value!r}",
            param="sampling_params",
        )
    return value


def _encode_experts(turn: Sampled, arrays: Sequence[SideArray]) -> Json:
    """Encode a turn's routed experts in the verifiers library's format.

    In the result, `start` is the position of the first token that has values, counted from the start of the prompt.
    """
    if len(arrays) != 1:
        return None  # there are none, or they cover separate parts of the prompt, which the format cannot express
    [array] = arrays
    return {
        "data": base64.b64encode(encode_values(array.values)).decode(),
        "shape": list(array.values.shape),
        "start": turn.parent.length + array.first,
        "dtype": array.values.dtype.name,
    }


def _step_json(
    turn: Sampled, untrained: str, messages: Mapping[int, list[msgspec.Raw]], view: SessionView
) -> dict[str, Json]:
    session, prompt = view.session, path_ids(turn.parent)
    limit = session.config.limits.context_tokens
    truncated = turn.info.finish == "length"
    logprobs: Json = [] if turn.logprobs is None else turn.logprobs
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": turn.ids,
        "completion_mask": [0 if untrained else 1] * turn.size,
        "completion_logprobs": logprobs,
        "overlong_prompt": limit is not None and len(prompt) > limit,
        "is_truncated": truncated,
        "routed_experts": _encode_experts(turn, view.side.get(turn.id, ())),
    }
    return {
        "prompt": [message for node in path_to(turn)[:-1] for message in messages[node.id]],
        "completion": messages[turn.id],
        "tokens": tokens,
        "reward": None,
        "advantage": None,
        "is_truncated": truncated,
        "trajectory_id": session.id,
        "extras": {
            "node": turn.id,
            "biases": turn.info.biases,
            "untrained": untrained,
            "version": turn.info.version_end,
        },
    }


def _node_messages(node: Node, text: bytes) -> list[msgspec.Raw]:
    """Return a node's messages in OpenAI's format. Context that arrived in that format is returned unchanged."""
    if isinstance(node, Sampled):
        return [encode_piece(_to_wire(orjson.loads(text)))]
    if node.info.dialect == _chat.name:
        return [encode_piece(message) for message in orjson.loads(text)]
    return [encode_piece(message_to_wire(message)) for message in decode_stored_messages(node.info.dialect, text)]


def _to_wire(stored: Json) -> Json:
    """Convert a stored message to OpenAI's format."""
    message = msgspec.convert(stored, Message)
    wire: dict[str, Json] = {"role": message.role, "content": message.content or None}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in message.tool_calls
        ]
    return wire
