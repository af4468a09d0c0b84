"""Record the outcome of a rollout at the gateway, which stores it with the trace."""

from __future__ import annotations

import msgspec

from turngate.client.gateway import GatewayClient
from turngate.client.retry import retry_while_unreachable
from turngate.rollout.outcome import Outcome
from turngate.store.outcomes import RecordedOutcome

_LOG_CHARS = 4000  # how many characters from the end of each log are recorded


def build_record(outcome: Outcome) -> RecordedOutcome:
    """Build the record that the gateway stores. It contains what is needed to build samples and to diagnose failures, but no files.

    The same outcome must always produce the same record, because the gateway rejects a second record that differs from the first.
    """
    assert outcome.kind is not None
    grade, fault = outcome.grade, outcome.fault
    rewards = None if grade is None or outcome.reward is None else grade.turn_rewards
    logs = {
        "stdout": outcome.collected.stdout,
        "stderr": outcome.collected.stderr,
        "verifier": "" if grade is None else grade.log,
    }
    return RecordedOutcome(
        kind=outcome.kind,
        reward=outcome.reward,
        resolved=None if grade is None else grade.resolved,
        group=outcome.group,
        task=outcome.task,
        attempt=outcome.attempt,
        message="" if grade is None else grade.message,
        data={
            "rollout": outcome.rollout,
            "status": outcome.status,
            "agent": outcome.agent,
            "sandbox": outcome.sandbox,
            "exit_code": outcome.exit_code,
            "seconds": {stage: spent for stage, spent in outcome.seconds.items() if stage != "record"},
            "logs": {name: text[-_LOG_CHARS:] for name, text in logs.items() if text},
            **({} if fault is None else {"fault": {"stage": fault.stage, "boundary": fault.boundary}}),
            **({"warnings": outcome.warnings} if outcome.warnings else {}),
        },
        turn_rewards=msgspec.UNSET if rewards is None else rewards,
    )


async def record_outcome(
    gateway: GatewayClient, session: str, record: RecordedOutcome, *, wait_s: float, is_sealed: bool = False
) -> str:
    """Seal the session if necessary, and record the outcome. Wait up to `wait_s` seconds for a gateway that is restarting.

    Return why the outcome does not count, or an empty string if it does.
    """

    async def seal_and_record() -> str:
        nonlocal is_sealed
        if not is_sealed:
            await gateway.seal(session, "error")  # a session that is already sealed keeps its reason
            is_sealed = True
        return await gateway.record(session, record)

    return await retry_while_unreachable(seal_and_record, limit_s=wait_s)
