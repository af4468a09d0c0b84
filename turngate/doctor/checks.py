"""List all checks, and run them concurrently, each with a time limit. A timeout or an expected error in a check becomes a finding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from turngate.common.safe_text import sanitize_line
from turngate.doctor import agents_and_sandboxes, cell, engine, gateway, machine, tokenizer
from turngate.doctor.context import DoctorContext, NotChecked
from turngate.doctor.finding import CheckOutcome, DoctorCheck, Finding, failure, not_checked
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
        description="The extras that the settings need are installed. The check also lists the other extras.",
    ),
    DoctorCheck(
        name="data folder",
        where="here",
        timeout_s=20,
        run=machine.check_data,
        description="The data folder is writable, supports locks and SQLite's write-ahead log, and its recordings can be read.",
    ),
    DoctorCheck(
        name="shared store",
        where="here",
        timeout_s=20,
        run=cell.check_shared_store,
        description="For cells: the shared store answers, and ended sessions reach it.",
    ),
    DoctorCheck(
        name="disk",
        where="here",
        timeout_s=5,
        run=machine.check_disk,
        description="There is enough disk space for recordings: 2 GB recommended, 0.2 GB required.",
    ),
    DoctorCheck(
        name="admin key",
        where="here",
        timeout_s=5,
        run=machine.check_keys,
        description="The admin key and the metrics key are long enough, and the file `admin-key` is accessible only to its owner.",
    ),
    DoctorCheck(
        name="port",
        where="here",
        timeout_s=10,
        run=machine.check_port,
        description="The port is free or used by the gateway of this data folder. Otherwise, the check names the other program if it can.",
    ),
    DoctorCheck(
        name="clock",
        where="anywhere",
        timeout_s=5,
        run=machine.check_clock,
        description="The wall clock does not jump relative to the monotonic clock.",
    ),
    DoctorCheck(
        name="open files",
        where="anywhere",
        timeout_s=5,
        run=machine.check_open_files,
        description="The hard limit allows at least 8,192 open files. Each active session needs two.",
    ),
    DoctorCheck(
        name="memory",
        where="anywhere",
        timeout_s=5,
        run=machine.check_memory,
        description="At least 0.5 GB of memory is available on the machine and in this container.",
    ),
    DoctorCheck(
        name="engine",
        where="here",
        timeout_s=30,
        run=engine.check_reachable,
        description="Each replica responds, and serves the model under the configured name.",
    ),
    DoctorCheck(
        name="engine call",
        where="here",
        timeout_s=120,
        run=engine.check_call,
        description="A call of four tokens returns ids with log-probabilities, and vLLM reports that it received the prompt unchanged.",
    ),
    DoctorCheck(
        name="log-probabilities",
        where="here",
        timeout_s=120,
        run=engine.check_logprobs,
        description="The engine returns log-probabilities of the sampled distribution (processed), not of the original one (raw).",
    ),
    DoctorCheck(
        name="engine clock",
        where="here",
        timeout_s=10,
        run=engine.check_clock,
        description="This machine's clock is within five seconds of the engine's Date header.",
    ),
    DoctorCheck(
        name="template",
        where="here",
        timeout_s=120,
        run=tokenizer.check_template,
        description="The chat template is certified: appending to the sampled ids gives the same ids as a full render.",
    ),
    DoctorCheck(
        name="tokenizer",
        where="here",
        timeout_s=120,
        run=tokenizer.check_agreement,
        description="The engine encodes text, decodes ids and (vLLM only) renders conversations exactly as the gateway does.",
    ),
    DoctorCheck(
        name="gateway",
        where="gateway",
        timeout_s=30,
        run=gateway.check_reachable,
        description="The gateway responds, accepts the key, and is not holding all calls at its fence.",
    ),
    DoctorCheck(
        name="gateway engines",
        where="gateway",
        timeout_s=15,
        run=gateway.check_engines,
        description="The gateway's engines are up.",
    ),
    DoctorCheck(
        name="gateway call",
        where="gateway",
        timeout_s=120,
        run=gateway.check_call,
        description="A call in a new session produces a training row. The session is deleted afterwards.",
    ),
    DoctorCheck(
        name="gateway clock",
        where="gateway",
        timeout_s=10,
        run=gateway.check_clock,
        description="This machine's clock is within five seconds of the gateway's.",
    ),
    DoctorCheck(
        name="gateway load",
        where="gateway",
        timeout_s=15,
        run=gateway.check_load,
        description="The gateway's event loop is responsive, its workers respond, and its engine calls succeed.",
    ),
    DoctorCheck(
        name="agents",
        where="anywhere",
        timeout_s=60,
        run=agents_and_sandboxes.check_agents,
        description="The agents' pinned versions are installed, with the Node, glibc or Python that they need.",
    ),
    DoctorCheck(
        name="sandboxes",
        where="anywhere",
        timeout_s=180,
        run=agents_and_sandboxes.check_sandboxes,
        description="A sandbox of each chosen kind starts, runs `true` and, if it isolates the network, has no network access.",
    ),
)


async def diagnose(context: DoctorContext, only: Sequence[str] = ()) -> list[Finding]:
    """Run all checks that apply to the context, or the checks named in `only`. Return the findings in the order of `CHECKS`."""
    scopes = ("gateway", "anywhere") if context.gateway else ("here", "anywhere")
    checks = [check for check in CHECKS if (check.name in only if only else check.where in scopes)]
    groups = await asyncio.gather(*(_run_check(check, context) for check in checks))
    return [finding for findings in groups for finding in findings]


async def _run_check(check: DoctorCheck, context: DoctorContext) -> list[Finding]:
    start = time.monotonic()
    limit = asyncio.timeout(check.timeout_s)
    try:
        async with limit:
            results = await check.run(context)
    except NotChecked as error:
        results = [not_checked(error.message, error.fix)]
    except TurngateError as error:
        fix = "correct the setting" if error.boundary == "config" else "fix the problem, and run the check again"
        results = [failure(error.message, fix)]
    except OSError as error:  # also the TimeoutError of our own limit
        results = [_describe_limit(check) if limit.expired() else _describe_os_error(error)]
    return [_build_finding(check, result, time.monotonic() - start) for result in results]


def _describe_limit(check: DoctorCheck) -> CheckOutcome:
    return failure(
        f"the check did not finish within {check.timeout_s:.0f} s",
        "find out what is blocking it, and run the check again",
    )


def _describe_os_error(error: OSError) -> CheckOutcome:
    # A `TimeoutError` of a time limit inside the check has no text.
    reason = error.strerror or str(error) or "an operation timed out"
    return failure(f"{reason} {error.filename or ''}".strip(), "fix the problem, and run the check again")


def _build_finding(check: DoctorCheck, result: CheckOutcome, seconds: float) -> Finding:
    """Build a finding. Redact secrets and replace control characters, since parts of the text come from engines and other programs."""
    return Finding(
        check=check.name,
        state=result.state,
        message=redact(sanitize_line(result.message)),
        fix=redact(sanitize_line(result.fix)),
        seconds=round(seconds, 3),
    )
