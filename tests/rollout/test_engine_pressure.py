"""Test that a batch starts no further rollouts while the engines are saturated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from turngate.client.gateway import GatewayUnreachable
from turngate.client.protocol import EnginesView
from turngate.rollout import engine_pressure
from turngate.rollout.engine_pressure import EnginePressure


class PressedGateway:
    """A gateway that reports what a test sets, and counts the questions."""

    def __init__(self) -> None:
        self.saturated = True
        self.asked = 0
        self.fails = False

    async def engines(self) -> EnginesView:
        self.asked += 1
        if self.fails:
            raise GatewayUnreachable("the gateway is restarting")
        return EnginesView(engines=[], saturated=self.saturated)


def pressure(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> EnginePressure:
    monkeypatch.setattr(engine_pressure, "_PAUSE_S", 0.02)
    return EnginePressure(gateway)


async def test_waits_until_engines_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = PressedGateway()
    waiting = pressure(gateway, monkeypatch)
    tasks = [asyncio.create_task(waiting.wait(lambda: True)) for _ in range(50)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    assert gateway.asked < 20  # one question serves all workers
    gateway.saturated = False
    await asyncio.gather(*tasks)


async def test_does_not_wait_without_other_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = PressedGateway()
    await pressure(gateway, monkeypatch).wait(lambda: False)
    assert not gateway.asked


async def test_unreachable_gateway_is_no_pressure(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = PressedGateway()
    gateway.fails = True
    await pressure(gateway, monkeypatch).wait(lambda: True)
