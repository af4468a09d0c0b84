"""The feed API for trainers, under `/admin/feeds` and `/admin/groups`.

Each route requires the admin key, or an API key with one of the route's scopes (`scopes.py`). Deliveries are msgpack with raw little-endian
arrays. Everything else is JSON, including errors. Any worker can serve these routes, because feeds are in the store.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from turngate.client.protocol import (
    DeliveryPage,
    FeedConfig,
    FeedForm,
    FeedList,
    FeedView,
    MismatchReply,
    MismatchReport,
)
from turngate.errors import BadRequest
from turngate.gateway.feeds import Feeds
from turngate.server.auth import Auth
from turngate.server.decoding import Seconds, Whole
from turngate.server.http import json_response, route
from turngate.server.operations import Endpoint, JsonReply, MsgpackReply


class CommitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reader: str
    number: Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class TakeOverQuery(msgspec.Struct, frozen=True):
    """Query parameters: the position in the trainer's checkpoint, if there is one.

    `after` is the number of the last delivery that the checkpoint includes, and `mark` is the feed's `mark` (see `FeedView`). If the store
    was restored from a backup, a position that may no longer refer to the same deliveries is rejected.
    """

    after: Whole | None = None
    mark: str = ""


class DeliveriesQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query parameters. `reader` is the reader's token. The server waits for a delivery with a number above `after`.

    It waits up to `wait` seconds, but at most 60. By default, `after` is the last committed number. With `form=tree`, rows are returned as
    trees. In a tree, a prefix that several rows share occurs once.
    """

    reader: str = ""
    after: Whole | None = None
    wait: Seconds = 0.0
    limit: Whole = 1
    form: FeedForm = "rows"


class DeletedFeed(msgspec.Struct, frozen=True):
    name: str
    deleted: bool


class NewFeedReader(msgspec.Struct, frozen=True):
    reader: str
    feed: FeedView


class ClosedGroup(msgspec.Struct, frozen=True):
    """A closed group, and the number of its delivery in each feed."""

    group: str
    deliveries: dict[str, int]


class FeedRoutes:
    def __init__(self, feeds: Feeds, auth: Auth) -> None:
        self._feeds = feeds
        self._auth = auth

    def routes(self) -> list[Route]:
        feed = "/admin/feeds/{name}"
        table: list[tuple[str, str, Endpoint]] = [
            ("/admin/feeds", "GET", self.listing),
            (feed, "PUT", self.open),
            (feed, "GET", self.show),
            (feed, "DELETE", self.delete),
            (f"{feed}/reader", "POST", self.take_over),
            (f"{feed}/deliveries", "GET", self.deliveries),
            (f"{feed}/commit", "POST", self.commit),
            (f"{feed}/mismatch", "POST", self.report_mismatch),
            ("/admin/groups/{group:path}/close", "POST", self.close_group),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]

    async def listing(self, request: Request) -> JsonReply[FeedList]:
        """List the feeds."""
        return json_response(FeedList(self._feeds.list_feeds()))

    async def open(self, request: Request, body: FeedConfig) -> JsonReply[FeedView]:
        """Create a feed, or return the existing feed if it has these settings."""
        return json_response(await self._feeds.open(request.path_params["name"], body))

    async def show(self, request: Request) -> JsonReply[FeedView]:
        """Return the state of a feed."""
        return json_response(self._feeds.show(request.path_params["name"]))

    async def delete(self, request: Request) -> JsonReply[DeletedFeed]:
        """Delete a feed."""
        name = request.path_params["name"]
        self._feeds.delete(name)
        return json_response(DeletedFeed(name, True))

    async def take_over(self, request: Request, query: TakeOverQuery) -> JsonReply[NewFeedReader]:
        """Become the reader of a feed."""
        view, reader = self._feeds.take_over(request.path_params["name"], query.after, query.mark)
        return json_response(NewFeedReader(reader, view))

    async def deliveries(self, request: Request, query: DeliveriesQuery) -> MsgpackReply[DeliveryPage]:
        """Return the next deliveries of a feed."""
        name = request.path_params["name"]
        if not query.reader:
            raise BadRequest(f"'reader' is missing; get one with `POST /admin/feeds/{name}/reader`", param="reader")
        page = await self._feeds.page(
            name, query.reader, after=query.after, wait=query.wait, limit=query.limit or 1, form=query.form
        )
        return MsgpackReply(page)

    async def commit(self, request: Request, body: CommitBody) -> JsonReply[FeedView]:
        """Commit all deliveries up to and including a delivery number."""
        return json_response(self._feeds.commit(request.path_params["name"], body.reader, body.number))

    async def report_mismatch(self, request: Request, body: MismatchReport) -> JsonReply[MismatchReply]:
        """Report how the log-probabilities that a trainer computed differ from the recorded ones."""
        return json_response(MismatchReply(self._feeds.report_mismatch(request.path_params["name"], body)))

    async def close_group(self, request: Request) -> JsonReply[ClosedGroup]:
        """Close a group: deliver it with the rollouts that it has, even if some are missing."""
        group = request.path_params["group"]
        return json_response(ClosedGroup(group, self._feeds.close_group(group)))
