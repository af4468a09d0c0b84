"""Tests with the real `verifiers` package in its own environment: the tests of `inside_verifiers/`, and `vf-eval` with a real agent."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from tests.kit import Running, calls, gateway, say
from tests.nested import ROOT, environment, run_tests
from tests.speed import scaled
from tools import parts

pytestmark = [pytest.mark.needs("verifiers", "agent:pi"), pytest.mark.full]

PART = "verifiers"
AGENT = "pi"
EXAMPLES = ROOT / "examples" / "verifiers"
FIX = [
    say("I look first.\n" + calls(("bash", {"command": "cat main.py"}))),
    say("I mend it.\n" + calls(("bash", {"command": "sed -i 's/a - b/a + b/' main.py"}))),
    say("It is mended."),
]


@pytest.fixture(scope="module")
def programs() -> Path:
    """The `bin` folder of the environment with verifiers."""
    return parts.ensure(PART) / "bin"


@pytest.mark.repeat  # vf-eval uses the same environment
def test_inside_verifiers_tests_pass(programs: Path) -> None:
    """Run the tests of `inside_verifiers/` in its environment."""
    env = environment(EXAMPLES)
    assert run_tests(str(programs / "python"), "tests/trainers/inside_verifiers", "", env=env) > 25


async def evaluate(programs: Path, g: Running, folder: Path, task: str, *more: str) -> list[dict[str, object]]:
    """Run `vf-eval` and return the traces it wrote."""
    command = [
        str(programs / "vf-eval"),
        "turngate-env",
        "--env.taskset.tasks",
        str(ROOT / "examples" / "tasks" / task),
    ]
    command += ["-m", "m", "--no-rich", "--no-push", "-o", str(folder / "runs")]
    command += ["--env.agent.harness.agent", AGENT, "--env.agent.harness.out", str(folder / "left"), *more]
    env = environment(EXAMPLES, TURNGATE_GATEWAY=g.root, TURNGATE_ADMIN_KEY=g.app.admin_key)
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=env, capture_output=True, text=True, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr[-5000:]
    [file] = (folder / "runs").rglob("traces.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.real
async def test_vf_eval_runs_real_agent(programs: Path, tmp_path: Path) -> None:
    async with gateway(FIX) as g:
        rollouts = ("-r", "2", "--env.agent.harness.sandbox", "local", "--sampling.temperature", "0.9")
        traces = await evaluate(programs, g, tmp_path, "fix-add", *rollouts)
        assert len(traces) == 2
        for trace in _traces(traces):
            assert (
                trace["ok"]
                and trace["rewards"]["grade"]["score"] == 1.0
                and trace["info"]["turngate"]["class"] == "graded"
            )
            [row] = await g.samples(trace["info"]["turngate"]["session"])
            nodes = trace["nodes"]
            assert [token for node in nodes for token in node["token_ids"]] == row["ids"]
            assert [mask for node in nodes for mask in node["mask"]] == [bool(m) for m in row["mask"]]
            recorded = [lp for lp in row["logprobs"] if lp is not None]
            written = [lp for node in nodes for lp in node["logprobs"]]
            assert written == pytest.approx(
                recorded, abs=1e-4
            )  # its files round to four decimals; the wire format does not
            assert sum(node["sampled"] for node in nodes) == 3
        assert {request.sampling.temperature for request in g.engine.received} == {0.9}


def _traces(written: list[dict[str, object]]) -> list[dict[str, object]]:
    """Flatten episodes; verifiers writes single-trace episodes as plain traces."""
    return [trace for line in written for trace in line.get("traces", [line])]  # type: ignore[attr-defined]
