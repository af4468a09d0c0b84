"""Run the web page's queries in a separate thread, so that they do not delay turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from starlette.responses import Response

from turngate.errors import StoreError
from turngate.render import Tokenizer
from turngate.server.http import raw_json_response
from turngate.server.web.view_cache import ViewCache
from turngate.store.reader import StoreReader
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store
from turngate.types import Json
from turngate.views.overview import Overview
from turngate.views.session import encode_json
from turngate.views.shared_overview import SharedOverview

T = TypeVar("T")

log = logging.getLogger("turngate")
_IDLE_S = 1.0  # interval between updates of the lists of a shared store


class PageReader:
    """Runs the page's queries one at a time in its own thread. Only queries may use `views`. Close the reader when the gateway stops."""

    def __init__(self, store: Store, tokenizer: Tokenizer | None) -> None:
        self._thread = StoreReader(store, "page")
        self._shared = SharedOverview() if isinstance(store, SharedStore) else None
        self.views = ViewCache(tokenizer, self._shared or Overview())

    async def keep_lists_current(self) -> None:
        """Update the lists of a shared store until cancelled or closed, so that requests need not do it.

        For any other store, return at once.
        """
        while self._shared is not None:
            is_complete = True
            try:
                is_complete = await self.run(self._shared.update)
            except StoreError as error:
                if self._thread.closed:
                    return
                log.warning("cannot update the lists of rollouts: %s; retrying", error.message)
            await asyncio.sleep(_IDLE_S if is_complete else 0)

    async def run(self, query: Callable[[Store], T]) -> T:
        return await self._thread.run(query)

    async def respond(self, query: Callable[[Store], Json]) -> Response:
        """Return a query's result as a JSON response, encoded in the reader's thread."""
        return raw_json_response(await self.run(lambda store: encode_json(query(store))))

    def close(self) -> None:
        self._thread.close()
        if self._shared is not None:
            self._shared.close()
