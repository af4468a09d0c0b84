"""A trainer on Ray, run by `test_groups.py` with the Python of the part `ray`: two actors share one iterator over complete groups."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import ray

from turngate.client.feed import FeedConfig
from turngate.trainers.ray.groups import GroupIterator, open_groups


class Trainer:
    async def train(self, groups: GroupIterator, count: int) -> list[tuple[int, int]]:
        """Train on `count` groups. Return the number of each and its trained tokens."""
        trained = []
        async for delivery in groups:
            trained.append((delivery.number, sum(int(row.mask.sum()) for row in delivery.rows())))
            if len(trained) == count:
                return trained
        raise AssertionError("the iterator has ended")


async def main(address: str, url: str) -> None:
    ray.init(address, log_to_driver=False)
    groups = open_groups(url, "f", FeedConfig(n=2, advantage="none"))
    mark = await groups.mark()
    print(msgspec.json.encode({"mark": mark}).decode(), flush=True)  # rollouts may start
    trainers = [ray.remote(Trainer).options(num_cpus=0).remote() for _ in range(2)]
    trained = await asyncio.gather(*(trainer.train.remote(groups, 2) for trainer in trainers))
    numbers = sorted(number for part in trained for number, _ in part)
    await groups.commit(numbers[-1])
    print(msgspec.json.encode({"trained": trained}).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
