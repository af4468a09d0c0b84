"""TRL's weight sync inside the gateway's fence."""

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


class Sent(NoTransfer):
    """A transfer that says what is asked of it, and may break in the middle."""

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
async def test_calls_wait_while_weights_go_over_and_are_of_the_next_version_then() -> None:
    async with gateway([say("Yes.")] * 3) as g:
        trainer = SimpleNamespace(weight_transfer=(sent := Sent()))
        fence_weight_sync(trainer, g.root, admin_key=g.app.admin_key)
        transfer = trainer.weight_transfer
        assert isinstance(transfer, FencedTransfer)
        await apart(transfer.init_weight_transfer)
        await apart(transfer.pause)
        waits = asyncio.create_task(rolled(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.2)
        assert not waits.done() and g.app.fence.paused
        await apart(transfer.send_weights, iter([("lm_head", None)]))
        await apart(transfer.resume)
        [turn] = await g.turns(await waits)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        assert sent.done == ["pause", "lm_head", "resume"]
        await apart(transfer.destroy)


async def test_the_worker_and_the_fence_count_together() -> None:
    """TRL calls `resume`, and then `update_model_version`."""
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


async def test_adapters_are_asked_for_by_the_name_that_trl_gave_them() -> None:
    async with gateway([say("Yes.")] * 3) as g, GatewayClient(g.root, g.app.admin_key) as client:
        async with following(g, n=1, start=False, adapter="trl-policy") as worker:
            for version in (1, 2):
                await apart(worker.update_model_version, version)
                assert (g.app.fence.version, g.app.fence.model) == (version, f"trl-policy-v{version}")
        assert (await client.fence()).version == 2


async def test_weights_that_did_not_all_go_over_leave_the_gateway_paused_whatever_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the engine has then is neither version. The next trainer sends whole weights first of all, and calls go on."""
    async with gateway([say("Yes.")]) as g:
        transfer = FencedTransfer(Sent(breaks="send"), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await apart(transfer.init_weight_transfer)
        await apart(transfer.pause)
        with pytest.raises(RuntimeError, match="the link is down"):
            await apart(transfer.send_weights, iter([]))
        with caplog.at_level(logging.WARNING, "turngate"):
            await apart(transfer.destroy)
        assert "stays paused" in caplog.text
        waits = asyncio.create_task(rolled(g, "a", 1.0, turns=1))
        await asyncio.sleep(0.6)
        assert g.app.fence.paused and g.app.fence.version == 0 and not waits.done()
        again = FencedTransfer(Sent(), g.root, admin_key=g.app.admin_key)
        await apart(again.init_weight_transfer)
        await apart(again.pause)
        await apart(again.send_weights, iter([]))
        await apart(again.resume)
        [turn] = await g.turns(await waits)
        assert (turn["version_start"], turn["version_end"]) == (1, 1)
        await apart(again.destroy)


async def test_a_trainer_that_dies_before_the_first_weight_keeps_nobody_waiting() -> None:
    async with gateway([say("Yes.")] * 2) as g:
        gone = FencedTransfer(Sent(), g.root, admin_key=g.app.admin_key, limit_s=0.3)
        await apart(gone.init_weight_transfer)
        await apart(gone.pause)
        [turn] = await g.turns(await rolled(g, "a", 1.0, turns=1))  # the engine has the old weights, all of them
        assert (turn["version_start"], g.app.fence.paused) == (0, False)
        await apart(gone.destroy)
        failed = FencedTransfer(Sent(breaks="pause"), g.root, admin_key=g.app.admin_key)
        await apart(failed.init_weight_transfer)
        with pytest.raises(RuntimeError, match="the link is down"):
            await apart(failed.pause)
        assert g.app.fence.paused
        await apart(failed.destroy)
        assert not g.app.fence.paused and g.app.fence.version == 0


def test_ranks_that_send_nothing_have_no_fence() -> None:
    trainer = SimpleNamespace(weight_transfer=None)
    fence_weight_sync(trainer, "http://127.0.0.1:1", admin_key="k")
    assert trainer.weight_transfer is None
