"""Tests for the verifiers environment: loading, rollouts, rewards and errors."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.serve.client import EnvClient
from verifiers.v1.serve.server import EnvServer

from tests.kit import Running, gateway, say
from tests.speed import scaled
from turngate.engines.scripted import ScriptedTurn

pytestmark = pytest.mark.process

PRELUDE = """\
import json, os, sys, time, urllib.request
def ask(*texts):
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = json.dumps({"model": os.environ["TURNGATE_MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["TURNGATE_API_KEY"]}
    request = urllib.request.Request(os.environ["TURNGATE_BASE_URL"] + "/v1/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3600) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]
"""
TASKS = """
from turngate.tasks.task import Function, Task

def tasks():
    yield Task(id="one", instruction={program!r}, grader=Function(name={grader!r}) if {grader!r} else None, setup={setup!r})

def grade(work):
    return 0.75 if (work.folder / "answer").read_text() == "Hello." else 0.0

def broken(work):
    raise RuntimeError("no")
"""


def make_config(
    g: Running,
    tmp_path: Path,
    program: str,
    *,
    grader: str = "grade",
    setup: str = "",
    agent: Any = None,
    **harness: Any,
) -> vf.EnvConfig:
    """Build the environment's config with a small program as the agent."""
    os.environ["TURNGATE_ADMIN_KEY"] = g.app.admin_key  # removed by the shared fixture
    file = tmp_path / "tasks.py"
    name = f"{file}:{grader}" if grader else ""
    file.write_text(TASKS.format(program=PRELUDE + program, grader=name, setup=setup))
    settings = {"agent": "shell", "sandbox": "local", "gateway": g.root, "out": str(tmp_path / "left"), **harness}
    settings.setdefault("options", {"command": "exec python3 -"})
    return vf.resolve_env_config(
        {"taskset": {"id": "turngate-env", "tasks": f"{file}:tasks"}, "agent": {**(agent or {}), "harness": settings}}
    )


async def episode(g: Running, tmp_path: Path, program: str, **how: Any) -> vf.Trace:
    """Run one episode with verifiers' loader and runner."""
    env = vf.load_environment(make_config(g, tmp_path, program, **how))
    [task] = env.taskset
    context = vf.ModelContext(model="m", client=vf.EvalClientConfig(), sampling=vf.Sampling(temperature=0.5))
    async with env.serving():
        [slot] = env.slots(task)
        done = await env.run_slot(slot, context)
    assert not done.errors, done.errors
    [trace] = done.traces
    return trace


async def test_episode_through_environment_server(tmp_path: Path) -> None:
    """Through verifiers' environment server and client, turns come back at full precision."""
    async with gateway([say("Hello."), say("Bye.")]) as g:
        program = 'a = ask("Hi"); open("answer", "w").write(a); ask("Hi", a, "More")'
        config = make_config(g, tmp_path, program)
        [task] = vf.load_taskset(config.taskset)
        server = EnvServer(config, "tcp://127.0.0.1:*")
        serving = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        try:
            data = task.data.model_dump(mode="json")
            done = await asyncio.wait_for(client.run(vf.EvalClientConfig(), "m", vf.Sampling(), data), scaled(60))
        finally:
            await client.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
        [trace] = done.traces
        [row], [branch] = await g.samples(trace.info["turngate"]["session"]), trace.branches
        assert done.ok and trace.rewards["grade"].score == 0.75
        assert branch.token_ids == row["ids"] and branch.logprobs == [lp or 0.0 for lp in row["logprobs"]]
        assert branch.sampled_mask == [bool(m) for m in row["mask"]]


async def test_rows_reward_and_sampling_match_gateway(tmp_path: Path) -> None:
    async with gateway([say("Hello."), say("Bye.")]) as g:
        program = 'a = ask("Hi"); open("answer", "w").write(a); ask("Hi", a, "More")'
        trace = await episode(g, tmp_path, program)
        assert trace.ok and trace.reward == 0.75 and trace.rewards["grade"].score == 0.75
        session = trace.info["turngate"]["session"]
        [row], [branch] = await g.samples(session), trace.branches
        assert branch.token_ids == row["ids"] and branch.sampled_mask == [bool(m) for m in row["mask"]]
        assert branch.logprobs == [lp or 0.0 for lp in row["logprobs"]] and trace.num_turns == 2
        assert g.engine.received[0].sampling.temperature == 0.5
        assert (await g.show(session))["outcome"]["reward"] == 0.75
        # Round trip through the wire format, as in a separate trainer process.
        again = vf.WireTrace.model_validate(trace.model_dump())
        assert again.branches[0].token_ids == row["ids"] and again.task.data.model_extra["task"] == "one"


async def test_zero_reward_is_recorded(tmp_path: Path) -> None:
    async with gateway([say("No.")]) as g:
        trace = await episode(g, tmp_path, 'open("answer", "w").write(ask("Hi"))')
        assert trace.ok and trace.rewards["grade"].score == 0.0


@pytest.mark.parametrize(
    ("script", "how", "error"),
    [
        ([say("Hello.")], {"grader": "broken"}, "TaskError"),  # invalid task: the grader fails
        ([say("Hello.")], {"setup": "exit 3"}, "TaskError"),
        ([ScriptedTurn(fail_before=True)] * 9, {}, "ProviderError"),
        pytest.param(
            [say("Hello.")],
            {"sandbox": "docker", "image": "turngate-has-no-such-image"},
            "SandboxError",
            marks=[pytest.mark.needs("docker"), pytest.mark.full],
        ),
        ([say("Hello.")], {"options": {"command": "exec python3 -", "other": "x"}}, "HarnessError"),
    ],
)
async def test_faults_outside_agent_have_no_reward(
    tmp_path: Path, script: list[ScriptedTurn], how: Any, error: str
) -> None:
    async with gateway(script) as g:
        trace = await episode(g, tmp_path, 'open("answer", "w").write(ask("Hi"))', **how)
        assert not trace.ok and trace.last_error.type == error, trace.last_error
        assert trace.rewards == {"grade": None}


async def test_limits_timeouts_and_failures_map_to_verifiers(tmp_path: Path) -> None:
    async with gateway([say("Hello.")] * 9) as g:
        program = 'a = ask("Hi"); open("answer", "w").write(a); ask("Hi", a, "More")'
        limited = await episode(g, tmp_path, program, agent={"max_turns": 1})
        assert limited.ok and limited.is_truncated and limited.stop_condition == "max_turns" and limited.reward == 0.75
        # The program is the task's prompt, so each episode below is a different task.
        late = await episode(
            g, tmp_path, 'open("answer", "w").write(ask("Hi")); time.sleep(3600)', timeout_s=scaled(1.5)
        )
        assert late.ok and late.is_timeout and late.num_turns == 1 and late.reward == 0.75
        failed = await episode(g, tmp_path, 'open("answer", "w").write(ask("Hi")); sys.exit(3)')
        assert failed.ok and failed.stop_condition == "agent_failed" and failed.reward == 0.75
        excluded = await episode(g, tmp_path, 'ask("Hi"); sys.exit(3)', on_failure="exclude")
        assert not excluded.ok and excluded.rewards == {"grade": None} and excluded.num_turns == 1


async def test_ungraded_task_has_no_reward(tmp_path: Path) -> None:
    async with gateway([say("Hello.")]) as g:
        trace = await episode(g, tmp_path, 'ask("Hi")', grader="")
        assert trace.ok and trace.rewards == {"grade": None} and trace.num_turns == 1


async def test_verifiers_timeout_keeps_recorded_turns(tmp_path: Path) -> None:
    async with gateway([say("Hello."), ScriptedTurn(hang=True)]) as g:
        program = 'a = ask("Hi"); ask("Hi", a, "More")'
        trace = await episode(g, tmp_path, program, agent={"timeout": {"rollout": scaled(2)}})
        assert trace.is_timeout and trace.num_turns == 1 and trace.rewards == {"grade": None}
        assert (await g.show(trace.id))["status"] == "cancelled"


async def test_missing_gateway_fails_before_run(tmp_path: Path) -> None:
    async with gateway() as g:
        with pytest.raises((vf.InterceptionError, ExceptionGroup), match="gateway"):
            await asyncio.wait_for(episode(g, tmp_path, "pass", gateway="http://127.0.0.1:9"), scaled(60))
