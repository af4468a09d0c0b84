"""The web page's static files, read once from `turngate/ui`, and the security headers of every response under `/page`.

The page shows arbitrary text from agents. The headers restrict scripts, styles and requests to this server, forbid content sniffing, and
prevent other sites from framing or reading the page.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from turngate.errors import NotFound
from turngate.server.asgi import Send

FOLDER = Path(__file__).parents[2] / "ui"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "x-frame-options": "DENY",
}
_RAW_SECURITY_HEADERS = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
_NO_STORE = (b"cache-control", b"no-store")


class StaticFile(msgspec.Struct, frozen=True):
    content: bytes
    type: str
    etag: str


class StaticFiles:
    """The page's static files by path. No request can reach a file outside this set."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): _load_file(path)
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES and path.is_file()
        }

    def __iter__(self) -> Any:
        return iter(self._files)

    def serve(self, request: Request, name: str) -> Response:
        file = self._files.get(name or "index.html")
        if file is None:
            raise NotFound(f"no route for {request.method} {request.url.path[:200]}")
        headers = {"etag": file.etag, "cache-control": "no-cache"}
        if file.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.type, headers=headers)


@cache
def load_static_files() -> StaticFiles:
    """Load the static files once. All projects share them."""
    return StaticFiles()


def _load_file(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(content, _TYPES[path.suffix], f'"{sha256(content).hexdigest()[:32]}"')


def is_page_path(path: str) -> bool:
    return path == "/page" or path.startswith("/page/")


def add_security_headers(send: Send) -> Send:
    """Wrap `send` so that every response has the security headers, and `cache-control: no-store` unless it sets a different value."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            present = {name.lower() for name, _ in headers}
            added = (header for header in (*_RAW_SECURITY_HEADERS, _NO_STORE) if header[0] not in present)
            message["headers"] = [*headers, *added]
        await send(message)

    return send_with_headers
