"""The web page's lists: overview, rollouts, groups, training and failures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from turngate import __version__
from turngate.errors import BadRequest
from turngate.server.http import int_param, json_response
from turngate.server.web.reader import PageReader
from turngate.server.web.view_cache import summarize_drift
from turngate.types import Json
from turngate.views.filters import RolloutQuery
from turngate.views.rollout_entry import STATUSES

CLASSES = ("graded", "agent failed", "invalid task", "infrastructure fault", "none")
_MAX_ROWS = 500
_MAX_UNREAD_TRACES = 512  # maximum to read for one group's advantages; no trainer's group is larger


class ListRoutes:
    """List routes. `describe_gateway` returns the gateway's current state for the page's header."""

    def __init__(self, reader: PageReader, describe_gateway: Callable[[], dict[str, Json]]) -> None:
        self._reader = reader
        self._views = reader.views
        self._describe_gateway = describe_gateway

    async def overview(self, request: Request) -> Response:
        sums = await self._reader.run(self._views.overview.sums)
        return json_response({**sums, "turngate": __version__, "gateway": self._describe_gateway()})

    async def rollouts(self, request: Request) -> Response:
        filters = _parse_filters(request, "-opened")
        return await self._reader.respond(lambda store: self._views.overview.rollouts(store, filters))

    async def groups(self, request: Request) -> Response:
        filters = _parse_filters(request, "-latest")
        return await self._reader.respond(lambda store: self._views.overview.groups(store, filters))

    async def group(self, request: Request) -> Response:
        """Show one group.

        A rollout's trace determines whether it contributes to the advantages. Each trace is read in its own query, so that other requests
        are served in between.
        """
        name = request.query_params.get("name", "")
        graded = await self._reader.run(lambda store: self._views.overview.list_graded(store, name))
        if len(self._views.unread(graded)) > _MAX_UNREAD_TRACES:
            return await self._reader.respond(lambda store: self._views.overview.group(store, name, {}))
        trains = {
            key: await self._reader.run(partial(self._views.trains, session=session, key=key))
            for session, key in graded
        }
        return await self._reader.respond(lambda store: self._views.overview.group(store, name, trains))

    async def group_evidence(self, request: Request) -> Response:
        """Show the entropy and forks of a group's rollouts. Each is read in its own query, so that other requests are served in between."""
        name = request.query_params.get("name", "")
        members = await self._reader.run(lambda store: self._views.overview.members(store, name))
        rollouts = []
        for session, key in members:
            facts = await self._reader.run(partial(self._views.facts, session=session, key=key))
            rollouts.append({"id": session, **facts})
        return json_response(summarize_drift(name, rollouts))

    async def training(self, request: Request) -> Response:
        prefix = request.query_params.get("group", "")
        buckets = min(max(int_param(request, "buckets", 120) or 120, 1), 500)
        return await self._reader.respond(lambda store: self._views.overview.training(store, prefix, buckets))

    async def failures(self, request: Request) -> Response:
        prefix = request.query_params.get("group", "")
        return await self._reader.respond(lambda store: self._views.overview.failures(store, prefix))


def _parse_filters(request: Request, sort: str) -> RolloutQuery:
    query = request.query_params

    def values_of(name: str) -> tuple[str, ...]:
        return tuple(value for value in query.getlist(name) if value)

    def choices_of(name: str, known: tuple[str, ...]) -> tuple[str, ...]:
        values = values_of(name)
        for value in values:
            if value not in known:
                raise BadRequest(f"{name} must be one of {', '.join(known)}, not {value[:100]!r}", param=name)
        return values

    return RolloutQuery(
        status=choices_of("status", STATUSES),
        kind=choices_of("class", CLASSES),
        group=values_of("group"),
        task=values_of("task"),
        agent=values_of("agent"),
        model=values_of("model"),
        mode=values_of("mode"),
        text=query.get("q", "")[:1000].casefold(),
        sort=query.get("sort") or sort,
        offset=int_param(request, "offset", 0) or 0,
        limit=min(max(int_param(request, "limit", 50) or 50, 1), _MAX_ROWS),
    )
