"""Login to the web page with the admin key or an API key, and the login cookie.

The cookie contains a random number and an expiry time, signed with a key derived from the admin key. Any worker can therefore verify the
cookie, even after a restart, and a new admin key invalidates it. Logging out stores the cookie's hash, so that all workers reject the
cookie until it expires. The cookie grants access only to the page's routes.

After a login with an API key, the cookie starts with the key's prefix, and its signature also depends on the key. Such a cookie is valid
only in the key's project, and only while the key is valid.
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
from turngate.gateway.api_keys import KeyRing
from turngate.server.auth import Auth, require_scope
from turngate.server.scopes import Scopes, scopes_of
from turngate.store.projects import OPERATOR_CALLER, ApiKey, Caller
from turngate.store.store import Store

COOKIE = "turngate_page"
PAGE_HEADER = "x-turngate-page"  # forms and scripts of other sites cannot send this header without a CORS preflight
COOKIE_LIFETIME_S = 12 * 3600.0
_MAX_TRIES = 8  # wrong keys per client address within `_TRIES_WINDOW_S`
_TRIES_WINDOW_S = 60.0
_MAX_CALLERS = 4096  # client addresses whose wrong keys are counted
_LOGGED_OUT = "page_logged_out"  # setting in the store: a JSON object from cookie hashes to expiry times
_SCOPES = scopes_of("GET", "/page/api/me")
_END = struct.Struct(">d")
_RANDOM_BYTES = 24
_MAC_BYTES = 32


class PageLogin:
    def __init__(self, admin_key: str, auth: Auth, ring: KeyRing, store: Store) -> None:
        self._auth = auth
        self._ring = ring
        self._store = store
        self._key = hmac.digest(admin_key.encode(), b"turngate web page, version 1", "sha256")
        self._wrong: dict[str, deque[float]] = {}

    def log_in(self, request: Request, key: str) -> tuple[str, float]:
        """Check the admin key, or an API key of any project. Return a cookie and its expiry time."""
        caller = request.client.host if request.client is not None else ""
        now = time.time()
        # The key is checked before wrong keys are counted: clients behind a proxy share an address, and the right key must always work.
        api_key = None if self._auth.is_admin(key) else self._ring.find(key)
        if api_key is not None:
            require_scope(api_key, _SCOPES)
        elif not self._auth.is_admin(key):
            self._reject(caller, now)
        self._wrong.pop(caller, None)
        end = now + COOKIE_LIFETIME_S
        body = _END.pack(end) + secrets.token_bytes(_RANDOM_BYTES)
        token = _encode(body + self._sign(body, api_key))
        return (token if api_key is None else f"{api_key.prefix}.{token}"), end

    def _reject(self, caller: str, now: float) -> NoReturn:
        tries = self._wrong.setdefault(caller, deque())
        while tries and tries[0] < now - _TRIES_WINDOW_S:
            tries.popleft()
        while len(self._wrong) > _MAX_CALLERS:
            del self._wrong[next(iter(self._wrong))]
        if len(tries) >= _MAX_TRIES:
            wait = tries[0] + _TRIES_WINDOW_S - now
            raise TooManyRequests(f"too many attempts with a wrong key; try again in {wait:.0f} s", wait_s=wait)
        tries.append(now)
        raise Unauthorized("the key is neither the admin key nor a valid API key", param="key")

    def log_out(self, request: Request) -> None:
        """Invalidate the client's cookie in all workers."""
        token = self._read(request.cookies.get(COOKIE, ""))
        if token is None:
            return
        raw, end = token

        def add_digest(stored: str | None) -> str:
            logged_out = msgspec.json.decode(stored or "{}", type=dict[str, float])
            valid = {digest: at for digest, at in logged_out.items() if at > time.time()}
            return msgspec.json.encode({**valid, _digest(raw): end}).decode()

        self._store.change_setting(_LOGGED_OUT, add_digest)

    def require(self, request: Request, scopes: Scopes = _SCOPES) -> float:
        """Return the expiry time of the client's cookie.

        Raise an error if the cookie is missing or invalid, or if its API key has none of the scopes.
        """
        cookie = request.cookies.get(COOKIE, "")
        end = self.expiry_of(cookie)
        if end is None:
            problem = "the login has expired or is not valid" if cookie else "you are not logged in"
            raise Unauthorized(f"{problem}; send the admin key or an API key to `POST /page/login`")
        if (api_key := self._find_key(cookie)) is not None:
            require_scope(api_key, scopes)
        return end

    def find_caller(self, request: Request) -> Caller:
        """Return who is logged in, for the audit log. The cookie must already have been checked."""
        api_key = self._find_key(request.cookies.get(COOKIE, ""))
        return OPERATOR_CALLER if api_key is None else Caller(api_key.prefix, api_key.project)

    def _find_key(self, cookie: str) -> ApiKey | None:
        """Return the API key that a cookie names, or None if it names none or the key is not valid in this project."""
        prefix = cookie.rpartition(".")[0]
        return self._auth.find_prefix(prefix) if prefix else None

    def expiry_of(self, cookie: str) -> float | None:
        """Return the expiry time of a cookie, or None if it is not valid."""
        token = self._read(cookie)
        if token is None:
            return None
        raw, end = token
        try:
            logged_out = self._store.setting(_LOGGED_OUT) or "{}"
        except StoreError:  # the store is being closed
            return None
        return None if _digest(raw) in msgspec.json.decode(logged_out, type=dict[str, float]) else end

    def _read(self, cookie: str) -> tuple[bytes, float] | None:
        """Return a cookie's bytes and expiry time.

        Return None if the cookie is invalid or has expired, or if its API key is not valid in this project.
        """
        prefix, _, token = cookie.rpartition(".")
        api_key = self._find_key(cookie)
        if prefix and api_key is None:
            return None
        try:
            raw = base64.urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        except (binascii.Error, UnicodeEncodeError, ValueError):
            return None
        if len(raw) != _END.size + _RANDOM_BYTES + _MAC_BYTES:
            return None
        if _encode(raw) != token:  # base64 can encode the same bytes in several ways; only ours is accepted
            return None
        body, mac = raw[:-_MAC_BYTES], raw[-_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._sign(body, api_key)):
            return None
        (end,) = _END.unpack_from(body)
        return (raw, float(end)) if time.time() < end <= time.time() + COOKIE_LIFETIME_S else None

    def _sign(self, body: bytes, api_key: ApiKey | None) -> bytes:
        key = self._key if api_key is None else hmac.digest(self._key, api_key.hash, "sha256")
        return hmac.digest(key, body, "sha256")


def require_same_origin(request: Request) -> None:
    """Reject a state-changing request that another site may have sent."""
    if not request.headers.get(PAGE_HEADER):
        raise Forbidden(
            f"the header {PAGE_HEADER} is missing; every POST request under /page needs it",
            param=PAGE_HEADER,
        )
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        if site != "same-origin":
            raise Forbidden(
                f"sec-fetch-site must be 'same-origin', not {site[:40]!r}; only the page itself may send this request"
            )
        return
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower():
        raise Forbidden(
            f"origin {origin[:200]!r} does not match the Host header; only the page itself may send this request, and a proxy must not "
            "change the Host header"
        )


def set_login_cookie(response: Response, request: Request, token: str, seconds: float) -> Response:
    """Set the login cookie, or delete it if `seconds` is 0. A cookie set over TLS is sent only over TLS."""
    is_tls = (
        request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").split(",")[0].strip() == "https"
    )
    response.set_cookie(
        COOKIE, token, max_age=int(seconds), path="/page", httponly=True, samesite="strict", secure=is_tls
    )
    return response


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
