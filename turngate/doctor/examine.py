"""All checks, and how they are run: side by side, each within its time, and whatever goes wrong is a finding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from turngate.common.safe_text import sanitize_line
from turngate.doctor import agents_and_sandboxes, engine, gateway, machine, tokenizer
from turngate.doctor.context import Subject
from turngate.doctor.finding import Check, Finding, Seen, failure
from turngate.errors import TurngateError
from turngate.telemetry.logs import redact

CHECKS = (
    Check(name="python", where="anywhere", within_s=5, look=machine.python, about="Python 3.11 or newer, on Linux."),
    Check(
        name="extras",
        where="anywhere",
        within_s=10,
        look=machine.extras,
        about="The extras that the settings need are installed; which others are.",
    ),
    Check(
        name="data folder",
        where="here",
        within_s=20,
        look=machine.data,
        about="It can be written, locks hold, SQLite's write-ahead log works there, and what is recorded there can be read.",
    ),
    Check(
        name="disk",
        where="here",
        within_s=5,
        look=machine.disk,
        about="Room for what is recorded: 2 GB, and 0.2 GB at least.",
    ),
    Check(
        name="admin key",
        where="here",
        within_s=5,
        look=machine.key,
        about="It is long enough, its file is its owner's alone, and so for the metrics' key.",
    ),
    Check(name="port", where="here", within_s=10, look=machine.port, about="It is free; who has it, if not."),
    Check(
        name="clock",
        where="anywhere",
        within_s=5,
        look=machine.clock,
        about="The wall clock goes on as the monotonic one does.",
    ),
    Check(
        name="open files",
        where="anywhere",
        within_s=5,
        look=machine.files,
        about="The hard limit allows 8,192: a session takes two.",
    ),
    Check(
        name="memory",
        where="anywhere",
        within_s=5,
        look=machine.memory,
        about="Half a gigabyte is free, here or in this container.",
    ),
    Check(
        name="engine",
        where="here",
        within_s=30,
        look=engine.reachable,
        about="Each replica answers, and serves the model under the name that was given.",
    ),
    Check(
        name="engine call",
        where="here",
        within_s=120,
        look=engine.call,
        about="A real call of four tokens: ids in, ids with log-probabilities out, and the prompt seen as it was sent.",
    ),
    Check(
        name="log-probabilities",
        where="here",
        within_s=120,
        look=engine.logprobs,
        about="They are of the distribution that was sampled from (processed), and not from before temperature and truncation (raw).",
    ),
    Check(
        name="engine clock",
        where="here",
        within_s=10,
        look=engine.clock,
        about="It is within five seconds of the engine's (its Date header).",
    ),
    Check(
        name="template",
        where="here",
        within_s=120,
        look=tokenizer.template,
        about="The chat template is certified: extending the sampled ids says what it would say.",
    ),
    Check(
        name="tokenizer",
        where="here",
        within_s=120,
        look=tokenizer.agreement,
        about="The engine has the same ids for a text, the same words for ids, and (vLLM) the same ids for conversations with tools.",
    ),
    Check(
        name="gateway",
        where="gateway",
        within_s=30,
        look=gateway.reachable,
        about="It answers, takes the key, and does not hold all calls at its fence.",
    ),
    Check(
        name="gateway engines", where="gateway", within_s=15, look=gateway.engines, about="Those that it has are up."
    ),
    Check(
        name="gateway call",
        where="gateway",
        within_s=120,
        look=gateway.call,
        about="A session is opened, a call made, its row looked at, and the session deleted again.",
    ),
    Check(
        name="gateway clock",
        where="gateway",
        within_s=10,
        look=gateway.clock,
        about="It is within five seconds of this one.",
    ),
    Check(
        name="gateway load",
        where="gateway",
        within_s=15,
        look=gateway.load,
        about="Its event loop is not late, its workers answer, its engine calls succeed.",
    ),
    Check(
        name="agents",
        where="anywhere",
        within_s=60,
        look=agents_and_sandboxes.agents,
        about="They are installed in the version that is pinned, and Node, glibc or the Python that they need is there.",
    ),
    Check(
        name="sandboxes",
        where="anywhere",
        within_s=180,
        look=agents_and_sandboxes.sandboxes,
        about="One of each kind is really made, runs `true`, and has no network where none was asked for.",
    ),
)


async def examine(subject: Subject, only: Sequence[str] = ()) -> list[Finding]:
    """Every check that there is something to look at for, in the table's order."""
    wanted = ("gateway", "anywhere") if subject.gateway else ("here", "anywhere")
    checks = [check for check in CHECKS if (check.name in only if only else check.where in wanted)]
    found = await asyncio.gather(*(_done(check, subject) for check in checks))
    return [finding for findings in found for finding in findings]


async def _done(check: Check, subject: Subject) -> list[Finding]:
    began = time.monotonic()
    try:
        async with asyncio.timeout(check.within_s):
            seen = await check.look(subject)
    except TimeoutError:
        seen = [failure(f"no answer within {check.within_s:.0f} s", "look at what it waits for, and try again")]
    except TurngateError as error:
        seen = [
            failure(
                error.message, "correct that setting" if error.boundary == "config" else "correct that, and try again"
            )
        ]
    except OSError as error:
        seen = [failure(f"{error.strerror or error} {error.filename or ''}".strip(), "correct that, and try again")]
    return [_finding(check, one, time.monotonic() - began) for one in seen]


def _finding(check: Check, seen: Seen, seconds: float) -> Finding:
    """With nothing secret in it, and nothing that could command a terminal: engines and programs said some of it."""
    return Finding(
        check=check.name,
        state=seen.state,
        seen=redact(sanitize_line(seen.what)),
        mend=redact(sanitize_line(seen.mend)),
        seconds=round(seconds, 3),
    )
