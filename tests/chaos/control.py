"""The control: damage a store on purpose, and check that the suite notices.

Rollouts are recorded by a real gateway in this process. Then the store is edited behind its back: a turn is lost, a turn is recorded twice,
an id is changed (with a valid checksum), a reward is changed. Each kind of damage must show up in its own column. The same is done to the
store of a batch, for which there is more evidence: the runner's ledger, and the output of the agents.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from tests import kit
from tests.chaos.agents import RolloutLog
from tests.chaos.batch_runs import BatchRun, read_evidence
from tests.chaos.engine import Generation, read_serials, write_answer
from tests.chaos.invariants import Breaches, RecordedRollout, check_batch, check_rollouts
from tests.verify.kit import Tampering, tampering
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn, derive_logprobs
from turngate.store.outcomes import RecordedOutcome

TURNS = 3
REWARD = 0.625


def _last_sampled(store: Tampering) -> int:
    return max(row.id for row in store.rows() if row.kind == "sampled")


def lose_turn(store: Tampering) -> None:
    store.sql("DELETE FROM nodes WHERE session=? AND id=?", store.key, _last_sampled(store))


def duplicate_turn(store: Tampering) -> None:
    last = store.row(_last_sampled(store))
    store.add(msgspec.structs.replace(last, id=last.id + 1))


def change_id(store: Tampering) -> None:
    """Change the lowest bit of the last id."""
    last = store.row(_last_sampled(store))
    store.node(last.id, ids=last.ids[:-4] + bytes([last.ids[-4] ^ 1]) + last.ids[-3:])


def change_reward(store: Tampering) -> None:
    outcome = RecordedOutcome(kind="graded", reward=REWARD + 1, task="t").encode()
    store.sql("UPDATE outcomes SET outcome=? WHERE session=?", outcome, store.key)


PLANTS: dict[str, tuple[Callable[[Tampering], None], str]] = {  # and the column that must show it
    "a lost turn": (lose_turn, "lost"),
    "a turn recorded twice": (duplicate_turn, "duplicated"),
    "a wrong id": (change_id, "inexact"),
    "a wrong reward": (change_reward, "wrong_rewards"),
}


async def run_control(plant: Callable[[Tampering], None] | None) -> Breaches:
    """Record a rollout, damage it, and return what the suite finds."""
    serials = itertools.count(1)
    generations: dict[int, Generation] = {}

    def answer(request: Generate, index: int) -> ScriptedTurn:
        turn = kit.say(write_answer(serial := next(serials)))
        prompt, ids = [int(token) for token in request.prompt], list(turn.ids)
        generations[serial] = Generation(serial, request.session, prompt, ids, [*derive_logprobs(prompt, ids)])
        return turn

    with tempfile.TemporaryDirectory(dir=kit.MEMORY_FOLDER) as name:
        async with kit.gateway(answer, data=Path(name)) as gateway:
            log = await _record_rollout(gateway)
        if plant is not None:
            with tampering(Path(name), log.session) as store:
                plant(store)
        async with kit.gateway(answer, data=Path(name)) as gateway:
            shown = await gateway.show(log.session)
            samples = await gateway.samples(log.session, keep_empty=True)
            recorded = RecordedRollout(await gateway.trace(log.session), samples, shown["outcome"])
            (Path(name) / "turngate.db").unlink()  # else tests/verify/everywhere.py finds the damage, too
    return check_rollouts([log], {log.session: recorded}, generations)


async def _record_rollout(gateway: kit.Running) -> RolloutLog:
    session = await gateway.open()
    log = RolloutLog(session.id, REWARD)
    messages = [kit.user("Work.")]
    for turn in range(TURNS):
        reply = await gateway.ask(session.key, messages)
        log.received += read_serials(reply.content or "")
        messages = [*messages, reply.message(), kit.user(f"go on {turn}")]
    await gateway.seal(session.id)
    outcome = msgspec.to_builtins(RecordedOutcome(kind="graded", reward=REWARD, task="t"))
    (await gateway.admin.put(f"/admin/sessions/{session.id}/outcome", json=outcome)).raise_for_status()
    log.is_recorded = True
    return log


async def detect_plants() -> dict[str, bool]:
    """Plant each damage, and return whether its column shows it. An undamaged rollout must be clean."""
    found = {"nothing planted, nothing found": (await run_control(None)).total == 0}
    for name, (plant, column) in PLANTS.items():
        found[name] = getattr(await run_control(plant), column) > 0
    return found


async def detect_batch_plants(run: BatchRun) -> dict[str, bool]:
    """Damage a rollout of a finished batch in each way, and return whether its column shows it."""
    before = await read_evidence(run, may_fail=True)
    guessed = {session for session, log in before.logs.items() if log.guess}
    whole = [name for name, done in before.finished.items() if done.kind == "graded" and done.session in guessed]
    assert len(whole) >= len(PLANTS), "the batch has too few complete rollouts to damage"
    chosen = dict(zip(PLANTS, whole, strict=False))
    found = {"nothing planted, nothing found": check_batch(before).total == 0}
    finished = {name: done for name, done in before.finished.items() if name != whole[0]}
    found["a lost rollout"] = check_batch(replace(before, finished=finished)).lost == 1
    await asyncio.to_thread(run.site.server.kill)
    for plant, rollout in chosen.items():
        with run.tamper(before.finished[rollout].session) as store:
            PLANTS[plant][0](store)
    run.site.server.start()
    after = await read_evidence(run, may_fail=True)
    for plant, rollout in chosen.items():
        found[plant] = getattr(check_batch(after.select(rollout)), PLANTS[plant][1]) > 0
    return found
