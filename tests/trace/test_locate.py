"""Test where a request attaches to the trace: each case has the recorded calls, the request and the node it extends.

Every case runs with the raw bytes of recent requests (a fast path) and without them, as after a restart.
"""

from __future__ import annotations

import pytest

from tests.trace.kit import Call, Recorder, Wire, assistant, result, system, user

YOU, ASK = system("You code."), user("Fix it.")
FIRST = [YOU, ASK]
RUN = assistant("", ("call_1", "run", '{"cmd": "ls", "n": 5}'))
SECOND = [*FIRST, RUN, result("call_1", "a b")]
THIRD = [*SECOND, assistant("Done."), user("Thanks.")]
LINE = [Call(FIRST, RUN), Call(SECOND, assistant("Done.", thinking="All good."))]
LONG = assistant("", ("call_1", "write", '{"text": "%s"}' % ("x" * 4000)))


def run(arguments: str, call_id: str = "call_1") -> Wire:
    return assistant("", (call_id, "run", arguments))


def after(*messages: Wire) -> list[Wire]:
    return [*FIRST, *messages]


# (turn it extends or None for the root, index of the first new message), or ("repeats", n): it repeats the context of turn n
Point = tuple[int | None, int] | tuple[str, int]

CASES: list[tuple[str, list[Call], Call, Point]] = [
    ("into an empty trace", [], Call(FIRST), (None, 0)),
    ("the next turn", LINE[:1], Call(SECOND), (0, 3)),
    ("two turns on", LINE, Call(THIRD), (1, 5)),
    ("the same request", LINE, Call(FIRST), ("repeats", 0)),
    ("the same request, later", LINE, Call(SECOND), ("repeats", 1)),
    ("from an earlier turn", LINE, Call(after(RUN, result("call_1", "c"))), (0, 3)),
    ("another question", LINE, Call([YOU, user("No.")]), (None, 0)),
    ("another preamble", LINE, Call(THIRD, preamble="other"), (None, 0)),
    ("an answer that was never given", LINE, Call(after(assistant("Me."), user("So?"))), (None, 0)),
    ("an answer that was never given, later", LINE, Call([*SECOND, assistant("Me."), user("So?")]), (0, 3)),
    ("a shorter history", LINE, Call([YOU]), (None, 0)),
    # history rewritten by the agent
    ("arguments in another spelling", LINE[:1], Call(after(run('{"n":5,"cmd":"ls"}'), result("call_1", "a"))), (0, 3)),
    ("null for no text", LINE[:1], Call(after({**RUN, "content": None}, result("call_1", "a"))), (0, 3)),
    ("parts for a string", LINE[:1], Call([YOU, user([{"type": "text", "text": "Fix it."}]), *SECOND[2:]]), (0, 3)),
    ("trimmed text", LINE, Call([*SECOND, assistant(" Done.\n"), user("Thanks.")]), (1, 5)),
    ("kept reasoning", LINE, Call([*SECOND, assistant("Done.", thinking="All good."), user("Thanks.")]), (1, 5)),
    ("renamed call ids", LINE, Call(after(run('{"cmd": "ls", "n": 5}', "x"), result("x", "a b"), *THIRD[4:])), (1, 5)),
    # rewritten arguments with the original text and call ids
    (
        "defaults filled in",
        LINE[:1],
        Call(after(run('{"cmd": "ls", "n": 5, "dir": "."}'), result("call_1", "a"))),
        (0, 3),
    ),
    ("a little cut off", LINE[:1], Call(after(run('{"cmd": "ls"}'), result("call_1", "a"))), (0, 3)),
    (
        "rewritten, with renamed ids",
        LINE[:1],
        Call(after(run('{"cmd": "ls -a", "n": 5}', "x"), result("x", "a"))),
        (None, 0),
    ),
    (
        "most of an argument cut off",
        [Call(FIRST, LONG)],
        Call(after(assistant("", ("call_1", "write", '{"text": "…"}')), result("call_1", "ok"))),
        (None, 0),
    ),
    # several answers to one request
    (
        "the answer whose call id it has",
        [Call(FIRST, run("{}", "call_1")), Call(FIRST, run("{}", "call_2"))],
        Call(after(run("{}", "call_1"), result("call_1", "a"))),
        (0, 3),
    ),
    (
        "the answer whose exact text it has",
        [Call(FIRST, assistant("Done. ")), Call(FIRST, assistant("Done."))],
        Call(after(assistant("Done. "), user("So?"))),
        (0, 3),
    ),
    (
        "the answer whose reasoning it has",
        [Call(FIRST, assistant("Done.", thinking="A")), Call(FIRST, assistant("Done.", thinking="B"))],
        Call(after(assistant("Done.", thinking="A"), user("So?"))),
        (0, 3),
    ),
    (
        "the answer that was continued like this before",
        [
            Call(FIRST, assistant("Done.", thinking="A")),
            Call(after(assistant("Done.", thinking="A"), user("So?"))),
            Call(FIRST, assistant("Done.", thinking="B")),
        ],
        Call(after(assistant("Done."), user("So?"), assistant("answer 1"), user("More."))),
        (1, 5),
    ),
    (
        "the answer that arrived",
        [Call(FIRST, assistant("Done.")), Call(FIRST, assistant("Done."), delivered=False)],
        Call(after(assistant("Done."), user("So?"))),
        (0, 3),
    ),
    (
        "the newest answer",
        [Call(FIRST, assistant("Done.")), Call(FIRST, assistant("Done."))],
        Call(after(assistant("Done."), user("So?"))),
        (1, 3),
    ),
    # several branches with the same start
    (
        "the branch that has its later answers",
        [
            Call(FIRST, assistant("Done.")),
            Call(after(assistant("Done."), user("So?")), assistant("A")),
            Call(FIRST, assistant("Done.")),
            Call(after(assistant("Done."), user("So?")), assistant("B")),
        ],
        Call(after(assistant("Done."), user("So?"), assistant("A"), user("More."))),
        (1, 5),
    ),
]


@pytest.mark.parametrize("with_bytes", [True, False], ids=["by bytes", "by meaning"])
@pytest.mark.parametrize(("before", "call", "point"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_locate(before: list[Call], call: Call, point: Point, with_bytes: bool) -> None:
    recorder = Recorder(before)
    if not with_bytes:
        recorder.trace._recent.clear()
    location = recorder.locate(call)
    if point[0] == "repeats":
        turn = recorder.turns[point[1]]
        assert location.context is turn.parent and location.node is turn.parent.parent
        assert location.start == turn.parent.count - turn.parent.added
    else:
        assert location.context is None
        found = None if location.node is None else recorder.turns.index(location.node)
        assert (found, location.start) == point


def test_only_new_messages_are_decoded() -> None:
    recorder = Recorder(LINE)
    location = recorder.locate(Call(THIRD))
    decoded = [location.request.peek(index) is not None for index in range(len(THIRD))]
    assert decoded == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]  # the first is cached; the answer and the question are new
