"""A rollout that is aborted, at whatever stage: generation, agent and sandbox are gone when `abort` returns, and a result is there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.kit import until
from tests.service.kit import KEY, Service, served
from tests.speed import scaled
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.sandboxes.base import SandboxSpec
from turngate.sandboxes.local import LocalBackend
from turngate.sandboxes.supervised import SupervisedSandbox
from turngate.service.catalog import EndpointChoice
from turngate.service.gateways import GatewayConnection, Gateways

pytestmark = pytest.mark.process


class Slow(LocalBackend):
    """Takes for ever to make a sandbox."""

    async def create(self, spec: SandboxSpec) -> SupervisedSandbox:
        await asyncio.sleep(36000)
        return await super().create(spec)


async def aborted(service: Service, rollout: str, stage: str) -> None:
    await service.at(rollout, stage)
    if stage == "agent":
        await until(lambda: service.engine.in_flight == 1, 120)
    state = await service.rollouts.abort(rollout, "enough")
    assert (state.status, state.done, state.reward, state.kind) == ("cancelled", True, None, None)
    assert service.engine.in_flight == 0 and service.left() == []
    result = await service.rollouts.finalize(rollout)
    assert (result.status, result.stop, result.error) == ("cancelled", "aborted: enough", None)
    events = await service.all_events(rollout)
    assert [event.cursor for event in events] == list(range(1, state.cursor + 1))
    assert [event.kind for event in events if event.kind in ("abort", "ended")] == ["abort", "ended"]
    assert abs(result.wall_s - (events[-1].time - events[0].time)) < scaled(1)
    assert await service.rollouts.abort(rollout, "again") == state


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        ("setup", {"setup_shell": "sleep 600"}),
        ("agent", {"program": 'ask("Hi")'}),
        ("grade", {"test_script": "sleep 600"}),
    ],
)
async def test_while_it_runs(stage: str, how: dict[str, Any]) -> None:
    def script(request: Generate, n: int) -> ScriptedTurn:
        return ScriptedTurn(hang=True)

    async with served(script) as service:
        rollout = service.rollouts.start(service.asked(**how))
        await aborted(service, rollout, stage)


async def test_while_it_waits_and_while_its_sandbox_is_made() -> None:
    async with served(backend=Slow, running=1) as service:
        first = service.rollouts.start(service.asked())
        second = service.rollouts.start(service.asked())
        await aborted(service, second, "queued")
        await aborted(service, first, "sandbox")
        at_once = service.rollouts.start(service.asked())
        assert (await service.rollouts.abort(at_once)).status == "cancelled"  # before it took its first step


async def test_while_its_gateway_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one that waits for the same gateway is not disturbed."""
    go = asyncio.Event()
    opened = Gateways._open

    async def slow(self: Gateways, choice: EndpointChoice, stack: Any) -> GatewayConnection:
        await go.wait()
        return await opened(self, choice, stack)

    monkeypatch.setattr(Gateways, "_open", slow)
    async with served() as service:
        first, second = (service.rollouts.start(service.asked('ask("Hi")')) for _ in range(2))
        await service.at(second, "gateway")
        await aborted(service, first, "gateway")
        go.set()
        assert (await service.rollouts.finalize(second)).status == "finished"


async def test_several_times_at_once_and_by_closing_the_service(tmp_path: Path) -> None:
    async with served(data=tmp_path) as service:
        first = service.rollouts.start(
            service.asked("import signal\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)")
        )
        second = service.rollouts.start(service.asked("time.sleep(600)"))
        await service.at(first, "agent")
        states = await asyncio.gather(*(service.rollouts.abort(first, str(n)) for n in range(5)))
        assert all(state == states[0] for state in states)
        assert [event.kind for event in await service.all_events(first)].count("abort") == 1
    async with served(data=tmp_path) as service:
        result = await service.rollouts.finalize(second)
        assert (result.status, result.stop, result.model_key) == (
            "cancelled",
            "aborted: the service is being stopped",
            KEY,
        )
