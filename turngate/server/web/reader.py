"""Run the web page's queries in their own thread, so that they do not delay turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.responses import Response

from turngate.render import Tokenizer
from turngate.server.http import raw_json_response
from turngate.server.web.view_cache import ViewCache
from turngate.store.reader import StoreReader
from turngate.store.sqlite import Store
from turngate.types import Json
from turngate.views.session import encode_json

T = TypeVar("T")


class PageReader:
    """A reader that runs the page's queries one at a time. Only queries may use `views`. Close it when the gateway stops."""

    def __init__(self, store: Store, tokenizer: Tokenizer | None) -> None:
        self._thread = StoreReader(store, "page")
        self.views = ViewCache(tokenizer)

    async def run(self, query: Callable[[Store], T]) -> T:
        return await self._thread.run(query)

    async def respond(self, query: Callable[[Store], Json]) -> Response:
        """Return a query's result as a JSON response, encoded in the reader's thread."""
        return raw_json_response(await self.run(lambda store: encode_json(query(store))))

    def close(self) -> None:
        self._thread.close()
