"""The web page's lists: overview, rollouts, groups, training and failures."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from turngate import __version__
from turngate.server.decoding import Whole
from turngate.server.http import json_response
from turngate.server.web.reader import PageReader
from turngate.server.web.view_cache import summarize_drift, summarize_entropy
from turngate.types import Json
from turngate.views.filters import RolloutQuery
from turngate.views.rollout_entry import Status

_MAX_ROWS = 500
_MAX_UNREAD_TRACES = 512  # maximum number of traces to read for one group; trainers use smaller groups


class RolloutListQuery(msgspec.Struct, frozen=True, rename={"kind": "class"}):
    """Query parameters: filters, order and page. A filter may be repeated to match any of several values. `q` is text to search for."""

    status: tuple[Status, ...] = ()
    kind: tuple[Literal["graded", "agent failed", "invalid task", "infrastructure fault", "none"], ...] = ()
    group: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    agent: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    mode: tuple[str, ...] = ()
    q: str = ""
    sort: str = ""
    offset: Whole = 0
    limit: Whole = 50


class GroupQuery(msgspec.Struct, frozen=True):
    """Query parameters. `name` is the name of a group."""

    name: str = ""


class TrainingQuery(msgspec.Struct, frozen=True):
    """Query parameters. `group` is a prefix of group names, and `buckets` limits the number of points in a chart."""

    group: str = ""
    buckets: Whole = 120


class GroupPrefixQuery(msgspec.Struct, frozen=True):
    """Query parameters. `group` is a prefix of group names."""

    group: str = ""


class ListRoutes:
    """The routes of the lists. `describe_gateway` returns the gateway's current state for the page's header."""

    def __init__(self, reader: PageReader, describe_gateway: Callable[[], dict[str, Json]]) -> None:
        self._reader = reader
        self._views = reader.views
        self._describe_gateway = describe_gateway

    async def overview(self, request: Request) -> Response:
        """Return the counts of the overview, and the state of the gateway."""
        sums = await self._reader.run(self._views.overview.sums)
        return json_response({**sums, "turngate": __version__, "gateway": self._describe_gateway()})

    async def rollouts(self, request: Request, query: RolloutListQuery) -> Response:
        """List rollouts."""
        filters = _to_filters(query, "-opened")
        return await self._reader.respond(lambda store: self._views.overview.rollouts(store, filters))

    async def groups(self, request: Request, query: RolloutListQuery) -> Response:
        """List groups."""
        filters = _to_filters(query, "-latest")
        return await self._reader.respond(lambda store: self._views.overview.groups(store, filters))

    async def group(self, request: Request, query: GroupQuery) -> Response:
        """Show one group.

        Whether a rollout contributes to the advantages depends on its trace. Each trace is read in a separate query, so that other requests
        are served in between. If more than `_MAX_UNREAD_TRACES` traces would have to be read, none are read, and all graded
        rollouts with sampled tokens are assumed to contribute.
        """
        name = query.name
        graded = await self._reader.run(lambda store: self._views.overview.list_graded(store, name))
        # The cache belongs to the reader's thread.
        unread = await self._reader.run(lambda _: self._views.unread(graded))
        if len(unread) > _MAX_UNREAD_TRACES:
            return await self._reader.respond(lambda store: self._views.overview.group(store, name, {}))
        trains = {
            key: await self._reader.run(partial(self._views.trains, session=session, key=key))
            for session, key in graded
        }
        return await self._reader.respond(lambda store: self._views.overview.group(store, name, trains))

    async def group_evidence(self, request: Request, query: GroupQuery) -> Response:
        """Show the entropy and the forks of a group's rollouts.

        Each rollout is read in a separate query, so that other requests are served in between.
        """
        name = query.name
        members = await self._reader.run(lambda store: self._views.overview.members(store, name))
        rollouts = []
        for session, key in members:
            facts = await self._reader.run(partial(self._views.facts, session=session, key=key))
            rollouts.append({"id": session, **facts})
        return json_response(summarize_drift(name, rollouts))

    async def training(self, request: Request, query: TrainingQuery) -> Response:
        """Return the progress of training."""
        buckets = min(query.buckets or 120, 500)
        return await self._reader.respond(lambda store: self._views.overview.training(store, query.group, buckets))

    async def training_entropy(self, request: Request, query: GroupPrefixQuery) -> Response:
        """Return the entropy of selected policy versions, each estimated from the traces of a few rollouts.

        Each rollout is read in a separate query, so that other requests are served in between.
        """
        chosen = await self._reader.run(lambda store: self._views.overview.choose_entropy_rollouts(store, query.group))
        rollouts = []
        for version, session, key in chosen:
            facts = await self._reader.run(partial(self._views.facts, session=session, key=key))
            rollouts.append((version, facts))
        return json_response(summarize_entropy(rollouts))

    async def failures(self, request: Request, query: GroupPrefixQuery) -> Response:
        """Return the failures by class and message."""
        return await self._reader.respond(lambda store: self._views.overview.failures(store, query.group))


def _to_filters(query: RolloutListQuery, sort: str) -> RolloutQuery:
    return RolloutQuery(
        status=query.status,
        kind=query.kind,
        group=query.group,
        task=query.task,
        agent=query.agent,
        model=query.model,
        mode=query.mode,
        text=query.q[:1000].casefold(),
        sort=query.sort or sort,
        offset=query.offset,
        limit=min(query.limit or 50, _MAX_ROWS),
    )
