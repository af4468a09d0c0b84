"""Tests for TRL's weight sync inside the gateway's fence."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kit import gateway, say
from tests.trainers.inside_trl.kit import in_thread, run_rollout, running_worker
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
        await in_thread(transfer.init_weight_transfer)
        await in_thread(transfer.pause)
        waiting = asyncio.create_task(run_rollout(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.2)
        assert not waiting.done() and g.app.fence.paused
        await in_thread(transfer.send_weights, iter([("lm_head", None)]))
        await in_thread(transfer.resume)
        [turn] = await g.turns(await waiting)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        assert sent.done == ["pause", "lm_head", "resume"]
        await in_thread(transfer.destroy)


async def test_worker_and_fence_versions_stay_in_step() -> None:
    """TRL calls `resume` and then `update_model_version`; the version increases once."""
    async with gateway([say("Yes.")] * 3) as g:
        transfer = FencedTransfer(NoTransfer(), g.root, admin_key=g.app.admin_key)
        await g.resume(7)
        await in_thread(transfer.init_weight_transfer)
        async with running_worker(g, n=1, start=False) as worker:
            for version in (1, 2, 3):
                await in_thread(transfer.pause)
                await in_thread(transfer.resume)
                await in_thread(worker.update_model_version, version)
                assert g.app.fence.version == 7 + version
        await in_thread(transfer.destroy)


async def test_adapter_names_follow_trl_versions() -> None:
    async with gateway([say("Yes.")] * 3) as g, GatewayClient(g.root, g.app.admin_key) as client:
        async with running_worker(g, n=1, start=False, adapter="trl-policy") as worker:
            for version in (1, 2):
                await in_thread(worker.update_model_version, version)
                assert (g.app.fence.version, g.app.fence.model) == (version, f"trl-policy-v{version}")
        assert (await client.fence()).version == 2


async def test_partial_weight_sync_leaves_gateway_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The engine then has mixed weights; calls continue once the next trainer has sent complete ones."""
    async with gateway([say("Yes.")]) as g:
        transfer = FencedTransfer(RecordingTransfer(breaks="send"), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await in_thread(transfer.init_weight_transfer)
        await in_thread(transfer.pause)
        with pytest.raises(RuntimeError, match="the link is down"):
            await in_thread(transfer.send_weights, iter([]))
        with caplog.at_level(logging.WARNING, "turngate"):
            await in_thread(transfer.destroy)
        assert "stays paused" in caplog.text
        waiting = asyncio.create_task(run_rollout(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.6)
        assert g.app.fence.paused and g.app.fence.version == 0 and not waiting.done()
        again = FencedTransfer(RecordingTransfer(), g.root, admin_key=g.app.admin_key)
        await in_thread(again.init_weight_transfer)
        await in_thread(again.pause)
        await in_thread(again.send_weights, iter([]))
        await in_thread(again.resume)
        [turn] = await g.turns(await waiting)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        await in_thread(again.destroy)


async def test_sync_aborted_before_first_weight_resumes_calls() -> None:
    async with gateway([say("Yes.")] * 2) as g:
        gone = FencedTransfer(RecordingTransfer(), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await in_thread(gone.init_weight_transfer)
        await in_thread(gone.pause)
        [turn] = await g.turns(await run_rollout(g, "a", 1.0, turns=1))  # the engine still has the complete old weights
        assert (turn["version_start"], g.app.fence.paused) == (0, False)
        await in_thread(gone.destroy)
        failed = FencedTransfer(RecordingTransfer(breaks="pause"), g.root, admin_key=g.app.admin_key)
        await in_thread(failed.init_weight_transfer)
        with pytest.raises(RuntimeError, match="the link is down"):
            await in_thread(failed.pause)
        assert g.app.fence.paused
        await in_thread(failed.destroy)
        assert not g.app.fence.paused and g.app.fence.version == 0


async def test_engine_is_resumed_if_no_weight_was_sent() -> None:
    """The engine holds calls while it is paused, so it must not stay paused when the gateway lets calls through."""
    async with gateway([say("Yes.")] * 2) as g:
        transfer = FencedTransfer(sent := RecordingTransfer(), g.root, admin_key=g.app.admin_key)
        await in_thread(transfer.init_weight_transfer)
        await in_thread(transfer.pause)
        await in_thread(transfer.destroy)
        assert sent.done == ["pause", "resume"] and not g.app.fence.paused


def test_rank_without_transfer_has_no_fence() -> None:
    trainer = SimpleNamespace(weight_transfer=None)
    fence_weight_sync(trainer, "http://127.0.0.1:1", admin_key="k")
    assert trainer.weight_transfer is None
