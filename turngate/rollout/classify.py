"""From how a rollout ended to its class and reward. Only what an agent did is graded; what others did to it never is."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from turngate.errors import Boundary
from turngate.rollout.outcome import Fault, Outcome
from turngate.rollout.spec import EndAction, EndPolicy
from turngate.store.outcomes import OutcomeClass, RecordedOutcome
from turngate.tasks.grading.grade import grade
from turngate.tasks.grading.types import Grade, GradingEnvironment, Work
from turngate.tasks.task import Task

TRIES = 3  # of a grading that something else than the work made fail
BACK_OFF_S = 1.0  # before the second try; four times as long before the third
LOG = 4000  # characters of each log that the gateway keeps: its end
# Whose fault makes which class. An engine, a sandbox, a store, a gateway: none of them is the agent.
_CLASSES: Mapping[Boundary, OutcomeClass] = {"task": "invalid task", "agent": "agent failed"}


def without_grading(outcome: Outcome, policy: EndPolicy) -> Grade | None:
    """The grade of a rollout whose work no grader has to look at; None: one has to."""
    if outcome.fault is not None:
        return Grade(kind=blamed(outcome.fault), message=outcome.fault.message)
    if outcome.status != "finished" and not outcome.turns:
        return Grade(
            kind="agent failed", message=f"it {_ended(outcome)} before its first turn: there is nothing to grade"
        )
    chosen: Mapping[str, EndAction] = {"timed out": policy.timed_out, "failed": policy.failed, "limit": policy.limit}
    match chosen.get(outcome.status, "grade"):
        case "exclude":
            return Grade(kind="agent failed", message=f"it {_ended(outcome)}, and is left out for that")
        case "zero":
            return Grade(kind="agent failed", reward=0.0, message=f"it {_ended(outcome)}, and that counts as 0")
        case _:
            return None


def lost(work: Work, policy: EndPolicy) -> Grade:
    """Nothing can be graded, by the agent's own doing. Where that had no price, it would be a way out of every bad grade."""
    return Grade(kind="agent failed", reward=0.0 if policy.lost == "zero" else None, message=work.lost)


def blamed(fault: Fault) -> OutcomeClass:
    return _CLASSES.get(fault.boundary, "infrastructure fault")


async def graded(task: Task, work: Work, ground: GradingEnvironment) -> Grade:
    """By the task's grader. A fault of the infrastructure is tried again, with the same work: the agent never runs twice."""
    tries = 1
    while True:
        found = await grade(task, work, ground)
        if found.kind != "infrastructure fault" or tries == TRIES:
            return found
        await asyncio.sleep(BACK_OFF_S * 4 ** (tries - 1))
        tries += 1


def _ended(outcome: Outcome) -> str:
    match outcome.status:
        case "timed out":
            return "ran out of time"
        case "limit":
            return f"met the limit of its session ({outcome.stop.replace('_', ' ')})"
        case _:
            return f"ended with exit code {outcome.exit_code}"


def recorded(outcome: Outcome) -> RecordedOutcome:
    """What the gateway keeps beside the trace: enough to make samples of it, and to see what went wrong. Files stay with the runner.

    The same for the same rollout, whenever it is asked for: the gateway takes no second one that differs."""
    assert outcome.kind is not None
    grade = outcome.grade
    logs = {
        "stdout": outcome.collected.stdout,
        "stderr": outcome.collected.stderr,
        "verifier": "" if grade is None else grade.log,
    }
    fault = outcome.fault
    return RecordedOutcome(
        kind=outcome.kind,
        reward=outcome.reward,
        resolved=None if outcome.grade is None else outcome.grade.resolved,
        group=outcome.group,
        task=outcome.task,
        attempt=outcome.attempt,
        message="" if outcome.grade is None else outcome.grade.message,
        data={
            "rollout": outcome.rollout,
            "status": outcome.status,
            "agent": outcome.agent,
            "sandbox": outcome.sandbox,
            "exit_code": outcome.exit_code,
            "seconds": {stage: spent for stage, spent in outcome.seconds.items() if stage != "record"},
            "logs": {name: text[-LOG:] for name, text in logs.items() if text},
            **({} if fault is None else {"fault": {"stage": fault.stage, "boundary": fault.boundary}}),
        },
    )
