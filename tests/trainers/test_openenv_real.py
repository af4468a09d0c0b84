"""Tests that the `openenv` package accepts the traces: strict models, validators and rollout checks."""

from __future__ import annotations

import asyncio
import json
import subprocess

import openai
import pytest

from tests.kit import Json, Running, calls, gateway, read_reply, result, say, tool, user
from tests.speed import scaled
from tools import parts
from turngate.engines.scripted import ScriptedTurn
from turngate.views.training_trace import training_trace

pytestmark = [pytest.mark.needs("trl"), pytest.mark.full]

PART = "trl"  # its environment has openenv

JUDGE = """
import json, sys
from types import SimpleNamespace
from openenv.core.harness.training import TrainingTrace
from openenv.core.harness.capture.validate import check_sequence, check_turn

given = json.load(sys.stdin)
report = {}
trace = TrainingTrace.model_validate(given["trace"])
report["turns"] = len(trace.turns)
report["trained"] = sum(sum(turn.loss_mask) for turn in trace.turns)
assert TrainingTrace.from_entries(given["entries"]) == TrainingTrace.from_entries(trace.to_trace_entries())
report["findings"] = [
    str(finding)
    for row in given["rollout"]["sequences"]
    for finding in check_sequence(SimpleNamespace(**row)).fatal
    if row["trainable"] or finding.code != "nothing_trainable"
]
assert any(row["trainable"] for row in given["rollout"]["sequences"])
report["turn_findings"] = [
    str(finding)
    for turn in trace.turns
    for finding in check_turn(turn.prompt_token_ids, turn.completion_token_ids, turn.per_token_logps).fatal
]
try:
    TrainingTrace.model_validate({**given["trace"], "turngate": 1})
except ValueError:
    report["strict"] = True
json.dump(report, sys.stdout)
"""


@pytest.fixture(scope="module")
def python() -> str:
    """The Python interpreter of the environment with openenv."""
    return str(parts.ensure(PART) / "bin" / "python")


async def validate(python: str, g: Running, session: str) -> Json:
    given = {
        "trace": training_trace(await g.trace(session)),
        "entries": (await g.admin.get(f"/sessions/{session}/trace_entries")).json()["entries"],
        "rollout": (await g.admin.get(f"/sessions/{session}/rollout")).json(),
    }
    command = [python, "-c", JUDGE]
    done = await asyncio.to_thread(
        subprocess.run, command, input=json.dumps(given), capture_output=True, text=True, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.real
async def test_openenv_accepts_traces(python: str) -> None:
    """A session with a side request, a retry, missing log-probabilities, a truncated turn and a forced call."""
    script = [
        say("A title"),
        say(calls(("read_file", {"path": "a"}))),
        ScriptedTurn(say("First try.").ids, null_logprobs=True),
        say("Second try."),
        say("Cut sho", close=False),
        say('[{"name": "read_file", "parameters": {"path": "a"}}]'),
    ]
    async with gateway(script) as g:
        opened = (await g.admin.post("/sessions", json={"purpose": "train"})).json()
        client = g.client(opened["session_id"])

        async def ask(messages: Json, **request: Json) -> Json:
            return read_reply(await client.chat.completions.create(model="m", messages=messages, **request))

        tools = [tool()]
        await ask([user("Give it a title")])
        history: list[Json] = [user("Fix it")]
        first = await ask(history, tools=tools)
        history += [first.message(), result(first.calls[0], "the file")]
        await ask(history, tools=tools)
        again = await ask(history, tools=tools, extra_headers={"x-stainless-retry-count": "1"})
        history += [again.message(), user("More")]
        await ask(history, tools=tools)
        await ask([user("Now")], tools=tools, tool_choice="required")
        report = await validate(python, g, opened["id"])
        rows = await g.samples(opened["id"])
        assert report["turns"] == 6 and report["trained"] == sum(sum(row["mask"]) for row in rows) > 0
        assert report["findings"] == report["turn_findings"] == [] and report["strict"]


async def test_openai_client_uses_session_id_as_key(python: str) -> None:
    """OpenEnv configures agents with a base URL and the session id as the API key."""
    async with gateway([say("Hello.")]) as g:
        opened = (await g.admin.post("/sessions", json={})).json()

        def agent() -> str:
            with openai.OpenAI(api_key=opened["session_id"], base_url=g.base_url, max_retries=0) as client:
                reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}])
                return reply.choices[0].message.content or ""

        assert await asyncio.to_thread(agent) == "Hello."
        assert (await validate(python, g, opened["id"]))["turns"] == 1
