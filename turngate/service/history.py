"""Rollouts that have ended: states in memory, results on disk. Rollouts that an earlier process left unfinished are marked as ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from contextlib import suppress

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.errors import NotFound, StoreError, TurngateError
from turngate.service import final_state, report
from turngate.service.config import ServiceConfig
from turngate.service.result import ConversationMessage, RolloutEvent, RolloutResult, RolloutState
from turngate.service.storage import ServiceStorage

log = logging.getLogger("turngate")


class RolloutHistory:
    """Keeps the newest `config.keep` rollouts that have ended. Results that cannot be written stay in memory until a retry succeeds."""

    def __init__(self, config: ServiceConfig, storage: ServiceStorage) -> None:
        self._config = config
        self._storage = storage
        self._states: dict[str, RolloutState] = {}  # oldest first
        self._gateways: dict[str, str] = {}  # rollout → name of its gateway
        self._orphans: dict[str, list[str]] = {}  # gateway → sessions that an earlier process may have left open
        self._unwritten: dict[str, tuple[RolloutResult, list[ConversationMessage]]] = {}
        self._flushing = asyncio.Lock()

    @property
    def states(self) -> Collection[RolloutState]:
        return self._states.values()

    @property
    def gateways(self) -> set[str]:
        """The names of the gateways that hold the traces of the rollouts kept here."""
        return set(self._gateways.values())

    def find(self, rollout: str) -> RolloutState:
        state = self._states.get(rollout)
        if state is None:
            raise NotFound(
                f"unknown rollout_id {rollout[:80]!r} (the server keeps only the newest {self._config.keep:,} rollouts)",
                param="rollout_id",
            )
        return state

    def gateway_of(self, rollout: str) -> str | None:
        return self._gateways.get(rollout)

    async def read_result(self, rollout: str) -> RolloutResult:
        self.find(rollout)
        if (unwritten := self._unwritten.get(rollout)) is not None:
            return unwritten[0]
        result = await asyncio.to_thread(self._storage.read_result, rollout)
        if result is None:
            raise StoreError(
                f"rollout {rollout} has no result: its file could not be written, or was deleted", param="rollout_id"
            )
        return result

    async def read_messages(self, rollout: str) -> list[ConversationMessage]:
        self.find(rollout)
        if (unwritten := self._unwritten.get(rollout)) is not None:
            return unwritten[1]
        return await asyncio.to_thread(self._storage.read_messages, rollout)

    def add(self, state: RolloutState, gateway: str) -> None:
        """Keep the final state of a rollout that has ended. `gateway` is the name of its gateway."""
        self._states[state.rollout_id] = state
        self._gateways[state.rollout_id] = gateway
        try:
            self._storage.save_state(state, gateway)
        except StoreError as error:
            log.error("the final state of rollout %s could not be written: %s", state.rollout_id, error.message)

    async def save_result(self, result: RolloutResult, messages: list[ConversationMessage]) -> None:
        try:
            await asyncio.to_thread(self._storage.write_result, result, messages)
        except StoreError as error:
            log.error(
                "the result of rollout %s could not be written and is only in memory: %s",
                result.rollout_id,
                error.message,
            )
            self._unwritten[result.rollout_id] = result, messages

    async def flush(self) -> None:
        """Try again to write the results that are only in memory."""
        async with self._flushing:
            for rollout, unwritten in list(self._unwritten.items()):
                try:
                    await asyncio.to_thread(self._storage.write_result, *unwritten)
                    if (state := self._states.get(rollout)) is not None:
                        self._storage.save_state(state, self._gateways[rollout])
                except StoreError:  # logged by `save_result`
                    return
                self._unwritten.pop(rollout, None)

    def log_unwritten(self) -> None:
        for rollout in self._unwritten:
            log.error("the result of rollout %s is lost because it could not be written", rollout)

    async def delete_oldest(self) -> None:
        """Delete the oldest rollouts, so that at most `config.keep` remain."""
        surplus = list(self._states)[: max(0, len(self._states) - self._config.keep)]
        if not surplus:
            return
        try:
            self._storage.delete_rows(surplus)
        except StoreError as error:  # their files are kept, too, until the next try
            log.error("the oldest rollouts could not be deleted: %s", error.message)
            return
        for rollout in surplus:
            del self._states[rollout], self._gateways[rollout]
            self._unwritten.pop(rollout, None)
        for rollout in surplus:
            await asyncio.to_thread(self._storage.delete_files, rollout)

    # ── after a restart ─────────────────────────────────────────────────────────────────────────────────────────

    async def load(self) -> None:
        """Load the rollouts of earlier processes. An unfinished rollout is marked as lost, unless its result or grade was recorded."""
        for rollout, gateway, state in self._storage.read_states():
            self._gateways[rollout] = gateway  # also if the state is damaged, so that its traces are kept
            if state is None:
                continue
            if not state.done:
                self._orphans.setdefault(gateway, []).append(rollout)
                state = await self._end_interrupted(state, gateway)
            self._states[rollout] = state
        await self.delete_oldest()

    async def _end_interrupted(self, state: RolloutState, gateway: str) -> RolloutState:
        """Store and return the final state of an interrupted rollout.

        If the rollout's events or result cannot be read, or its final state cannot be written, log an error. The next start tries again.
        """
        storage, rollout = self._storage, state.rollout_id
        events: list[RolloutEvent] = []
        try:
            events = storage.read_events(rollout, 0, -1)
            result = await asyncio.to_thread(storage.read_result, rollout)
        except StoreError as error:
            log.error("interrupted rollout %s is shown as lost: %s", rollout, error.message)
            return msgspec.structs.replace(final_state.from_events(state, events), cursor=len(events))
        if result is not None:  # only the final state is missing
            state = final_state.from_result(result, state)
        else:
            state = final_state.from_events(state, events)
            notes, folder = final_state.list_notes(state), storage.artifacts_folder(rollout)
            result = report.build_result(state, None, None, folder, self._config.clamp, notes)
            await self.save_result(result, [])
        state = msgspec.structs.replace(state, cursor=len(events))
        try:
            if not events or events[-1].kind != "ended":
                data = final_state.build_end_event_data(state)
                storage.add_event(
                    rollout, RolloutEvent(cursor=len(events) + 1, time=time.time(), kind="ended", data=data)
                )
                state = msgspec.structs.replace(state, cursor=len(events) + 1)
            if rollout not in self._unwritten:  # otherwise `flush` saves the state after the result
                storage.save_state(state, gateway)
        except StoreError as error:
            log.error("the final state of rollout %s could not be written: %s", rollout, error.message)
        await asyncio.to_thread(storage.delete_inputs, rollout)
        return state

    async def cancel_orphans(self, gateway: str, client: GatewayClient) -> None:
        """Cancel the sessions that an earlier process may have left open at a gateway."""
        for session in self._orphans.pop(gateway, ()):
            with suppress(TurngateError):
                await client.cancel(session)
