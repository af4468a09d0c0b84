"""Aborting at any stage: when `abort` returns, generation, agent and sandbox are gone, and there is a result."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kit import until
from tests.service.kit import KEY, Service, run_service
from tests.speed import scaled
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.sandboxes.supervised_sandbox import SupervisedSandbox
from turngate.service.catalog import EndpointChoice
from turngate.service.gateways import GatewayConnection, Gateways

pytestmark = pytest.mark.process


class HangingBackend(LocalBackend):
    """Never finishes creating a sandbox."""

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        await asyncio.sleep(36000)
        return await super().create(spec)


async def abort_at(service: Service, rollout: str, stage: str) -> None:
    await service.wait_for_stage(rollout, stage)
    if stage == "agent":
        await until(lambda: service.engine.in_flight == 1, 120)
    state = await service.rollouts.abort(rollout, "enough")
    assert (state.status, state.done, state.reward, state.kind) == ("cancelled", True, None, None)
    assert service.engine.in_flight == 0 and service.leftovers() == []
    result = await service.rollouts.finalize(rollout)
    assert (result.status, result.stop, result.error) == ("cancelled", "aborted: enough", None)
    events = await service.all_events(rollout)
    assert [event.cursor for event in events] == list(range(1, state.cursor + 1))
    assert [event.kind for event in events if event.kind in ("abort", "ended")] == ["abort", "ended"]
    assert abs(result.wall_s - (events[-1].time - events[0].time)) < scaled(1)
    assert await service.rollouts.abort(rollout, "again") == state


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("setup", {"setup_shell": "sleep 600"}),
        ("agent", {"program": 'ask("Hi")'}),
        ("grade", {"test_script": "sleep 600"}),
    ],
)
async def test_abort_while_running(stage: str, options: dict[str, Any]) -> None:
    def script(request: Generate, n: int) -> ScriptedTurn:
        return ScriptedTurn(hang=True)

    async with run_service(script) as service:
        rollout = service.rollouts.start(service.request(**options))
        await abort_at(service, rollout, stage)


async def test_abort_while_queued_and_during_sandbox_creation() -> None:
    async with run_service(backend=HangingBackend, running=1) as service:
        first = service.rollouts.start(service.request())
        second = service.rollouts.start(service.request())
        await abort_at(service, second, "queued")
        await abort_at(service, first, "sandbox")
        third = service.rollouts.start(service.request())
        assert (await service.rollouts.abort(third)).status == "cancelled"  # before its first step


async def test_abort_during_gateway_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rollout that waits for the same gateway is unaffected."""
    release = asyncio.Event()
    open_gateway = Gateways._open

    async def open_when_released(self: Gateways, choice: EndpointChoice, stack: Any) -> GatewayConnection:
        await release.wait()
        return await open_gateway(self, choice, stack)

    monkeypatch.setattr(Gateways, "_open", open_when_released)
    async with run_service() as service:
        first, second = (service.rollouts.start(service.request('ask("Hi")')) for _ in range(2))
        await service.wait_for_stage(second, "gateway")
        await abort_at(service, first, "gateway")
        release.set()
        assert (await service.rollouts.finalize(second)).status == "finished"


async def test_concurrent_aborts_and_abort_on_close(tmp_path: Path) -> None:
    async with run_service(data=tmp_path) as service:
        first = service.rollouts.start(
            service.request("import signal\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)")
        )
        second = service.rollouts.start(service.request("time.sleep(600)"))
        await service.wait_for_stage(first, "agent")
        states = await asyncio.gather(*(service.rollouts.abort(first, str(n)) for n in range(5)))
        assert all(state == states[0] for state in states)
        assert [event.kind for event in await service.all_events(first)].count("abort") == 1
    async with run_service(data=tmp_path) as service:
        result = await service.rollouts.finalize(second)
        assert (result.status, result.stop, result.model_key) == (
            "cancelled",
            "aborted: the service is stopping",
            KEY,
        )
