"""The feed API for trainers, under `/admin/feeds` and `/admin/groups`. Requires the admin key.

Deliveries are msgpack with raw little-endian arrays. Everything else is JSON, including errors. Any worker can serve these routes, because
feeds are in the store.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import FeedConfig
from turngate.errors import BadRequest
from turngate.gateway.feeds import Feeds
from turngate.server.auth import Auth
from turngate.server.http import decode_body, int_param, json_response, route


class CommitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reader: str
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class FeedRoutes:
    def __init__(self, feeds: Feeds, auth: Auth) -> None:
        self._feeds = feeds
        self._auth = auth

    def routes(self) -> list[Route]:
        feed = "/admin/feeds/{name}"
        table: list[tuple[str, Literal["GET", "POST", "PUT", "DELETE"], object]] = [
            ("/admin/feeds", "GET", self.listing),
            (feed, "PUT", self.open),
            (feed, "GET", self.show),
            (feed, "DELETE", self.delete),
            (f"{feed}/reader", "POST", self.take_over),
            (f"{feed}/deliveries", "GET", self.deliveries),
            (f"{feed}/commit", "POST", self.commit),
            ("/admin/groups/{group:path}/close", "POST", self.close_group),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def listing(self, request: Request) -> Response:
        return json_response({"feeds": self._feeds.list_feeds()})

    async def open(self, request: Request) -> Response:
        return json_response(
            await self._feeds.open(request.path_params["name"], await decode_body(request, FeedConfig))
        )

    async def show(self, request: Request) -> Response:
        return json_response(self._feeds.show(request.path_params["name"]))

    async def delete(self, request: Request) -> Response:
        name = request.path_params["name"]
        self._feeds.delete(name)
        return json_response({"name": name, "deleted": True})

    async def take_over(self, request: Request) -> Response:
        view, reader = self._feeds.take_over(
            request.path_params["name"], int_param(request, "after"), request.query_params.get("mark", "")
        )
        return json_response({"reader": reader, "feed": view})

    async def deliveries(self, request: Request) -> Response:
        name = request.path_params["name"]
        reader = request.query_params.get("reader", "")
        if not reader:
            raise BadRequest(f"reader is missing; POST /admin/feeds/{name}/reader to obtain one", param="reader")
        page = await self._feeds.page(
            name,
            reader,
            after=int_param(request, "after"),
            wait=_seconds_param(request, "wait"),
            limit=int_param(request, "limit", 1) or 1,
        )
        return Response(page, media_type="application/msgpack")

    async def commit(self, request: Request) -> Response:
        commit = await decode_body(request, CommitBody)
        return json_response(self._feeds.commit(request.path_params["name"], commit.reader, commit.number))

    async def close_group(self, request: Request) -> Response:
        group = request.path_params["group"]
        return json_response({"group": group, "deliveries": self._feeds.close_group(group)})


def _seconds_param(request: Request, name: str) -> float:
    text = request.query_params.get(name, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadRequest(f"{name} must be a number of seconds, 0 or more, not {text!r}", param=name)
    return seconds
