"""The gateway of one project: an ASGI application over the project's own store.

All projects of a gateway share the engine, the admin key, and the fence at which calls wait during weight updates (`app.py`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from turngate.common.sharding import Shard
from turngate.config import ServeConfig
from turngate.dialects import DIALECTS
from turngate.engines.base import Engine, Relay
from turngate.engines.gate import Gate
from turngate.errors import NotFound, StoreError
from turngate.gateway.attempts import Attempts
from turngate.gateway.cell.announcement import AnnouncementWait
from turngate.gateway.cell.cell import Cell
from turngate.gateway.engine_changes import EngineChanges
from turngate.gateway.events import Events
from turngate.gateway.eviction import Evictor
from turngate.gateway.fair_shares import FairShares
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.host_tools import HostTools
from turngate.gateway.housekeeping import Housekeeper
from turngate.gateway.loading import TimeSlicer, TraceLoader
from turngate.gateway.outcomes import OutcomeRecorder
from turngate.gateway.projects import Projects
from turngate.gateway.quotas import ProjectQuota, QuotaKeeper
from turngate.gateway.recording import TurnRecorder
from turngate.gateway.replies import ReplyArchive
from turngate.gateway.retention import SessionPruner
from turngate.gateway.sessions import Sessions
from turngate.gateway.stale_sessions import StaleSessions
from turngate.gateway.turn import PipelineSettings, TurnPipeline
from turngate.gateway.weights import LocalBarrier, WeightUpdates
from turngate.render import Renderer
from turngate.server.admin import AdminRoutes
from turngate.server.asgi import Receive, Scope, Send, add_gateway_header
from turngate.server.attempts import AttemptRoutes
from turngate.server.auth import Auth
from turngate.server.compat.openenv import OpenEnvRoutes
from turngate.server.compat.prime import PrimeRoutes
from turngate.server.engines import EngineRoutes
from turngate.server.feeds import FeedRoutes
from turngate.server.gate import GateRoutes
from turngate.server.host_tools import HostToolRoutes
from turngate.server.metrics import MetricsEndpoint
from turngate.server.model_calls import ModelCalls
from turngate.server.openapi import OpenApiDocument
from turngate.server.projects import ProjectRoutes
from turngate.server.public import PublicRoutes
from turngate.server.responses import ResponseRoutes
from turngate.server.routing import DialectRoutes, dialect_of, hint_for, is_unserved_call
from turngate.server.web.files import add_security_headers, is_page_path
from turngate.server.web.routes import WebPage
from turngate.server.websocket import refuse_path, serve_socket
from turngate.server.weights import FenceRoutes
from turngate.store.journal import Journal
from turngate.store.projects import DEFAULT_PROJECT, Caller
from turngate.store.pruning import locate_archive
from turngate.store.store import Store
from turngate.telemetry.logs import redact_known
from turngate.telemetry.metrics import Metrics
from turngate.types import Json, Mode
from turngate.verify import Verdict
from turngate.views.background_verifier import BackgroundVerifier, summarize_verdict
from turngate.views.session import SessionViews
from turngate.views.session_directory import SessionDirectory

log = logging.getLogger("turngate")
ANSWER_S = 10.0  # how long the event loop waits for an answer from the shared store
_SESSION_PATH = re.compile(r"/(s|rollout|v1/rollouts)/([^/]+)(/.+)")
_TOOL_PATH = re.compile(r"(?:/(?:s|rollout)/([^/]+))?/v1/tools/([^/]+)")


class ProjectGateway:
    """The gateway of one project. Subclasses open the project's store, and set the attributes that all projects share."""

    project: str = DEFAULT_PROJECT
    config: ServeConfig
    shard: Shard
    store: Store
    metrics: Metrics
    admin_key: str
    # shared with the other projects
    renderer: Renderer | None
    engine: Engine | None
    relay: Relay | None
    gate: Gate | None  # the engine, if the trainer generates the replies
    fence: Fence
    cell: Cell | None
    projects: Projects
    updates: WeightUpdates
    barrier: LocalBarrier
    engine_changes: EngineChanges
    quota_keeper: QuotaKeeper
    shares: FairShares
    slicer: TimeSlicer
    max_context: int | None
    _metrics_key: str
    _background: tuple[asyncio.Task[None], ...] = ()
    _loop: asyncio.AbstractEventLoop | None = None

    def _store_renderer(self) -> None:
        """Store the tokenizer's folder and the renderer's name, so that recorded ids can be decoded later."""
        if self.renderer is not None:
            tokenizer = self.renderer.tokenizer
            self.store.set_setting(f"tokenizer:{tokenizer.digest}", str(tokenizer.folder.absolute()))
            self.store.set_setting(f"renderer:{tokenizer.digest}", self.renderer.name)

    def _compose_sessions(self) -> None:
        config = self.config
        self.events = Events(self.store, self.slicer, shared=self.shard.workers > 1 or config.is_shared)
        self._verifier = (
            BackgroundVerifier(Path(config.data), config.verify_every, self._on_verdict)
            if config.verify_every and not config.is_shared
            else None
        )
        self.sessions = Sessions(
            self.store,
            self.events,
            modes=self._modes(),
            models=(config.model,) if config.model and self.engine is not None else (),
            vocabulary=self._vocabulary,
            shard=self.shard,
            metrics=self.metrics,
            on_close=self.engine.release if self.engine is not None else lambda session_id: None,
            on_end=self._verifier.submit if self._verifier is not None else lambda session_id: None,
            require_room=self._require_room,
            project=self.project,
            slicer=self.slicer,
        )
        self.quota = ProjectQuota(
            self.project, self.metrics, lambda: self.sessions.open_count, self.store.database.used_bytes
        )
        announced = None if self.cell is None else AnnouncementWait(self.store.outbox, self.cell.wake_shippers).wait
        self.attempts = Attempts(self.store.attempts, self.sessions, self.events, announced)
        self.feeds = Feeds(self.store, self.events, self.fence, self.metrics, config.mismatch_limits)
        self.host_tools = HostTools(self.store, self.events)
        self.outcomes = OutcomeRecorder(
            self.store,
            self.sessions,
            self.events,
            self.feeds,
            self.metrics,
            require_lease=self.cell.permit.require if self.cell is not None else lambda: None,
        )
        self.stale = StaleSessions(self.store, self.sessions, self.feeds, self.fence)
        self.session_views = SessionViews(self.store)
        self.evictor = Evictor(self.store, self.sessions, config.rest_s, config.max_loaded_mb)
        self.trace_loader = TraceLoader(self.store, self.slicer, on_load=self.evictor.count_loaded)
        self.directory = SessionDirectory(self.store, self.sessions, self.session_views, self.trace_loader)
        event_days = config.event_days if self.shard.number == 0 else 0.0  # one worker prunes events for all
        self._housekeeper = Housekeeper(
            self.sessions, self.attempts, self.evictor, self.events, idle_s=config.idle_s, event_s=event_days * 86400
        )
        session_days = config.session_days if self.shard.number == 0 else 0.0  # one worker prunes old sessions for all
        archive = locate_archive(Path(config.archive) if config.archive else None, self.project)
        self._pruner = SessionPruner(self.store, config.data, self.events, days=session_days, archive=archive)

    def _compose_routes(self) -> None:
        self.auth = Auth(
            self.admin_key,
            self.sessions,
            self.projects.ring,
            project=self.project,
            metrics=self._metrics_key,
            open_loopback=self.config.open_loopback,
        )
        self.metrics_endpoint = MetricsEndpoint(
            self.metrics,
            self.sessions,
            self.feeds,
            self.fence,
            self.engine,
            self.auth,
            engine_name=self.config.engine,
            shard=self.shard,
            project=self.project,
            cell=self.cell,
        )
        journal = Journal(self.store, self.metrics)
        self.recorder = TurnRecorder(journal, self.events, self.metrics, log_turns=self.config.log_turns)
        self.replies = ReplyArchive(self.store)
        self._model_calls = self._compose_model_calls()
        self._dialect_routes = DialectRoutes(DIALECTS)
        self._host_tool_routes = HostToolRoutes(self.host_tools, self.auth)
        self.page = WebPage(
            self.sessions,
            self.events,
            self.fence,
            self.auth,
            self.projects.ring,
            self.store,
            admin_key=self.admin_key,
            model=self.config.model,
            note=self.note,
            shard=self.shard,
            tokenizer=self.renderer.tokenizer if self.renderer is not None else None,
        )
        self._starlette = self._compose_starlette()

    def limit_context(self, tokens: int) -> None:
        """Limit the context of model calls to this number of tokens."""
        self.max_context = tokens
        self._model_calls = self._compose_model_calls()

    def _compose_model_calls(self) -> ModelCalls:
        self.pipeline = TurnPipeline(
            settings=PipelineSettings(
                models=(self.config.model,) if self.config.model else (),
                max_context=self.max_context,
                echo_prompt=self.config.echo_prompt,
                vocabulary=self._vocabulary,
                mode=self._engine_mode,
                project=self.project,
                routed_experts=bool(self.config.routed_experts),
                sampling_masks=self.config.sampling_masks,
            ),
            recorder=self.recorder,
            fence=self.fence,
            renderer=self.renderer,
            engine=self.engine,
            relay=self.relay,
            metrics=self.metrics,
            slicer=self.slicer,
            quota=self.quota,
            shares=self.shares,
        )
        return ModelCalls(
            self.pipeline,
            self.recorder,
            self.replies,
            self.sessions,
            self.trace_loader,
            self.auth,
            self.metrics,
            max_body=int(self.config.max_body_mb * 1e6),
            alive_s=self.config.alive_s,
        )

    def _compose_starlette(self) -> Starlette:
        async def not_found(request: Request, error: Exception) -> Response:
            message = f"no route for {request.method} {redact_known(request.url.path)}{hint_for(request)}"
            dialect, unknown = dialect_of(request), NotFound(message)
            is_call = is_unserved_call(request)
            answer = await self._model_calls.refuse_unserved(request, dialect, unknown) if is_call else unknown
            return Response(
                dialect.encode_error(answer), status_code=dialect.error_status(answer), media_type="application/json"
            )

        routes = [
            *PublicRoutes(self.engine, self.relay, self.auth, self.config.model).routes(),
            self.metrics_endpoint.route(),
            *self._host_tool_routes.routes(),
            *ResponseRoutes(self.replies, self.auth).routes(),
            *AdminRoutes(
                self.sessions,
                self.attempts,
                self.directory,
                self.session_views,
                self.events,
                self.outcomes,
                self.host_tools,
                self.quota,
                self.note,
                self.auth,
            ).routes(),
            *AttemptRoutes(self.attempts, self.auth).routes(),
            *FenceRoutes(self.updates, self.auth, self.sessions, self.note_all).routes(),
            *EngineRoutes(self.engine_changes, self.auth).routes(),
            *(GateRoutes(self.gate, self.auth).routes() if self.gate is not None else ()),
            *FeedRoutes(self.feeds, self.auth).routes(),
            *ProjectRoutes(self.projects, self.auth, self.project).routes(),
            *PrimeRoutes(self.sessions, self.session_views, self.quota, self.auth).routes(),
            *OpenEnvRoutes(
                self.sessions, self.directory, self.session_views, self.quota, self.note, self.auth
            ).routes(),
            *self.page.routes(),
        ]
        document = OpenApiDocument([*self._dialect_routes.operations, *self._host_tool_routes.call_operations], routes)
        return Starlette(routes=[*routes, document.route()], exception_handlers={404: not_found, 405: not_found})

    def _require_room(self) -> None:
        """Raise an error if this gateway is a cell that cannot open another session of this project now."""
        if self.cell is not None:
            self.cell.guard.require_room(self.store.outbox)

    @property
    def _vocabulary(self) -> str:
        return self.renderer.tokenizer.digest if self.renderer is not None else ""

    def _modes(self) -> tuple[Mode, ...]:
        if self.config.is_shared:
            return ()
        own: tuple[Mode, ...] = (self._engine_mode,) if self.engine is not None else ()
        return (*own, "observe") if self.relay is not None else own

    @property
    def _engine_mode(self) -> Mode:
        """The mode of the sessions that the engine serves."""
        return "gate" if self.gate is not None else "exact"

    def note(self, caller: Caller, action: str, subject: str = "", **details: Json) -> None:
        """Add an entry about this project to the audit log."""
        self.projects.note(caller, self.project, action, subject, details)

    def note_all(self, caller: Caller, action: str, subject: str = "", **details: Json) -> None:
        """Add an entry about all projects to the audit log."""
        self.projects.note(caller, "", action, subject, details)

    # ── other projects ──────────────────────────────────────────────────────────────────────────────────────────

    def attach_project(self, project: ProjectGateway) -> None:
        """Include another project in the gateway's work for all projects, such as weight updates, metrics and quota checks."""
        if self.cell is not None:
            self.cell.add_project(project.store, project.sessions, project.project)
        self.stale.others.append(project.stale)
        self.barrier.other_events.append(project.events)
        self.metrics_endpoint.hosted.append(project.metrics_endpoint)
        self.quota_keeper.add(project.quota)
        self.shares.is_active = True

    def detach_project(self, project: ProjectGateway) -> None:
        """Exclude a deleted project from the gateway's work for all projects."""
        if self.cell is not None:
            self.cell.remove_project(project.store)
        self.stale.others.remove(project.stale)
        self.barrier.other_events.remove(project.events)
        self.metrics_endpoint.hosted.remove(project.metrics_endpoint)
        self.quota_keeper.remove(project.quota)

    # ── start and stop ──────────────────────────────────────────────────────────────────────────────────────────

    def start_tasks(self) -> None:
        """Start the background tasks of the project."""
        self._background = (
            asyncio.create_task(self._housekeeper.run()),
            asyncio.create_task(self.evictor.run()),
            asyncio.create_task(self.page.keep_lists_current()),
        )
        self._pruner.start()
        self._loop = asyncio.get_running_loop()
        if self._verifier is not None:
            self._verifier.start()

    async def stop_tasks(self) -> None:
        if self._verifier is not None:
            await asyncio.to_thread(self._verifier.stop)
        await self._pruner.stop()
        for task in self._background:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def close_readers(self) -> None:
        await self.stale.close()
        for reader in (self.feeds, self.session_views, self.page):
            await asyncio.to_thread(reader.close)

    async def end_requests(self) -> None:
        """End event streams and long polls, and abort model calls. The tokens sampled so far are recorded.

        Called before the gateway stops, and after the project has been deleted.
        """
        self.events.close()
        await self.sessions.abort_all_calls()

    def _on_verdict(self, verdict: Verdict) -> None:
        """Pass a verdict from the verifier's thread to the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._record_verdict, verdict)

    def _record_verdict(self, verdict: Verdict) -> None:
        try:
            if self.store.find(verdict.session) is not None:  # the session may have been deleted in the meantime
                self.events.add(verdict.session, "verified", summarize_verdict(verdict))
        except StoreError as error:
            log.warning(
                "could not store the result of verifying session %s as an event: %s", verdict.session, error.message
            )

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve model calls and host-tool calls directly, to avoid Starlette's overhead. Starlette serves all other HTTP requests."""
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
            return
        path = scope["path"]
        if scope["method"] == "POST":
            match = self._dialect_routes.match(path)
            if match is not None:
                await self._model_calls.serve(scope, receive, send, match)
                return
            named = _SESSION_PATH.fullmatch(path)
            if named is not None:
                area, session_id, rest = named.groups()
                match = self._dialect_routes.match(rest)
                if match is not None:
                    await self._model_calls.serve(scope, receive, send, match, session_id, prime=area == "v1/rollouts")
                    return
            if tool := _TOOL_PATH.fullmatch(path):
                await self._host_tool_routes.serve(scope, receive, send, tool[2], tool[1])
                return
        await self._starlette(
            scope, receive, add_gateway_header(add_security_headers(send) if is_page_path(path) else send)
        )

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        session_id, prime, path = None, False, scope["path"]
        match = self._dialect_routes.match(path)
        if match is None and (named := _SESSION_PATH.fullmatch(path)):
            area, session_id, rest = named.groups()
            match, prime = self._dialect_routes.match(rest), area == "v1/rollouts"
        if match is None or not match.socket:
            await refuse_path(scope, send)
            return
        await serve_socket(self._model_calls, self.replies, scope, receive, send, match, session_id, prime=prime)
