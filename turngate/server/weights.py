"""The fence and the weights behind it, under `/admin/fence` and `/admin/weights`, behind the admin key.

`Updates` is the order of things: calls are held, the engines are loaded, calls go on at the new version; or, if a replica refuses, all of
it is put back. It works on the fence of this gateway or on that of all workers (`together.py`), whichever it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from turngate.client.protocol import PauseMode
from turngate.engines.base import Engine
from turngate.engines.weights import Load, Updatable, replicas
from turngate.errors import BadRequest, Conflict, EngineError, EngineTimeout, StoreError, TurngateError
from turngate.gateway.sessions import Control
from turngate.server.auth import Auth
from turngate.server.http import decode_body, json_response, route
from turngate.types import Json

log = logging.getLogger("turngate")
_SETTLE_S = 0.1  # in which tokens of a frozen engine that are on their way arrive
_AGAIN_S = 2.0  # between tries to wake an engine
_KEEPING = "keep calls in flight over an update (pause with hold or drain)"
_NOT_TRIED = "not tried"
_KEPT = 2  # adapters: the one in force, and the one before it, with which calls in flight may go on

Version = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Limit = Annotated[float, msgspec.Meta(gt=0, le=7 * 86400)]


class PauseBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`limit_s`: after so long without a resume, calls go on at the old version: whoever paused is gone."""

    mode: PauseMode = "hold"
    limit_s: Limit | None = None


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`model`: the name under which the engine has this version; None: its weights were replaced."""

    version: Version | None = None
    model: str | None = None


class WeightsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of `path` and `lora_path`, as the engines see them. `name`: what an adapter is called there; `{version}` is filled in."""

    version: Version
    path: str = ""
    lora_path: str = ""
    name: str = "policy-v{version}"
    mode: PauseMode | None = None  # None: drain for a model, hold for an adapter
    limit_s: Limit = 600.0  # for which calls in flight are waited for

    def load(self) -> Load:
        if bool(self.path) == bool(self.lora_path):
            raise BadRequest("path: give either the path of a model or the lora_path of an adapter", param="path")
        if self.path and self.mode == "hold":
            raise BadRequest(
                "mode: calls in flight would go on while their weights change; drain lets them end, keep freezes them",
                param="mode",
            )
        name = self.name.replace("{version}", str(self.version)) if self.lora_path else ""
        if self.lora_path and not name:
            raise BadRequest("name: an adapter needs a name", param="name")
        return Load(version=self.version, path=self.path, lora_path=self.lora_path, name=name)


class Replica(msgspec.Struct, frozen=True):
    """What became of one replica. `has`: the version of its weights; None: unknown, and it gets no calls."""

    url: str
    ok: bool
    has: int | None
    detail: str = ""


class Bar(Protocol):
    """A fence, be it of one process or of many."""

    async def hold(self, until: float | None) -> None:
        """New calls wait; `until` is noted, for whoever is started meanwhile."""

    async def drained(self) -> None: ...

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, look: bool = False) -> None:
        """Calls go on, at a version. `look`: at every replica first, which may not be what it was."""

    async def stands(self) -> dict[str, Json]: ...


class OneBar:
    """The fence of a gateway that is one process. `ready`: what a version needs before it is in force."""

    def __init__(self, control: Control, ready: Callable[[int, bool], Awaitable[None]]) -> None:
        self._control = control
        self._ready = ready

    async def hold(self, until: float | None) -> None:
        self._control.note_held(until)
        await self._control.hold()

    async def drained(self) -> None:
        await self._control.drained()

    async def open(self, version: int | None, model: str | None, *, expired: bool = False, look: bool = False) -> None:
        self._control.check_version(version, model)
        await self._ready(self._control.version if version is None else version, look)
        self._control.resume(version, model, expired=expired)

    async def stands(self) -> dict[str, Json]:
        return self._control.fence()


class Updates:
    def __init__(self, control: Control, engine: Engine | None, bar: Bar) -> None:
        self._control = control
        self._engine = engine
        self._bar = bar
        self._changing = asyncio.Lock()  # one change after the other
        self._limit: asyncio.Task[None] | None = None
        self._adapters: list[str] = []  # that were loaded from here, and not unloaded
        self.frozen = False  # the engines are paused, with what they have begun

    async def start(self) -> None:
        """A pause outlives the gateway: whoever paused may be in the middle of sending weights. Engines that were frozen without one
        are woken."""
        self.frozen = self._control.was_frozen()
        until = self._control.held_until()
        if until is not None:
            await self._go_on_holding(until)
        elif self.frozen:
            log.warning("the engines were paused when the gateway was stopped; they go on")
            self._again()

    async def _go_on_holding(self, until: float) -> None:
        await self._control.hold()
        left = until - time.time()
        if left <= 0:  # also an update of our own that came to no end, which nobody is going to resume
            log.warning("calls were held when the gateway was stopped, for longer than they should be; they go on")
            self._limit = asyncio.create_task(self._keep_opening(expired=True))
            return
        self._control.paused("keep" if self.frozen else "hold", restarted=True)
        log.warning(
            "calls are held, as they were when the gateway was stopped: a trainer had paused it, and its weights may be half sent. "
            "They go on with POST /admin/fence/resume and the version that the engines have (the present one is %d)%s",
            self._control.version,
            "" if left == math.inf else f", or at the present one in {left:.0f} s, the limit of the pause",
        )
        if left < math.inf:
            self.arm(left)

    async def close(self) -> None:
        self._disarm()

    # ── pause and resume, around whatever a trainer does to the engines itself ──────────────────────────────────

    async def pause(self, mode: PauseMode, limit_s: float | None) -> dict[str, Json]:
        async with self._changing:
            await self._hold(mode, limit_s)
        if mode == "drain":
            await self._bar.drained()
        self._control.paused(mode)
        return await self._bar.stands()

    async def resume(self, version: int | None, model: str | None) -> dict[str, Json]:
        async with self._changing:
            self._control.check_version(version, model)
            if version is not None and version > self._control.version:
                self._control.note_weights(Load(version=version, name=model or ""))
            else:
                await self._take_back()
            await self._open(version, model)
            self._disarm()
        return await self._bar.stands()

    async def _hold(self, mode: PauseMode, limit_s: float | None) -> None:
        if mode == "keep":
            self._replicas(_KEEPING)
        present = self._present()
        await self._bar.hold(None if limit_s is None else time.time() + limit_s)
        if mode == "keep":
            try:
                await self._freeze()
            except TurngateError:
                await self._restore(*present)
                raise
        self._disarm()
        if limit_s is not None:
            self.arm(limit_s)

    def _present(self) -> tuple[bool, bool]:
        return self._control.is_paused, self.frozen

    async def _restore(self, was_paused: bool, was_frozen: bool) -> None:
        """As it was before something failed, which is what the caller has to know; what cannot be done now is tried until it can."""
        try:
            if not was_paused:
                await self._open(None, None, look=True)
            elif self.frozen and not was_frozen:
                await self._thaw()
        except TurngateError as error:
            log.warning("calls are still held: %s", error.message)
            if self._control.is_paused and not was_paused:
                self._disarm()
                self._limit = asyncio.create_task(self._keep_opening())

    async def _freeze(self) -> None:
        each = self._replicas(_KEEPING)
        self._control.note_frozen(True)
        self.frozen = True
        # All of them to their ends, also where one fails: a pause that is still under way would outlast the resume.
        found = await asyncio.gather(*(one.pause() for one in each), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                raise error
        await asyncio.sleep(_SETTLE_S)

    async def _open(self, version: int | None, model: str | None, *, look: bool = False) -> None:
        """First the version, then the engines: whatever they sample from then on is of that version."""
        await self._bar.open(version, model, look=look)
        if self.frozen:
            await self._thaw()

    async def _thaw(self) -> None:
        found = await asyncio.gather(*(one.resume() for one in replicas(self._engine)), return_exceptions=True)
        for error in found:
            if isinstance(error, BaseException):
                self._again()
                raise error
        self.frozen = False
        self._note_awake()

    def _again(self) -> None:
        """Engines that could not be woken are tried again until they are: calls wait in them."""
        self._disarm()
        self._limit = asyncio.create_task(self._keep_thawing())

    async def _keep_thawing(self) -> None:
        while True:
            async with self._changing:
                if not self.frozen:
                    return
                found = await asyncio.gather(*(one.resume() for one in replicas(self._engine)), return_exceptions=True)
                if not any(isinstance(error, BaseException) for error in found):
                    self.frozen = False
                    self._note_awake()
                    return
            await asyncio.sleep(_AGAIN_S)

    def _note_awake(self) -> None:
        try:
            self._control.note_frozen(False)
        except StoreError as error:
            log.warning("that the engines go on could not be written down: %s", error.message)

    # ── the time limit of a pause ───────────────────────────────────────────────────────────────────────────────

    def arm(self, seconds: float) -> None:
        self._limit = asyncio.create_task(self._expire(seconds))

    def _disarm(self) -> None:
        if self._limit is not None and self._limit is not asyncio.current_task():
            self._limit.cancel()
        self._limit = None

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        log.warning("nobody resumed within the limit of a pause; calls go on at the old version")
        await self._keep_opening(expired=True)

    async def _keep_opening(self, *, expired: bool = False) -> None:
        """At the version that is in force, as soon as that can be."""
        while True:
            try:
                async with self._changing:
                    await self._take_back()
                    await self._bar.open(None, None, expired=expired, look=True)
                break
            except TurngateError as error:
                log.warning("calls are still held: %s", error.message)
            await asyncio.sleep(_AGAIN_S)
        if self.frozen:
            self._again()

    async def _take_back(self) -> None:
        """A gateway that was killed in the middle of loading a model: what got it has to have the one that is in force again."""
        load = self._control.loading()
        present = self._control.version
        if load is None or load.is_adapter or load.version <= present:
            return
        before = self._control.weights(present) or Load(version=present)
        for one in replicas(self._engine):
            one.expect(load)
            if all(health.ok for health in await one.health()):
                log.warning(
                    "%s has weights that never came into force; version %d is loaded again", one.address, present
                )
                await self._as_before(one, before)

    # ── weights that the gateway loads ──────────────────────────────────────────────────────────────────────────

    async def load(self, wanted: WeightsBody) -> dict[str, Json]:
        load = wanted.load()
        mode: PauseMode = wanted.mode or ("drain" if load.path else "hold")
        async with self._changing:
            before = self._may(load, mode)
            each = self._replicas("load weights")
            began = time.monotonic()
            present = self._present()
            self._control.note_loading(load)
            await self._stop(mode, wanted.limit_s, present)
            found = await self._load_each(each, load, repair=load.version == before.version)
            if not all(replica.ok for replica in found):
                found = await self._put_back(each, found, load, before)
                await self._restore(*present)
                self._tell({"version": load.version, "failed": True, "replicas": found})
                raise _refusal(load, before.version, found)
            try:
                await self._open(load.version, load.name if load.is_adapter or before.name else None, look=True)
            except TurngateError:
                if self._control.version != load.version:  # new weights are not to be sampled under the old version
                    await self._put_back(each, found, load, before)
                if self._control.is_paused:
                    await self._restore(*present)
                raise
            self._disarm()
            await self._clear_out(each, (before.name if before.lora_path else "", load.name))
            seconds = round(time.monotonic() - began, 3)
            self._tell({"version": load.version, "mode": mode, "seconds": seconds, "replicas": found})
        return {**await self._bar.stands(), "replicas": found}

    async def stands(self) -> dict[str, Json]:
        return await self._bar.stands()

    async def show(self) -> dict[str, Json]:
        state = await self._bar.stands()
        seen = [] if self._engine is None else await self._engine.health()
        return {**state, "weights": self._control.weights(state["version"]), "replicas": seen}

    def _may(self, load: Load, mode: PauseMode) -> Load:
        """What is in force. The same version again is for replicas that have lost it, and has to be the same."""
        present = self._control.version
        noted = self._control.weights(present) or Load(version=present)
        if load.version < present:
            raise Conflict(f"version: {load.version} is older than the present {present}", param="version")
        if load.version == present and load != noted:
            raise Conflict(
                f"version: {present} is in force with other weights; give these another one", param="version"
            )
        if noted.name and load.path and mode == "keep":
            raise Conflict(
                "mode: calls in flight use an adapter of the old model; let them end with drain", param="mode"
            )
        return noted

    def _replicas(self, to_do: str) -> list[Updatable]:
        found = replicas(self._engine)
        if not found:
            raise Conflict(f"this gateway's engine cannot {to_do}: only vllm and sglang can")
        return found

    async def _stop(self, mode: PauseMode, limit_s: float, present: tuple[bool, bool]) -> None:
        try:
            if not present[0]:
                await self._bar.hold(time.time())  # whoever is started again in the middle of it lets calls go on
            if mode == "keep":
                await self._freeze()
            elif mode == "drain":
                async with asyncio.timeout(limit_s):
                    await self._bar.drained()
        except TimeoutError:
            await self._restore(*present)
            raise EngineTimeout(
                f"mode: calls in flight did not end within {limit_s:g} s, and nothing was loaded; use keep, or a longer limit_s"
            ) from None
        except TurngateError:
            await self._restore(*present)
            raise

    async def _load_each(self, each: list[Updatable], load: Load, *, repair: bool) -> list[Replica]:
        """One first: what is wrong with the weights themselves shall cost no more than that one."""

        async def work(one: Updatable) -> None:
            if not (repair and all(health.ok for health in await one.health())):
                await one.load(load, frozen=self.frozen)

        first = await self._attempt(each[0], load, work)
        if not first.ok:
            return [first, *(Replica(one.address, True, None, _NOT_TRIED) for one in each[1:])]
        return [first, *await asyncio.gather(*(self._attempt(one, load, work) for one in each[1:]))]

    async def _attempt(self, one: Updatable, load: Load, work: Callable[[Updatable], Awaitable[None]]) -> Replica:
        try:
            await work(one)
        except TurngateError as error:
            return Replica(one.address, False, None, error.message)
        return Replica(one.address, True, load.version)

    async def _put_back(self, each: list[Updatable], found: list[Replica], load: Load, before: Load) -> list[Replica]:
        """An adapter more does no harm; whole models have to be loaded again as they were."""
        if load.version == before.version:
            return found

        async def back(one: Updatable) -> None:
            if load.is_adapter:
                if load.version > before.version:
                    with contextlib.suppress(TurngateError):
                        await one.unload(load.name)
            else:
                await self._as_before(one, before)

        after = []
        for one, replica in zip(each, found, strict=True):
            if replica.detail == _NOT_TRIED or (load.is_adapter and not replica.ok):
                after.append(msgspec.structs.replace(replica, has=before.version))
            elif replica.ok:
                after.append(await self._attempt(one, before, back))
            else:  # half a model: it is marked, gets no calls, and what it had frozen must not go on with that
                with contextlib.suppress(TurngateError):
                    await one.abort_all()
                after.append(replica)
        return after

    async def _as_before(self, one: Updatable, before: Load) -> None:
        if before.path:
            await one.load(before, frozen=self.frozen)
        else:
            await one.original(frozen=self.frozen)

    async def _clear_out(self, each: list[Updatable], names: tuple[str, ...]) -> None:
        """Adapters that no call can be using any more."""
        self._adapters += [name for name in names if name and name not in self._adapters]
        while len(self._adapters) > _KEPT:
            old = self._adapters.pop(0)
            for one in each:
                with contextlib.suppress(TurngateError):  # it was started again, and has it not
                    await one.unload(old)

    def _tell(self, facts: dict[str, Json]) -> None:
        try:
            self._control.events.add("", "weights", msgspec.to_builtins(facts))
        except StoreError as error:
            log.warning("an update of weights is not in the events: %s", error.message)


def _refusal(load: Load, before: int, found: list[Replica]) -> EngineError:
    each = "; ".join(
        f"{replica.url}: {replica.detail or 'put back'}, has "
        + ("nothing that can be used" if replica.has is None else f"version {replica.has}")
        for replica in found
    )
    return EngineError(f"version {load.version} was not loaded, and version {before} stays in force. {each}")


class FenceRoutes:
    def __init__(self, updates: Updates, auth: Auth) -> None:
        self._updates = updates
        self._auth = auth

    def routes(self) -> list[Route]:
        table: list[tuple[str, Literal["GET", "POST"], object]] = [
            ("/admin/fence", "GET", self.fence),
            ("/admin/fence/pause", "POST", self.pause),
            ("/admin/fence/resume", "POST", self.resume),
            ("/admin/weights", "GET", self.show),
            ("/admin/weights", "POST", self.load),
        ]
        return [route(path, method, endpoint, self._auth) for path, method, endpoint in table]  # type: ignore[arg-type]

    async def fence(self, request: Request) -> Response:
        return json_response(await self._updates.stands())

    async def pause(self, request: Request) -> Response:
        wanted = await decode_body(request, PauseBody)
        return json_response(await self._updates.pause(wanted.mode, wanted.limit_s))

    async def resume(self, request: Request) -> Response:
        wanted = await decode_body(request, ResumeBody)
        return json_response(await self._updates.resume(wanted.version, wanted.model))

    async def show(self, request: Request) -> Response:
        return json_response(await self._updates.show())

    async def load(self, request: Request) -> Response:
        return json_response(await self._updates.load(await decode_body(request, WeightsBody)))
