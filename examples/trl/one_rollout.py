"""Run one SWE rollout by hand: an agent works on a task, the host grades it, and the rows are printed as TRL receives them.

    python examples/trl/one_rollout.py --task swe-rows.jsonl --only django__django-11099 --sandbox docker \\
        --gateway http://127.0.0.1:8700 --model Qwen/Qwen3-8B          # with TURNGATE_ADMIN_KEY set
    python examples/trl/one_rollout.py --dry-run                       # a tiny model with random weights, on this CPU

`TurngateWorker` does the same for n rollouts of every task, repeatedly.
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


async def run_rollout(options: argparse.Namespace, gateway: GatewayClient, folder: Path) -> tuple[Outcome, Delivery]:
    """Run a rollout as a group of one, whose advantage is its reward, and return its outcome and its delivery."""
    [task] = tasks.read_tasks(options.task, only=[options.only] if options.only else (), limit=1)
    agent = find_agent(options.agent).spec
    spec = RolloutSpec(
        task=task,
        agent=agent,
        installed=ensure_installed(agent, lambda line: print(line, file=sys.stderr)),
        backend=get_backend(options.sandbox),
        model=options.model,
        timeout_s=options.timeout,
        session={"limits": {"turns": options.turns}, **({"max_tokens": options.tokens} if options.tokens else {})},
        folder=folder,
        group=f"{FEED}.{os.getpid()}",
    )
    feed_config = FeedConfig(n=1, advantage="none", groups=f"{FEED}.")
    async with await Feed.open(gateway, FEED, feed_config) as feed, GatewayConnector(gateway.url) as connector:
        outcome = await Rollout(
            spec, gateway, connector, lambda progress: print(f"  {progress.stage}", file=sys.stderr)
        ).run()
        if outcome.reward is None:
            raise SystemExit(f"{outcome.kind or outcome.status}: {outcome.fault or outcome.grade}")
        delivery = await feed.next(30)
        assert delivery is not None, "a rollout with a reward completes its group"
        await feed.commit(delivery.number)
        return outcome, delivery


def print_rows(outcome: Outcome, delivery: Delivery) -> None:
    print(f"{outcome.agent} on {outcome.task}: {outcome.status}, turns: {outcome.turns}, reward {outcome.reward:g}")
    print(f"to see it: turngate show {outcome.session}")
    for item in build_items(delivery, base=0).items:
        row = item.sample
        mask = row.completion_mask.astype(bool)
        print(
            f"row of {len(row.input_ids)} tokens, {mask.sum()} trained, mean log-probability {row.old_log_probs[mask].mean():.3f}, "
            f"advantage {row.advantage:g}, policy version {row.model_version}"
        )
    for rollout in delivery.rollouts:
        for span in (span for row in rollout.rows for span in row.spans):
            print(f"  turn {span.node}: tokens {span.start} to {span.end}, {span.role}, {span.reason or 'trained'}")


async def main(options: argparse.Namespace, url: str, key: str) -> None:
    with tempfile.TemporaryDirectory(prefix="turngate-one-") as folder:
        async with GatewayClient(url, key) as gateway:
            print_rows(*await run_rollout(options, gateway, Path(folder)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one rollout by hand.")
    parser.add_argument("--dry-run", action="store_true", help="run a gateway and a tiny model in this process")
    parser.add_argument(
        "--task", default=str(HERE.parent / "tasks" / "fix-add"), help="task folder, or a file of SWE rows"
    )
    parser.add_argument("--only", default="", help="id of the row to run")
    parser.add_argument("--agent", default="pi")
    parser.add_argument("--sandbox", default="bubblewrap")
    parser.add_argument("--gateway", default="http://127.0.0.1:8700")
    parser.add_argument("--model", default="policy", help="the gateway's name for the model")
    parser.add_argument("--turns", type=int, default=40, help="maximum turns")
    parser.add_argument("--tokens", type=int, help="maximum tokens per turn")
    parser.add_argument("--timeout", type=float, default=1800.0)
    return parser.parse_args()


if __name__ == "__main__":
    options = parse_options()
    with ExitStack() as stack:
        if options.dry_run:
            import cpu

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-model-")))
            local = stack.enter_context(cpu.run_gateway(cpu.make_model(folder), options.model))
            options.tokens = options.tokens or 32
            asyncio.run(main(options, local.url, local.key))
        else:
            asyncio.run(main(options, options.gateway, read_admin_key()))
