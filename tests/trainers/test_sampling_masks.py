"""Truncated sampling end to end: the local engine records its masks, and the trainer renormalizes over them.

The reference is a direct calculation with torch: which ids each setting keeps, and the log-probability of the sampled id among them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.engines.local_kit import SHAPE, make_request, model, random_prompts, start_engine, torch
from tests.kit import Running, gateway, tokenizer, user
from tests.server.test_page import fetch, log_in
from tests.teacher_kit import expected_scores, serve_teacher
from turngate.cli.show import _print_rows, load_from_gateway, load_from_store
from turngate.client.feed import Feed, Row
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig
from turngate.common.terminal import console
from turngate.engines.local import LocalEngine, Model
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.export import ExportChoices, export
from turngate.trainers.export.side_data import decode_columns
from turngate.trainers.local.distillation import read_scores
from turngate.trainers.local.grpo import GrpoSettings, Learner, LogprobMismatch
from turngate.trainers.teacher import TeacherConfig
from turngate.types import RaggedArray
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify
from turngate.views.session import open_row_source

pytestmark = pytest.mark.needs("torch")
MASK = "sampling_mask"
SETTINGS: list[dict[str, Any]] = [
    {"top_p": 0.7},
    {"top_k": 3},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 6, "min_p": 0.02, "temperature": 0.6},
]


def keep(scores: Any, how: dict[str, Any]) -> set[int]:
    """The ids that are left to sample from, computed directly: min-p, then top-k, then top-p."""
    likely = (scores.double() / how.get("temperature", 1.0)).softmax(-1)
    likely = torch.where(likely >= how.get("min_p", 0.0) * likely.max(), likely, 0.0)
    if "top_k" in how:
        likely = torch.where(likely >= likely.topk(how["top_k"]).values[-1], likely, 0.0)
    likely /= likely.sum()
    kept: set[int] = set()
    total = 0.0
    for token in likely.argsort(descending=True).tolist():
        if likely[token] == 0 or (kept and total >= how.get("top_p", 1.0)):
            break
        kept.add(token)
        total += float(likely[token])
    return kept


def compute(
    made: Model, ids: Sequence[int], first: int, how: dict[str, Any], masks: list[set[int]] | None = None
) -> tuple[list[set[int]], list[float]]:
    """The kept ids for each token from `first` on, unless given, and the log-probability of the token among them."""
    with torch.no_grad():
        scores = made(torch.tensor([list(ids)]))[0, first - 1 : -1].float()
    kept = masks or [keep(row, how) for row in scores]
    logprobs = []
    for row, allowed, token in zip(scores / how.get("temperature", 1.0), kept, ids[first:], strict=True):
        logprobs.append(float(row[token] - row[sorted(allowed)].logsumexp(0)))
    return kept, logprobs


@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("stream", [True, False])
async def test_local_engine_returns_its_masks(how: dict[str, Any], stream: bool) -> None:
    """Of several calls at once, of which some do not request masks."""

    async def sample(engine: LocalEngine, prompt: list[int], wanted: bool) -> tuple[list[int], list[Any], list[Any]]:
        request = msgspec.structs.replace(make_request(prompt, 20, **how), sampling_mask=wanted, stream=stream)
        async with engine.generate(request) as chunks:
            found = [chunk async for chunk in chunks]
        ids = [token for chunk in found for token in chunk.ids]
        return ids, [v for chunk in found for v in chunk.logprobs or ()], [array for c in found for array in c.side]

    prompts = random_prompts(6, seed=3)
    async with start_engine() as engine:
        replies = await asyncio.gather(*(sample(engine, prompt, n % 3 > 0) for n, prompt in enumerate(prompts)))
        for n, (prompt, (ids, logprobs, side)) in enumerate(zip(prompts, replies, strict=True)):
            assert bool(side) == (n % 3 > 0)
            if not side:
                continue
            masks = [set(each.tolist()) for array in side for each in array.values.lists()]
            kept, _ = compute(engine.model, [*prompt, *ids], len(prompt), how)
            # Rounding, which depends on the other calls in the batch, may keep or cut the last id.
            assert all(len(mask ^ due) <= 1 for mask, due in zip(masks, kept, strict=True))
            _, expected = compute(engine.model, [*prompt, *ids], len(prompt), how, masks)
            assert logprobs == pytest.approx(expected, abs=1e-4)
            assert [array.first for array in side] == np.cumsum([0, *(len(a.values) for a in side)])[:-1].tolist()
    assert 1 < np.mean([len(mask) for mask in masks]) < SHAPE.vocabulary / 2


# ── through the gateway ─────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def training_gateway(data: Path, **config: Any) -> AsyncIterator[tuple[Running, GatewayClient, LocalEngine]]:
    engine = LocalEngine(model(vocabulary=tokenizer().vocab_size), slots=8, flush_s=0.0)
    settings = {"sampling_masks": True} | config
    async with gateway(engine=engine, data=data, **settings) as g, GatewayClient(g.root, g.app.admin_key) as client:
        yield g, client, engine


async def run_group(g: Running, client: GatewayClient, sampling: dict[str, Any], n: int = 3) -> list[str]:
    sessions = []
    for number in range(n):
        session = await g.open(metadata={"group": "g"}, sampling={**sampling, "seed": number})
        await g.ask(session.key, "Hi", max_tokens=8)
        await g.seal(session.id)
        await client.record(session.id, RecordedOutcome(kind="graded", reward=float(number), group="g", task="t"))
        sessions.append(session.id)
    return sessions


async def read_rows(client: GatewayClient, name: str, *side: str, n: int = 3) -> tuple[list[Row], list[str]]:
    config = FeedConfig(n=n, from_start=True, side=side) if side else FeedConfig(n=n, from_start=True)
    async with await Feed.open(client, name, config) as feed:
        delivery = await feed.next(10)
    assert delivery is not None
    return delivery.rows(), [rolled.excluded for rolled in delivery.rollouts]


@pytest.mark.parametrize("how", SETTINGS, ids=str)
async def test_truncated_turns_are_trained_with_their_masks(how: dict[str, Any], tmp_path: Path) -> None:
    async with training_gateway(tmp_path) as (g, client, engine):
        [session, *_] = await run_group(g, client, how)
        rows, excluded = await read_rows(client, "masked", MASK)
        assert len(rows) == 3 and not any(excluded)
        bare, why = await read_rows(client, "bare")
        assert not bare and all("trained only with their sampling masks" in reason for reason in why)
        shown = await client.show(session)
        assert shown.training is not None and shown.training.amount == "most"
        learner = Learner(engine.model, GrpoSettings())
        for row in rows:
            first = int(np.flatnonzero(row.mask)[0])
            kept, logprobs = compute(engine.model, row.ids.tolist(), first, how)
            column = row.side[MASK]
            assert isinstance(column.values, RaggedArray) and column.spans == ((first, len(row.ids)),)
            assert [set(each.tolist()) for each in column.values.lists()] == kept
            now, entropy = learner.logprobs([row])
            assert now.tolist() == pytest.approx(logprobs, abs=1e-4)
            assert now.tolist() == pytest.approx(row.logprobs[row.mask].tolist(), abs=1e-4)
            assert torch.isfinite(entropy).all() and {span.temperature for span in row.spans} == {
                how.get("temperature", 1)
            }
        measured = learner.gradients(rows, version=0)
        assert measured.signal and not measured.refused and (measured.difference or 1) < 1e-4
        assert all(torch.isfinite(p.grad).all() for p in engine.model.parameters() if p.grad is not None)
        without = [msgspec.structs.replace(row, side={}) for row in rows]
        with pytest.raises(LogprobMismatch, match="sampling masks"):
            Learner(engine.model, GrpoSettings()).gradients(without, version=0)
        renderer = g.app.renderer
    check_exports(tmp_path, rows)
    with SessionReader(tmp_path) as reader, open_row_source(tmp_path) as source:
        verdict = verify(reader, session, VerifyOptions(rows=source, renderers=Renderers(given=renderer)))
    assert verdict.ok, verdict.wrong
    assert "sampling masks" in [finding.check for finding in verdict.findings]


def check_exports(data: Path, rows: list[Row]) -> None:
    out = data / "rows.jsonl"
    export(data, out, ExportChoices(format="rows", side=(MASK,)))
    records = {tuple(record["ids"]): record for record in map(json.loads, out.read_text().splitlines())}
    for row in rows:
        record = records[tuple(row.ids.tolist())]
        values, expected = decode_columns(record["side"])[MASK].values, row.side[MASK].values
        assert isinstance(values, RaggedArray) and isinstance(expected, RaggedArray)
        assert values.items.tolist() == expected.items.tolist() and values.sizes.tolist() == expected.sizes.tolist()
        assert [span["trained"] for span in record["spans"]] == [True]
    with pytest.raises(Exception, match="nothing to train on"):
        export(data, out, ExportChoices(format="rows"))


async def test_teacher_scores_rows_that_need_their_masks(tmp_path: Path) -> None:
    async with training_gateway(tmp_path) as (g, client, _):
        await run_group(g, client, {"top_p": 0.7}, n=2)
    out = tmp_path / "rows.jsonl"
    with serve_teacher() as server:
        teacher = TeacherConfig(engine="vllm", url=server.url, model="teacher")
        export(tmp_path, out, ExportChoices(format="rows", side=(MASK,), teacher=teacher))
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2
    for record in records:
        side = decode_columns(record["side"])
        [(first, end)] = side["teacher_logprobs"].spans
        assert side[MASK].spans == ((first, end),)
        assert side["teacher_logprobs"].values.tolist() == [
            np.float32(score) for score in expected_scores(record["ids"])[first:end]
        ]


async def test_counts_include_turns_with_masks_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with training_gateway(tmp_path) as (g, client, _):
        [session] = await run_group(g, client, {"top_p": 0.7}, n=1)
        assert await client.samples(session) == [], "rows without masks"
        [row] = await client.samples(session, everything=True)
        assert [span.reason for span in row.spans] == ["trained only with its sampling mask: top_p"]
        [counted] = await client.samples(session, masks=True)
        report = (await client.show(session)).training
        assert report is not None and report.trained_tokens == sum(map(bool, counted.mask)) == 8
        shown = await load_from_gateway(GatewayClient(g.root, g.app.admin_key), session)
        assert shown.masked == [counted.spans[0].node]
    stored, _ = load_from_store(tmp_path, session)
    for view in (shown, stored):
        assert [(row.mask, row.spans[0].trained) for row in view.rows] == [(counted.mask, True)]
        capsys.readouterr()
        _print_rows(view, console())
        assert "1 turn is trained only in rows with sampling masks" in " ".join(capsys.readouterr().out.split())


async def test_page_exports_rows_without_masks(tmp_path: Path) -> None:
    """Its rows are those of `turngate export rows`. A rollout that has rows only with masks does not affect their advantages."""
    data = tmp_path / "data"
    data.mkdir()
    async with training_gateway(data) as (g, client, _):
        page = await log_in(g)
        for number, turns in enumerate([({}, {}), ({}, {"top_p": 0.7}), ({"top_p": 0.7},)]):
            session = await g.open(metadata={"group": "g"}, bias="record")
            messages = [user("Hi")]
            for how in turns:
                reply = await g.ask(session.key, messages, max_tokens=8, **how)
                messages += [reply.message(), user("On")]
            await g.seal(session.id)
            await client.record(session.id, RecordedOutcome(kind="graded", reward=float(number), group="g", task="t"))
        assert (await fetch(page, f"rollouts/{session.id}"))["totals"]["trained_tokens"] == 8, "counted with masks"
        saved = await page.get("/page/api/export", params={"group": "g", "format": "rows"})
        rows = [json.loads(line) for line in saved.text.splitlines()]
        out = tmp_path / "rows.jsonl"
        export(data, out, ExportChoices(format="rows"))
    assert rows == [json.loads(line) for line in out.read_text().splitlines()]
    assert [[span["trained"] for span in row["spans"]] for row in rows] == [[True, True], [True, False]]


async def test_masks_are_recorded_only_if_set(tmp_path: Path) -> None:
    async with training_gateway(tmp_path, sampling_masks=False) as (g, client, _):
        await run_group(g, client, {"top_p": 0.7}, n=1)
        rows, excluded = await read_rows(client, "masked", MASK, n=1)
        assert not rows and "sampled with a bias (top_p)" in excluded[0]


async def test_untruncated_turns_have_no_masks(tmp_path: Path) -> None:
    """They are sampled as if masks were not recorded, and temperatures other than 1 need no setting of the trainer."""
    async with training_gateway(tmp_path) as (g, client, engine):
        await run_group(g, client, {"temperature": 0.5})
        rows, _ = await read_rows(client, "f", MASK)
        assert len(rows) == 3 and not any(row.side for row in rows)
        measured = Learner(engine.model, GrpoSettings()).gradients(rows, version=0)
        assert not measured.refused and (measured.difference or 1) < 1e-4
        with pytest.raises(LogprobMismatch):
            Learner(engine.model, GrpoSettings(temperature=1.0)).gradients(rows, version=0)
    scored = msgspec.structs.replace(rows[0], side={"teacher_logprobs": rows[0].side.get("x") or _make_scores(rows[0])})
    assert read_scores(scored) == (
        "the teacher's scores assume sampling at temperature 1 from the whole vocabulary, but the row was sampled differently"
    )


def _make_scores(row: Row) -> Any:
    from turngate.trace.side_data import SideColumn

    first = int(np.flatnonzero(row.mask)[0])
    return SideColumn(((first, len(row.ids)),), np.zeros(len(row.ids) - first, np.float32))


async def test_rows_that_cannot_be_computed_are_refused(tmp_path: Path) -> None:
    """Greedy turns of a policy that trains biased turns, and masks with unknown ids. The gradients of other rows stay finite."""
    async with training_gateway(tmp_path) as (g, client, engine):
        for number, how in enumerate([{"temperature": 0.0}, {"temperature": 0.9}, {"top_k": 3}]):
            session = await g.open(metadata={"group": "g"}, sampling={**how, "seed": number}, policy={"biased": True})
            await g.ask(session.key, "Hi", max_tokens=8)
            await g.seal(session.id)
            await client.record(session.id, RecordedOutcome(kind="graded", reward=float(number), group="g", task="t"))
        rows, _ = await read_rows(client, "f", MASK)
        learner = Learner(engine.model, GrpoSettings())
        measured = learner.gradients(rows, version=0)
        [why] = measured.refused
        assert "were sampled greedily" in why and measured.compared == 2 and measured.signal
        column = rows[2].side[MASK]
        unknown = RaggedArray.from_lists([[*each, engine.model.shape.vocabulary] for each in column.values.lists()])
        rows[2] = msgspec.structs.replace(rows[2], side={MASK: msgspec.structs.replace(column, values=unknown)})
        measured = learner.gradients(rows, version=0)
        assert "ids outside the model's vocabulary" in measured.refused[1] and measured.compared == 1


async def test_masked_tokens_get_no_gradient(tmp_path: Path) -> None:
    """The gradient of the loss equals that of the same loss, computed directly from the scores of the kept ids."""
    how = {"top_p": 0.7, "temperature": 0.8}
    async with training_gateway(tmp_path) as (g, client, engine):
        await run_group(g, client, how)
        rows, _ = await read_rows(client, "f", MASK)
        learner = Learner(engine.model, GrpoSettings())
        learner.gradients(rows, version=0)
        found = [p.grad.clone() for p in engine.model.parameters() if p.grad is not None]
        learner.optimizer.zero_grad(set_to_none=True)
        total = sum(int(row.mask.sum()) for row in rows)
        loss = torch.zeros(())
        for row in rows:
            scores = engine.model(torch.from_numpy(row.ids.astype(np.int64))[None])[0].float() / 0.8
            column = row.side[MASK]
            assert isinstance(column.values, RaggedArray)
            for at, kept in zip(np.flatnonzero(row.mask).tolist(), column.values.lists(), strict=True):
                logprob = scores[at - 1, int(row.ids[at])] - scores[
                    at - 1, torch.from_numpy(kept.astype(np.int64))
                ].logsumexp(0)
                loss = (
                    loss - row.advantage * logprob / total
                )  # the ratio is 1, so this has the gradient of the GRPO loss
        loss.backward()
        expected = [p.grad for p in engine.model.parameters() if p.grad is not None]
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(other.abs().max()))
