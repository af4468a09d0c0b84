"""HTTP transport to a gateway: connection pool, admin key, decoding of replies, and typed errors."""

from __future__ import annotations

import errno
import ssl
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from turngate.client.keys import ADMIN_KEY, ADMIN_KEY_FILE
from turngate.client.outage import OutageReport
from turngate.client.protocol import ErrorDetail, ErrorReply
from turngate.common.validation import explain_error, reject_credentials
from turngate.errors import ConfigError, TurngateError, Unauthorized
from turngate.telemetry.logs import register_secrets
from turngate.types import Json, decode_array

T = TypeVar("T")
_LIMIT = aiohttp.ClientTimeout(total=60)
_PROXY_STATUSES = (502, 503, 504)  # statuses that a proxy returns while it cannot reach the gateway
_REPLY_LOST_STATUSES = (502, 504)  # a proxy also returns these if it sent the request but got no reply
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)


class GatewayUnreachable(TurngateError):
    """The gateway cannot be reached, or returned status 503, for example because it is stopping. The request is safe to send again."""

    status = 503
    kind = "gateway_unreachable"
    retry_safe = True


class GatewayReplyLost(GatewayUnreachable):
    """The gateway's reply did not arrive, for example because of a timeout. The gateway may have carried out the request."""

    kind = "gateway_reply_lost"
    retry_safe = False


class RequestRejected(TurngateError):
    """The gateway answered the request with an error. `answered` is the HTTP status of its reply."""

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(f"gateway: {message}", param=param)
        self.answered = status


class InvalidReply(TurngateError):
    """The gateway sent a reply that this client cannot decode, for example because client and gateway have different versions."""

    status = 502
    kind = "gateway_reply_invalid"


def _is_http_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as http://[
        return False


class GatewayTransport:
    """Sends requests to one gateway. Use it as an async context manager."""

    def __init__(self, url: str, admin_key: str, project: str = "") -> None:
        """`admin_key` is the admin key or the key of a project. With the admin key, `project` is the project to act on."""
        reject_credentials(url, "gateway", f"set the key in {ADMIN_KEY} instead")
        if not _is_http_url(url):
            raise ConfigError(
                f"gateway: {url!r} is not an http(s) URL; pass a URL such as http://127.0.0.1:8700", param="gateway"
            )
        self.url = url.rstrip("/")
        self.project = project
        self._key = admin_key
        register_secrets(admin_key)
        self._outage = OutageReport(self.url)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"authorization": f"Bearer {self._key}"}
        if self.project:
            headers["x-turngate-project"] = self.project
        self._http = aiohttp.ClientSession(headers=headers, timeout=_LIMIT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def post_msgpack(self, path: str, message: object, reply: type[T], within_s: float = 60) -> T:
        """Send a POST request with a msgpack body and decode the msgpack reply, as the gate requires."""
        limit = aiohttp.ClientTimeout(total=within_s)
        return await self._request("POST", path, reply, msgspec.msgpack.encode(message), msgpack=True, within=limit)

    async def _request(
        self,
        method: str,
        path: str,
        reply: type[T],
        body: Json = None,
        *,
        msgpack: bool = False,
        within: aiohttp.ClientTimeout = _LIMIT,
        headers: Mapping[str, str] = {},
    ) -> T:
        """Send a request and decode the reply. `msgpack` applies only to successful replies; errors are always JSON."""
        assert self._http is not None, "use the client as a context manager"
        try:
            # A gateway never redirects. Following a redirect would send the key to another server.
            async with self._http.request(
                method, self.url + path, **_body_arguments(body), headers=headers, allow_redirects=False, timeout=within
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, OSError) as error:
            self._outage.add_failure()
            kind = GatewayUnreachable if isinstance(error, _NOT_SENT) else GatewayReplyLost
            raise kind(f"gateway: {self._explain(error)}", param="gateway") from None
        is_ours = "x-turngate" in response.headers
        if is_ours:
            self._outage.add_answer()
        if response.status < 300 and is_ours:
            return self._decode_reply(raw, reply, msgpack=msgpack)
        raise self._to_error(response.status, raw, is_ours=is_ours)

    def _explain(self, error: Exception) -> str:
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno == errno.ECONNREFUSED:
            return f"nothing is listening at {self.url}; start a gateway with `turngate serve`"
        why = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else str(error)
        return f"no reply from {self.url} ({why or type(error).__name__})"

    def _decode_reply(self, raw: bytes, reply: type[T], *, msgpack: bool) -> T:
        try:
            decode = msgspec.msgpack.decode if msgpack else msgspec.json.decode
            return decode(raw, type=reply, dec_hook=decode_array)
        except msgspec.ValidationError as error:
            message, field = explain_error(error, reply)
            raise InvalidReply(
                f"gateway: {self.url} sent a reply that this client cannot decode ({message}); check that client and gateway have the "
                "same version",
                param=field,
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidReply(
                f"gateway: {self.url} sent a reply that is not valid {'msgpack' if msgpack else 'JSON'} ({error})"
            ) from None

    def _to_error(self, status: int, raw: bytes, *, is_ours: bool) -> TurngateError:
        if not is_ours and status in _PROXY_STATUSES:
            self._outage.add_failure()
            kind = GatewayReplyLost if status in _REPLY_LOST_STATUSES else GatewayUnreachable
            return kind(
                f"gateway: {self.url} returned status {status}, but the reply is not from a turngate gateway: "
                "either a proxy in front of the gateway got no reply from it, or the address is wrong",
                param="gateway",
            )
        if not is_ours:
            return ConfigError(
                f"gateway: {self.url} returned status {status}, but the reply is not from a turngate gateway; check the address and "
                "any proxy in front of the gateway",
                param="gateway",
            )
        try:
            error = msgspec.json.decode(raw, type=ErrorReply).error
        except (msgspec.DecodeError, UnicodeDecodeError):
            error = ErrorDetail(message=str(status))
        if status == 401:
            return Unauthorized(
                f"gateway: {self.url} {'rejected the key' if self._key else 'needs a key'}; use the key in the file {ADMIN_KEY_FILE} "
                f"in the gateway's data folder, the {ADMIN_KEY} that the gateway was started with, or a valid API key",
                param=ADMIN_KEY,
            )
        if status == GatewayUnreachable.status:
            return GatewayUnreachable(f"gateway: {error.message}", param="gateway")
        return RequestRejected(error.message, status, error.param)


def _body_arguments(body: Json) -> dict[str, Any]:
    return {"data": body} if isinstance(body, bytes) else {"json": body}
