"""Who may look at the web page: whoever has shown the admin key, for as long as the cookie lasts. Called by `page.py`.

The cookie is a random number with an end, signed with a key that is made from the admin key; so every worker knows it, also after a
restart, nothing of it is kept anywhere, and it is worth nothing once the admin key is another one. Who logs out is remembered (by a hash)
until the cookie would have ended. It opens the page's routes and no others.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
import time
from collections import deque
from typing import NoReturn
from urllib.parse import urlsplit

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from turngate.errors import Forbidden, StoreError, TooManyRequests, Unauthorized
from turngate.server.auth import Auth
from turngate.store.sqlite import Store

COOKIE = "turngate_page"
PAGE_HEADER = "x-turngate-page"  # a header that no form and no other site's script can send unasked
COOKIE_LIFETIME_S = 12 * 3600.0
_MAX_TRIES = 8  # wrong keys of one caller
_TRIES_WINDOW_S = 60.0
_MAX_CALLERS = 4096  # that are remembered
_LOGGED_OUT = "page_logged_out"  # settings: JSON, ends by hash
_END = struct.Struct(">d")
_RANDOM_BYTES = 24
_MAC_BYTES = 32


class PageLogin:
    def __init__(self, admin_key: str, auth: Auth, store: Store) -> None:
        self._auth = auth
        self._store = store
        self._key = hmac.digest(admin_key.encode(), b"turngate web page, version 1", "sha256")
        self._wrong: dict[str, deque[float]] = {}

    def enter(self, request: Request, key: str) -> tuple[str, float]:
        """A cookie for whoever has the admin key, and its end."""
        caller = request.client.host if request.client is not None else ""
        now = time.time()
        # First of all: behind a proxy all have one address, and nobody's wrong keys keep others from entering with the right one.
        if not self._auth.is_admin(key):
            self._refuse(caller, now)
        self._wrong.pop(caller, None)
        end = now + COOKIE_LIFETIME_S
        body = _END.pack(end) + secrets.token_bytes(_RANDOM_BYTES)
        return _encode(body + self._mac(body)), end

    def _refuse(self, caller: str, now: float) -> NoReturn:
        tries = self._wrong.setdefault(caller, deque())
        while tries and tries[0] < now - _TRIES_WINDOW_S:
            tries.popleft()
        while len(self._wrong) > _MAX_CALLERS:
            del self._wrong[next(iter(self._wrong))]
        if len(tries) >= _MAX_TRIES:
            wait = tries[0] + _TRIES_WINDOW_S - now
            raise TooManyRequests(f"too many wrong keys; try again in {wait:.0f} seconds", wait_s=wait)
        tries.append(now)
        raise Unauthorized("key: this is not the admin key", param="key")

    def leave(self, request: Request) -> None:
        """The cookie opens nothing from now on, at no worker."""
        found = self._read(request.cookies.get(COOKIE, ""))
        if found is None:
            return
        raw, end = found

        def noted(before: str | None) -> str:
            known = msgspec.json.decode(before or "{}", type=dict[str, float])
            kept = {name: at for name, at in known.items() if at > time.time()}
            return msgspec.json.encode({**kept, _digest(raw): end}).decode()

        self._store.change_setting(_LOGGED_OUT, noted)

    def require(self, request: Request) -> float:
        """When the caller's cookie ends. Raises where there is none that opens anything."""
        end = self.opens(request.cookies.get(COOKIE, ""))
        if end is None:
            raise Unauthorized("not logged in, or no longer; POST /page/login with the admin key")
        return end

    def opens(self, token: str) -> float | None:
        found = self._read(token)
        if found is None:
            return None
        raw, end = found
        try:
            left = self._store.setting(_LOGGED_OUT) or "{}"
        except StoreError:  # being closed: nobody is let in
            return None
        return None if _digest(raw) in msgspec.json.decode(left, type=dict[str, float]) else end

    def _read(self, token: str) -> tuple[bytes, float] | None:
        """What it says, and its end. None: it is not ours, or over."""
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        except (binascii.Error, UnicodeEncodeError, ValueError):
            return None
        if len(raw) != _END.size + _RANDOM_BYTES + _MAC_BYTES:
            return None
        if _encode(raw) != token:  # the decoder takes many spellings for one; we wrote but one
            return None
        body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(body)):
            return None
        (end,) = _END.unpack_from(body)
        return (raw, float(end)) if time.time() < end <= time.time() + COOKIE_LIFETIME_S else None

    def _mac(self, body: bytes) -> bytes:
        return hmac.digest(self._key, body, "sha256")


def require_same_origin(request: Request) -> None:
    """What changes something is asked for by our own page: a header of its own, and nothing that speaks of another site."""
    if not request.headers.get(PAGE_HEADER):
        raise Forbidden(
            f"{PAGE_HEADER}: this header is missing; the page sends it with whatever changes something",
            param=PAGE_HEADER,
        )
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site != "same-origin":
            raise Forbidden(f"sec-fetch-site: {site[:40]!r}; only the page itself may ask for this")
        return
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise Forbidden(f"origin: {origin[:200]!r} is another site; only the page itself may ask for this")


def set_login_cookie(response: Response, request: Request, token: str, seconds: float) -> Response:
    """The cookie; `seconds` 0 takes it away. Over TLS it is never sent without."""
    secure = (
        request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").split(",")[0].strip() == "https"
    )
    response.set_cookie(
        COOKIE, token, max_age=int(seconds), path="/page", httponly=True, samesite="strict", secure=secure
    )
    return response


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
