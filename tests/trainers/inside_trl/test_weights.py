"""Tests for TRL's weight sync inside the gateway's fence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import gateway, say
from tests.trainers.inside_trl.kit import apart, following, rolled
from turngate.client.gateway import GatewayClient
from turngate.trainers.trl.weights import FencedTransfer, NoTransfer, fence_weight_sync

pytestmark = pytest.mark.process


class RecordingTransfer(NoTransfer):
    """A transfer that records its calls and can fail at a given step."""

    def __init__(self, *, breaks: str = "") -> None:
        self.done: list[str] = []
        self._breaks = breaks

    def pause(self) -> None:
        if self._breaks == "pause":
            raise RuntimeError("the link is down")
        self.done.append("pause")

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        if self._breaks == "send":
            raise RuntimeError("the link is down")
        self.done += [name for name, _ in iterator]

    def resume(self) -> None:
        self.done.append("resume")


@pytest.mark.real
async def test_calls_wait_for_weight_sync_and_get_next_version() -> None:
    async with gateway([say("Yes.")] * 3) as g:
        trainer = SimpleNamespace(weight_transfer=(sent := RecordingTransfer()))
        fence_weight_sync(trainer, g.root, admin_key=g.app.admin_key)
        transfer = trainer.weight_transfer
        assert isinstance(transfer, FencedTransfer)
        await apart(transfer.init_weight_transfer)
        await apart(transfer.pause)
        waiting = asyncio.create_task(rolled(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.2)
        assert not waiting.done() and g.app.fence.paused
        await apart(transfer.send_weights, iter([("lm_head", None)]))
        await apart(transfer.resume)
        [turn] = await g.turns(await waiting)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        assert sent.done == ["pause", "lm_head", "resume"]
        await apart(transfer.destroy)


async def test_worker_and_fence_versions_stay_in_step() -> None:
    """TRL calls `resume` and then `update_model_version`; the version increases once."""
    async with gateway([say("Yes.")] * 3) as g:
        transfer = FencedTransfer(NoTransfer(), g.root, admin_key=g.app.admin_key)
        await g.resume(7)
        await apart(transfer.init_weight_transfer)
        async with following(g, n=1, start=False) as worker:
            for version in (1, 2, 3):
                await apart(transfer.pause)
                await apart(transfer.resume)
                await apart(worker.update_model_version, version)
                assert g.app.fence.version == 7 + version
        await apart(transfer.destroy)


async def test_adapter_names_follow_trl_versions() -> None:
    async with gateway([say("Yes.")] * 3) as g, GatewayClient(g.root, g.app.admin_key) as client:
        async with following(g, n=1, start=False, adapter="trl-policy") as worker:
            for version in (1, 2):
                await apart(worker.update_model_version, version)
                assert (g.app.fence.version, g.app.fence.model) == (version, f"trl-policy-v{version}")
        assert (await client.fence()).version == 2


async def test_partial_weight_sync_leaves_gateway_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine then has mixed weights; calls continue once the next trainer has sent complete ones."""
    async with gateway([say("Yes.")]) as g:
        transfer = FencedTransfer(RecordingTransfer(breaks="send"), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await apart(transfer.init_weight_transfer)
        await apart(transfer.pause)
        with pytest.raises(RuntimeError, match="the link is down"):
            await apart(transfer.send_weights, iter([]))
        with caplog.at_level(logging.WARNING, "turngate"):
            await apart(transfer.destroy)
        assert "stays paused" in caplog.text
        waiting = asyncio.create_task(rolled(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.6)
        assert g.app.fence.paused and g.app.fence.version == 0 and not waiting.done()
        again = FencedTransfer(RecordingTransfer(), g.root, admin_key=g.app.admin_key)
        await apart(again.init_weight_transfer)
        await apart(again.pause)
        await apart(again.send_weights, iter([]))
        await apart(again.resume)
        [turn] = await g.turns(await waiting)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        await apart(again.destroy)


async def test_sync_aborted_before_first_weight_resumes_calls() -> None:
    async with gateway([say("Yes.")] * 2) as g:
        gone = FencedTransfer(RecordingTransfer(), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await apart(gone.init_weight_transfer)
        await apart(gone.pause)
        [turn] = await g.turns(await rolled(g, "a", 1.0, turns=1))  # the engine still has the complete old weights
        assert (turn["version_start"], g.app.fence.paused) == (0, False)
        await apart(gone.destroy)
        failed = FencedTransfer(RecordingTransfer(breaks="pause"), g.root, admin_key=g.app.admin_key)
        await apart(failed.init_weight_transfer)
        with pytest.raises(RuntimeError, match="the link is down"):
            await apart(failed.pause)
        assert g.app.fence.paused
        await apart(failed.destroy)
        assert not g.app.fence.paused and g.app.fence.version == 0


def test_rank_without_transfer_has_no_fence() -> None:
    trainer = SimpleNamespace(weight_transfer=None)
    fence_weight_sync(trainer, "http://127.0.0.1:1", admin_key="k")
    assert trainer.weight_transfer is None
