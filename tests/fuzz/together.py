"""Fuzz all targets at the same time, each in a process of its own and in rounds with different seeds, and summarize the results.

The results folder contains, for each target:

    progress/TARGET.jsonl   the figures of each round, every few seconds; the last line of a round counts
    logs/TARGET-ROUND.log   seed and findings of a round, and a traceback if one input takes minutes
    findings/TARGET-KIND    a finding (.txt) and its input (.input)
    corpus/TARGET           inputs that reached new lines, for the next round
"""

from __future__ import annotations

import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.fuzz.coverage_guided import ROOT
from tests.fuzz.rounds import GUIDED, NAMES, Round

_SILENCE_S = 90.0  # without progress, after which the traceback is logged
_LEAST_S = 5.0  # a shorter round is not started
_GROUPS: dict[str, tuple[str, ...]] = {
    "`decode-…` (4)": ("decode-",),
    "`covered-decode-…` (4)": ("covered-decode-",),
    "`parse-…` (7), `call-forms`": ("parse-", "call-forms"),
    "`covered-parse-…` (7)": ("covered-parse-",),
    "`agent-file`, `settings-file`, `task-file`, `task-row`, `transcript`": (
        "agent-file",
        "settings-file",
        "task-",
        "transcript",
    ),
    "`covered-agent-file`, `covered-transcript`": ("covered-agent-file", "covered-transcript"),
    "`http-memory`": ("http-memory",),
    "`http`, `http-gate`": ("http",),
    "`tree`": ("tree",),
    "`store`": ("store",),
    "`relay`": ("relay",),
    "`verify`": ("verify",),
}


def fuzz_together(folder: Path, names: Iterable[str], seconds: float, round_s: float, number: int) -> None:
    """Run a process per target until `seconds` have passed. If a process dies, start another one for its target."""
    make_folders(folder)
    end = time.time() + seconds
    running = {name: _start(folder, name, end, round_s, number) for name in names}
    while running:
        time.sleep(0.5)
        for name, process in list(running.items()):
            if process.poll() is not None:
                if process.returncode:
                    _write_line(folder, name, {"died": process.returncode, "time": time.time()})
                del running[name]
                if process.returncode and end - time.time() > _LEAST_S:
                    running[name] = _start(folder, name, end, round_s, number)
        if time.time() > end + 60:  # each has recorded its progress
            for process in running.values():
                process.kill()


def make_folders(folder: Path) -> None:
    for name in ("progress", "logs", "findings", "corpus"):
        (folder / name).mkdir(parents=True, exist_ok=True)


def _start(folder: Path, name: str, end: float, round_s: float, number: int) -> subprocess.Popen[bytes]:
    options = {"--target": name, "--end": end, "--round": round_s, "--seed": number, "--results": folder}
    command = [sys.executable, "-m", "tests.fuzz", *(str(part) for pair in options.items() for part in pair)]
    with (folder / "logs" / f"{name}.log").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def fuzz_in_rounds(folder: Path, name: str, end: float, round_s: float, number: int) -> None:
    """Fuzz one target in this process, in rounds."""
    index = len(read_rounds(folder, name))
    while (left := end - time.time()) > _LEAST_S:
        index += 1
        seed = number + index * 1_000_000
        with (folder / "logs" / f"{name}-{index}.log").open("w") as log:
            print(f"{name}, round {index}, seed {seed}, {min(left, round_s):.0f} s", file=log, flush=True)

            def report(one: Round, index: int = index, log: Any = log) -> None:
                faulthandler.dump_traceback_later(_SILENCE_S, file=log)
                _write_round(folder, index, one)

            _run(Round(name, min(left, round_s), seed, keep=folder / "corpus", report=report), report, log)


def _run(one: Round, report: Any, log: Any) -> None:
    report(one)
    try:
        one.run()
    finally:
        faulthandler.cancel_dump_traceback_later()
        print(f"{one.inputs} inputs, {one.cpu_s:.0f} s of CPU, statuses {one.statuses}", file=log)
        for found in one.findings.values():
            print(f"\n{found}", file=log)


def _write_round(folder: Path, index: int, one: Round) -> None:
    for kind, found in one.findings.items():
        file = folder / "findings" / f"{one.name}-{kind}.txt"
        if not file.exists():
            file.with_suffix(".input").write_bytes(found.value)
            file.write_text(str(found), errors="backslashreplace")
    line = {"round": index, "seed": one.number, "inputs": one.inputs, "cpu_s": round(one.cpu_s, 2)}
    line |= {"coverage": one.coverage, "new_coverage": one.new_coverage, "found": one.found}
    line |= {"kinds": sorted(one.findings), "complete": one.complete, "time": round(time.time(), 1)}
    _write_line(folder, one.name, line)


def _write_line(folder: Path, name: str, line: Any) -> None:
    with (folder / "progress" / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


# ── the summary ─────────────────────────────────────────────────────────────────────────────────────────────────────


def read_rounds(folder: Path, name: str) -> list[Any]:
    """Return the last figures of each round of a target."""
    file = folder / "progress" / f"{name}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return list({line["round"]: line for line in lines if "round" in line}.values())


def summarize(folder: Path) -> str:
    """Return the results as Markdown: a row per group of targets, then what each target found and reached."""
    rows = ["| targets | complete rounds | inputs | CPU minutes | findings |", "|---|---|---|---|---|"]
    details = []
    for group, names in group_targets().items():
        rounds = [one for name in names for one in read_rounds(folder, name)]
        complete = sum(one["complete"] for one in rounds)
        kinds = {kind for one in rounds for kind in one["kinds"]}
        inputs, cpu_s = sum(one["inputs"] for one in rounds), sum(one["cpu_s"] for one in rounds)
        rows.append(f"| {group} | {complete} of {len(rounds)} | {inputs:,} | {cpu_s / 60:.1f} | {len(kinds) or '–'} |")
        details += [_describe(folder, name) for name in names if read_rounds(folder, name)]
    return "\n".join([*rows, "", *details])


def group_targets() -> dict[str, list[str]]:
    """Return the targets by the group that is a row of the table."""
    groups, left = {}, list(NAMES)
    for group, starts in _GROUPS.items():
        groups[group] = [name for name in left if name.startswith(starts)]
        left = [name for name in left if name not in groups[group]]
    return groups


def _describe(folder: Path, name: str) -> str:
    rounds = read_rounds(folder, name)
    parts = [f"{name}: inputs {[one['inputs'] for one in rounds]}"]
    parts.append(f"CPU seconds {[round(one['cpu_s']) for one in rounds]}")
    if name.startswith(GUIDED):
        parts.append(f"new steps {[one['new_coverage'] for one in rounds]}")
    if not all(one["complete"] for one in rounds):
        parts.append(f"incomplete rounds {[one['round'] for one in rounds if not one['complete']]}")
    if died := (folder / "progress" / f"{name}.jsonl").read_text().count('"died"'):
        parts.append(f"DIED {died} times")
    if kinds := sorted({kind for one in rounds for kind in one["kinds"]}):
        parts.append(f"FOUND {kinds}, the last one in round {max(one['round'] for one in rounds if one['kinds'])}")
    return "; ".join(parts)
