"""The gateway, put together: one place where engine, renderer, store, pipeline and routes meet."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from turngate.client.keys import read_key
from turngate.common.sharding import SINGLE_SHARD, Shard
from turngate.config import OBSERVED_ENGINES, ServeConfig
from turngate.dialects import DIALECTS, Dialect
from turngate.engines.base import Engine, Health, Relay
from turngate.engines.gate import Gate
from turngate.engines.observe.anthropic import AnthropicRelay
from turngate.engines.observe.gemini import GeminiRelay
from turngate.engines.observe.openai import OpenAIRelay
from turngate.engines.observe.responses import ResponsesRelay
from turngate.engines.pool import Pool
from turngate.engines.scripted import Script, Scripted, Turn
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.errors import ConfigError, NotFound, StoreError, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.eviction import Evictor
from turngate.gateway.feeds import Feeds
from turngate.gateway.fence import Fence
from turngate.gateway.fence_state import FenceState
from turngate.gateway.host_tools import HostTools
from turngate.gateway.housekeeping import Housekeeper
from turngate.gateway.outcomes import OutcomeRecorder
from turngate.gateway.replicas import ReplicaSet
from turngate.gateway.sessions import Sessions
from turngate.gateway.staleness import StaleSessions
from turngate.gateway.turn import Settings, Turns
from turngate.gateway.weights import LocalBarrier, WeightUpdates
from turngate.render import BUILTIN_TOKENIZER, Certificate, Renderer, find_tokenizer, load_renderer
from turngate.server.admin import AdminRoutes
from turngate.server.asgi import Receive, Scope, Send, add_gateway_header
from turngate.server.auth import Auth, admin_key, metrics_key
from turngate.server.compat.openenv import OpenEnvRoutes
from turngate.server.compat.prime import PrimeRoutes
from turngate.server.feeds import FeedRoutes
from turngate.server.gate import GateRoutes
from turngate.server.host_tools import HostToolRoutes
from turngate.server.http import json_response, route
from turngate.server.metrics import MetricsEndpoint
from turngate.server.model_calls import DialectRoutes, ModelCalls
from turngate.server.web.files import SECURITY_HEADERS, add_security_headers, is_page_path
from turngate.server.web.routes import Page
from turngate.server.weights import FenceRoutes
from turngate.store.journal import Journal
from turngate.store.sqlite import Store
from turngate.telemetry.logs import redact_known
from turngate.telemetry.metrics import Metrics
from turngate.types import Mode
from turngate.verify import Verdict, summarize_verdict
from turngate.views.session import Looks
from turngate.views.session_directory import SessionDirectory
from turngate.views.verdict import BackgroundVerifier

log = logging.getLogger("turngate")
_SESSION_PATH = re.compile(r"/(s|rollout|v1/rollouts)/([^/]+)(/.+)")
_SESSION_PREFIX = re.compile(r"^/(s|rollout|v1/rollouts)/[^/]+")
_TOOL_PATH = re.compile(r"(?:/(?:s|rollout)/([^/]+))?/v1/tools/([^/]+)")
# Headers that only callers of one dialect send: paths such as /v1/models are common to several.
_DIALECT_HEADERS = {"anthropic-version": "messages", "x-goog-api-key": "gemini"}


class Gateway:
    """One running gateway: an ASGI application with a beginning and an end."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        engine: Engine | None = None,
        relay: Relay | None = None,
        renderer: tuple[Renderer, Certificate] | None = None,
        shard: Shard = SINGLE_SHARD,
    ) -> None:
        self.config = config
        self.shard = shard
        self.metrics = Metrics()
        data = Path(config.data)
        self.store = Store(data, config.durability, shard)
        with _CloseOnError(self.store.close) as undo:
            self.admin_key, metrics = admin_key(data), metrics_key()
            self.renderer, self.certificate = renderer or _load_renderer(config)
            self.engine, self.relay = (
                build_engine(config, self.renderer) if engine is None and relay is None else (engine, relay)
            )
            undo.keep()
        if self.renderer is not None:
            # So that whoever looks at a trace later can read its ids.
            tokenizer = self.renderer.tokenizer
            self.store.set_setting(f"tokenizer:{tokenizer.digest}", str(tokenizer.folder.absolute()))
            self.store.set_setting(f"renderer:{tokenizer.digest}", self.renderer.name)
        self.fence_state = FenceState(self.store)
        self.fence = Fence(*self.fence_state.read_policy())
        if isinstance(self.engine, Gate) and self.renderer is not None:
            vocabulary = self.renderer.tokenizer.vocab_size
            self.engine.attach(vocabulary=vocabulary, version=lambda: self.fence.version)
        self.events = Events(self.store, shared=shard.workers > 1)
        self._proof = BackgroundVerifier(data, config.verify_every, self._verified) if config.verify_every else None
        self.sessions = Sessions(
            self.store,
            self.events,
            modes=self._modes(),
            models=(config.model,) if config.model and self.engine is not None else (),
            vocabulary=self.renderer.tokenizer.digest if self.renderer is not None else "",
            shard=shard,
            metrics=self.metrics,
            on_close=self.engine.release if self.engine is not None else lambda session_id: None,
            on_end=self._proof.ended if self._proof is not None else lambda session_id: None,
        )
        self._compose_sessions(config)
        self._compose_fence()
        self.auth = Auth(self.admin_key, self.sessions, metrics=metrics, open_loopback=config.open_loopback)
        self.probe = MetricsEndpoint(self)
        self.journal = Journal(self.store, self.metrics)
        self.started = time.time()
        self.turns = self._turns(config.max_context)
        self._calls = self._model_calls()
        self._tools = HostToolRoutes(self.host_tools, self.auth)
        self._paths = DialectRoutes(DIALECTS)
        self.page = Page(
            self.sessions,
            self.events,
            self.fence,
            self.auth,
            self.store,
            admin_key=self.admin_key,
            model=config.model,
            shard=shard,
            tokenizer=self.renderer.tokenizer if self.renderer is not None else None,
        )
        self._other = self._starlette()
        self._housekeeping: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._seen: tuple[float, list[Health]] = (float("-inf"), [])

    def _compose_sessions(self, config: ServeConfig) -> None:
        """What works on sessions besides the pipeline of their calls."""
        self.feeds = Feeds(self.store, self.events, self.fence)
        self.host_tools = HostTools(self.store, self.events)
        self.outcomes = OutcomeRecorder(self.store, self.sessions, self.events, self.feeds, self.metrics)
        self.looks = Looks(self.store)
        self.directory = SessionDirectory(self.store, self.sessions, self.looks)
        self.evictor = Evictor(self.store, self.sessions, config.rest_s)
        event_days = config.event_days if self.shard.number == 0 else 0.0  # one worker prunes for all
        self._housekeeper = Housekeeper(
            self.sessions, self.evictor, self.events, idle_s=config.idle_s, event_s=event_days * 86400
        )

    def _compose_fence(self) -> None:
        self.stale = StaleSessions(self.store, self.sessions, self.feeds, self.fence)
        self.replicas = ReplicaSet(self.engine, self.fence_state)
        self.replicas.expect(self.fence.version)
        self.barrier = LocalBarrier(self.fence, self.fence_state, self.events, self.replicas, self.stale)
        self.updates = WeightUpdates(self.fence, self.fence_state, self.events, self.replicas, self.barrier)

    def _modes(self) -> tuple[Mode, ...]:
        own: tuple[Mode, ...] = (self._mode,) if self.engine is not None else ()
        return (*own, "observe") if self.relay is not None else own

    @property
    def _mode(self) -> Mode:
        """Of the sessions that the engine serves."""
        return "gate" if isinstance(self.engine, Gate) else "exact"

    def _turns(self, max_context: int | None) -> Turns:
        return Turns(
            settings=Settings(
                models=(self.config.model,) if self.config.model else (),
                max_context=max_context,
                echo_prompt=self.config.echo_prompt,
                vocabulary=self.renderer.tokenizer.digest if self.renderer is not None else "",
                mode=self._mode,
                log_turns=self.config.log_turns,
            ),
            journal=self.journal,
            fence=self.fence,
            renderer=self.renderer,
            engine=self.engine,
            relay=self.relay,
            events=self.events,
            metrics=self.metrics,
        )

    def _model_calls(self) -> ModelCalls:
        return ModelCalls(
            self.turns,
            self.sessions,
            self.auth,
            self.metrics,
            max_body=int(self.config.max_body_mb * 1e6),
            alive_s=self.config.alive_s,
        )

    async def start(self) -> None:
        for part in (self.engine, self.relay):
            if part is not None:
                await part.start()
        if self.config.max_context is None and self.engine is not None:
            known = [h.max_context for h in await self.engine.health() if h.max_context is not None]
            if known:
                self.turns = self._turns(min(known))
                self._calls = self._model_calls()
        if self.shard.workers == 1:
            await self.updates.start()
        self.probe.start()
        self._housekeeping = asyncio.create_task(self._housekeeper.run())
        self._loop = asyncio.get_running_loop()
        if self._proof is not None:
            self._proof.start()

    def _verified(self, verdict: Verdict) -> None:
        """Called in the thread that waits for verdicts."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell_verified, verdict)

    def _tell_verified(self, verdict: Verdict) -> None:
        try:
            if self.store.find(verdict.session) is not None:  # it may be deleted meanwhile
                self.events.add(verdict.session, "verified", summarize_verdict(verdict))
        except StoreError as error:
            log.warning("the verdict on session %s is not in the events: %s", verdict.session, error.message)

    async def end_polls(self) -> None:
        """Trainers that wait for a call are not waited for."""
        if isinstance(self.engine, Gate):
            await self.engine.close()

    async def stop(self) -> None:
        await self.probe.stop()
        if self._proof is not None:
            await asyncio.to_thread(self._proof.stop)
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._housekeeping
        await self.updates.close()
        for part in (self.engine, self.relay):
            if part is not None:
                await part.close()
        await self.stale.close()
        for reader in (self.feeds, self.looks, self.page):
            await asyncio.to_thread(reader.close)
        self.store.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        path = scope["path"]
        if scope["method"] == "POST":
            found = self._paths.find(path)
            if found is not None:
                await self._calls.serve(scope, receive, send, found)
                return
            named = _SESSION_PATH.fullmatch(path)
            if named is not None:
                area, session_id, rest = named.groups()
                found = self._paths.find(rest)
                if found is not None:
                    await self._calls.serve(scope, receive, send, found, session_id, prime=area == "v1/rollouts")
                    return
            if tool := _TOOL_PATH.fullmatch(path):
                await self._tools.serve(scope, receive, send, tool[2], tool[1])
                return
        await self._other(
            scope, receive, add_gateway_header(add_security_headers(send) if is_page_path(path) else send)
        )

    def _starlette(self) -> Starlette:
        async def missing(request: Request, error: Exception) -> Response:
            dialect = dialect_of(request)
            wrong = NotFound(f"there is no {request.method} {redact_known(request.url.path)} here{_hint(request)}")
            return Response(dialect.error(wrong), status_code=404, media_type="application/json")

        routes = [
            route("/health", "GET", self._health, None),
            self.probe.route(),
            Route("/", self._probe),
            Route("/s/{id}", self._probe),
            *(
                Route(base + path, self._models)
                for base in (
                    "/v1",
                    "/s/{id}/v1",
                    "/rollout/{id}/v1",
                    "/v1/rollouts/{id}",
                    "/v1/rollouts/{id}/v1",
                    "/v1beta",
                    "/s/{id}/v1beta",
                )
                for path in ("/models", "/models/{model:path}")
            ),
            *self._tools.routes(),
            *AdminRoutes(
                self.sessions, self.directory, self.looks, self.events, self.outcomes, self.host_tools, self.auth
            ).routes(),
            *FenceRoutes(self.updates, self.auth).routes(),
            *(GateRoutes(self.engine, self.auth).routes() if isinstance(self.engine, Gate) else ()),
            *FeedRoutes(self.feeds, self.auth).routes(),
            *PrimeRoutes(self.sessions, self.looks, self.auth).routes(),
            *OpenEnvRoutes(self.sessions, self.directory, self.looks, self.auth).routes(),
            *self.page.routes(),
        ]
        return Starlette(routes=routes, exception_handlers={404: missing, 405: missing})

    async def _health(self, request: Request) -> Response:
        """For load balancers: no key, nothing but whether calls can be served."""
        health = await self.engines()
        ok = any(h.ok for h in health)
        return json_response(
            {
                "status": "ok" if ok else "engine unavailable",
                "engines": sum(h.ok for h in health),
                "engines_total": len(health),
            },
            200 if ok else 503,
        )

    async def engines(self) -> list[Health]:
        """As seen at most two seconds ago: anybody may ask, and must not make us ask a provider each time."""
        now = time.monotonic()
        if now - self._seen[0] > 2:
            self._seen = now, await self._ask_engines()
        return self._seen[1]

    async def _ask_engines(self) -> list[Health]:
        return [h for part in (self.engine, self.relay) if part is not None for h in await part.health()]

    async def _probe(self, request: Request) -> Response:
        """Some agents look whether anybody is there before they begin. People with a browser want the page."""
        if request.url.path == "/" and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/page/", 307, headers=SECURITY_HEADERS)
        return json_response({"turngate": "model calls are served here"})

    async def _models(self, request: Request) -> Response:
        dialect = dialect_of(request)
        try:
            key = dialect.key(request.headers, request.query_params)
            if not self.auth.is_admin(key):
                session = self.auth.session(key, request.path_params.get("id"))
                names = [session.config.model or self.config.model]
            else:
                names = [self.config.model]
            names = [name for name in names if name] or [h.model for h in await self.engines() if h.model]
            wanted = request.path_params.get("model")
            if wanted is not None:
                if wanted not in names:
                    raise NotFound(f"The model {wanted!r} does not exist", param="model")
                return Response(dialect.model(wanted, int(self.started)), media_type="application/json")
            listed = dialect.models(list(dict.fromkeys(names)), int(self.started))
            return Response(listed, media_type="application/json")
        except TurngateError as error:
            return Response(dialect.error(error), status_code=dialect.status(error), media_type="application/json")


def dialect_of(request: Request) -> Dialect:
    """The dialect of somebody who asks for something that is no model call: the one whose area it is."""
    path = _SESSION_PREFIX.sub("", request.url.path) or "/"
    for header, name in _DIALECT_HEADERS.items():
        for dialect in DIALECTS:
            if dialect.name == name and header in request.headers:
                return dialect
    fitting = [dialect for dialect in DIALECTS if path.startswith(dialect.path_prefix)]
    return max(fitting, key=lambda dialect: len(dialect.path_prefix))


def _hint(request: Request) -> str:
    """What somebody may have meant who asked for a path that is not there."""
    if request.url.path.endswith("/v1/completions"):
        return "; text completions are not served, only chat: POST /v1/chat/completions"
    if request.method != "POST" and request.url.path.endswith(
        ("/seal", "/cancel", "/pause", "/resume", "/register", "/unregister")
    ):
        return "; use POST"
    return ""


class _CloseOnError:
    """Runs `undo` if the block fails."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo: Callable[[], None] | None = undo

    def keep(self) -> None:
        self._undo = None

    def __enter__(self) -> _CloseOnError:
        return self

    def __exit__(self, *_: object) -> None:
        if self._undo is not None:
            self._undo()


def _load_renderer(config: ServeConfig) -> tuple[Renderer | None, Certificate | None]:
    if config.engine in OBSERVED_ENGINES:
        return None, None
    wanted = config.tokenizer or (config.model_folder if config.engine == "local" else "")
    folder = find_tokenizer(wanted) if wanted else BUILTIN_TOKENIZER
    return load_renderer(folder, model=config.model, family=config.family)


def build_engine(config: ServeConfig, renderer: Renderer | None) -> tuple[Engine | None, Relay | None]:
    key = read_engine_key(config)
    match config.engine:
        case "vllm":
            return Pool(
                [
                    VLLM(
                        url,
                        config.model,
                        api=config.engine_api,
                        key=key,
                        ranks=config.engine_ranks,
                        silence_s=config.engine_silence_s,
                    )
                    for url in config.engine_url
                ]
            ), None
        case "sglang":
            return Pool(
                [
                    SGLang(url, config.model, key=key, ranks=config.engine_ranks, silence_s=config.engine_silence_s)
                    for url in config.engine_url
                ]
            ), None
        case "openai":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, OpenAIRelay(url, key, capture=config.capture, silence_s=silence)
        case "anthropic":
            return None, AnthropicRelay(config.engine_url[0], key, silence_s=config.engine_silence_s)
        case "gemini":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, GeminiRelay(url, key, capture=config.capture, silence_s=silence)
        case "responses":
            url, silence = config.engine_url[0], config.engine_silence_s
            return None, ResponsesRelay(url, key, capture=config.capture, silence_s=silence)
        case "local":
            return _build_local_engine(config), None
        case "gate":
            return Gate(model=config.model, max_context=config.max_context, silence_s=config.engine_silence_s), None
        case "scripted":
            assert renderer is not None
            return Scripted(
                _load_script(config.script, renderer),
                model=config.model or "scripted",
                max_context=config.max_context or 131_072,
            ), None


def _build_local_engine(config: ServeConfig) -> Engine:
    try:
        from turngate.engines.local import LocalEngine
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"engine: 'local' needs {error.name}: pip install 'turngate[local]' (without a GPU, first: "
            "pip install torch --index-url https://download.pytorch.org/whl/cpu)",
            param="engine",
        ) from None
    return LocalEngine(
        find_tokenizer(config.model_folder or config.tokenizer),
        device=config.engine_device,
        dtype=config.engine_dtype,
        slots=config.engine_slots,
        max_context=config.max_context,
        served=config.model,
    )


def read_engine_key(config: ServeConfig) -> str | None:
    if not config.engine_key_env:
        return None
    key = read_key(config.engine_key_env)
    if not key:
        raise ConfigError(
            f"engine_key_env: the environment variable {config.engine_key_env} is not set", param="engine_key_env"
        )
    return key


def _load_script(path: str, renderer: Renderer) -> Script:
    """What the scripted engine says: the texts of a JSON file, one per turn of a session and then from the start again."""
    texts = ["This is the scripted engine. Start with --script FILE (a JSON list of replies) to choose what it says."]
    if path:
        try:
            texts = msgspec.json.decode(Path(path).read_bytes(), type=list[str])
        except OSError as error:
            raise ConfigError(f"script: {path} cannot be read ({error.strerror})", param="script") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"script: {path} is not a JSON list of strings ({error})", param="script") from None
        if not texts:
            raise ConfigError(f"script: {path} holds no reply", param="script")
    turns = [Turn([*renderer.tokenizer.encode(text), renderer.stop_ids[0]]) for text in texts]
    return lambda request, index: turns[index % len(turns)]
