"""Run TRL's weight sync inside the gateway's fence: new calls wait until the weights are sent, then use the next version.

    trainer = AsyncGRPOTrainer(…, rollout_worker=worker)
    fence_weight_sync(trainer, "http://127.0.0.1:8080")

The weights are sent by TRL (over NCCL to vLLM) or by the trainer's own `weight_transfer`.

A trainer may die during the transfer. Until the first weight is sent, the engine has the old weights. The pause therefore has a time limit,
after which calls continue at the old version. Once sending has started, there is no limit, because the engine then has a mix of two
versions, and rows sampled from that mix could not be told apart from good ones. Calls then wait, even after the gateway restarts, until a
trainer has sent all weights (TRL does so when it starts), or until an operator restarts the engine and resumes the fence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.client.protocol import PauseMode
from turngate.client.retry import retry_while_unreachable
from turngate.common.loop_thread import LoopThread
from turngate.errors import TurngateError

log = logging.getLogger("turngate")
LIMIT_S = 900.0


class WeightTransfer(Protocol):
    """The methods of TRL's `WeightTransferProtocol`."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class FenceReopened(TurngateError):
    """The fence reopened before the weights could be sent."""

    kind = "fence_open"


def fence_weight_sync(
    trainer: Any, gateway: str, *, admin_key: str = "", pause: PauseMode = "hold", limit_s: float = LIMIT_S
) -> None:
    """Wrap a trainer's weight transfer, so that it runs inside the gateway's fence.

    This has no effect on ranks that send no weights, or if TRL publishes adapters under new names. New adapters need no fence, because
    calls in flight keep their adapter.
    """
    if trainer.weight_transfer is not None:
        trainer.weight_transfer = FencedTransfer(
            trainer.weight_transfer, gateway, admin_key=admin_key, pause=pause, limit_s=limit_s
        )


class FencedTransfer:
    """A weight transfer that runs inside the gateway's fence.

    With `pause="hold"`, calls in flight continue with the new weights, and their turns record both versions. With `"drain"`, the pause
    waits until those calls have ended. `limit_s` limits the time from the pause to the first weight. For a drain, it must exceed the
    duration of the longest call.
    """

    def __init__(
        self,
        inner: WeightTransfer,
        gateway: str,
        *,
        admin_key: str = "",
        pause: PauseMode = "hold",
        limit_s: float = LIMIT_S,
    ) -> None:
        self._inner = inner
        self._gateway = GatewayClient(gateway, admin_key or read_admin_key())
        self._mode: PauseMode = pause
        self._limit_s = limit_s
        self._thread = LoopThread("turngate-fence")
        self._version: int | None = None  # the version when the fence was closed; None: the fence is open
        self._sending = False  # True while the engine may have a mix of old and new weights

    def init_weight_transfer(self) -> None:
        self._thread.start()
        self._thread.run(self._gateway.__aenter__())
        self._inner.init_weight_transfer()

    def pause(self) -> None:
        fence = self._thread.run(retry_while_unreachable(lambda: self._gateway.pause(self._mode, self._limit_s)))
        if not fence.paused:
            raise FenceReopened(
                f"calls in flight did not end within {self._limit_s:g} s, so the fence reopened; increase limit_s, or use pause='hold'"
            )
        self._version = fence.version
        self._inner.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        # No time limit from here on. This cannot be a drain: the engine is paused, so its calls would not end.
        self._thread.run(retry_while_unreachable(lambda: self._gateway.pause("hold")))
        self._sending = True
        self._inner.send_weights(iterator)

    def resume(self) -> None:
        assert self._version is not None, "TRL pauses before it resumes"
        next_version = self._version + 1
        # Resume the gateway first: as soon as the engine resumes, calls in flight sample from the new version.
        self._thread.run(retry_while_unreachable(lambda: self._gateway.resume(next_version)))
        self._version, self._sending = None, False
        self._inner.resume()

    def destroy(self) -> None:
        with ExitStack() as stack:
            if self._thread.is_running:
                stack.callback(self._thread.stop)
                stack.callback(lambda: self._thread.run(self._gateway.__aexit__(None, None, None)))
                stack.callback(self._release_fence)
            stack.callback(self._inner.destroy)
            if self._version is not None and not self._sending:  # the engine still has its complete old weights
                self._inner.resume()

    def _release_fence(self) -> None:
        """Open the fence if it is still closed, unless the engine may have a mix of old and new weights."""
        if self._version is None:
            return
        if self._sending:
            log.warning(
                "the weight update was not completed, and the engine may have a mix of two versions, so the gateway at %s stays paused; to "
                "continue, start a trainer, which sends all weights, or restart the engine and call POST /admin/fence/resume",
                self._gateway.url,
            )
            return
        try:
            self._thread.run(self._gateway.resume())
        except TurngateError as error:
            log.warning(
                "could not resume the gateway at %s, which stays paused for up to %g s: %s",
                self._gateway.url,
                self._limit_s,
                error.message,
            )


class NoTransfer:
    """A transfer that sends nothing, for an engine that shares its weights with the trainer or whose weights never change."""

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in iterator:  # iterating gathers sharded parameters, which all ranks must do together
            pass

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass
