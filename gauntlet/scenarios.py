"""The scenarios. A scenario added to the list runs in every dialect and on every gateway."""

from __future__ import annotations

import argparse
import inspect
import tarfile
from dataclasses import replace

from gauntlet.reply_format import ToolCall
from gauntlet.scenario import (
    Answer,
    Call,
    Cause,
    Edit,
    Fault,
    Results,
    Say,
    Scenario,
    Start,
    Step,
    System,
    Together,
    Tools,
    ask,
    bash,
)

SYSTEM = "You are a careful programmer. You have a shell. Work step by step, and say when you are done."
TASK = "The test in tests/test_sum.py fails. Find out why, and mend it."


def _print_lines(n: int) -> str:
    return f"sed -n '1,120p' src/part_{n}.py"


def _read_file(n: int, **more: object) -> Answer:
    return Answer(think=f"I should look at file {n} first.", calls=(bash(f"cat src/part_{n}.py", timeout=30, **more),))


def _listing(n: int) -> str:
    return f"def part_{n}(values):\n    total = 0\n    for value in values:\n        total += value\n    return total - {n}\n"


def _slow(*calls: ToolCall) -> Answer:
    return Answer(
        text="I would rather talk about something else, at some length and at leisure.", calls=calls, pace_s=0.1
    )


_DONE = Answer(think="Nothing is left to do.", text="The sum was off by one; it is mended.")
_START = Start(TASK, system=SYSTEM)


def _loop(*answers: Answer) -> tuple[Step, ...]:
    """Build an agent's usual loop: a call, its results, the next call."""
    steps: list[Step] = [_START]
    for n, answer in enumerate(answers):
        steps.append(ask(answer))
        if answer.calls:
            steps.append(Results(tuple(_listing(10 * n + m) for m in range(len(answer.calls)))))
    return tuple(steps)


_PLAIN = _loop(_read_file(1), _read_file(2), _read_file(3), _DONE)
_WIDE = Answer(
    think="Both at once.",
    text="Let me look at two files.",
    calls=(bash("cat a.py"), ToolCall("read_file", {"path": "b.py", "lines": [1, 20]})),
)
_OTHER_AGENT: tuple[Cause, ...] = ("hand-off", "sub-agent", "new conversation")  # without tools, they look the same
_PLAN = "1. Read part 1. 2. Correct the sign of its result."
_CHANGE = "-    return total - 1\n+    return total"
_HUGE = "".join(f"{n:06d} {n * 7919 % 100_003} the quick brown fox jumps over the lazy dog\n" for n in range(5_000))


def _helper(name: str) -> tuple[Step, ...]:
    return (
        Start(f"Search the {name} folder.", line=name, system=f"You are a helper that searches {name}."),
        ask(Answer(calls=(bash(f"grep -rn total {name}"),)), line=name, role="subagent", causes=("sub-agent",)),
        Results((f"{name}/sum.py:3: total = 0",), line=name),
        ask(Answer(text=f"It is in {name}/sum.py, line 3."), line=name, role="subagent"),
    )


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("append-only", "Every request is the previous one plus its answer and tool results.", _PLAIN),
    Scenario(
        "odd-tokens",
        "The same, but the model samples tokens that its tokenizer would not choose for that text.",
        _loop(
            *(
                Answer(think=a.think, text=a.text, calls=a.calls, odd=True)
                for a in (_read_file(4), _read_file(5), _DONE)
            )
        ),
        drift=("template",),
    ),
    Scenario(
        "follow-up",
        "The user replies to an answer; stock templates then drop earlier thinking.",
        (
            _START,
            ask(_read_file(1)),
            Results((_listing(1),)),
            ask(Answer(think="It is the minus sign.", text="The minus sign is wrong. Shall I mend it?")),
            Say("Yes, and tell me how you found it."),
            ask(Answer(think="I can explain that.", text="I read the loop and its return value.")),
            Say("Thank you. Anything else?"),
            ask(Answer(think="Let me think about tests.", text="A test for the empty list would be good.")),
        ),
        drift=("thinking dropped", "template"),  # the template drops the thinking, so both causes are right
    ),
    Scenario(
        "thinking-dropped",
        "The agent never sends the model's thinking back.",
        _PLAIN,
        habits=("drop_thinking",),
        drift=("thinking dropped",),
    ),
    Scenario(
        "json-respelled",
        "Arguments of tool calls are sent back as the same JSON with different bytes.",
        _loop(_read_file(1, env={"b": 1, "a": [1.5, None]}), _read_file(2), _DONE),
        habits=("respell",),
        drift=("json spelling",),
    ),
    Scenario(
        "ids-renamed",
        "The agent replaces the ids of tool calls.",
        _PLAIN,
        habits=("rename_ids",),
        drift=("ids renamed",),
    ),
    Scenario(
        "whitespace-trimmed",
        "Text is sent back without surrounding whitespace.",
        _loop(
            Answer(think="Look first.", text="\n\nLet me have a look.  \n", calls=(bash("ls "),)),
            Answer(think="I see.", text="  The file is there.\n\n", calls=(bash("cat a.py"),)),
            Answer(think="Done.", text="It is mended.\n"),
        ),
        habits=("trim",),
        drift=("whitespace",),
    ),
    Scenario("parallel-calls", "Two tool calls in one turn.", _loop(_WIDE, _read_file(7), _DONE)),
    Scenario(
        "compaction",
        "The agent replaces the history with a summary, and continues.",
        (
            *_loop(Answer(calls=(bash(_print_lines(1)),)), _read_file(2)),
            Start(f"{TASK}\n\nSo far: {_print_lines(1)} showed no error. Part 3 is next.", system=SYSTEM),
            ask(_read_file(3), causes=("compaction",)),
            Results((_listing(3),)),
            ask(_DONE),
        ),
        rows=2,
    ),
    Scenario(
        "subagents",
        "Two sub-agents work concurrently in their own conversations.",
        (
            _START,
            ask(Answer(calls=(ToolCall("delegate", {"to": "src"}), ToolCall("delegate", {"to": "lib"})))),
            Together((_helper("src"), _helper("lib"))),
            Results(("src says: line 3", "lib says: line 3")),
            ask(_DONE),
        ),
        rows=3,
    ),
    Scenario(
        "side-calls",
        "A title and a topic check without tools, in addition to the main conversation.",
        (
            Start(f"Give this conversation a title: {TASK}", line="title", system="You write titles.", tools=False),
            # This is the first call, so a gateway may recognize it as a side call only later.
            ask(Answer(text="Mending a sum"), line="title", role="side", causes=("side call",), forks=False),
            *_loop(_read_file(1), _read_file(2)),
            Start("Is this a new topic? Mend the test.", line="topic", system="Answer with yes or no.", tools=False),
            ask(Answer(text="No."), line="topic", role="side", causes=("side call",)),
            ask(_DONE),
        ),
    ),
    Scenario(
        "reminders",
        "The agent adds a user message with a reminder after tool results; stock templates then drop earlier thinking.",
        (
            _START,
            ask(_read_file(1)),
            Results((_listing(1),)),
            Say("<system-reminder>The task list is empty.</system-reminder>"),
            ask(replace(_WIDE, sees=("The task list is empty.",))),
            Results((_listing(2), _listing(3))),
            Say("<system-reminder>part_1.py was changed by the user.</system-reminder>"),
            ask(replace(_read_file(4), sees=("part_1.py was changed by the user.",))),
            Results((_listing(4),)),
            ask(_DONE),
        ),
        drift=("thinking dropped", "template"),
    ),
    Scenario(
        "planner-executor",
        "A planner, an executor and a reviewer without tools. Each has its own conversation, which starts from the previous answer.",
        (
            Start(TASK, line="planner", system="You plan the work of others.", tools=False),
            ask(Answer(think="Two steps will do.", text=_PLAN), line="planner"),
            Start(f"Carry out this plan:\n\n{_PLAN}", line="executor", system="You carry out plans.", tools=False),
            ask(Answer(think="The sign.", text=_CHANGE), line="executor", role="subagent", causes=_OTHER_AGENT),
            Say("Does it handle an empty list?", line="executor"),
            ask(Answer(text="Yes: the sum of an empty list is 0."), line="executor", role="subagent"),
            Start(f"Review this change:\n\n{_CHANGE}", line="reviewer", system="You review changes.", tools=False),
            ask(Answer(text="The change is right."), line="reviewer", role="subagent", causes=_OTHER_AGENT),
        ),
        rows=3,
    ),
    Scenario(
        "hand-off",
        "An agent with tools hands its conversation over to one without tools, which has its own system prompt.",
        (
            *_loop(_read_file(1), Answer(think="I am done.", calls=(ToolCall("delegate", {"to": "writer"}),))),
            System("You explain changes to users."),
            Tools(()),
            ask(
                Answer(text="The loop was right, but the result was off by one.", sees=("You explain changes",)),
                role="subagent",
                causes=("hand-off", "sub-agent", "system prompt changed", "tools changed"),
            ),
        ),
        rows=2,
    ),
    Scenario(
        "greedy",
        "The agent asks for temperature 0. What the engine chooses at temperature 0 is not a sample of the policy.",
        _PLAIN,
        temperature=0.0,
    ),
    Scenario(
        "refused-call",
        "The agent asks a small model, which is not served, for a commit message, and continues without it.",
        (
            *_loop(_read_file(1), _read_file(2)),
            Start("Write a commit message.", line="commit", system="You write commit messages.", tools=False),
            Call((Answer(text="Mend the sum"),), "commit", "side", causes=("side call",), forks=False, unserved=True),
            ask(_DONE),
        ),
    ),
    Scenario(
        "cut-stream",
        "The engine's connection ends in the middle of an answer; the agent retries.",
        (
            _START,
            ask(_read_file(1)),
            Results((_listing(1),)),
            ask(
                Fault(cut_after=6, answer=Answer(text="This will never be whole, whatever is said.")),
                _read_file(2),
                causes=("retry",),
                forks=False,
            ),
            Results((_listing(2),)),
            ask(_DONE),
        ),
    ),
    Scenario(
        "lost-reply",
        "The agent closes the connection in the middle of an answer and retries.",
        (
            _START,
            ask(_read_file(1)),
            Results((_listing(1),)),
            # The first answer takes longer than the agent waits. Both answers are fine: a gateway may answer the retry with the first one.
            Call((_slow(bash("cat src/part_8.py")), _read_file(2)), hang_up_s=0.8, causes=("retry",), forks=False),
            Results((_listing(2),)),
            ask(_DONE),
        ),
        streamed=True,
    ),
    Scenario(
        "aborted",
        "The user interrupts an answer and sends another message.",
        (
            _START,
            ask(Answer(text="What shall I do first?")),
            Say("Look at part 9."),
            Call((_slow(),), hang_up_s=0.8, gives_up=True),
            Say("Stop. Look at part 1."),
            ask(_read_file(1), causes=("branch",), forks=False),
            Results((_listing(1),)),
            ask(_DONE),
        ),
        streamed=True,
    ),
    Scenario(
        "edited-history",
        "The agent rewrites an earlier answer of the model.",
        (
            _START,
            ask(Answer(text="I will look at everything.")),
            Say("Go on."),
            ask(Answer(text="It is the loop.")),
            Edit(0, "I will look at the loop only."),
            Say("And then?"),
            ask(Answer(text="Then it is mended.", sees=("I will look at the loop only.",)), causes=("edited",)),
        ),
        rows=2,
    ),
    Scenario(
        "system-changed",
        "The system prompt changes once, halfway through.",
        (
            *_loop(_read_file(1), _read_file(2)),
            System(f"{SYSTEM}\nYou are in plan mode now."),
            ask(
                Answer(think="A plan, then.", text="First part 1, then part 2.", sees=("You are in plan mode now.",)),
                causes=("system prompt changed", "hand-off"),  # on the wire, another agent looks the same
            ),
        ),
        rows=2,
    ),
    Scenario(
        "system-line",
        "One line of the system prompt changes with every request: Claude Code's billing header, which is not part of the prompt.",
        tuple(
            step
            for n, answer in enumerate((_read_file(1), _read_file(2), _read_file(3), _DONE))
            for step in (
                _START if n == 0 else Results((_listing(n),)),
                System(f"x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n:05x};\n{SYSTEM}"),
                ask(answer),
            )
        ),
        drift=("system prompt changed",),
        dialects=("messages",),
    ),
    Scenario(
        "tools-changed",
        "A tool is removed halfway through.",
        (
            *_loop(_read_file(1), _read_file(2)),
            Tools(("bash", "read_file")),
            ask(_read_file(3), causes=("tools changed",)),
            Results((_listing(3),)),
            ask(_DONE),
        ),
        rows=2,
    ),
    Scenario(
        "huge-result",
        "A tool result of 280 kilobytes.",
        (_START, ask(_read_file(1)), Results((_HUGE,)), ask(_read_file(2)), Results((_listing(2),)), ask(_DONE)),
    ),
    Scenario(
        "unicode",
        "Emoji, combining characters and right-to-left text in messages and sampled text.",
        (
            Start("Übersetze «naïve» 👩🏽‍💻 ins Türkische, नमस्ते.", system=SYSTEM),
            ask(Answer(think="Zwölf Boxkämpfer 🥊 …", calls=(bash("echo 'ğüşİ' 🏳️‍🌈 → שלום"),), odd=True)),
            Results(("ğüşİ 🏳️‍🌈 → שלום e\u0301 \u200b\u00a0 𝔘𝔫𝔦",)),
            ask(Answer(text="Fertig: «naif» 🎉 مرحبا", odd=True)),
            Say("Und «über»?"),
            ask(Answer(text="«Üzerinde» ✅")),
        ),
        drift=("template", "thinking dropped"),
    ),
    Scenario(
        "malformed-call",
        "The model makes a tool call that is not valid JSON, and the agent reports it.",
        (
            _START,
            ask(Answer(raw='I will try.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls}\n</tool_call>')),
            Say("That was not a tool call. Try again."),
            ask(_read_file(2)),
            Results((_listing(2),)),
            ask(_DONE),
        ),
        drift=("template",),
    ),
    Scenario(
        "cut-off",
        "The model reaches its token limit in the middle of an answer, and is told to continue.",
        (
            _START,
            ask(Answer(text="The first half of a long explanation, which then", finish="length")),
            Say("Go on."),
            ask(Answer(text="continues, and ends here.")),
        ),
    ),
    Scenario(
        "slow-engine",
        "The first token takes two seconds, and the rest arrive slowly.",
        (
            _START,
            ask(Answer(think="Slowly.", calls=(bash("sleep 1"),), delay_s=2.0, pace_s=0.02)),
            Results(("ok",)),
            ask(_DONE),
        ),
    ),
    *(
        Scenario(
            name,
            about,
            (
                _START,
                ask(_read_file(1)),
                Results((_listing(1),)),
                ask(fault, _read_file(2)),
                Results((_listing(2),)),
                ask(_DONE),
            ),
        )
        for name, about, fault in (
            ("engine-429", "The engine is busy once; the agent retries.", Fault(status=429)),
            ("engine-500", "The engine fails once; the agent retries.", Fault(status=500)),
            ("engine-503", "The engine is unavailable once; the agent retries.", Fault(status=503)),
            (
                "engine-drop",
                "The engine closes the connection before the first token; the agent retries.",
                Fault(drop=True),
            ),
        )
    ),
    Scenario(
        "overflow",
        "The prompt exceeds the context; the agent receives an error and shortens its history.",
        (
            *_loop(Answer(calls=(bash(_print_lines(1)),)), _read_file(2)),
            Call((Fault(status=400),), gives_up=True),
            Start(f"{TASK}\n\nSo far: {_print_lines(1)} showed no error.", system=SYSTEM),
            ask(_DONE, causes=("compaction",)),
        ),
        rows=2,
    ),
)

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def build_load(turns: int) -> Scenario:
    """Build the load of a coding agent with realistic sizes.

    It has a 6 KB system prompt, ten tools, a task with 14 KB of code, and 2 KB of code per turn.
    """
    system = SYSTEM + "\n" + "\n".join(f"Rule {n}: {_listing(n)}" for n in range(50))
    steps: list[Step] = [Start(f"{TASK}\n\n{_sample_code(0, 14_000)}", system=system, more_tools=9)]
    for n in range(turns):
        steps += [ask(_read_file(1000 + n)), Results((_sample_code(n + 1, 1_850),))]
    return Scenario("load", f"{turns} turns of a coding agent", tuple(steps[:-1]))


def _sample_code(index: int, size: int) -> str:
    """Return real code from the standard library, different for each index."""
    text = "\n".join(inspect.getsource(module) for module in (argparse, tarfile))
    start = index * 1_777 % (len(text) - size)
    return text[start : start + size]
