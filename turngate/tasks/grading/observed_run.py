"""Run a test command in a sandbox, while the witness (`witness.py`) records what each test does.

The SWE grader and `turngate tasks make repairs` both run tests in this way. The log is the output between two markers. In the sandbox, only
the shell that starts the command knows the markers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from turngate.errors import SandboxError, SandboxGone
from turngate.sandboxes.base import Sandbox
from turngate.tasks.grading import sandbox as grading_sandbox
from turngate.tasks.grading import witness
from turngate.tasks.grading.witness_report import WitnessReport, parse_report

PREFER_BASH = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$@"; else exec sh -c "$@"; fi'
_MAX_REPORT_BYTES = 64_000_000
# The markers are passed on stdin, so that no child process finds them in an argument or a variable.
_RUN = """
IFS= read -r turngate_start; IFS= read -r turngate_end
exec </dev/null 2>&1
turngate_place=$1 turngate_command=$3
eval "$2"
PYTHONPATH="$turngate_place${PYTHONPATH:+:$PYTHONPATH}"; export PYTHONPATH
printf '\\n%s\\n' "$turngate_start"
( eval "$turngate_command" )
turngate_code=$?
printf '\\n%s %s\\n' "$turngate_end" "$turngate_code"
"""
# PYTHONPATH may contain the working folder, so the witness imports only from Python's own library.
SITE = """
try:
    import os, sys
    turngate_before = set(sys.modules)
    turngate_path = list(sys.path)
    turngate_version = "python%d.%d" % sys.version_info[:2]
    turngate_own = [os.path.dirname(os.path.abspath(__file__))]
    for turngate_prefix in (sys.base_prefix, sys.base_exec_prefix):
        for turngate_lib in (getattr(sys, "platlibdir", "lib"), "lib", "lib64"):
            turngate_place = os.path.join(turngate_prefix, turngate_lib, turngate_version)
            turngate_own += [turngate_place, os.path.join(turngate_place, "lib-dynload")]
    sys.path[:] = [place for place in turngate_own if os.path.isdir(place)]
    try:
        import turngate_witness
        import importlib.machinery, importlib.util
    finally:
        sys.path[:] = turngate_path
    try:
        turngate_witness.start_witness(turngate_before)
    finally:
        turngate_witness.run_next_sitecustomize()
except Exception:
    pass
"""


class ObservedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test command, with the witness's report."""

    output: bytes  # everything that was printed
    log: str | None  # what the test command printed; None if the run was cut short
    exit_code: int
    timed_out: bool
    report: WitnessReport


async def run_observed(
    sandbox: Sandbox,
    test_cmd: str,
    *,
    before: str,
    test_files: Iterable[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> ObservedRun:
    """Run `before`, then `test_cmd` with the witness. `test_files` lists the files that an agent cannot change."""
    key, start, end = (secrets.token_hex(24) for _ in range(3))
    source = await asyncio.to_thread(Path(witness.__file__).read_bytes)
    tests = b"\0".join(os.fsencode(path) for path in (sandbox.workdir, *test_files))
    files = {"turngate_witness.py": source, "sitecustomize.py": SITE.encode(), "key": key.encode(), "tests": tests}
    ours = await grading_sandbox.upload_private_files(sandbox, files)
    done = await sandbox.exec(
        ["/bin/sh", "-c", PREFER_BASH, "sh", _RUN, "sh", ours, before, test_cmd],
        stdin=f"{start}\n{end}\n".encode(),
        env=env,
        timeout_s=timeout_s,
        keep=grading_sandbox.OUTPUT_LIMIT,
        leave=False,
    )
    _, began, rest = done.stdout.decode("utf-8", "replace").partition(f"\n{start}\n")
    between, ended, code = rest.rpartition(f"\n{end} ")
    whole = bool(began and ended and code.strip().isdecimal()) and not done.timed_out
    return ObservedRun(
        output=done.stdout.replace(start.encode(), b"(start)").replace(end.encode(), b"(end)"),
        log=between if whole else None,
        exit_code=int(code) if whole else done.exit_code,
        timed_out=done.timed_out,
        report=await _read_report(sandbox, ours, key.encode()) if whole else WitnessReport(),
    )


async def _read_report(sandbox: Sandbox, folder: str, key: bytes) -> WitnessReport:
    try:
        data = await sandbox.read(f"{folder}/report", limit=_MAX_REPORT_BYTES)
    except SandboxGone:
        raise
    except SandboxError:  # the report is missing, or something else is in its place
        data = b""
    return await asyncio.to_thread(parse_report, key, data)
