"""Recorded training data for the tests and screenshots of the page, written directly into a store.

    add_training_run(data)    # groups of 8 whose rewards rise with the policy's version; two still running
    add_task_group(data)      # `fix-slug-0` … `-3`, one group: realistic work with tools, a sub-agent, a retry and a compaction

Call them before a gateway opens the folder, like the builders of `tests/page_kit.py`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests import kit
from tests.page_kit import Builder, TraceBuilder, open_builder
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.tree import Context, Sampled
from turngate.types import CallSignals, Limits

Json = Any
BATCH = "train.5e1f0a77"
GROUP = f"{BATCH}.fix-slug"
_TASKS = ("fix-slug", "parse-dates", "csv-quotes", "retry-loop", "rename-api", "cache-key", "utf8-paths", "flaky-test")
_FAULTS = (
    (
        "infrastructure fault",
        "setup: no space left on device",
        {"stderr": "tar: write error: No space left on device\n"},
    ),
    ("agent failed", "it ended with exit code 2", {"stderr": "Error: context window exceeded after compaction\n"}),
    ("invalid task", "tests/test.sh: the reference solution scores 0", {"verifier": "1 failed: test_reference\n"}),
)
SYSTEM = "You are a coding agent. Work in /workspace. Use the tools to read and change files, run the tests, and say when you are done."
PROMPT = (
    '`slugify` turns "Crème brûlée" into "crme-brle". It should keep the letters and drop only their accents. '
    "Fix it; the tests are in tests/."
)


def add_training_run(data: Path, groups: int = 48, n: int = 8) -> None:
    """Add groups with rising rewards and policy versions, delivered by a feed."""
    rng = random.Random(3)
    first = time.time() - 225.0 * groups
    with open_builder(data) as builder:
        for number in range(groups):
            at, version = first + 225.0 * number, number // 3
            if number % 3 == 0 and number:
                builder.event("", "fence", {"paused": False, "version": version}, at)
            _add_group(builder, number, n, at, version, rng, running=number >= groups - 2)


def _add_group(
    builder: Builder, number: int, n: int, at: float, version: int, rng: random.Random, *, running: bool
) -> None:
    task = _TASKS[number % len(_TASKS)]
    group = f"{BATCH}.{task}@{number // len(_TASKS) + 1}"
    success_rate = 0.12 + 0.78 / (1 + 2.7 ** (3.2 - 0.17 * number))
    for index in range(n):
        opened = at + 9.0 * index
        is_running = running and index >= 3
        name = f"{number:02x}{index:x}{rng.randrange(16**9):09x}"
        metadata = {
            "task": task,
            "task_kind": task.partition("-")[2],
            "agent": ("pi", "claude-code", "codex")[number % 3],
            "agent_version": "1.0",
            "sandbox": "docker",
            "group": group,
            "batch": BATCH,
            "rollout": f"{group}.{index}",
            "attempt": 1,
        }
        about = {"rollout": metadata["rollout"], "attempt": 1}
        for position, stage in enumerate(("sandbox", "files", "setup", "session", "agent")):
            builder.event(name, "stage", {"stage": stage, **about}, opened - 5 + position)
        duration = 25 + 160 * rng.random()
        ended = None if is_running else opened + duration
        status = "open" if is_running else "sealed"
        limits = Limits(turns=50)
        key = builder.session(name, opened, status=status, closed=ended, metadata=metadata, limits=limits)
        trace = TraceBuilder(builder, key, name, opened)
        turns = rng.randint(2, 5)
        versions = sorted(max(0, version - rng.choice((0, 0, 0, 0, 1))) for _ in range(turns))
        context = trace.ask([{"role": "user", "content": f"Fix {task}."}])
        for turn in range(turns):
            text = rng.choice(
                ("The test fails on an empty name.", "I look at the caller first.", "Done: the suite passes.")
            )
            turn_node = trace.answer(
                context,
                text * 3,
                version=versions[turn],
                seconds=duration / turns,
                logprobs=random_logprobs(text * 3, rng),
            )
            if turn < turns - 1:
                context = trace.ask([{"role": "tool", "tool_call_id": "c", "content": "ok\n"}], turn_node)
        if ended is None:
            continue
        builder.event(name, "sealed", {"stop": "", "turns": turns}, ended)
        outcome = _outcome(group, task, metadata["rollout"], success_rate, rng)
        builder.outcome(key, name, outcome, ended + 1)
        done = {"stage": "done", **about, "status": "finished", "class": outcome.kind, "reward": outcome.reward}
        builder.event(name, "stage", done, ended + 1.1)
    if not running:
        data = {"feed": "main", "number": number + 1, "group": group, "rollouts": n}
        builder.event("", "delivery", data, at + 9.0 * n + 190)


def _outcome(group: str, task: str, rollout: str, success_rate: float, rng: random.Random) -> RecordedOutcome:
    data: Json = {"rollout": rollout, "status": "finished", "sandbox": "docker"}
    if rng.random() < 0.07:
        kind, message, logs = _FAULTS[rng.choice((0, 0, 1, 1, 1, 2))]
        return RecordedOutcome(kind=kind, message=message, group=group, task=task, data={**data, "logs": logs})  # type: ignore[arg-type]
    reward = 1.0 if rng.random() < success_rate else rng.choice((0.0, 0.0, 0.5))
    return RecordedOutcome(kind="graded", reward=reward, resolved=reward == 1.0, group=group, task=task, data=data)


def random_logprobs(text: str, rng: random.Random) -> list[float]:
    """Log-probabilities like those of a trained model: mostly near 0, a few low."""
    return [_random_logprob(rng) for _ in range(len(kit.tokenizer().encode(text)) + 1)]


def _random_logprob(rng: random.Random) -> float:
    where = rng.random()
    if where < 0.72:
        return -rng.random() * 0.08
    if where < 0.88:
        return -0.1 - rng.random() * 1.2
    return -1.3 - rng.random() * 2 if where < 0.97 else -3.2 - rng.random() * 4


class _Rollout:
    """One rollout of `add_task_group`, turn by turn."""

    def __init__(self, builder: Builder, index: int, opened: float) -> None:
        self.name = f"fix-slug-{index}"
        self.chance = random.Random(index)
        self.builder, self.index, self.opened = builder, index, opened
        metadata = {
            "task": "fix-slug",
            "agent": "claude-code",
            "agent_version": "2.1.3",
            "sandbox": "docker",
            "group": GROUP,
            "batch": BATCH,
            "rollout": f"{GROUP}.{index}",
            "attempt": 1,
        }
        for position, stage in enumerate(("sandbox", "files", "setup", "session", "relay", "launch", "agent")):
            data = {"stage": stage, "rollout": metadata["rollout"], "attempt": 1}
            builder.event(self.name, "stage", data, opened - (8.1, 6.2, 5.9, 1.2, 1.1, 0.4, 0.2)[position])
        limits = Limits(turns=50, sampled_tokens=32768)
        self.key = builder.session(
            self.name, opened, closed=opened + 74, metadata=metadata, limits=limits, sampling={"temperature": 1.0}
        )
        self.trace = TraceBuilder(builder, self.key, self.name, opened)
        self.calls = self.turns = 0

    def begin(self, **options: Json) -> Context:
        return self.trace.ask([{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}], **options)

    def say(
        self, context: Context, text: str, tool: str = "", thought: str = "", version: int = 15, **arguments: str
    ) -> Sampled:
        message: Json = {"reasoning": thought} if thought else {}
        self.turns += 1
        full_text = f"<think>\n{thought}\n</think>\n\n{text}" if thought else text
        if tool:
            self.calls += 1
            encoded = json.dumps(arguments)
            message["tool_calls"] = [{"id": f"call_{self.calls}", "name": tool, "arguments": encoded}]
            full_text += f'\n<tool_call>\n{{"name": "{tool}", "arguments": {encoded}}}\n</tool_call>'
        ids = [*kit.tokenizer().encode(full_text), kit.renderer().stop_ids[0]]
        scores = [_random_logprob(self.chance) for _ in ids]
        finish = "tool_calls" if tool else "stop"
        seconds = 1.5 + self.chance.random() * 4
        return self.trace.answer(
            context, text, ids=ids, logprobs=scores, message=message, finish=finish, version=version, seconds=seconds
        )

    def add_result(self, turn_node: Sampled, output: str) -> Context:
        return self.trace.ask([{"role": "tool", "tool_call_id": f"call_{self.calls}", "content": output}], turn_node)

    def end(self, reward: float, verifier: str) -> None:
        ended = self.opened + 74
        self.builder.event(self.name, "sealed", {"stop": "", "turns": self.turns}, ended)
        logs = {"stdout": "claude-code 2.1.3\nsession ended\n", "verifier": verifier}
        data: Json = {"rollout": f"{GROUP}.{self.index}", "status": "finished", "sandbox": "docker", "logs": logs}
        outcome = RecordedOutcome(
            kind="graded", reward=reward, resolved=reward == 1, group=GROUP, task="fix-slug", data=data
        )
        self.builder.outcome(self.key, self.name, outcome, ended + 3)
        done = {"stage": "done", "rollout": f"{GROUP}.{self.index}", "attempt": 1, "status": "finished"}
        self.builder.event(self.name, "stage", {**done, "class": "graded", "reward": reward}, ended + 3.1)


_SOURCE = '''import re


def slugify(text: str) -> str:
    """A text as part of an address."""
    text = re.sub(r"[^a-zA-Z0-9]+", "-", text)
    return text.strip("-").lower()
'''
_FAILED = "FAILED tests/test_slug.py::test_accents - AssertionError: assert 'cr-me-br-l-e' == 'creme-brulee'\n1 failed, 6 passed in 0.08s\n"
_PASSED = "7 passed in 0.06s\n"


def add_task_group(data: Path) -> None:
    """Add four rollouts of one task: two solve it, one partly, one not."""
    start = time.time() - 200
    with open_builder(data) as builder:
        _add_first_rollout(_Rollout(builder, 0, start))
        for index, (fix, output, reward) in enumerate(_OTHERS, 1):
            work = _Rollout(builder, index, start + 6 * index)
            context = work.begin()
            context = work.add_result(
                work.say(context, "I'll look at the code first.", "bash", command="cat slug.py"), _SOURCE
            )
            context = work.add_result(
                work.say(context, fix, "bash", command=f"python fix_{index}.py && pytest -q"), output
            )
            work.say(context, "Done." if reward else "It is mended now; the failing test expects something else.")
            work.end(reward, output)


_OTHERS: Sequence[tuple[str, str, float]] = (
    ("`unicodedata.normalize` takes the accents apart.", _PASSED, 1.0),
    ("I map the letters by hand: é, è, û and ê.", "1 failed, 6 passed in 0.07s\n", 0.5),
    ("The regular expression should allow é and û.", _FAILED, 0.0),
)


def _add_first_rollout(work: _Rollout) -> None:
    """Add the main rollout, with a title, a retry, a sub-agent and a compaction."""
    title = work.trace.ask([{"role": "user", "content": "Write a title of five words for: " + PROMPT}], tools=False)
    work.trace.answer(
        title, "Keep letters in slugs", logprobs=random_logprobs("Keep letters in slugs", work.chance), version=15
    )
    context = work.begin()
    thought = "The expression drops every character that is not ASCII. The accents have to be taken apart, and only they be dropped."
    turn_node = work.say(
        context, "I'll look at the code and its tests first.", "bash", thought, command="cat slug.py && ls tests"
    )
    context = work.add_result(turn_node, _SOURCE + "test_slug.py\n")
    lost = [*kit.tokenizer().encode("I run the te")]
    work.trace.answer(
        context,
        "I run the te",
        ids=lost,
        logprobs=[_random_logprob(work.chance) for _ in lost],
        finish="abort",
        version=15,
    )
    turn_node = work.say(context, "Now the tests, to see what they expect.", "bash", command="pytest -q")
    context = work.add_result(turn_node, _FAILED)
    turn_node = work.say(
        context,
        "A helper looks for other callers of `slugify`, while I fix it.",
        "task",
        prompt="Find every caller of slugify.",
    )
    helper = work.trace.ask(
        [{"role": "user", "content": "Find every caller of slugify."}],
        cause="subagent",
        signals=CallSignals("t2", "t1", "subagent"),
    )
    found = work.say(helper, "", "bash", command="rg -n slugify --type py")
    work.say(
        work.add_result(found, "slug.py:4:def slugify\nviews.py:31:    return slugify(title)\n"),
        "It is called once: views.py, line 31.",
    )
    work.calls -= 1
    context = work.add_result(turn_node, "It is called once: views.py, line 31.")
    thought = "NFKD splits é into e and a combining accent. Encoding to ASCII with errors ignored drops the accent and keeps the e."
    fix = "sed -i 's/^    text = re.sub/    text = plain(text)\\n&/' slug.py && cat >> slug.py <<END"
    fix += '\n\n\ndef plain(text: str) -> str:\n    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()\nEND'
    turn_node = work.say(
        context,
        "Only `views.py` calls it, and with plain text. I take the accents apart with NFKD and drop the marks.",
        "bash",
        thought,
        version=16,
        command=fix,
    )
    context = work.add_result(turn_node, "")
    turn_node = work.say(
        context,
        "And the import.",
        "edit",
        version=16,
        path="slug.py",
        old="import re\n",
        new="import re\nimport unicodedata\n",
    )
    summary = (
        "So far: slug.py takes accents apart with unicodedata.normalize (NFKD) and drops them. Left: run the tests."
    )
    context = work.trace.ask(
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": PROMPT},
            {"role": "user", "content": summary},
        ],
        cause="compaction",
    )
    turn_node = work.say(context, "I run the tests.", "bash", version=16, command="pytest -q")
    context = work.add_result(turn_node, _PASSED)
    work.say(
        context,
        '`slugify` keeps letters now: "Crème brûlée" becomes "creme-brulee". All seven tests pass, and nothing else that calls it changes.',
        version=16,
    )
    work.end(1.0, _PASSED)
