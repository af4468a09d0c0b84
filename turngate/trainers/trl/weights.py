"""TRL's weight sync inside the gateway's fence: new calls wait, the weights go over, and what follows is of the next version.

    trainer = AsyncGRPOTrainer(…, rollout_worker=worker)
    fenced(trainer, "http://127.0.0.1:8080")

How the weights go over stays TRL's business (NCCL into vLLM), or that of whatever was given to the trainer as `weight_transfer`.

A trainer may die in the middle of it. Until the first weight is sent the engine has the old ones, so the pause has a limit, after which
calls go on at the old version. From then on it has none: what the engine holds is neither version, and nothing that it samples could be
told apart from good rows. Calls wait, also in a gateway that is started again, until a trainer has sent all of its weights (TRL does that
first of all when it is started), or until somebody resumes by hand an engine that was started anew.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from turngate.client.gateway import GatewayClient
from turngate.client.keys import read_admin_key
from turngate.client.protocol import PauseMode
from turngate.common.loop_thread import LoopThread
from turngate.errors import TurngateError
from turngate.trainers.trl.retry import patiently

log = logging.getLogger("turngate")
LIMIT_S = 900.0


class Transfer(Protocol):
    """TRL's `WeightTransferProtocol`."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


class NotHeld(TurngateError):
    """The fence was open again before the weights could be sent."""

    kind = "fence_open"


def fenced(
    trainer: Any, gateway: str, *, admin_key: str = "", pause: PauseMode = "hold", limit_s: float = LIMIT_S
) -> None:
    """Put a trainer's weight sync inside the fence. On ranks that send none, and where TRL publishes adapters under new names (calls in
    flight keep theirs, and need no fence), nothing changes."""
    if trainer.weight_transfer is not None:
        trainer.weight_transfer = FencedTransfer(
            trainer.weight_transfer, gateway, admin_key=admin_key, pause=pause, limit_s=limit_s
        )


class FencedTransfer:
    """`pause`: "hold" lets calls in flight go on, at the new weights as soon as they are there (their turns tell both versions);
    "drain" waits for their end first. `limit_s`: from the pause to the first weight; more than the longest call takes, for a drain."""

    def __init__(
        self,
        inner: Transfer,
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
        self._version: int | None = None  # at which the fence was closed; None: it is open
        self._sending = False  # the engine's weights may be neither the old nor the new ones

    def init_weight_transfer(self) -> None:
        self._thread.start()
        self._thread.run(self._gateway.__aenter__())
        self._inner.init_weight_transfer()

    def pause(self) -> None:
        told = self._thread.run(patiently(lambda: self._gateway.pause(self._mode, self._limit_s)))
        if not told["paused"]:
            raise NotHeld(
                f"limit_s: calls in flight did not end within {self._limit_s:g} s, and calls go on; raise it, or pause with hold"
            )
        self._version = int(told["version"])
        self._inner.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        # Without a limit from here on. Not a drain: the engine is paused by now, and calls in it would not end.
        self._thread.run(patiently(lambda: self._gateway.pause("hold")))
        self._sending = True
        self._inner.send_weights(iterator)

    def resume(self) -> None:
        assert self._version is not None, "TRL pauses before it resumes"
        next_version = self._version + 1
        # The gateway first: what calls in flight sample from here on is of the new version.
        self._thread.run(patiently(lambda: self._gateway.resume(next_version)))
        self._version, self._sending = None, False
        self._inner.resume()

    def destroy(self) -> None:
        try:
            self._inner.destroy()
        finally:
            if self._thread.is_running:
                try:
                    self._left()
                finally:
                    self._thread.run(self._gateway.__aexit__(None, None, None))
                    self._thread.stop()

    def _left(self) -> None:
        """What becomes of a fence that TRL did not open."""
        if self._version is None:
            return
        if self._sending:
            log.warning(
                "the weights did not all go over: %s stays paused, since nobody knows what would be sampled; it goes on when a trainer "
                "has sent all of them, or, with an engine that was started anew, after POST /admin/fence/resume",
                self._gateway.url,
            )
            return
        try:
            self._thread.run(self._gateway.resume())
        except TurngateError as error:
            log.warning("%s stays paused for up to %g s: %s", self._gateway.url, self._limit_s, error.message)


class NoTransfer:
    """For an engine that shares its weights with the trainer, or whose weights stay as they are."""

    def init_weight_transfer(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        for _ in iterator:  # sharded parameters are gathered by it, on all ranks at once
            pass

    def resume(self) -> None:
        pass

    def destroy(self) -> None:
        pass
