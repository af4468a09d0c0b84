"""Tests for what rows carry besides tokens: each judge accepts the truth and rejects every change of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gauntlet import probes, proof
from gauntlet.commands import CommandError, run_command
from gauntlet.extras import encode_experts, sampling_masks, score_prompt, version_spans
from gauntlet.features import FEATURES, judge
from gauntlet.gateways import GATEWAYS
from gauntlet.gateways.base import Row
from gauntlet.gateways.delivery import Absence, Delivery, Feature, Segment, Verdict
from gauntlet.sampler import Behavior, Generation, Sample
from gauntlet.table import format_table, set_column
from gauntlet.tokens import Json

PROMPT, FIRST, TOOL, SECOND, OTHER, THIRD = [5, 6, 7], [11, 12, 13], [8, 9], [21, 22], [8, 4], [31, 32, 33]
REWARDS = (0.5, 0.25, -0.125)


def entry(prompt: Sequence[int], ids: Sequence[int], versions: Sequence[str]) -> Json:
    digest = proof.digest(prompt)
    return {"prompt_tokens": len(prompt), "prompt_digest": digest, "ids": list(ids), "versions": list(versions)}


LOG = [
    entry(PROMPT, FIRST, ["default", "default", "1"]),
    entry([*PROMPT, *FIRST, *TOOL], SECOND, ["1", "1"]),
    entry([*PROMPT, *FIRST, *OTHER], THIRD, ["1", "1", "2"]),
]
LEFT = Row([*PROMPT, *FIRST, *TOOL, *SECOND], [0] * 3 + [1] * 3 + [0] * 2 + [1] * 2, [-0.5] * 10)
RIGHT = Row([*PROMPT, *FIRST, *OTHER, *THIRD], [0] * 8 + [1] * 3, [-0.25] * 11)
ROWS = [LEFT, RIGHT]


def values_of(feature: Feature) -> list[list[Any]]:
    found = []
    for row, versions in ((LEFT, [0, 0, 1, 1, 1]), (RIGHT, [1, 1, 2])):
        states, given = proof.digests(row.ids), iter(versions)
        columns: dict[str, list[Any]] = {
            "experts": [*map(proof.experts, states[:-1]), None],
            "masks": [proof.sampling_mask(before, token) for before, token in zip([0, *states], row.ids, strict=False)],
            "teacher": [proof.teacher_logprob(state) for state in states],
            "versions": [next(given) if trained else None for trained in row.mask],
            "turn rewards": [0.0] * len(row.ids),
        }
        found.append(columns[feature])
    if feature == "turn rewards":
        found[0][5], found[0][9], found[1][10] = REWARDS
    return found


SEGMENTS = [Segment(None, [*PROMPT, *FIRST]), Segment(0, [*TOOL, *SECOND]), Segment(0, [*OTHER, *THIRD])]


def deliver(feature: Feature) -> Delivery:
    if feature == "tree":
        return Delivery(ROWS, segments=SEGMENTS, leaves=[1, 2])
    if feature == "loaders":
        return Delivery(ROWS, loaded={"verl": [RIGHT, LEFT]})
    return Delivery(ROWS, values_of(feature))


@pytest.mark.parametrize("feature", FEATURES)
def test_truth_is_accepted(feature: Feature) -> None:
    assert judge(feature, deliver(feature), LOG, REWARDS).mark == "yes"


def shift(delivery: Delivery) -> Delivery:
    """Move all values by one token, as an alignment that is off by one does."""
    return replace(delivery, values=[[None, *values[:-1]] for values in delivery.values])


def drop_one(delivery: Delivery) -> Delivery:
    """Remove a value of a trained token that is not the last one."""
    first, *others = delivery.values
    return replace(delivery, values=[[*first[:5], None, *first[6:]], *others])


def untrain(delivery: Delivery) -> Delivery:
    left, right = delivery.rows
    return replace(delivery, rows=[replace(left, mask=[0] * 10), right])


def flat(delivery: Delivery) -> Delivery:
    """A "tree" without anything shared."""
    return replace(delivery, segments=[Segment(None, row.ids) for row in ROWS], leaves=[0, 1])


CHANGES: dict[str, tuple[Sequence[Feature], Callable[[Delivery], Delivery]]] = {
    "shifted": (("experts", "masks", "teacher", "versions", "turn rewards"), shift),
    "one missing": (("experts", "masks", "teacher", "versions", "turn rewards"), drop_one),
    "none": (("experts", "masks", "teacher", "versions", "turn rewards"), lambda d: replace(d, values=[])),
    "of one row": (
        ("experts", "masks", "teacher", "versions", "turn rewards"),
        lambda d: replace(d, values=d.values[:1]),
    ),
    "in both rows": (("turn rewards",), lambda d: replace(d, values=[d.values[0], [0.5, *d.values[1][1:]]])),
    "no rows": (tuple(FEATURES), lambda d: replace(d, rows=[], values=[], leaves=[])),
    "untrained turn": (tuple(FEATURES), untrain),
    "flat": (("tree",), flat),
    "other path": (("tree",), lambda d: replace(d, leaves=[2, 1])),
    "no trainer": (("loaders",), lambda d: replace(d, loaded={})),
    "lost row": (("loaders",), lambda d: replace(d, loaded={"verl": [LEFT]})),
    "other value": (("loaders",), lambda d: replace(d, loaded={"verl": [LEFT, replace(RIGHT, logprobs=[-0.5] * 11)]})),
}


@pytest.mark.parametrize(("change", "feature"), [(name, each) for name, (of, _) in CHANGES.items() for each in of])
def test_change_is_rejected(change: str, feature: Feature) -> None:
    verdict = judge(feature, CHANGES[change][1](deliver(feature)), LOG, REWARDS)
    assert verdict.mark == "wrong" and verdict.detail


def test_versions_need_a_change_of_weights() -> None:
    log = [{**each, "versions": ["default"] * len(each["ids"])} for each in LOG]
    values = [[0] * len(row.ids) for row in ROWS]
    assert "were not changed" in judge("versions", Delivery(ROWS, values), log, REWARDS).detail


def test_engine_reports_the_truth() -> None:
    sample = Sample(PROMPT, FIRST, [], "stop", Behavior(), Generation("", 0, 0, 0, []))
    raw = encode_experts(sample, 1, "raw")
    assert isinstance(raw, dict) and raw["shape"] == [4, *proof.EXPERT_SHAPE]  # without the first and the last token
    np = pytest.importorskip("numpy")
    import base64
    import io

    npy = encode_experts(sample, 0, "npy")
    assert isinstance(npy, str)
    read = np.load(io.BytesIO(base64.b64decode(npy)))
    assert [token.ravel().tolist() for token in read] == [
        proof.experts(state) for state in proof.digests([*PROMPT, *FIRST])[:-1]
    ]
    assert all(token in mask for token, mask in zip(FIRST, sampling_masks(sample), strict=True))
    assert version_spans(["a", "a", "b"]) == [
        {"version": "a", "start": 0, "end": 2},
        {"version": "b", "start": 2, "end": 3},
    ]
    scored = score_prompt(PROMPT)
    assert scored[0] is None and [*(scored[2] or {})] == ["7"]


@pytest.mark.parametrize(
    ("absence", "mark"),
    [
        (Absence("no field", "a/b.py"), "no"),
        (Absence("no field", "a/b.py", without="reward"), "no"),
        (Absence("no field", "a/b.py", says="class Row", without="reward"), "no"),
        (Absence("no field", "a/b.py", without="ids"), "not tested"),
        (Absence("no field", "a/b.py", says="class Sample"), "not tested"),
        (Absence("no field", "a/c.py"), "not tested"),
    ],
)
def test_absence_needs_evidence(absence: Absence, mark: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("class Row:\n    ids: list[int]\n")
    assert absence.check(tmp_path).mark == mark


def test_every_gateway_has_a_test_or_a_reason_for_each_feature() -> None:
    for gateway in GATEWAYS.values():
        assert not gateway.lacks.keys() & gateway.untested.keys()
        tested = FEATURES.keys() - gateway.lacks.keys() - gateway.untested.keys()
        assert not tested or gateway.deliver is not GATEWAYS["rllm"].deliver, gateway.name
        for absence in gateway.lacks.values():
            assert absence.says or absence.without, gateway.name


def test_column_is_set_or_replaced() -> None:
    table = format_table(("gateway", "turns"), [["a", "1"], ["b", "2"]])
    once = set_column(table, "also", {"a": "tree"})
    assert once.splitlines()[2:] == ["| a | 1 | tree |", "| b | 2 | – |"]
    assert set_column(once, "also", {"b": "x"}).splitlines()[2:] == ["| a | 1 | – |", "| b | 2 | x |"]


class _DyingEngine:
    """A mock engine that Ctrl-C ends too, so that it does not answer during the cleanup."""

    def __init__(self) -> None:
        self.alive = True

    async def set_extras(self, extras: Any) -> None:
        if not self.alive:
            raise aiohttp.ClientConnectionError("connection refused")


async def test_interrupted_probe_has_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, running = _DyingEngine(), asyncio.Event()

    @asynccontextmanager
    async def start_nothing(*arguments: Any) -> AsyncIterator[None]:
        yield

    async def run_forever(trial: Any, feature: Feature) -> Verdict:
        if engine.alive:
            running.set()
            await asyncio.Event().wait()
        return Verdict("yes")

    monkeypatch.setattr(probes, "start_gateway", start_nothing)
    monkeypatch.setattr(probes, "_run_rollout", run_forever)
    task = asyncio.create_task(probes.probe_features(GATEWAYS["turngate"], None, engine))  # type: ignore[arg-type]
    await running.wait()
    engine.alive = False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "limit_s", "message", "detail"),
    [
        ("echo no >&2; echo reason >&2; exit 3", None, "failed with exit code 3: reason", "no\nreason"),
        ("echo out; exit 1", None, "failed with exit code 1: no output", "out"),
        ("sleep 600 & sleep 600", 0.2, "did not finish within 0 s", "did not finish within 0 s"),
    ],
)
async def test_failed_command(script: str, limit_s: float | None, message: str, detail: str) -> None:
    with pytest.raises(CommandError) as caught:
        await run_command(["sh", "-c", script], limit_s=limit_s)
    assert (str(caught.value), caught.value.detail) == (message, detail)


@pytest.mark.process
async def test_command_gets_variables_and_folder(tmp_path: Path) -> None:
    done = await run_command(["sh", "-c", "echo $NAME; pwd; echo hm >&2"], variables={"NAME": "x"}, folder=tmp_path)
    assert (done.out, done.errors) == (f"x\n{tmp_path}\n", "hm")
    with pytest.raises(CommandError, match="nowhere/program: No such file or directory"):
        await run_command(["nowhere/program"])
