"""TRL's weight sync inside the gateway's fence: new calls wait, the weights go over, and what follows is of the next version.

    trainer = AsyncGRPOTrainer(…, rollout_worker=worker)
    fenced(trainer, "http://127.0.0.1:8080")

How the weights go over stays TRL's business (NCCL into vLLM), or that of whatever was given to the trainer as `weight_transfer`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from turngate.fence import Pause
from turngate.rollout.client import GatewayClient, admin_key_given
from turngate.trainers.trl.thread import LoopThread, patiently

log = logging.getLogger("turngate")


class Transfer(Protocol):
    """TRL's `WeightTransferProtocol`."""

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None: ...

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None: ...

    def resume(self) -> None: ...

    def destroy(self) -> None: ...


def fenced(trainer: Any, gateway: str, *, admin_key: str = "", pause: Pause = "hold") -> None:
    """Put a trainer's weight sync inside the fence. On ranks that send none, and where TRL publishes adapters under new names (calls in
    flight keep theirs, and need no fence), nothing changes."""
    if trainer.weight_transfer is not None:
        trainer.weight_transfer = FencedTransfer(trainer.weight_transfer, gateway, admin_key=admin_key, pause=pause)


class FencedTransfer:
    """`pause`: "hold" lets calls in flight go on, at the new weights as soon as they are there (their turns tell both versions);
    "drain" waits for their end first."""

    def __init__(self, inner: Transfer, gateway: str, *, admin_key: str = "", pause: Pause = "hold") -> None:
        self._inner = inner
        self._gateway = GatewayClient(gateway, admin_key or admin_key_given())
        self._mode: Pause = pause
        self._thread = LoopThread("turngate-fence")
        self._version: int | None = None  # at which the fence was closed; None: it is open

    def init_weight_transfer(self) -> None:
        self._thread.run(self._gateway.__aenter__())
        self._inner.init_weight_transfer()

    def pause(self) -> None:
        self._version = int(self._thread.run(patiently(lambda: self._gateway.pause(self._mode)))["version"])
        self._inner.pause()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._inner.send_weights(iterator)

    def resume(self) -> None:
        assert self._version is not None, "TRL pauses before it resumes"
        next_version = self._version + 1
        # The gateway first: what calls in flight sample from here on is of the new version.
        self._thread.run(patiently(lambda: self._gateway.resume(next_version)))
        self._version = None
        self._inner.resume()

    def destroy(self) -> None:
        try:
            self._inner.destroy()
        finally:
            if self._version is not None:
                log.warning(
                    "the weights did not all go over: %s stays paused, since nobody knows what would be sampled; "
                    "POST /admin/fence/resume lets calls go on",
                    self._gateway.url,
                )
            if self._thread.running:
                self._thread.run(self._gateway.__aexit__(None, None, None))
                self._thread.close()


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
