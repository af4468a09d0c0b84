"""All checks, and how they run: concurrently, each with a time limit. Every error becomes a finding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from turngate.common.safe_text import sanitize_line
from turngate.doctor import agents_and_sandboxes, engine, gateway, machine, tokenizer
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckOutcome, DoctorCheck, Finding, failure
from turngate.errors import TurngateError
from turngate.telemetry.logs import redact

CHECKS = (
    DoctorCheck(
        name="python",
        where="anywhere",
        timeout_s=5,
        run=machine.check_python,
        description="Python 3.11 or newer, on Linux.",
    ),
    DoctorCheck(
        name="extras",
        where="anywhere",
        timeout_s=10,
        run=machine.check_extras,
        description="The extras that the settings need are installed; also lists the others.",
    ),
    DoctorCheck(
        name="data folder",
        where="here",
        timeout_s=20,
        run=machine.check_data,
        description="It is writable, locks and SQLite's write-ahead log work there, and its recordings can be read.",
    ),
    DoctorCheck(
        name="disk",
        where="here",
        timeout_s=5,
        run=machine.check_disk,
        description="Free disk space for recordings: 2 GB recommended, 0.2 GB required.",
    ),
    DoctorCheck(
        name="admin key",
        where="here",
        timeout_s=5,
        run=machine.check_keys,
        description="It is long enough, and only its owner can read its file; the same for the metrics key.",
    ),
    DoctorCheck(
        name="port",
        where="here",
        timeout_s=10,
        run=machine.check_port,
        description="It is free. If not, names its owner.",
    ),
    DoctorCheck(
        name="clock",
        where="anywhere",
        timeout_s=5,
        run=machine.check_clock,
        description="The wall clock runs steadily: it does not jump against the monotonic clock.",
    ),
    DoctorCheck(
        name="open files",
        where="anywhere",
        timeout_s=5,
        run=machine.check_open_files,
        description="The hard limit allows 8,192 open files: a session needs two.",
    ),
    DoctorCheck(
        name="memory",
        where="anywhere",
        timeout_s=5,
        run=machine.check_memory,
        description="Half a gigabyte is free, on the machine or in this container.",
    ),
    DoctorCheck(
        name="engine",
        where="here",
        timeout_s=30,
        run=engine.check_reachable,
        description="Each replica answers, and serves the model under the configured name.",
    ),
    DoctorCheck(
        name="engine call",
        where="here",
        timeout_s=120,
        run=engine.check_call,
        description="A real call of four tokens: the engine accepts ids, returns ids with log-probabilities, and sees the prompt as sent.",
    ),
    DoctorCheck(
        name="log-probabilities",
        where="here",
        timeout_s=120,
        run=engine.check_logprobs,
        description="They are those of the sampled distribution (processed), not from before temperature and truncation (raw).",
    ),
    DoctorCheck(
        name="engine clock",
        where="here",
        timeout_s=10,
        run=engine.check_clock,
        description="This clock is within five seconds of the engine's (its Date header).",
    ),
    DoctorCheck(
        name="template",
        where="here",
        timeout_s=120,
        run=tokenizer.check_template,
        description="The chat template is certified: extending the sampled ids equals a full render.",
    ),
    DoctorCheck(
        name="tokenizer",
        where="here",
        timeout_s=120,
        run=tokenizer.check_agreement,
        description="The engine agrees: the same ids for a text, the same text for ids, and (vLLM) the same ids for conversations.",
    ),
    DoctorCheck(
        name="gateway",
        where="gateway",
        timeout_s=30,
        run=gateway.check_reachable,
        description="It answers, accepts the key, and does not hold all calls at its fence.",
    ),
    DoctorCheck(
        name="gateway engines",
        where="gateway",
        timeout_s=15,
        run=gateway.check_engines,
        description="Its engines are up.",
    ),
    DoctorCheck(
        name="gateway call",
        where="gateway",
        timeout_s=120,
        run=gateway.check_call,
        description="Opens a session, makes a call, checks its training row, and deletes the session.",
    ),
    DoctorCheck(
        name="gateway clock",
        where="gateway",
        timeout_s=10,
        run=gateway.check_clock,
        description="The gateway's clock is within five seconds of this one.",
    ),
    DoctorCheck(
        name="gateway load",
        where="gateway",
        timeout_s=15,
        run=gateway.check_load,
        description="Its event loop is responsive, its workers answer, its engine calls succeed.",
    ),
    DoctorCheck(
        name="agents",
        where="anywhere",
        timeout_s=60,
        run=agents_and_sandboxes.check_agents,
        description="The pinned versions are installed, and so are the Node, glibc or Python that they need.",
    ),
    DoctorCheck(
        name="sandboxes",
        where="anywhere",
        timeout_s=180,
        run=agents_and_sandboxes.check_sandboxes,
        description="One of each kind really starts, runs `true`, and has no network.",
    ),
)


async def diagnose(context: DoctorContext, only: Sequence[str] = ()) -> list[Finding]:
    """Run every check that applies, in the order of the table."""
    scopes = ("gateway", "anywhere") if context.gateway else ("here", "anywhere")
    checks = [check for check in CHECKS if (check.name in only if only else check.where in scopes)]
    groups = await asyncio.gather(*(_run_check(check, context) for check in checks))
    return [finding for findings in groups for finding in findings]


async def _run_check(check: DoctorCheck, context: DoctorContext) -> list[Finding]:
    start = time.monotonic()
    try:
        async with asyncio.timeout(check.timeout_s):
            results = await check.run(context)
    except TimeoutError:
        results = [failure(f"no answer within {check.timeout_s:.0f} s", "find out what it waits for, and try again")]
    except TurngateError as error:
        fix = "correct that setting" if error.boundary == "config" else "correct that, and try again"
        results = [failure(error.message, fix)]
    except OSError as error:
        message = f"{error.strerror or error} {error.filename or ''}".strip()
        results = [failure(message, "correct that, and try again")]
    return [_build_finding(check, result, time.monotonic() - start) for result in results]


def _build_finding(check: DoctorCheck, result: CheckOutcome, seconds: float) -> Finding:
    """Remove secrets and control characters: parts of the text come from engines and other programs."""
    return Finding(
        check=check.name,
        state=result.state,
        message=redact(sanitize_line(result.message)),
        fix=redact(sanitize_line(result.fix)),
        seconds=round(seconds, 3),
    )
