"""Test turn roles: each case has the calls of a rollout and the expected role of each turn."""

from __future__ import annotations

import pytest

from tests.trace.kit import Call, Recorder, assistant, system, user
from turngate.trace.roles import ROLES, TurnRole, assign_roles
from turngate.types import CallSignals

YOU, ASK = system("You code."), user("Fix it.")
FIRST = [YOU, ASK]
SECOND = [*FIRST, assistant("On it."), user("And?")]
WORK = [Call(FIRST, assistant("On it.")), Call(SECOND, assistant("Done."))]
TITLE = Call([system("Write a title."), ASK], preamble="")
HELPER = Call([system("You search."), user("Find it.")])
SIDE = CallSignals(role="side")


def on(thread: str, parent: str = "") -> CallSignals:
    return CallSignals(thread=thread, parent=parent)


CASES: list[tuple[str, list[Call], list[TurnRole]]] = [
    ("nothing", [], []),
    ("the agent's own work", WORK, ["main", "main"]),
    ("work without tools", [Call(FIRST, preamble="")], ["main"]),
    ("without tools, the longest", [TITLE, *[Call(c.messages, c.answer, "") for c in WORK]], ["side", "main", "main"]),
    # helpers
    ("a helper, by structure", [*WORK, HELPER], ["main", "main", "subagent"]),
    (
        "a helper, by its signal",
        [*WORK, Call([YOU, user("Find.")], signals=CallSignals(role="subagent"))],
        ["main", "main", "subagent"],
    ),
    (
        "a helper, by its parent",
        [*WORK, Call([YOU, user("Find.")], signals=on("b", "a"))],
        ["main", "main", "subagent"],
    ),
    (
        "a helper on its parent's history, by its thread",
        [Call(FIRST, assistant("On it."), signals=on("a")), Call(SECOND, signals=on("b"))],
        ["main", "subagent"],
    ),
    (
        "a question without tools on another thread",
        [
            Call(FIRST, assistant("On it."), preamble="", signals=on("a")),
            Call(SECOND, preamble="", signals=on("b")),
        ],
        ["main", "main"],
    ),
    # side calls
    ("a title before the work", [TITLE, *WORK], ["side", "main", "main"]),
    ("a title in between", [WORK[0], TITLE, WORK[1]], ["main", "side", "main"]),
    (
        "two titles before the work",
        [TITLE, Call([system("Name it."), ASK], preamble=""), *WORK],
        ["side", "side", "main", "main"],
    ),
    (
        "a side call with tools, by its signal",
        [*WORK, Call([YOU, user("Title?")], signals=SIDE)],
        ["main", "main", "side"],
    ),
    (
        "a summary of the work, by its signal",
        [*WORK, Call([*SECOND, user("Sum up.")], signals=CallSignals(role="summary"))],
        ["main", "main", "summary"],
    ),
    ("a side call with tools first", [Call([YOU, user("Title?")], signals=SIDE), *WORK], ["side", "main", "main"]),
    # the same work with a different start
    ("compaction", [*WORK, Call([YOU, user("So far: …")])], ["main", "main", "main"]),
    ("another system prompt", [*WORK, Call([system("You code well."), ASK])], ["main", "main", "main"]),
    ("other tools", [*WORK, Call(SECOND, preamble="more tools")], ["main", "main", "main"]),
    ("an edited history", [*WORK, Call([*FIRST, assistant("No."), user("Why?")])], ["main", "main", "main"]),
    ("a fork of the template", [WORK[0], Call(FIRST, preamble="other", cause="template")], ["main", "main"]),
    # several answers to one request
    ("resampled, and neither continued", [WORK[0], Call(FIRST, assistant("Hm."))], ["main", "main"]),
    (
        "resampled, and the first continued",
        [WORK[0], Call(FIRST, assistant("Hm.")), WORK[1]],
        ["main", "superseded", "main"],
    ),
    ("retried", [WORK[0], Call(FIRST, assistant("Hm."), retried=True)], ["superseded", "main"]),
    (
        "retried twice",
        [WORK[0], Call(FIRST, assistant("Hm."), retried=True), Call(FIRST, assistant("So."), retried=True)],
        ["superseded", "superseded", "main"],
    ),
    ("never delivered", [Call(FIRST, delivered=False)], ["superseded"]),
    ("not delivered, but continued", [Call(FIRST, assistant("On it."), delivered=False), WORK[1]], ["main", "main"]),
    # aborted or truncated
    ("aborted", [Call(FIRST, finish="abort")], ["aborted"]),
    ("aborted and retried", [Call(FIRST, finish="abort"), *WORK], ["aborted", "main", "main"]),
    ("cut by a limit", [Call(FIRST, finish="length")], ["main"]),
]


@pytest.mark.parametrize(("calls", "roles"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_roles(calls: list[Call], roles: list[TurnRole]) -> None:
    recorder = Recorder(calls)
    assigned = assign_roles(recorder.trace)
    assert [assigned[turn.id] for turn in recorder.turns] == roles


def test_cases_cover_every_role() -> None:
    # "unknown" depends on what answers contain: tests/trace/test_role_conversations.py
    assert {role for case in CASES for role in case[2]} == set(ROLES) - {"unknown"}
