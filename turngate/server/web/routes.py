"""The web page's API, below `/page`: lists, one rollout from header to tokens, groups, training, failures, and the few things to do.

Its files are in `turngate/ui` (`page_files.py`), its cookie is the business of `page_login.py`. Everything is read from the store, in one
thread apart from those that serve turns; what is made there is JSON bytes already. Lists come from `overview.py`, what is in a rollout from
`evidence.py`. With several workers any of them answers for all rollouts, and what names one rollout goes to the worker that has it, so that
it can be ended there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from turngate import __version__
from turngate.common.sharding import Shard
from turngate.errors import BadRequest, Conflict, NotFound, StoreError, TooManyRequests, TurngateError
from turngate.gateway.events import Events
from turngate.gateway.fence import Fence
from turngate.gateway.sessions import Sessions
from turngate.render import Tokenizer
from turngate.server.auth import Auth
from turngate.server.http import decode_body, encoded_response, error_response, int_param, json_response, read_cursor
from turngate.server.web.files import StaticFiles
from turngate.server.web.login import COOKIE_LIFETIME_S, PageLogin, require_same_origin, set_login_cookie
from turngate.server.web.view_cache import FORMATS, ViewCache, summarize_drift
from turngate.store.reader import StoreReader
from turngate.store.sqlite import Store
from turngate.trace.advantage import compute_advantages
from turngate.types import BATCH_STREAM, Json
from turngate.views.filters import RolloutFilter
from turngate.views.rollout import RolloutView
from turngate.views.rollout_index import STATUSES
from turngate.views.session import encode_json, encode_piece, load_session_view

CLASSES = ("graded", "agent failed", "invalid task", "infrastructure fault", "none")
_MOST = 500  # rows of a list
_PACE_S = 0.4  # between two tellings of what changed
_ALIVE_S = 15.0
_BEHIND = 10_000  # events, after which a follower is told to begin anew
_ANSWER_S = 4.0  # for a batch to say what it makes of being asked for a retry
_STREAMS = 128  # followers at once
_READ = 512  # traces that are read to reckon a group's advantages; no trainer's group is larger
_NAME = re.compile(r"[^A-Za-z0-9._-]+")
Endpoint = Callable[[Request], Awaitable[Response]]


class LoginBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: str


class Page:
    """`close` when the gateway stops."""

    def __init__(
        self,
        sessions: Sessions,
        events: Events,
        fence: Fence,
        auth: Auth,
        store: Store,
        *,
        admin_key: str,
        model: str,
        shard: Shard,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._sessions = sessions
        self._events = events
        self._fence = fence
        self._store = store
        self._model = model
        self._shard = shard
        self._reader = StoreReader(store, "page")
        self._views = ViewCache(tokenizer)
        self._files = StaticFiles()
        self.login = PageLogin(admin_key, auth, store)
        self._streams = 0

    def close(self) -> None:
        self._reader.close()

    def routes(self) -> list[Route]:
        one = "/page/api/rollouts/{id}"
        table: list[tuple[str, Literal["GET", "POST"], Endpoint]] = [
            ("/page/api/me", "GET", self.me),
            ("/page/api/overview", "GET", self.overview),
            ("/page/api/rollouts", "GET", self.rollouts),
            ("/page/api/groups", "GET", self.groups),
            ("/page/api/group", "GET", self.group),
            ("/page/api/group/evidence", "GET", self.group_evidence),
            ("/page/api/training", "GET", self.training),
            ("/page/api/failures", "GET", self.failures),
            ("/page/api/events", "GET", self.changes),
            ("/page/api/export", "GET", self.export_group),
            (one, "GET", self.rollout),
            (f"{one}/tree", "GET", self.tree),
            (f"{one}/messages", "GET", self.messages),
            (f"{one}/tokens", "GET", self.tokens),
            (f"{one}/events", "GET", self.events),
            (f"{one}/export", "GET", self.export),
            (f"{one}/cancel", "POST", self.cancel),
            (f"{one}/seal", "POST", self.seal),
            (f"{one}/retry", "POST", self.retry),
        ]
        return [
            self._route("/page/login", "POST", self.enter, known=False),
            self._route("/page/logout", "POST", self.leave, known=False),
            *(self._route(path, method, endpoint) for path, method, endpoint in table),
            Route("/page", self._to_page, methods=["GET"]),
            self._route("/page/{name:path}", "GET", self.file, known=False),
        ]

    def _route(self, path: str, method: Literal["GET", "POST"], endpoint: Endpoint, *, known: bool = True) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                if method == "POST":
                    require_same_origin(request)
                if known:
                    self.login.require(request)
                return await endpoint(request)
            except TurngateError as error:
                response = error_response(error)
                if isinstance(error, TooManyRequests):
                    response.headers["retry-after"] = str(int(error.wait_s) + 1)
                return response

        return Route(path, guarded, methods=[method])

    async def _to_page(self, request: Request) -> Response:
        return RedirectResponse("/page/", 307)

    async def file(self, request: Request) -> Response:
        return self._files.serve(request, request.path_params["name"])

    # ── in and out ──────────────────────────────────────────────────────────────────────────────────────────────

    async def enter(self, request: Request) -> Response:
        wanted = await decode_body(request, LoginBody)
        token, end = self.login.enter(request, wanted.key)
        return set_login_cookie(json_response({"expires": end}), request, token, COOKIE_LIFETIME_S)

    async def leave(self, request: Request) -> Response:
        self.login.leave(request)
        return set_login_cookie(json_response({}), request, "", 0)

    async def me(self, request: Request) -> Response:
        return json_response({"expires": self.login.require(request)})

    # ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────

    async def overview(self, request: Request) -> Response:
        sums = await self._reader.run(self._views.overview.sums)
        return json_response({**sums, "turngate": __version__, "gateway": self._gateway()})

    def _gateway(self) -> dict[str, Json]:
        return {
            "model": self._model,
            "modes": self._sessions.modes,
            "version": self._fence.version,
            "paused": self._fence.paused,
            "workers": self._shard.workers,
        }

    async def rollouts(self, request: Request) -> Response:
        wanted = _wanted(request, "-opened")
        return await self._made(lambda store: self._views.overview.rollouts(store, wanted))

    async def groups(self, request: Request) -> Response:
        wanted = _wanted(request, "-latest")
        return await self._made(lambda store: self._views.overview.groups(store, wanted))

    async def group(self, request: Request) -> Response:
        """Whether a rollout counts is in its trace. One after the other, so that others are answered in between."""
        name = request.query_params.get("name", "")
        graded = await self._reader.run(lambda store: self._views.overview.list_graded(store, name))
        if len(self._views.unread(graded)) > _READ:
            return await self._made(lambda store: self._views.overview.group(store, name, {}))
        trains = {
            key: await self._reader.run(partial(self._views.trains, session=session, key=key))
            for session, key in graded
        }
        return await self._made(lambda store: self._views.overview.group(store, name, trains))

    async def group_evidence(self, request: Request) -> Response:
        """One rollout after the other, so that others are answered in between."""
        name = request.query_params.get("name", "")
        members = await self._reader.run(lambda store: self._views.overview.members(store, name))
        found = []
        for session, key in members:
            facts = await self._reader.run(partial(self._views.facts, session=session, key=key))
            found.append({"id": session, **facts})
        return json_response(summarize_drift(name, found))

    async def training(self, request: Request) -> Response:
        prefix = request.query_params.get("group", "")
        buckets = min(max(int_param(request, "buckets", 120) or 120, 1), 500)
        return await self._made(lambda store: self._views.overview.training(store, prefix, buckets))

    async def failures(self, request: Request) -> Response:
        prefix = request.query_params.get("group", "")
        return await self._made(lambda store: self._views.overview.failures(store, prefix))

    async def _made(self, make: Callable[[Store], Json]) -> Response:
        return encoded_response(await self._reader.run(lambda store: encode_json(make(store))))

    # ── one of them ─────────────────────────────────────────────────────────────────────────────────────────────

    async def rollout(self, request: Request) -> Response:
        session = request.path_params["id"]
        live = self._sessions.find_live(session)
        told = None if live is None else {"in_flight": live.in_flight, "last_error": live.last_error}
        return await self._made(lambda store: {**self._views.header(store, session), "live": told})

    async def tree(self, request: Request) -> Response:
        return await self._closely(request, lambda close: close.tree())

    async def messages(self, request: Request) -> Response:
        after = int_param(request, "after", 0) or 0
        limit = min(max(int_param(request, "limit", 50) or 50, 1), 200)
        branch, only = int_param(request, "branch"), int_param(request, "node")
        return await self._closely(
            request, lambda close: close.messages(after=after, limit=limit, branch=branch, only=only)
        )

    async def tokens(self, request: Request) -> Response:
        node, branch = int_param(request, "node"), int_param(request, "branch")
        token = int_param(request, "token", 0) or 0
        limit = min(max(int_param(request, "limit", 4000) or 4000, 1), 20_000)
        return await self._closely(
            request, lambda close: close.tokens(node=node, token=token, limit=limit, branch=branch)
        )

    async def _closely(self, request: Request, make: Callable[[RolloutView], dict[str, Json]]) -> Response:
        session = request.path_params["id"]

        def made(store: Store) -> bytes:
            close, cursor = self._views.close(store, session)
            told = make(close)
            nodes = [
                encode_piece(node) for node in told["nodes"]
            ]  # one by one: a long call into C keeps the interpreter from everybody
            return encode_json({**told, "nodes": nodes, "cursor": cursor})

        return encoded_response(await self._reader.run(made))

    # ── as it happens ───────────────────────────────────────────────────────────────────────────────────────────

    async def changes(self, request: Request) -> Response:
        return self._stream(request, self._changes(request, self._after(request)))

    async def events(self, request: Request) -> Response:
        session = request.path_params["id"]
        if not self._sessions.knows(session):
            raise NotFound(f"there is no rollout {session!r}")
        return self._stream(request, self._stream_events(request, session, self._after(request)))

    def _after(self, request: Request) -> int:
        """Where to begin: behind what was seen; at what comes now, where nothing is said."""
        told = request.headers.get("last-event-id") or request.query_params.get("after")
        newest = self._events.newest()
        return newest if not told else min(read_cursor(request), newest)

    def _stream(self, request: Request, told: AsyncGenerator[bytes, None]) -> Response:
        if self._streams >= _STREAMS:
            raise TooManyRequests("too many pages follow what happens; close some", wait_s=5)
        return StreamingResponse(
            self._counted(told), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )

    async def _counted(self, told: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            async with aclosing(told):
                async for part in told:
                    yield part
        finally:
            self._streams -= 1

    def _still(self, request: Request) -> bool:
        """Whether somebody who follows may go on doing so."""
        if self._events.closed:
            return False
        try:
            self.login.require(request)
        except TurngateError:
            return False
        return True

    async def _changes(self, request: Request, after: int) -> AsyncGenerator[bytes, None]:
        events = self._events
        yield b": live\n\n"

        def more() -> int | None:
            newest = events.newest()
            return newest if newest > after else None

        while self._still(request):
            newest = await events.wait_for(more, _ALIVE_S, woken_by="")
            if not self._still(request):  # who logged out meanwhile is told nothing more
                return
            if newest is None:
                yield b": alive\n\n"
                continue
            if newest - after > _BEHIND or after < self._store.events.last_pruned():
                after = newest
                yield _event("reload", after, encode_json({"cursor": after}))
                continue
            try:
                told = await self._reader.run(partial(self._changed, after=after))
            except StoreError:  # the gateway is being stopped
                return
            after = told["cursor"]
            yield _event("changed", after, encode_json({**told, "gateway": self._gateway()}))
            await asyncio.sleep(_PACE_S)  # what happens meanwhile is told together

    def _changed(self, store: Store, *, after: int) -> dict[str, Json]:
        """Written down in the thread, whose rows they are."""
        told = self._views.overview.list_changes(store, after)
        return {**told, "rollouts": [encode_piece(row) for row in told["rollouts"]]}

    async def _stream_events(self, request: Request, session: str, after: int) -> AsyncGenerator[bytes, None]:
        yield b": live\n\n"
        async with aclosing(self._events.follow(session, after)) as following:
            async for event in following:
                if not self._still(request):
                    return
                if event is None:
                    yield b": alive\n\n"
                else:
                    yield _event(event.kind, event.seq, msgspec.json.encode(event))

    # ── what can be done ────────────────────────────────────────────────────────────────────────────────────────

    async def cancel(self, request: Request) -> Response:
        self._require_open(request.path_params["id"])
        await self._sessions.cancel(request.path_params["id"])
        return await self._row(request)

    async def seal(self, request: Request) -> Response:
        self._require_open(request.path_params["id"])
        await self._sessions.seal(request.path_params["id"], "sealed by hand")
        return await self._row(request)

    async def retry(self, request: Request) -> Response:
        """Its batch is asked for another attempt, durably: one that runs answers at once, another one reads it when it is run again."""
        session = request.path_params["id"]
        row, why = await self._reader.run(partial(self._views.overview.check_retry, session=session))
        if why:
            raise Conflict(f"it cannot be tried again: {why}")
        stream = f"{BATCH_STREAM}{row.batch}"
        asked = self._events.announce(
            stream, "retry", {"rollout": row.name, "session": session, "attempt": row.attempt}
        )
        answer = await self._events.wait_for(lambda: self._answer(stream, asked), _ANSWER_S, woken_by=stream)
        if answer is None:
            silent = (
                "nobody runs this batch now; it is asked for, and taken up when the batch is run again on its folder"
            )
            return json_response({"asked": True, "taken": None, "message": silent})
        return json_response({"asked": True, "taken": answer["taken"], "message": answer["message"]})

    def _answer(self, stream: str, asked: int) -> dict[str, Json] | None:
        found = (event.data for event in self._events.page(stream, asked) if event.kind == "note")
        return next((data for data in found if data.get("retry") == asked), None)

    def _require_open(self, session: str) -> None:
        row = self._store.find(session)
        if row is None:
            told = self._events.knows(session)
            raise Conflict("its session is not open") if told else NotFound(f"there is no rollout {session!r}")
        if row.status != "open":
            raise Conflict(f"its session is {row.status} already")

    async def _row(self, request: Request) -> Response:
        session = request.path_params["id"]
        return await self._made(lambda store: {"rollout": self._views.overview.rollout(store, session)[0]})

    async def export(self, request: Request) -> Response:
        session, format = request.path_params["id"], _format(request, FORMATS)
        if format == "trace":
            trace = await self._reader.run(partial(_trace, session=session))
            return _attached(_whole(trace), f"{session}.trace.json", "application/json")
        members = await self._reader.run(partial(self._views.group_of, session=session))
        mine = [(session, dict(members)[session])]
        return await self._told_lines(f"{session}.{format}.jsonl", format, mine, members)

    async def export_group(self, request: Request) -> Response:
        name, format = request.query_params.get("group", ""), _format(request, ("rows", "messages"))
        members = await self._reader.run(partial(self._views.overview.members, name=name))
        return await self._told_lines(f"{name}.{format}.jsonl", format, members, members)

    async def _told_lines(
        self, name: str, format: str, wanted: list[tuple[str, int]], group: list[tuple[str, int]]
    ) -> Response:
        """How many of them are damaged is known before the first line: it is left out, not broken off at."""
        damaged = 0
        for session, key in wanted:
            damaged += await self._reader.run(partial(self._views.damaged, session=session, key=key))
        if damaged == len(wanted):
            raise StoreError("nothing of it can be read: its trace is damaged on disk")
        response = _attached(self._exported(format, wanted, group), name, "application/x-ndjson")
        response.headers["x-turngate-left-out"] = str(damaged)
        return response

    async def _exported(
        self, format: str, wanted: list[tuple[str, int]], group: list[tuple[str, int]]
    ) -> AsyncIterator[bytes]:
        """One rollout at a time. Advantages are over the whole group, whichever of it are asked for."""
        rewards = []
        for session, key in group if format == "rows" else ():
            rewards.append(await self._reader.run(partial(self._views.counted_reward, session=session, key=key)))
        known = dict(zip((session for session, _ in group), compute_advantages(rewards, "normalised"), strict=False))
        for session, key in wanted:
            told = partial(self._views.lines, session=session, key=key, format=format, advantage=known.get(session))
            for line in await self._reader.run(told):
                yield line


def _wanted(request: Request, sort: str) -> RolloutFilter:
    query = request.query_params

    def one_of(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
        given = tuple(value for value in query.getlist(name) if value)
        for value in given:
            if value not in known:
                raise BadRequest(f"{name}: {value[:100]!r} is not one of {', '.join(known)}", param=name)
        return given

    def any_of(name: str) -> tuple[str, ...]:
        return tuple(value for value in query.getlist(name) if value)

    return RolloutFilter(
        status=one_of("status", STATUSES),
        kind=one_of("class", CLASSES),
        group=any_of("group"),
        task=any_of("task"),
        agent=any_of("agent"),
        model=any_of("model"),
        mode=any_of("mode"),
        text=query.get("q", "")[:1000].casefold(),
        sort=query.get("sort") or sort,
        offset=int_param(request, "offset", 0) or 0,
        limit=min(max(int_param(request, "limit", 50) or 50, 1), _MOST),
    )


def _format(request: Request, known: tuple[str, ...]) -> str:
    format = request.query_params.get("format", "rows")
    if format not in known:
        raise BadRequest(f"format: {format[:100]!r} is not one of {', '.join(known)}", param="format")
    return format


def _event(kind: str, seq: int, data: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (seq, kind.encode(), data)


def _trace(store: Store, *, session: str) -> bytes:
    with store.snapshot():
        shown = load_session_view(store, session)
    view = shown.trace()
    return encode_json({**view, "nodes": [encode_piece(node) for node in view["nodes"]]})


async def _whole(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), 256 * 1024):
        yield content[start : start + 256 * 1024]
        await asyncio.sleep(0)


def _attached(told: AsyncIterator[bytes], name: str, kind: str) -> Response:
    """To be saved, never shown. Names may hold anything, a header may not."""
    file = _NAME.sub("-", name)[-120:].lstrip(".-") or "export"
    return StreamingResponse(told, media_type=kind, headers={"content-disposition": f'attachment; filename="{file}"'})
