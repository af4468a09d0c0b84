"""One SWE rollout by hand: pi works on a task through a gateway, the host grades it, and the rows are printed as TRL would get them.

    python examples/trl/one_rollout.py --task swe-rows.jsonl --only django__django-11099 --sandbox docker \\
        --gateway http://127.0.0.1:8700 --model Qwen/Qwen3-8B          # TURNGATE_ADMIN_KEY is the gateway's
    python examples/trl/one_rollout.py --dry-run                       # a tiny model with random weights, on this CPU

This is what `TurngateWorker` does for n rollouts of every task, over and over, without the feed in between.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from turngate import tasks  # noqa: E402
from turngate.agents.install import ensure_installed  # noqa: E402
from turngate.agents.spec import find_agent  # noqa: E402
from turngate.client.feed import Delivery, Feed  # noqa: E402
from turngate.client.gateway import GatewayClient  # noqa: E402
from turngate.client.keys import read_admin_key  # noqa: E402
from turngate.client.protocol import FeedConfig  # noqa: E402
from turngate.rollout.connection import GatewayConnector  # noqa: E402
from turngate.rollout.outcome import Outcome  # noqa: E402
from turngate.rollout.rollout import Rollout  # noqa: E402
from turngate.rollout.spec import RolloutSpec  # noqa: E402
from turngate.sandboxes import get_backend  # noqa: E402
from turngate.trainers.trl.rows import build_items  # noqa: E402

FEED = "one-rollout"


async def rolled_out(given: argparse.Namespace, gateway: GatewayClient, folder: Path) -> tuple[Outcome, Delivery]:
    """A group of one, whose advantage is its reward."""
    [task] = tasks.read_tasks(given.task, only=[given.only] if given.only else (), limit=1)
    agent = find_agent(given.agent).spec
    order = RolloutSpec(
        task=task,
        agent=agent,
        installed=ensure_installed(agent, lambda line: print(line, file=sys.stderr)),
        backend=get_backend(given.sandbox),
        model=given.model,
        timeout_s=given.timeout,
        session={"limits": {"turns": given.turns}, **({"max_tokens": given.tokens} if given.tokens else {})},
        folder=folder,
        group=f"{FEED}.{os.getpid()}",
    )
    choices = FeedConfig(n=1, advantage="none", groups=f"{FEED}.")
    async with await Feed.open(gateway, FEED, choices) as feed, GatewayConnector(gateway.url) as connector:
        outcome = await Rollout(order, gateway, connector, lambda at: print(f"  {at.stage}", file=sys.stderr)).run()
        if outcome.reward is None:
            raise SystemExit(f"{outcome.kind or outcome.status}: {outcome.fault or outcome.grade}")
        delivery = await feed.next(30)
        assert delivery is not None, "a rollout with a reward is a whole group of one"
        await feed.commit(delivery.number)
        return outcome, delivery


def shown(outcome: Outcome, delivery: Delivery) -> None:
    print(f"{outcome.agent} on {outcome.task}: {outcome.status}, {outcome.turns} turns, reward {outcome.reward:g}")
    print(f"look at it: turngate show {outcome.session}")
    for item in build_items(delivery, base=0).items:
        row = item.sample
        mask = row.completion_mask.astype(bool)
        print(
            f"row of {len(row.input_ids)} tokens, {mask.sum()} trained, mean log-probability {row.old_log_probs[mask].mean():.3f}, "
            f"advantage {row.advantage:g}, policy version {row.model_version}"
        )
    for rolled in delivery.rollouts:
        for span in (span for row in rolled.rows for span in row.spans):
            print(f"  turn {span.node}: tokens {span.start} to {span.end}, {span.role}, {span.reason or 'trained'}")


async def main(given: argparse.Namespace, url: str, key: str) -> None:
    with tempfile.TemporaryDirectory(prefix="turngate-one-") as folder:
        async with GatewayClient(url, key) as gateway:
            shown(*await rolled_out(given, gateway, Path(folder)))


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rollout by hand.")
    parser.add_argument("--dry-run", action="store_true", help="a gateway and a tiny model in this process")
    parser.add_argument("--task", default=str(HERE.parent / "tasks" / "fix-add"), help="a task's folder, or SWE rows")
    parser.add_argument("--only", default="", help="the id of the row")
    parser.add_argument("--agent", default="pi")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--gateway", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="policy", help="as the gateway calls it")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--tokens", type=int, help="at most, of a turn")
    parser.add_argument("--timeout", type=float, default=1800.0)
    return parser.parse_args()


if __name__ == "__main__":
    given = flags()
    with ExitStack() as stack:
        if given.dry_run:
            import cpu

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-model-")))
            stage = stack.enter_context(cpu.stage(cpu.make_model(folder), given.model))
            given.tokens = given.tokens or 32
            asyncio.run(main(given, stage.url, stage.key))
        else:
            asyncio.run(main(given, given.gateway, read_admin_key()))
