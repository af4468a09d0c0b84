"""Test what a gateway's rows carry besides ids, mask and log-probabilities. Each feature has its own rollout, in a gateway of its own."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable

import aiohttp

from gauntlet.agent import Agent, build_script
from gauntlet.clients import CLIENTS
from gauntlet.features import FEATURES, judge
from gauntlet.gateways.base import CannotStart, Gateway
from gauntlet.gateways.delivery import Feature, Verdict
from gauntlet.scenario import Answer, Results, Rewind, Say, Scenario, Start, ask, bash
from gauntlet.trial import ROLLOUT_LIMIT_S, MockEngine, Trial, raise_if_cancelled, start_gateway

SCENARIO = Scenario(
    "row-data",
    "Three turns, of which the second is slow, and a branch from before the third.",
    (
        Start("Find out why the test fails.", system="You are a careful programmer."),
        ask(Answer(text="I look at the test first.", calls=(bash("cat tests/test_sum.py"),))),
        Results(("assert total([1, 2]) == 3",)),
        ask(Answer(text="Now I look at the function that it tests.", calls=(bash("cat src/sum.py"),), pace_s=0.05)),
        Results(("def total(values): return sum(values) - 1",)),
        ask(Answer(text="The function subtracts one from the sum.")),
        Rewind(),
        Say("Answer with one word."),
        ask(Answer(text="Off-by-one."), causes=("branch",)),
    ),
    rows=2,
)
REWARDS = (0.5, 0.0, 0.25, -0.125)  # of the turns, in their order
_SLOW_TURN = 1  # the index of the turn during which the weights change
_BOXES = re.compile("[\u2500-\u257f]+")
_DIALECT = "chat"  # which every gateway supports
_DELIVERY_LIMIT_S = 600.0  # trainers take long to import


async def probe_features(
    make: Callable[[], Gateway], http: aiohttp.ClientSession, mock: MockEngine
) -> dict[Feature, Verdict]:
    """Test every feature of a gateway. If the task is cancelled, raise `CancelledError`: an interrupted test has no verdict."""
    verdicts: dict[Feature, Verdict] = {}
    for feature in FEATURES:
        gateway = make()
        if feature in gateway.untested:
            verdicts[feature] = Verdict("not tested", gateway.untested[feature])
            continue
        try:
            if feature in gateway.lacks:
                await gateway.install()
                verdicts[feature] = gateway.lacks[feature].check(gateway.packages)
            else:
                verdicts[feature] = await _probe(gateway, feature, http, mock)
        except CannotStart as error:
            raise_if_cancelled()
            verdicts[feature] = Verdict("not tested", _to_line(error))
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            raise_if_cancelled()
            verdicts[feature] = Verdict("wrong", f"{type(error).__name__}: {_to_line(error)}")
    return verdicts


def _to_line(error: Exception) -> str:
    """Return an error message as one line, without the boxes that command-line programs draw."""
    return " ".join(_BOXES.sub(" ", str(error)).split())[:300]


async def _probe(gateway: Gateway, feature: Feature, http: aiohttp.ClientSession, mock: MockEngine) -> Verdict:
    gateway.feature = feature
    await mock.set_extras(
        {"experts": gateway.expert_format if feature == "experts" else "", "masks": feature == "masks"}
    )
    try:
        async with start_gateway(gateway, http, mock) as trial, asyncio.timeout(ROLLOUT_LIMIT_S + _DELIVERY_LIMIT_S):
            return await _run_rollout(trial, feature)
    finally:
        await mock.set_extras({})


async def _run_rollout(trial: Trial, feature: Feature) -> Verdict:
    gateway, mock, name = trial.gateway, trial.mock, secrets.token_hex(6)
    await mock.add_steps(build_script(SCENARIO, name))
    session = await gateway.open(trial.http, name)
    agent = Agent(trial.http, CLIENTS[_DIALECT], SCENARIO, name, session.base_url, session.key, stream=False)
    others = [_change_weights(trial, name)] if feature == "versions" else []
    await asyncio.gather(agent.play(), *others)
    if agent.played.error:
        return Verdict("wrong", agent.played.error)
    log = await mock.log(name)
    await mock.forget(name)
    delivery = await gateway.deliver(trial.http, session, [entry["ids"] for entry in log], REWARDS)
    return judge(feature, delivery, log, REWARDS)


async def _change_weights(trial: Trial, rollout: str) -> None:
    """Change the engine's weights while it samples the slow turn."""
    while True:
        log = await trial.mock.log(rollout)
        if len(log) > _SLOW_TURN and len(log[_SLOW_TURN]["ids"]) > 3:
            break
        await asyncio.sleep(0.05)
    await trial.gateway.update_weights(trial.http, 1)
