"""Test fork causes: each case has the recorded calls, the next call and the expected cause."""

from __future__ import annotations

import pytest

from tests.trace.kit import Call, Recorder, Wire, assistant, system, user
from turngate.trace.tree import Cause
from turngate.types import CallSignals

YOU, ASK = system("You code."), user("Fix it.")
FIRST = [YOU, ASK]
SECOND = [*FIRST, assistant("On it."), user("And?")]
THIRD = [*SECOND, assistant("Done."), user("Thanks.")]
LINE = [Call(FIRST, assistant("On it.")), Call(SECOND, assistant("Done.")), Call(THIRD, assistant("Bye."))]
SUM = "Two files were read and fixed."
LONG = [*LINE, Call([*THIRD, assistant("Bye."), user("Sum up.")], assistant(SUM))]
MAP = user("A map of the repository.")
SHOTS = [YOU, user("Fix one."), assistant("One is fixed.")]
TASK = "Find the sums in all the folders."
TITLE = Call([system("Write a title."), ASK], preamble="")
SIDE, HELPER = CallSignals(role="side"), CallSignals(role="subagent")


def on(thread: str, parent: str = "") -> CallSignals:
    return CallSignals(thread=thread, parent=parent)


def first(**changes: object) -> Call:
    return Call(FIRST, assistant("On it."), **changes)  # type: ignore[arg-type]


CASES: list[tuple[str, list[Call], Call, Cause | None]] = [
    ("the first call", [], Call(FIRST), None),
    ("the next turn", LINE[:1], Call(SECOND), None),
    ("the turn after that", LINE[:2], Call(THIRD), None),
    # repeated request
    ("again", LINE[:1], Call(FIRST), "resample"),
    ("again, and the client says so", LINE[:1], Call(FIRST, retried=True), "retry"),
    ("again with the same key", [first(key="k")], Call(FIRST, key="k"), "retry"),
    ("again with another key", [first(key="k")], Call(FIRST, key="l"), "resample"),
    ("again without a key", [first(key="k")], Call(FIRST), "resample"),
    ("again after an aborted answer", [first(finish="abort")], Call(FIRST), "retry"),
    ("again after an undelivered answer", [first(delivered=False)], Call(FIRST), "retry"),
    (
        "again after one lost answer and one that arrived",
        [first(finish="abort"), Call(FIRST, assistant("Hm."))],
        Call(FIRST),
        "retry",
    ),
    (
        "in parallel with one lost and one delivered answer",
        [first(started=1.0, ended=9.0, finish="abort"), Call(FIRST, assistant("Hm."), started=1.0, ended=2.0)],
        Call(FIRST, started=3.0),
        "resample",
    ),
    ("in parallel, started before the answer", [first(started=5.0, ended=6.0)], Call(FIRST, started=4.0), None),
    # other continuation of a recorded turn
    ("another continuation", LINE[:2], Call([*FIRST, assistant("On it."), user("Why?")]), "branch"),
    ("a side call from a recorded turn", LINE[:2], Call([*SECOND, user("Sum up.")], signals=SIDE), "side"),
    (
        "the main line after a side call",
        [*LINE[:1], Call([*FIRST, assistant("On it."), user("Sum up.")], signals=SIDE)],
        Call(SECOND),
        None,
    ),
    (
        "a helper from a recorded turn",
        LINE[:1],
        Call([*SECOND[:3], user("Search.")], signals=CallSignals(thread="b", role="subagent")),
        "subagent",
    ),
    ("a helper without a thread of its own", LINE[:1], Call([*SECOND[:3], user("Search.")], signals=HELPER), None),
    (
        "a helper that continues its own turn",
        [
            Call(FIRST, assistant("On it."), signals=on("a")),
            Call([*SECOND[:3], user("Search.")], assistant("Found."), signals=on("b", "a")),
        ],
        Call([*SECOND[:3], user("Search."), assistant("Found."), user("More.")], signals=on("b", "a")),
        None,
    ),
    (
        "a helper that continues its own turn twice",
        [
            Call(FIRST, assistant("On it."), signals=on("a")),
            Call([*SECOND[:3], user("Search.")], assistant("Found."), signals=on("b", "a")),
            Call([*SECOND[:3], user("Search."), assistant("Found."), user("More.")], signals=on("b", "a")),
        ],
        Call([*SECOND[:3], user("Search."), assistant("Found."), user("Stop.")], signals=on("b", "a")),
        "subagent",
    ),
    ("an inserted answer", LINE[:1], Call([*SECOND, assistant("I was here."), user("Go.")]), "edited"),
    # different start
    ("other tools", LINE[:2], Call(SECOND, preamble="more tools"), "tools"),
    ("the same without tools", LINE[:2], Call(SECOND, preamble=""), "side"),
    ("another system prompt", LINE[:2], Call([system("You code well."), ASK]), "system"),
    ("a question without tools beside work with tools", LINE[:2], TITLE, "side"),
    ("other work with tools", LINE[:2], Call([system("You search."), user("Find it.")]), "subagent"),
    ("other work with the same tools, without system prompts", [Call([ASK])], Call([user("Fix that.")]), "new"),
    ("other work with other tools, without system prompts", [Call([ASK], preamble="x")], Call([MAP]), "subagent"),
    ("work without a system prompt beside work with one", LINE[:2], Call([user("Fix that.")]), "subagent"),
    ("work with a system prompt beside work without one", [Call([ASK])], Call([YOU, user("Fix that.")]), "subagent"),
    ("the question in a text, without system prompts", [Call([ASK])], Call([user("Fix it.\nNow.")]), "subagent"),
    (
        "the arguments of a tool call, without system prompts",
        [Call([ASK], assistant("", ("c1", "task", f'{{"prompt": "{TASK}"}}')))],
        Call([user(TASK)]),
        "subagent",
    ),
    ("shortened, with a summary as the question", LINE, Call([YOU, user("So far: …")]), "new"),
    ("shortened, with the model's summary as the question", LONG, Call([YOU, user(f"So far: {SUM}")]), "compaction"),
    ("shortened, with the question in the summary", LINE, Call([YOU, user("Fix it.\n\nSo far: …")]), "compaction"),
    ("shortened, with the question at the end", LINE, Call([YOU, user("So far: …\nTask:\nFix it.")]), "compaction"),
    (
        "shortened, with the question in a long text",
        LINE,
        Call([YOU, user("Fix it.\n\n" + "\n\n".join(f"{n} is done.\nIt is fine." for n in range(99)))]),
        "compaction",
    ),
    ("another task that begins with the words of the first", LINE, Call([YOU, user("Fix it. Then test.")]), "new"),
    ("another task", LINE, Call([YOU, user("Fix that.")]), "new"),
    ("another task after one turn", LINE[:1], Call([YOU, user("Fix that.")]), "new"),
    ("another task after the same fixed message", [Call([YOU, MAP, ASK])], Call([YOU, MAP, user("No.")]), "new"),
    ("another task after the same examples", [Call([*SHOTS, ASK])], Call([*SHOTS, user("Fix that.")]), "new"),
    (
        "another task after the same examples, without tools",
        [Call([*SHOTS, ASK], preamble="")],
        Call([*SHOTS, user("Fix that.")], preamble=""),
        "new",
    ),
    ("shortened, with the question kept", LINE, Call([YOU, ASK, user("So far: …")]), "compaction"),
    ("the question kept, and hardly shorter", LINE[:2], Call([YOU, ASK, user("So"), user("far")]), "edited"),
    (
        "shortened, with an answer after the summary",
        LONG,
        Call([YOU, user(f"So far: {SUM}"), assistant("I see."), user("Go on.")]),
        "compaction",
    ),
    (
        "another task, with an answer that the agent wrote",
        LINE[:1],
        Call([YOU, user("Fix that."), assistant("I see."), user("Go on.")]),
        "new",
    ),
    ("another task at the same length", LINE[:1], Call([YOU, user("Fix that."), user("And this.")]), "new"),
    (
        "another question before the same history",
        LINE,
        Call([YOU, user("Fix that."), *THIRD[2:]]),
        "edited",
    ),
    (
        "the same question, and another first answer",
        LINE,
        Call([*FIRST, assistant("No."), user("Why not?")]),
        "edited",
    ),
    # signals of the agent
    ("a side call, by its signal", LINE, Call([YOU, user("Title?")], signals=SIDE), "side"),
    ("a helper, by its signal", LINE, Call([YOU, user("So far: …")], signals=HELPER), "subagent"),
    ("a helper, by its parent", LINE, Call([YOU, user("So far: …")], signals=on("b", "a")), "subagent"),
    ("its own parent", [], Call(FIRST, signals=on("a", "a")), None),
    ("another thread with tools", [first(signals=on("a"))], Call([YOU, ASK, ASK], signals=on("b")), "subagent"),
    (
        "another thread without tools",
        [first(signals=on("a"))],
        Call([YOU, user("Title?")], preamble="", signals=on("b")),
        "side",
    ),
    (
        "the same thread with another task",
        [first(signals=on("a"))],
        Call([YOU, user("So far: …")], signals=on("a")),
        "compaction",
    ),
    (
        "the same thread with other work",
        [first(signals=on("a"))],
        Call([system("You search."), user("Find it.")], signals=on("a")),
        "compaction",
    ),
    # title calls before the main work
    ("the work after a title", [TITLE], Call(FIRST), None),
    ("the work after a title, by its signal", [Call([YOU, user("Title?")], signals=SIDE)], Call(FIRST), None),
    ("a second title", [TITLE], Call([system("Name it."), user("Or so.")], preamble=""), "new"),
    (
        "the answers with another system prompt and other tools",
        LINE[:1],
        Call([system("You test."), *SECOND[1:]], preamble="other tools"),
        "handoff",
    ),
]


@pytest.mark.parametrize(("before", "call", "cause"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_fork_cause(before: list[Call], call: Call, cause: Cause | None) -> None:
    assert Recorder(before).find_cause(call) == cause


def test_cases_cover_every_cause() -> None:
    expected = {case[3] for case in CASES}
    # "template" needs a renderer: tests/gateway/test_recording.py
    assert expected == {*Cause.__args__, None} - {"template"}  # type: ignore[attr-defined]


def test_request_equal_in_meaning_is_resample() -> None:
    recorder = Recorder(LINE[:1])
    repeated: list[Wire] = [YOU, user("Fix it.  ")]
    location = recorder.locate(Call(repeated))
    assert location.context is recorder.turns[0].parent
    assert recorder.find_cause(Call(repeated)) == "resample"
