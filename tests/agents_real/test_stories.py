"""What agents do besides working straight on: they hand work to helpers, sum up, crash and run out of context.

Each story is played with the real agents. Whatever happens, the trace says what every turn was for, and a turn is trained once.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.agents_real import kit
from tests.agents_real.kit import Branch, Check, Staged, branches, call, findings, says, shell, turns
from tests.speed import scaled
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import CheckCall
from turngate.rollout.agent_check import CheckOptions
from turngate.rollout.playbook import Scene

pytestmark = pytest.mark.full
TASK = "MAIN-TASK: find out how long notes.txt is."


# ── sub-agents ──────────────────────────────────────────────────────────────────────────────────────────────────────


def helper(agent: str, task: str) -> CheckCall:
    """The call that hands a task to a helper."""
    match agent:
        case "opencode":
            return call("task", description="Count", prompt=task, subagent_type="general")
        case "claude-code":
            return call("Agent", description="Count", prompt=task, subagent_type="general-purpose")
        case "qwen-code":
            return call("agent", description="Count", prompt=task, subagent_type="general-purpose")
        case _:
            return call("invoke_agent", agent_name="generalist", prompt=task)


def reports(agent: str, text: str) -> Any:
    """How a helper ends."""
    return says("", call("complete_task", result={"response": text})) if agent == "gemini-cli" else says(text)


@pytest.mark.parametrize("agent", kit.agents("claude-code", "opencode", "gemini-cli", "qwen-code"))
async def test_helpers_side_by_side_are_branches_of_their_own(run: Check, agent: str) -> None:
    def scenes(workdir: str) -> tuple[Scene, ...]:
        counts = (says("Two helpers.", helper(agent, "HELP-1: lines"), helper(agent, "HELP-2: words")), says("Done."))
        looks = {unit: says("I count.", shell(agent, f"wc -{unit} notes.txt"), think="Hm.") for unit in "lw"}
        return (
            Scene("MAIN-TASK", counts),
            Scene("HELP-1", (looks["l"], reports(agent, "Three lines.")), pace_s=0.1),
            Scene("HELP-2", (looks["w"], reports(agent, "Three words.")), pace_s=0.1),
        )

    report = await run(agent, staging=CheckOptions(scenes=scenes, instruction=TASK))
    assert report.passed, findings(report)
    own, *others = [branch for branch in branches(report) if "side" not in branch.roles]
    assert own.cause is None and set(own.roles) == {"main"}
    assert others == [Branch("subagent", ("subagent", "subagent"))] * 2
    assert kit.rows(report, "main") == 1 and kit.rows(report, "subagent") == 2
    assert kit.trained_once(report)
    one, other = (
        [turn for turn in turns(report, "subagent") if turn.id in {span.node for span in row.spans}]
        for row in report.samples
        if any(span.role == "subagent" for span in row.spans)
    )
    assert one[0].started < other[-1].ended and other[0].started < one[-1].ended, "they worked at once"


@pytest.mark.real
@pytest.mark.needs("agent:codex")
async def test_codex_spawns_an_agent_and_waits_for_it(run: Check) -> None:
    spawns = says("", call("multi_agent_v1__spawn_agent", message="HELP-1: count the lines"))
    waits = says("", call("multi_agent_v1__wait_agent", targets=["{helper}"], timeout_ms=int(1000 * scaled(20))))
    looks = says("I count.", shell("codex", "wc -l notes.txt"), think="Hm.")
    scenes = (
        Scene("MAIN-TASK", (spawns, waits, says("Done.")), finds={"helper": r'"agent_id":\s*"([^"]+)"'}),
        Scene("HELP-1", (looks, says("Three lines."))),
    )
    report = await run("codex", staging=CheckOptions(scenes=lambda workdir: scenes, instruction=TASK))
    assert report.passed, findings(report)
    assert branches(report) == [Branch(None, ("main",) * 3), Branch("subagent", ("subagent",) * 2)]
    assert kit.rows(report, "main") == kit.rows(report, "subagent") == 1 and kit.trained_once(report)


@pytest.mark.needs("agent:codex")
async def test_a_codex_agent_that_inherits_its_parents_history_forks_there(run: Check) -> None:
    looks = call("exec", input="text((await tools.exec_command({cmd: 'wc -l notes.txt'})).output)")
    spawns = says("", call("collaboration__spawn_agent", task_name="count", message="Count the lines."))
    waits = says("", call("collaboration__wait_agent", timeout_ms=int(1000 * scaled(20))))
    scenes = (
        Scene("You are now a newly spawned child agent", (says("I count.", looks), says("Three lines.")), begins=1),
        Scene("MAIN-TASK", (spawns, waits, says("Done."))),
    )
    # Codex gives its newer multi-agent tools to models that it knows by name.
    staging = CheckOptions(scenes=lambda workdir: scenes, instruction=TASK, model="gpt-6.1-sol")
    report = await run("codex", staging=staging)
    assert report.passed, findings(report)
    assert branches(report) == [Branch(None, ("main",) * 3), Branch("subagent", ("subagent",) * 2)]
    [shared] = [row for row in report.samples if row.spans[-1].role == "subagent"]
    assert [span.role for span in shared.spans] == ["main", "subagent", "subagent"]
    assert [span.trained for span in shared.spans] == [False, True, True]
    assert kit.rows(report, "main") == 1 and kit.trained_once(report)


# ── compaction ──────────────────────────────────────────────────────────────────────────────────────────────────────

SUMS_UP = {
    "claude-code": "CRITICAL: Respond with TEXT ONLY",
    "opencode": "You are a context summarization agent",
    "codex": "CONTEXT CHECKPOINT COMPACTION",
    "qwen-code": "You are the component that summarizes a conversation",
}
SUMMARY = "SUMMARY-OF-ALL: much was printed. Next: look once more."


def long_work(agent: str, long: int) -> Any:
    """So many long outputs, a short one, and an end; with a summary in between, it goes on with one more look."""

    def scenes(workdir: str) -> tuple[Scene, ...]:
        printing = [says(f"Part {n}.", shell(agent, "seq 1 1900")) for n in range(long)]
        end = says("", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
        summary = says(f"<summary><state_snapshot>{SUMMARY}</state_snapshot></summary>")
        return (
            Scene(SUMS_UP.get(agent, "no such words"), (summary,), tools=False),
            Scene("LOOKED-AGAIN", (says("Done."),)),
            Scene("SUMMARY-OF-ALL", (says("Once more.", shell(agent, "echo LOOKED''-AGAIN")),)),
            Scene(
                "MAIN-TASK",
                (*printing, says("A little.", shell(agent, "seq 1 100")), end if "mini" in agent else says("Done.")),
            ),
        )

    return scenes


# The context length in each agent's configuration, and how many long outputs come close to it.
WINDOWS = {"claude-code": (57000, 3), "opencode": (28500, 2), "codex": (45000, 3), "qwen-code": (70000, 3)}


@pytest.mark.parametrize("agent", kit.agents(*WINDOWS))
async def test_after_a_summary_the_work_goes_on_in_a_new_branch(run: Check, agent: str) -> None:
    tokens, long = WINDOWS[agent]
    told = ModelLimits(context_tokens=tokens, max_output_tokens=2000)
    report = await run(agent, staging=CheckOptions(scenes=long_work(agent, long), instruction=TASK, model_limits=told))
    assert report.passed, findings(report)
    assert SUMMARY in turns(report, "side")[-1].decode_message().content, "the summary is a side call"
    own, side, *after = [branch for branch in branches(report) if branch.cause or "main" in branch.roles]
    assert own.cause is None and set(own.roles) == {"main"}
    assert side == Branch("side", ("side",))
    # Qwen Code puts its standing context back into the history one turn after a summary: that makes a second branch.
    each = [("main",), ("main",)] if agent == "qwen-code" else [("main", "main")]
    assert after == [Branch("compaction", roles) for roles in each]
    assert kit.trained_once(report)


# ── a context that is shorter than the agent's configuration says ───────────────────────────────────────────────────────────────

# As the agents' own descriptions have it. OpenCode works on after its summary, but its exit code tells of the refusal.
COMPACTS = {"claude-code": ("finished", 40000), "opencode": ("failed", 25000), "qwen-code": ("finished", 45000)}
ENDS = {  # whatever their exit code says
    "codex": ("limit", 25000),
    "gemini-cli": ("limit", 30000),
    "pi": ("limit", 10000),
    "mini-swe-agent": ("limit", 10000),
}


@pytest.mark.parametrize("agent", kit.agents(*COMPACTS, *ENDS))
async def test_a_context_overflow_is_understood(run: Check, agent: str) -> None:
    status, most = {**COMPACTS, **ENDS}[agent]
    staging = CheckOptions(scenes=long_work(agent, 4), instruction=TASK, max_context=most, timeout_s=60)
    report = await run(agent, staging=staging)
    assert report.outcome.status == status, findings(report)
    causes = [branch.cause for branch in branches(report)]
    if agent in COMPACTS:
        assert "compaction" in causes and "side" in causes, findings(report)
        assert turns(report, "main")[-1].decode_message().content == "Done."
    else:
        assert causes == [None]
        assert kit.rows(report, "main") == 1
    assert kit.trained_once(report)
    assert all(len(row.ids) < most for row in report.samples)


# ── an end in the middle of a turn ──────────────────────────────────────────────────────────────────────────────────

SPEECH = "word " * 400


def slow(agent: str) -> CheckOptions:
    """Two quick turns, then one that takes its time."""
    quick = [says("Look.", shell(agent, "cat notes.txt")), says("Print.", shell(agent, "echo SLOW''LY"))]
    scenes = (Scene("SLOWLY", (says(SPEECH),), pace_s=0.2), Scene("MAIN-TASK", tuple(quick)))
    return CheckOptions(scenes=lambda workdir: scenes, instruction=TASK)


def assert_third_turn_aborted(report: Any) -> None:
    """Two turns are as they were, and of the third there is what was sampled of it."""
    [turn] = turns(report, "aborted")
    assert turn.finish == "abort" and turn.fault and turn.logprobs is not None
    assert 0 < len(turn.ids) < len(SPEECH.split()) and len(turn.logprobs) == len(turn.ids)
    assert SPEECH.startswith(turn.decode_message().content.strip())
    main = [branch for branch in branches(report) if "main" in branch.roles]
    assert main == [Branch(None, ("main", "main", "aborted"))], findings(report)
    assert kit.rows(report, "main") == 1 and kit.trained_once(report)
    [exact] = [finding for finding in report.results if "every recorded id" in finding.name]
    assert exact.ok


async def in_the_third_turn(engine: Any, agent: str) -> None:
    calls = 4 if agent == "opencode" else 3
    await kit.until(lambda: len(engine.received) == calls and engine.in_flight)
    await asyncio.sleep(scaled(0.25))  # a few tokens of hundreds


@pytest.mark.parametrize("agent", kit.agents("pi", "codex", "claude-code", "gemini-cli", "opencode"))
async def test_an_agent_that_is_killed_in_mid_turn(stage: Staged, agent: str, root: Path) -> None:
    async with stage(agent, staging=slow(agent)) as ready:
        running = asyncio.create_task(ready.run())
        await in_the_third_turn(ready.engine, agent)
        for pid, command in kit.processes_of(root).items():
            if "supervisor.py" not in command and "relay." not in command:
                os.kill(pid, signal.SIGKILL)
        report = await running
    assert report.outcome.status == "failed" and report.outcome.exit_code == 137, findings(report)
    assert ready.engine.aborted == 1, "the engine aborted it"
    assert not report.outcome.collected.differences, "what it wrote down until then is what was recorded"
    assert_third_turn_aborted(report)


@pytest.mark.needs("agent:claude-code")
async def test_a_session_that_is_cancelled_in_mid_turn(stage: Staged) -> None:
    async with stage("claude-code", staging=slow("claude-code")) as ready:
        running = asyncio.create_task(ready.run())
        await in_the_third_turn(ready.engine, "claude-code")
        await ready.gateway.cancel(ready.rollout.outcome.session)
        report = await asyncio.wait_for(running, scaled(20))
    assert report.outcome.status == "cancelled" and "cancelled" in report.outcome.stop, findings(report)
    assert_third_turn_aborted(report)


@pytest.mark.needs("agent:pi")
async def test_a_rollout_that_is_cancelled_in_mid_turn(stage: Staged) -> None:
    async with stage("pi", staging=slow("pi")) as ready:
        running = asyncio.create_task(ready.run())
        await in_the_third_turn(ready.engine, "pi")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        report = await ready.build_report()
    assert report.outcome.status == "cancelled", findings(report)
    assert_third_turn_aborted(report)
