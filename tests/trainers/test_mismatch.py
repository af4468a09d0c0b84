"""The reference trainer reports differences between log-probabilities, and an engine whose values are off causes an alarm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from tests.engines.local_kit import torch  # noqa: F401  # skips if torch is missing
from tests.trainers.test_grpo import _model, _train, training_gateway
from turngate.client.feed import Feed, TakenOver
from turngate.client.gateway import GatewayClient
from turngate.common.terminal import console
from turngate.engines.base import Chunk, Generate
from turngate.engines.local import LocalEngine
from turngate.store.events import GatewayEvent
from turngate.trainers.local.display import TrainingDisplay
from turngate.trainers.local.grpo import GrpoSettings, LogprobMismatch, Step
from turngate.trainers.local.training import StepTime

pytestmark = pytest.mark.needs("torch")


class ShiftedEngine(LocalEngine):
    """A local engine that reports log-probabilities that are off by a constant."""

    shift = 0.0

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:  # type: ignore[override]
        return self._shifted(request)

    @asynccontextmanager
    async def _shifted(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        async with super().generate(request) as chunks:
            yield self._shift(chunks)

    async def _shift(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            shifted = [value + self.shift for value in chunk.logprobs or () if value is not None]
            yield msgspec.structs.replace(chunk, logprobs=shifted)


def shifted_engine(shift: float) -> ShiftedEngine:
    engine = ShiftedEngine(_model(), slots=8, flush_s=0.0)
    engine.shift = shift
    return engine


async def reports(client: GatewayClient) -> list[GatewayEvent]:
    return [event async for event in client.events(wait=False) if event.kind == "mismatch"]


async def run_steps(shift: float, settings: GrpoSettings, data: Path) -> tuple[list[Step], list[GatewayEvent]]:
    async with training_gateway(data, engine=shifted_engine(shift)) as here:
        steps = await _train(here, 2, settings=settings)
        return steps, await reports(here.client)


@pytest.mark.parametrize(
    ("shift", "alarms"),
    [(0.0, []), (-0.3, ["difference", "kl"]), (-0.15, ["kl"])],
)
async def test_planted_difference_causes_an_alarm(
    shift: float, alarms: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = GrpoSettings(groups=1, tolerance=1.0)  # accept the rows, so that training continues
    steps, events = await run_steps(shift, settings, tmp_path)
    for step, event in zip(steps, events, strict=True):
        [same] = step.measured.mismatch
        assert same.lag == 0 and same.tokens == step.measured.tokens
        assert same.mean == pytest.approx(-shift, abs=1e-3) and same.k1 == pytest.approx(shift, abs=1e-3)
        assert [alarm.kind for alarm in step.alarms] == alarms == [one["kind"] for one in event.data["alarms"]]
        TrainingDisplay(console(), 2).print_step(step, StepTime(whole=1, training=1, sampling=0, turngate=0))
    assert ("alarm" in capsys.readouterr().out) == bool(alarms)


async def test_report_precedes_a_stop(tmp_path: Path) -> None:
    async with training_gateway(tmp_path, engine=shifted_engine(-0.3)) as here:
        with pytest.raises(LogprobMismatch):
            await _train(here, 1)
        [event] = await reports(here.client)
    assert [one["kind"] for one in event.data["alarms"]] == ["difference", "kl"]


async def test_failed_report_does_not_hide_why_training_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise TakenOver("another reader has taken over the feed")

    monkeypatch.setattr(Feed, "report_lags", fail)
    async with training_gateway(tmp_path, engine=shifted_engine(-0.3)) as here:
        with pytest.raises(LogprobMismatch):
            await _train(here, 1)
