"""A complete training run for `test_grpo_crash.py` to kill: gateway, engine, trainer, and rollouts without agents.

python -m tests.trainers.grpo_run FOLDER STEPS EVERY
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from pathlib import Path

from tests.engines.local_kit import model
from tests.trainers.test_grpo import VOCABULARY, N, TrainingGateway, share_of_even, training_gateway
from turngate.client.feed import Feed
from turngate.client.protocol import FeedConfig
from turngate.engines.local import LocalEngine
from turngate.trainers.local.grpo import GrpoSettings, Step, Trainer

AHEAD = 3  # groups produced ahead of the trainer, so that some are stale


async def produce_groups(here: TrainingGateway, trainer: Trainer) -> None:
    for number in itertools.count():
        while (await here.client.show_feed("f")).newest >= trainer.state.number + AHEAD:
            await asyncio.sleep(0.01)
        await here.group(f"{os.getpid()}.{number}", share_of_even)


def print_step(step: Step) -> None:
    print(f"step {step.step} deliveries {step.first} to {step.last}", flush=True)


async def main(folder: Path, steps: int, every: int) -> None:
    engine = LocalEngine(model(vocabulary=VOCABULARY), slots=8, flush_s=0.0)
    async with training_gateway(folder / "data", engine) as here:
        trainer = Trainer(
            engine, here.client, GrpoSettings(groups=2), folder=folder / "checkpoints", every=every, watch=print_step
        )
        await trainer.restore()
        async with await Feed.open(here.client, "f", FeedConfig(n=N), after=trainer.state.number) as feed:
            rolling = asyncio.create_task(produce_groups(here, trainer))
            await trainer.run(feed, steps)
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)
        print(f"committed {(await here.client.show_feed('f')).committed}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
