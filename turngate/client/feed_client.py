"""Client for the feeds of a gateway, with one method per operation. `feed.py` uses it to read a feed."""

from __future__ import annotations

from urllib.parse import quote

import aiohttp
import msgspec

from turngate.client.protocol import (
    DeliveryPage,
    FeedConfig,
    FeedForm,
    FeedList,
    FeedReader,
    FeedView,
    MismatchReply,
    MismatchReport,
)
from turngate.client.transport import GatewayTransport
from turngate.trace.mismatch import MismatchAlarm

_BUILD_S = 120  # how long a gateway may be silent while it builds the rows of a large group


class IgnoredReply(msgspec.Struct, frozen=True):
    """A reply whose content is ignored."""


class FeedClient(GatewayTransport):
    async def feeds(self) -> list[FeedView]:
        return (await self._request("GET", "/admin/feeds", FeedList)).feeds

    async def show_feed(self, name: str) -> FeedView:
        """Return the state of a feed, including up to 1000 of its incomplete groups."""
        return await self._request("GET", _feed_path(name), FeedView)

    async def open_feed(self, name: str, config: FeedConfig) -> FeedView:
        """Open a feed, creating it if necessary. Raise `RequestRejected` (409) if it exists with different settings."""
        return await self._request("PUT", _feed_path(name), FeedView, msgspec.to_builtins(config))

    async def delete_feed(self, name: str) -> None:
        await self._request("DELETE", _feed_path(name), IgnoredReply)

    async def take_over_feed(self, name: str, after: int | None = None, mark: str = "") -> str:
        """Become the reader of a feed. Return the token for fetching and committing deliveries.

        The previous reader's token stops working. `after` and `mark` come from the trainer's checkpoint, if it has one.
        """
        start = "" if after is None else f"?after={after}&mark={quote(mark, safe='')}"
        return (await self._request("POST", f"{_feed_path(name)}/reader{start}", FeedReader)).reader

    async def fetch_deliveries(
        self,
        name: str,
        reader: str,
        *,
        after: int | None = None,
        wait: float = 0,
        limit: int = 1,
        form: FeedForm = "rows",
    ) -> DeliveryPage:
        """Return up to `limit` deliveries after the number `after` (default: the last committed number), oldest first.

        Wait up to `wait` seconds for the first delivery.
        """
        path = f"{_feed_path(name)}/deliveries?reader={quote(reader, safe='')}&wait={wait:.3f}&limit={limit}"
        start = ("" if after is None else f"&after={after}") + ("" if form == "rows" else f"&form={form}")
        limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=wait + _BUILD_S)
        return await self._request("GET", path + start, DeliveryPage, msgpack=True, within=limits)

    async def commit_feed(self, name: str, reader: str, number: int) -> int:
        """Commit all deliveries up to and including `number`. Return the last committed number, which may be higher."""
        body = {"reader": reader, "number": number}
        return (await self._request("POST", f"{_feed_path(name)}/commit", FeedView, body)).committed

    async def report_mismatch(self, name: str, report: MismatchReport) -> tuple[MismatchAlarm, ...]:
        """Report how a trainer's log-probabilities differ from the recorded ones. Return the resulting alarms."""
        path = f"{_feed_path(name)}/mismatch"
        return (await self._request("POST", path, MismatchReply, msgspec.to_builtins(report))).alarms

    async def close_group(self, group: str) -> None:
        """Declare a group complete, even if it has fewer rollouts than expected. Safe to repeat."""
        await self._request("POST", f"/admin/groups/{quote(group, safe='')}/close", IgnoredReply)


def _feed_path(name: str) -> str:
    return f"/admin/feeds/{quote(name, safe='')}"
