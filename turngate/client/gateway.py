"""A gateway seen from a rollout: its admin API over HTTP, whether it lives in this process or elsewhere."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from turngate.client.keys import ADMIN_KEY
from turngate.client.protocol import DeliveryPage, FeedConfig, FeedView, PauseMode
from turngate.common.validation import reject_credentials
from turngate.errors import ConfigError, TurngateError, Unauthorized
from turngate.store.outcomes import RecordedOutcome
from turngate.telemetry.logs import register_secrets
from turngate.telemetry.spans import TRACEPARENT
from turngate.types import Json

T = TypeVar("T")
_PAGE = 100  # tool calls that are asked for at once
_LIMIT = aiohttp.ClientTimeout(total=60)
_PROXY_STATUSES = (502, 503, 504)  # what a proxy says for a gateway that is not there, or not yet
_BUILD_S = 120  # for which a gateway may be silent while it makes the rows of a large group


class OpenedSession(msgspec.Struct, frozen=True):
    id: str
    key: str  # the secret


class GatewayUnreachable(TurngateError):
    """No gateway answers there, at least for now: none can be reached, or it says that it is being stopped or cannot write (503), or
    a proxy says so for it. The same may be asked again."""

    status = 503
    kind = "gateway_unreachable"
    retry_safe = True


class RequestRejected(TurngateError):
    """The gateway said no."""

    def __init__(self, message: str, status: int, param: str | None = None) -> None:
        super().__init__(f"gateway: {message}", param=param)
        self.answered = status


class GatewayClient(AbstractAsyncContextManager["GatewayClient"]):
    def __init__(self, url: str, admin_key: str) -> None:
        reject_credentials(url, "gateway", f"the key comes from {ADMIN_KEY}")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"gateway: {url!r} is not an http(s) URL", param="gateway")
        self.url = url.rstrip("/")
        self._key = admin_key
        register_secrets(admin_key)
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> GatewayClient:
        self._http = aiohttp.ClientSession(headers={"authorization": f"Bearer {self._key}"}, timeout=_LIMIT)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._http is not None:
            await self._http.close()

    async def open(self, config: dict[str, Json], session: str | None = None, traceparent: str = "") -> OpenedSession:
        """A new session; under an id of the caller's own, so that it can be ended even where no answer came. `traceparent`: the span
        that its turns belong to, where there are spans."""
        headers = {TRACEPARENT: traceparent} if traceparent else {}
        opened = await self._request("POST", "/admin/sessions", {**config, "id": session}, headers=headers)
        return OpenedSession(opened["id"], opened["api_key"])

    async def check(self) -> None:
        """That it is there, and takes our key. `ConfigError` where something else answers."""
        await self._request("GET", "/admin/fence")

    async def fence(self) -> Json:
        """`version` of the policy, `paused`, `in_flight`."""
        return await self._request("GET", "/admin/fence")

    async def pause(self, mode: PauseMode = "hold", limit_s: float | None = None) -> Json:
        """New calls wait from now on. `drain` answers when those in flight have ended, however long that takes; `keep` freezes them.

        `limit_s`: without a resume for so long calls go on at the old version.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request("POST", "/admin/fence/pause", {"mode": mode, "limit_s": limit_s}, within=limit)

    async def resume(self, version: int | None = None, model: str | None = None) -> Json:
        """Calls go on, at a policy version; None: the one that it was. `model`: the name under which the engine has it."""
        return await self._request("POST", "/admin/fence/resume", {"version": version, "model": model})

    async def load_weights(
        self, version: int, *, path: str = "", lora_path: str = "", name: str = "", mode: PauseMode | None = None
    ) -> Json:
        """Have every replica load a model or an adapter, and go on at that version. `RequestRejected` (502): the old one stays in force."""
        body = {"version": version, "path": path, "lora_path": lora_path, "mode": mode}
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        return await self._request("POST", "/admin/weights", {**body, **({"name": name} if name else {})}, within=limit)

    async def models(self) -> list[str]:
        """The names of the models that it serves."""
        return [model["id"] for model in (await self._request("GET", "/v1/models"))["data"]]

    async def sessions(self) -> list[str]:
        """Ids, newest first."""
        return [session["id"] for session in (await self._request("GET", "/admin/sessions?limit=1000"))["sessions"]]

    async def show(self, session: str) -> Json:
        return await self._request("GET", f"/admin/sessions/{quote(session)}")

    async def trace(self, session: str) -> Json:
        return await self._request("GET", f"/admin/sessions/{quote(session)}/trace")

    async def samples(self, session: str, *, everything: bool = False) -> list[Json]:
        suffix = "?all=1" if everything else ""
        found: list[Json] = (await self._request("GET", f"/admin/sessions/{quote(session)}/samples{suffix}"))["samples"]
        return found

    async def seal(self, session: str, stop: str = "") -> Json:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/seal", {"stop": stop})

    async def cancel(self, session: str) -> Json:
        return await self._request("POST", f"/admin/sessions/{quote(session)}/cancel")

    async def delete(self, session: str) -> None:
        """With everything that was recorded of it."""
        await self._request("DELETE", f"/admin/sessions/{quote(session)}")

    async def announce(self, session: str, kind: str, data: dict[str, Json]) -> int:
        """Put an event into the stream, beside the turns; the session need not be open yet. Its place there.

        A failure is a `TurngateError`, and what becomes of it is the caller's choice.
        """
        body = {"session": session, "kind": kind, "data": data}
        return int((await self._request("POST", "/admin/events", body))["seq"])

    async def record(self, session: str, recorded: RecordedOutcome, *, replace: bool = False) -> None:
        """How the rollout ended, kept beside its trace. Once: the same again is fine, another one is refused without `replace`."""
        recorded.check()
        suffix = "?replace=1" if replace else ""
        await self._request("PUT", f"/admin/sessions/{quote(session)}/outcome{suffix}", msgspec.to_builtins(recorded))

    async def close_group(self, group: str) -> None:
        """No further rollout of it will come. Once or more often, and whether anybody waits for it or not."""
        await self._request("POST", f"/admin/groups/{quote(group, safe='')}/close")

    # ── feeds; `trainers/feed.py` is the easy way to read one ────────────────────────────────────────────────────

    async def feeds(self) -> list[FeedView]:
        return msgspec.convert((await self._request("GET", "/admin/feeds"))["feeds"], list[FeedView])

    async def show_feed(self, name: str) -> FeedView:
        """With the groups that are not complete."""
        return msgspec.convert(await self._request("GET", _feed_path(name)), FeedView)

    async def open_feed(self, name: str, config: FeedConfig) -> FeedView:
        """The feed of that name, made if there is none. `RequestRejected` (409) where it is there with other choices."""
        return msgspec.convert(await self._request("PUT", _feed_path(name), msgspec.to_builtins(config)), FeedView)

    async def delete_feed(self, name: str) -> None:
        await self._request("DELETE", _feed_path(name))

    async def take_over_feed(self, name: str) -> str:
        """Become its reader: the token that pages and commits want. Who was so before is refused from now on."""
        return str((await self._request("POST", f"{_feed_path(name)}/reader"))["reader"])

    async def fetch_deliveries(
        self, name: str, reader: str, *, after: int | None = None, wait: float = 0, limit: int = 1
    ) -> DeliveryPage:
        """Deliveries past a number (None: the committed one), in order; waits up to so many seconds for the first."""
        asked = f"{_feed_path(name)}/deliveries?reader={quote(reader, safe='')}&wait={wait:.3f}&limit={limit}"
        past = "" if after is None else f"&after={after}"
        limits = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=wait + _BUILD_S)
        return await self._request("GET", asked + past, kind=DeliveryPage, within=limits)  # type: ignore[no-any-return]

    async def commit_feed(self, name: str, reader: str, number: int) -> int:
        """All up to a number is trained, and in a checkpoint. What is committed now, which may be more."""
        told = await self._request("POST", f"{_feed_path(name)}/commit", {"reader": reader, "number": number})
        return int(told["committed"])

    async def tool_calls(self, session: str) -> list[Json]:
        """Every call of a host tool, oldest first: `call`, `tool`, `arguments`, `time`, `reply`, `answered`, `waiting` …"""
        found: list[Json] = []
        while True:
            after = found[-1]["call"] if found else 0
            path = f"/admin/sessions/{quote(session)}/tools?after={after}&limit={_PAGE}"
            page = (await self._request("GET", path))["calls"]
            found += page
            if len(page) < _PAGE:
                return found

    async def answer_tool(self, session: str, call: int, reply: Json) -> Json:
        """Answer a call that waits for the host. `RequestRejected` (409) where nobody waits any more."""
        return await self._request("POST", f"/admin/sessions/{quote(session)}/tools/{call}/answer", {"reply": reply})

    async def events(self, session: str = "", after: int = 0, *, wait: bool = True) -> AsyncGenerator[Json, None]:
        """What happens in a session, or (empty) in all, past a cursor: `seq` of the last event that was seen, 0 for the beginning.

        Goes on for as long as the gateway is there, through its restarts: nothing is lost or told twice. `wait=False`: it ends
        with what there is now.
        """
        assert self._http is not None, "use it as a context manager"
        path = f"/admin/sessions/{quote(session)}/events" if session else "/admin/events"
        while True:
            try:
                url = f"{self.url}{path}?after={after}" + ("" if wait else "&wait=0")
                limit = aiohttp.ClientTimeout(sock_read=60)
                async with self._http.get(url, timeout=limit, allow_redirects=False) as response:
                    if response.status in (401, 403, 404):
                        return
                    async for line in response.content:
                        if line.startswith(b"data: ") and response.status == 200:
                            event = msgspec.json.decode(line[6:])
                            after = event["seq"]
                            yield event
                    if not wait and response.status == 200:
                        return
            except (
                aiohttp.ClientError,
                TimeoutError,
                ValueError,
            ):  # ValueError: a line that is too long to be one of ours
                pass
            await asyncio.sleep(0.5)

    async def post_msgpack(self, path: str, sent: object, kind: type[T], within_s: float = 60) -> T:
        """POST msgpack, and get msgpack: what the gate speaks (`trainers/gate.py`)."""
        limit = aiohttp.ClientTimeout(total=within_s)
        body = msgspec.msgpack.encode(sent)
        return await self._request("POST", path, body, kind=kind, within=limit)  # type: ignore[no-any-return]

    async def _request(
        self,
        method: str,
        path: str,
        body: Json = None,
        *,
        kind: type[Any] | None = None,
        within: aiohttp.ClientTimeout = _LIMIT,
        headers: Mapping[str, str] = {},
    ) -> Any:
        """`kind`: what the answer is, where it is msgpack; all others are JSON, errors always."""
        assert self._http is not None, "use it as a context manager"
        try:
            # A gateway redirects nobody, and its key is not for others.
            async with self._http.request(
                method, self.url + path, **_body_arguments(body), headers=headers, allow_redirects=False, timeout=within
            ) as response:
                raw = await response.read()
                answered = "x-turngate" in response.headers
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, OSError) as error:
            why = str(error) or type(error).__name__
            raise GatewayUnreachable(f"gateway: {self.url} cannot be reached ({why})", param="gateway") from None
        try:
            packed = kind is not None and response.status < 300 and answered
            value = msgspec.msgpack.decode(raw, type=kind) if packed else msgspec.json.decode(raw)
        except msgspec.DecodeError:
            value = None
        if response.status < 300 and answered and value is not None:
            return value
        if not answered and response.status in _PROXY_STATUSES:
            raise GatewayUnreachable(
                f"gateway: {self.url} answers {response.status}, and no turngate gateway does: whatever is in front of it cannot "
                "reach it, or this is not its address",
                param="gateway",
            )
        if not answered:
            raise ConfigError(f"gateway: {self.url} is not a turngate gateway", param="gateway")
        told = value["error"] if isinstance(value, dict) and "error" in value else {"message": f"{response.status}"}
        message = told["message"]
        if response.status == 401:
            raise Unauthorized(f"gateway: {message} (the key comes from {ADMIN_KEY})", param=ADMIN_KEY)
        if response.status == GatewayUnreachable.status:
            raise GatewayUnreachable(f"gateway: {message}", param="gateway")
        raise RequestRejected(message, response.status, told.get("param"))


def _body_arguments(body: Json) -> dict[str, Any]:
    return {"data": body} if isinstance(body, bytes) else {"json": body}


def _feed_path(name: str) -> str:
    return f"/admin/feeds/{quote(name, safe='')}"
