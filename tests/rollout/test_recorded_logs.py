"""The page shows the ends of a rollout's logs, without secrets."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tests.kit import say
from tests.rollout.kit import open_harness
from tests.rollout.test_grading import make_task
from tests.server.test_page import fetch, log_in
from turngate.tasks.task import HostVariable, Script

pytestmark = pytest.mark.process

PROGRAM = """
ask("Hi")
import sys
print("begun " + "x" * 9000 + " the end of stdout")
print({key: value for key, value in os.environ.items()}, file=sys.stderr)
sys.exit(3)
"""
TEST = """
echo "the verifier says 41"; echo "Authorization: Bearer abcdefgh12345678"
mkdir -p "$TURNGATE_LOGS/verifier"; echo 0 > "$TURNGATE_LOGS/verifier/reward.txt"
"""


HOST_TEST = """
echo "the grader has $GRADING and $MODE"
mkdir -p "$TURNGATE_LOGS/verifier"; echo 0 > "$TURNGATE_LOGS/verifier/reward.txt"
"""


async def test_values_of_the_machine_are_hidden_whatever_their_names(tmp_path: Path) -> None:
    """A task may use values of the machine that runs it: `${…}` in its file. They do not appear in its logs."""
    task = make_task(tmp_path, PROGRAM, HOST_TEST)
    assert isinstance(task.grader, Script)
    grader = msgspec.structs.replace(task.grader, env={"GRADING": "marked-host-0004", "MODE": "default-0005"})
    task = msgspec.structs.replace(
        task,
        env={"LOGIN": "marked-host-0003"},
        grader=grader,
        host_env=(
            HostVariable(place="environment", name="LOGIN", variable="A"),
            HostVariable(place="grader", name="GRADING", variable="B"),
            HostVariable(place="grader", name="MODE", variable="C", default="default-0005"),
        ),
    )
    async with open_harness([say("Hello.")] * 3) as harness:
        outcome = await harness.run(task=task)
        assert outcome.kind == "graded"
        client = await log_in(harness.gateway)
        logs = (await fetch(client, f"rollouts/{outcome.session}"))["logs"]
        assert "LOGIN" in logs["stderr"] and "default-0005" in logs["verifier"]
        assert not [name for name, text in logs.items() if "marked-host" in text]
        kept = [path for path in (harness.folder / outcome.session).rglob("*") if path.is_file()]
        assert kept and not [path for path in kept if b"marked-host" in path.read_bytes()]


async def test_log_tails_are_shown_without_secrets(tmp_path: Path) -> None:
    env = {"PROVIDER_API_KEY": "marked-secret-0001", "MODE": "ordinary-value-0002"}
    async with open_harness([say("Hello.")] * 3) as harness:
        outcome = await harness.run(task=make_task(tmp_path, PROGRAM, TEST), env=env)
        client = await log_in(harness.gateway)
        header = await fetch(client, f"rollouts/{outcome.session}")
        assert header["rollout"]["class"] == "graded" and header["outcome"]["data"]["exit_code"] == 3
        logs = header["logs"]
        assert logs["stdout"].endswith("the end of stdout\n") and len(logs["stdout"]) <= 4000
        assert "the verifier says 41" in logs["verifier"] and "ordinary-value-0002" in logs["stderr"]
        events = (await harness.gateway.admin.get("/admin/events", params={"wait": "0"})).text
        shown = (await harness.gateway.admin.get(f"/admin/sessions/{outcome.session}")).text
        for text in (*logs.values(), events, shown):
            assert "marked-secret-0001" not in text and "abcdefgh12345678" not in text
            assert not re.search(r"tga?-[\w-]{20,}", text) and harness.gateway.app.admin_key not in text
        assert header["stages"][0]["stage"] == "sandbox" and all(
            stage["seconds"] is not None for stage in header["stages"]
        )
