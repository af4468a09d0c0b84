"""The routes of OpenEnv's capture API: `/sessions`, `/sessions/{id}`, `/sessions/{id}/rollout` and `/sessions/{id}/trace_entries`.

In OpenEnv, the agent's API key is the session's id. Here, the id grants no access. Instead, the `session_id` that `POST /sessions` returns
is the session's secret, which works wherever a client uses OpenEnv's id. The `id` in the same reply is the session's real id, which all
other replies and `/admin` show. Paths accept both.

docs/openenv.md lists the differences from OpenEnv's own implementation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.common.aio import give_way
from turngate.errors import BadRequest, Conflict, NotFound
from turngate.gateway.projects import AuditNote
from turngate.gateway.quotas import ProjectQuota
from turngate.gateway.sampling import pin_for_training
from turngate.gateway.sessions import Sessions
from turngate.server.auth import Auth
from turngate.server.decoding import Whole
from turngate.server.http import json_response, raw_json_response, route
from turngate.server.operations import JsonReply
from turngate.trace.sample import Sample
from turngate.trace.session import Session, SessionConfig
from turngate.types import Capture, Json, Limits
from turngate.views.session import SessionView, SessionViews, encode_json, encode_piece
from turngate.views.session_directory import SessionDirectory, Summary
from turngate.views.trace import TraceView, TurnView, decode_trace, training_role
from turngate.views.training_trace import training_turns

Purpose = Literal["auto", "train", "eval"]
_NEUTRAL: Mapping[str, tuple[float, ...]] = {
    "top_p": (1.0,),
    "top_k": (-1, 0),
    "min_p": (0.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
}
_EVAL_SAMPLING = ("temperature", "top_p", "top_k")
_ENGINE_FIELDS = (
    "llm_url",
    "api_key",
    "auth_header",
    "provider",
)  # in OpenEnv, these fields choose the session's engine; here, they are rejected
_MAX_INT = 2**31 - 1  # the largest integer that engines accept
_MAX_LISTED = 1000  # maximum number of sessions in a list
_PAGE = 200  # sessions to read at once; many of them may not have been opened through this API
_MAX_READ = 5000  # sessions to read for one list
_METADATA_KEY = "openenv"  # metadata key that marks sessions opened through this API


class OpenEnvSessionBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /sessions`. Unknown fields are ignored, as in OpenEnv."""

    session_id: str | None = None
    metadata: dict[str, Json] | None = None
    model: str | None = None
    purpose: Purpose = "auto"
    sampling: dict[str, float] | None = None
    eval_sampling: dict[str, float] | None = None
    max_model_calls: Annotated[int, msgspec.Meta(ge=0, le=_MAX_INT)] = 0
    llm_url: str | None = None
    api_key: str | None = None
    auth_header: str | None = None
    provider: str | None = None


class OpenEnvListQuery(msgspec.Struct, frozen=True):
    """Query parameters. Only sessions older than `before` are listed.

    `before` is the value of `before` in the previous reply, or the `key` of a session in `GET /admin/sessions`.
    """

    before: Whole | None = None
    limit: Whole = 100


class OpenEnvRolloutQuery(msgspec.Struct, frozen=True):
    include_discarded: bool = False
    include_messages: bool = False


class OpenEnvDeleted(msgspec.Struct, frozen=True):
    deleted: bool


class OpenEnvRoutes:
    def __init__(
        self,
        sessions: Sessions,
        directory: SessionDirectory,
        session_views: SessionViews,
        quota: ProjectQuota,
        note: AuditNote,
        auth: Auth,
    ) -> None:
        self._quota = quota
        self._note = note
        self._sessions = sessions
        self._directory = directory
        self._session_views = session_views
        self._auth = auth

    def routes(self) -> list[Route]:
        session = "/sessions/{id}"
        return [
            route("/sessions", "POST", self.open, self._auth),
            route("/sessions", "GET", self.listing, self._auth),
            route(session, "GET", self.show, self._auth),
            route(session, "DELETE", self.delete, self._auth),
            route(f"{session}/rollout", "GET", self.rollout, self._auth),
            route(f"{session}/trace_entries", "GET", self.trace_entries, self._auth),
        ]

    async def open(self, request: Request, body: OpenEnvSessionBody) -> Response:
        """Open a session."""
        for name in _ENGINE_FIELDS:
            if getattr(body, name) and (name, getattr(body, name)) != ("auth_header", "Authorization"):
                raise BadRequest(
                    f"{name} is not supported, because a session cannot choose the engine; "
                    "choose the engine when starting the gateway (--engine, --engine-url, --engine-key-env)",
                    param=name,
                )
        mode = self._sessions.default_mode
        if body.purpose == "train" and mode == "observe":
            raise BadRequest(
                "purpose cannot be 'train', because this gateway is in observe mode and training requires exact token "
                "capture; use 'eval', or a gateway in exact mode",
                param="purpose",
            )
        bias: Literal["neutral", "record"] = "record" if body.purpose == "eval" else "neutral"
        config = SessionConfig(
            model=body.model or "",
            mode=mode,
            limits=Limits(turns=body.max_model_calls or None),
            # An evaluation uses the sampling that the agent requests, and records biased sampling.
            sampling=pin_for_training(_parse_sampling(body), mode, bias),
            bias=bias,
            metadata={**(body.metadata or {}), _METADATA_KEY: {"purpose": body.purpose}},
        )
        await self._quota.require_session()
        session, secret = self._sessions.open(config, body.session_id or None)
        return json_response(
            {
                "session_id": secret,
                "id": session.id,
                **_capture_kind(session),
                "max_model_calls": body.max_model_calls,
                "llm_url": None,
                "model": body.model or None,
            }
        )

    async def listing(self, request: Request, query: OpenEnvListQuery) -> Response:
        """List the sessions that were opened through this API, newest first. Pass the reply's `before` to get more, unless it is null."""
        limit, before = min(query.limit or 100, _MAX_LISTED), query.before
        found: list[dict[str, Json]] = []
        for _ in range(_MAX_READ // _PAGE):
            began = time.thread_time()
            page = await self._directory.list_sessions(before=before, limit=_PAGE)
            opened_here = [row for row in page if _METADATA_KEY in row.config.metadata][: limit - len(found)]
            if opened_here:
                shapes = await self._session_views.shapes(opened_here[-1].key, opened_here[0].key)
                found += [self._summary(row, shapes.get(row.key, (0, 0))) for row in opened_here]
            if len(found) == limit:
                before = opened_here[-1].key
                break
            if len(page) < _PAGE:
                before = None
                break
            before = page[-1].key
            await give_way(time.thread_time() - began)
        return json_response({"sessions": found, "before": before})

    async def show(self, request: Request) -> Response:
        """Return the state of a session."""
        name = self._session_id(request)
        live = self._sessions.find_live(name)

        def encode(view: SessionView) -> bytes:
            session = view.session
            summary = {
                "session_id": session.id,
                **_usage(live, session.last_used),
                "status": session.status,
                "stop": session.stop,
                **_tree_stats(_trace_view(view)),
            }
            return encode_json(summary)

        return raw_json_response(await self._session_views.build(name, encode))

    async def rollout(self, request: Request, query: OpenEnvRolloutQuery) -> Response:
        """Return the trace and the training rows of a session."""
        name = self._session_id(request)
        discarded, messages = query.include_discarded, query.include_messages
        live = self._sessions.find_live(name)
        limits_met = 0 if live is None else len(live.limits_announced)
        return raw_json_response(
            await self._session_views.build(
                name, lambda view: _encode_rollout(view, limits_met, discarded=discarded, messages=messages)
            )
        )

    async def trace_entries(self, request: Request) -> Response:
        """Return the turns of a session as training entries."""
        return raw_json_response(await self._session_views.build(self._session_id(request), _encode_entries))

    async def delete(self, request: Request) -> JsonReply[OpenEnvDeleted]:
        """End the session and delete its recorded data. Deleting it again has no effect."""
        try:
            session_id = self._session_id(request)
            await self._sessions.delete(session_id)
        except NotFound:
            return json_response(OpenEnvDeleted(False))
        self._note(request.state.caller, "session deleted", session_id)
        return json_response(OpenEnvDeleted(True))

    def _session_id(self, request: Request) -> str:
        """Return the session's id. The path contains either the session's secret, which OpenEnv clients use as the id, or its real id."""
        name: str = request.path_params["id"]
        return self._sessions.find_id_by_secret(name) or name

    def _summary(self, row: Summary, shape: tuple[int, int]) -> dict[str, Json]:
        metadata = {name: value for name, value in row.config.metadata.items() if name != _METADATA_KEY}
        return {
            **metadata,
            "session_id": row.id,
            "turns": shape[0],
            "roots": shape[1],
            **_usage(self._sessions.find_live(row.id), row.closed or row.opened),
        }


def _usage(live: Session | None, last_used: float) -> dict[str, Json]:
    """Return the idle time, and whether the last call failed (`upstream_errors`). Earlier failures are only in the events.

    If the session is not live (see `Sessions.live`), `upstream_errors` is 0.
    """
    used = last_used if live is None else live.last_used
    failed = live is not None and live.last_error is not None
    return {"idle_s": round(max(0.0, time.time() - used), 1), "upstream_errors": int(failed)}


def _trace_view(view: SessionView) -> TraceView:
    return TraceView(decode_trace(view.encode_trace()))


def _encode_entries(view: SessionView) -> bytes:
    kind = _capture_kind(view.session)
    if kind["rollout_type"] == "eval":
        why = (
            "is for evaluation"
            if kind["capture_level"] == "tokens"
            else "was recorded in observe mode without complete token ids"
        )
        raise Conflict(f"this session {why}, so it has no entries to train on; use /rollout to read it")
    entries = []
    for turn in training_turns(_trace_view(view)):
        node = turn.pop("node_id")
        entries.append(encode_piece({**turn, "metadata": {**turn["metadata"], "node_id": node}}))
    return encode_json({"session_id": view.session.id, "entries": entries})


def _capture_kind(session: Session) -> dict[str, str]:
    """Return the capture level, and whether the session is for training or evaluation."""
    captured = {turn.info.capture for turn in session.trace.turns()}
    if session.config.mode != "observe":
        level: Capture = "tokens"
    else:  # the lowest capture level of any turn
        level = next((level for level in ("text", "logprobs", "tokens") if level in captured), "text")
    purpose = session.config.metadata.get(_METADATA_KEY, {}).get("purpose", "auto")
    return {"capture_level": level, "rollout_type": "train" if level == "tokens" and purpose != "eval" else "eval"}


def _parse_sampling(body: OpenEnvSessionBody) -> dict[str, Json]:
    """Return the session's sampling parameters. For training, only the temperature may differ from its neutral value."""
    if body.eval_sampling and body.purpose != "eval":
        raise BadRequest("eval_sampling requires purpose 'eval'", param="eval_sampling")
    if body.purpose == "eval":
        if body.sampling is not None:
            raise BadRequest("'sampling' is only for training; use 'eval_sampling' for an evaluation", param="sampling")
        return _check_sampling("eval_sampling", body.eval_sampling or {}, _EVAL_SAMPLING)
    sampling = _check_sampling("sampling", body.sampling or {}, ("temperature", *_NEUTRAL))
    if sampling and not sampling.get("temperature"):
        raise BadRequest(
            "sampling.temperature must be set to a number greater than 0 for training", param="sampling.temperature"
        )
    for name, neutral in _NEUTRAL.items():
        if name in sampling and sampling.pop(name) not in neutral:
            raise BadRequest(
                f"sampling.{name} must be {' or '.join(map(str, neutral))} for training", param=f"sampling.{name}"
            )
    return sampling


def _check_sampling(field: str, values: dict[str, float], names: tuple[str, ...]) -> dict[str, Any]:
    if unknown := sorted(set(values) - set(names)):
        raise BadRequest(
            f"unknown parameter {field}.{unknown[0]} (supported: {', '.join(names)})", param=f"{field}.{unknown[0]}"
        )
    top_k = values.get("top_k", 0)
    if not -1 <= top_k <= _MAX_INT or top_k != int(top_k):
        raise BadRequest(
            f"{field}.top_k must be an integer from -1 to {_MAX_INT}, not {top_k:g}", param=f"{field}.top_k"
        )
    return {**values, **({"top_k": max(0, int(top_k))} if "top_k" in values else {})}  # in OpenEnv, -1 means off


# ── the rollout as one document ─────────────────────────────────────────────────────────────────────────────────────


def _encode_rollout(view: SessionView, limits_met: int, *, discarded: bool, messages: bool) -> bytes:
    session, trace, rows = view.session, _trace_view(view), view.samples(keep_empty=True)
    kind = _capture_kind(session)
    trains = kind["rollout_type"] == "train"
    by_id = {turn.id: turn for turn in trace.turns}
    sequences = [_sequence_json(row, by_id, trains) for row in rows]
    listed = [row for row in sequences if discarded or row["role"] != "discarded"]
    trained = [row for row in listed if row["trainable"]]
    document = {
        "session_id": session.id,
        "metadata": {name: value for name, value in session.config.metadata.items() if name != _METADATA_KEY},
        "budget_stop_count": limits_met,
        "turns": [encode_piece(_turn_json(trace, turn, index, messages)) for index, turn in enumerate(trace.turns)],
        "stats": {
            **_tree_stats(trace),
            "n_sequences": len(listed),
            "n_trainable_sequences": len(trained),
            "n_trainable_tokens": sum(row["n_trainable"] for row in trained),
        },
        "sequences": [encode_piece(row) for row in listed],
        "validation": [f"[WARN] untrained: turn {t.id}: {t.untrained}" for t in trace.turns if t.untrained],
        "trainable": bool(trained),
        **kind,
    }
    return encode_json(document)


def _sequence_json(row: Sample, by_id: dict[int, TurnView], trains: bool) -> dict[str, Json]:
    """Return one branch as JSON. The format requires a number at every position, so masked tokens have the log-probability 0.0."""
    turns = [by_id[span.node] for span in row.spans]
    mask = row.mask & trains
    for span, turn in zip(row.spans, turns, strict=True):
        mask[span.start : span.end] &= turn.logprobs is not None
    logprobs = [value if on else 0.0 for value, on in zip(row.logprobs.tolist(), mask.tolist(), strict=True)]
    role = training_role(turns[-1].role)
    trained = int(mask.sum())
    return {
        "role": role,
        "root_id": str(turns[0].root),
        "node_ids": [str(turn.id) for turn in turns],
        "n_turns": len(turns),
        "prompt_len": row.spans[0].start,
        "n_trainable": trained,
        "turn_lengths": [span.end - span.start for span in row.spans],
        "input_ids": row.ids,
        "loss_mask": mask.astype(int),
        "logprobs": logprobs,
        "trainable": bool(trained) and role == "agent",
        "validation": [f"[INFO] untrained: turn {s.node}: {s.reason}" for s in row.spans if s.reason],
    }


def _turn_json(trace: TraceView, turn: TurnView, index: int, messages: bool) -> dict[str, Json]:
    context = trace.contexts[turn.parent]
    return {
        "node_id": str(turn.id),
        "index": index,
        "root_id": str(turn.root),
        "n_sampled": len(turn.ids),
        "n_prompt": len(trace.prompt(turn)),
        "n_tools": len(context.tools),
        "finish_reason": turn.finish,
        "harness_session_id": context.signals.get("thread"),
        "sampling_params": turn.sampling or {},
        "requested_sampling_params": {},  # always empty: requested parameters that were not applied are not recorded
        "sampled_logprobs": turn.logprobs,
        "discarded": training_role(turn.role) == "discarded",
        **(
            {
                "request_messages": trace.messages(turn),
                "request_tools": context.tools or None,
                "response_message": turn.message,
            }
            if messages
            else {}
        ),
    }


def _tree_stats(trace: TraceView) -> dict[str, int]:
    """Count roots, leaves and forks as OpenEnv does.

    OpenEnv counts calls, so two replies to the same prompt are two roots if no turn precedes the prompt, and a fork otherwise.
    """
    parents = [trace.contexts[turn.parent].parent for turn in trace.turns]
    children: dict[int, int] = {}
    for parent in parents:
        if parent is not None:
            children[parent] = children.get(parent, 0) + 1
    return {
        "n_turns": len(trace.turns),
        "n_roots": sum(parent is None for parent in parents),
        "n_leaves": sum(turn.id not in children for turn in trace.turns),
        "n_forks": sum(count > 1 for count in children.values()),
        "n_discarded": sum(training_role(turn.role) == "discarded" for turn in trace.turns),
    }
