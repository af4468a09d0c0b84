"""Tests for the reference GRPO trainer: loss, log-probability checks, training loop, checkpoints and crashes."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from tests.engines.local_kit import model, torch  # skips if torch is missing
from tests.kit import Running, gateway, tokenizer, until
from turngate.client.feed import Feed, Row, RowSpan
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import FeedConfig, PauseMode
from turngate.engines.local import LocalEngine, Model
from turngate.errors import ConfigError
from turngate.store.outcomes import RecordedOutcome
from turngate.trainers.local import checkpoint
from turngate.trainers.local.grpo import (
    GrpoSettings,
    Learner,
    LogprobMismatch,
    NonFiniteGradient,
    Step,
    Trainer,
    is_of_version,
)
from turngate.trainers.local.loss import (
    LossTerms,
    Normalise,
    compute_clipped_share,
    compute_divergence,
    compute_divisor,
    compute_loss,
    compute_reference_penalty,
)
from turngate.trainers.local.packing import pack_rows, split_batches
from turngate.types import Json

pytestmark = pytest.mark.needs("torch")

VOCABULARY = tokenizer().vocab_size
N = 4


# ── the loss ────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Row 0: weight 1, advantage 1, two tokens whose ratios are 1.5 (clipped to 1.28) and 1.
# Row 1: weight 1/2 (one of two rows of its rollout), advantage -2, one token whose ratio is 0.5 (clipped to 0.8).


def example_terms() -> tuple[LossTerms, torch.Tensor]:
    then = torch.tensor([-1.0, -2.0, -0.5])
    now = (then + torch.tensor([math.log(1.5), 0.0, math.log(0.5)])).requires_grad_()
    terms = LossTerms(
        now=now,
        then=then,
        advantage=torch.tensor([1.0, 1.0, -2.0]),
        weight=torch.tensor([1.0, 1.0, 0.5]),
        row=torch.tensor([0, 0, 1]),
    )
    return terms, torch.tensor([2, 1])


def test_token_normalisation_weighs_tokens_equally() -> None:
    terms, tokens = example_terms()
    by = compute_divisor([1.0, 0.5], [2, 1], "token")
    assert by == 2.5  # 1 + 1 + 1/2
    value = compute_loss(terms, tokens, by=by, low=0.2, high=0.28, normalise="token")
    # gains: 1.28, 1, and 1/2 · min(0.5 · -2, 0.8 · -2) = -0.8
    assert value.item() == pytest.approx(-(1.28 + 1.0 - 0.8) / 2.5)


def test_sequence_normalisation_weighs_rollouts_equally() -> None:
    terms, tokens = example_terms()
    by = compute_divisor([1.0, 0.5], [2, 1], "sequence")
    assert by == 1.5
    value = compute_loss(terms, tokens, by=by, low=0.2, high=0.28, normalise="sequence")
    assert value.item() == pytest.approx(-((1.28 + 1.0) / 2 - 0.8) / 1.5)


def test_clipped_tokens_have_no_gradient() -> None:
    terms, tokens = example_terms()
    compute_loss(terms, tokens, by=2.5, low=0.2, high=0.28, normalise="token").backward()
    assert terms.now.grad is not None
    # d(ratio · A)/d(now) = ratio · A: only the middle token is not clipped.
    assert terms.now.grad.tolist() == pytest.approx([0.0, -1.0 / 2.5, 0.0])
    assert float(compute_clipped_share(terms, low=0.2, high=0.28)) == pytest.approx(2 / 3)


def test_tokens_without_an_advantage_are_never_clipped() -> None:
    log_ratios = torch.tensor([math.log(0.5), math.log(1.5), math.log(0.5), math.log(1.5)])
    terms = LossTerms(
        now=log_ratios - 1.0,
        then=torch.full((4,), -1.0),
        advantage=torch.tensor([0.0, 0.0, -1.0, 1.0]),
        weight=torch.ones(4),
        row=torch.zeros(4, dtype=torch.long),
    )
    assert float(compute_clipped_share(terms, low=0.2, high=0.28)) == 2 / 4


def test_divergence_from_sampling_policy() -> None:
    found = compute_divergence(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    assert found.tolist() == pytest.approx([2 - 1 - math.log(2)])


@pytest.mark.parametrize(
    ("normalise", "by", "weights"), [("token", 2.5, (1, 1, 0.5)), ("sequence", 1.5, (0.5, 0.5, 0.5))]
)
def test_reference_penalty(normalise: Normalise, by: float, weights: tuple[float, ...]) -> None:
    terms, tokens = example_terms()
    differences = (0.5, 0.0, -20.0)  # of the log-probabilities now from those under the initial weights
    reference = terms.now.detach() - torch.tensor(differences)
    value = compute_reference_penalty(terms, reference, tokens, by=by, normalise=normalise)
    pairs = list(zip(weights, differences, strict=True))
    assert value.item() == pytest.approx(sum(weight * difference**2 / 2 for weight, difference in pairs) / by)
    value.backward()
    assert terms.now.grad is not None
    assert terms.now.grad.tolist() == pytest.approx([weight * difference / by for weight, difference in pairs])


@pytest.mark.parametrize("recorded", [-100.0, -math.inf])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_extreme_recorded_logprob_keeps_loss_finite(recorded: float, advantage: float) -> None:
    now = torch.tensor([-1.0], requires_grad=True)
    terms = LossTerms(
        now=now,
        then=torch.tensor([recorded]),
        advantage=torch.tensor([advantage]),
        weight=torch.ones(1),
        row=torch.tensor([0]),
    )
    value = compute_loss(terms, torch.tensor([1]), by=1.0, low=0.2, high=0.28, normalise="token")
    value.backward()
    assert math.isfinite(value.item()) and now.grad is not None and now.grad.tolist() == [0.0]
    assert math.isfinite(float(compute_divergence(now, terms.then))) and math.isfinite(
        float(compute_clipped_share(terms, low=0.2, high=0.28))
    )


# ── rows and weights ────────────────────────────────────────────────────────────────────────────────────────────────


class TrainingGateway(NamedTuple):
    """A gateway in front of a random model."""

    g: Running
    client: GatewayClient
    engine: LocalEngine

    async def rollout(self, group: str, number: int, reward: Callable[[list[int]], float]) -> None:
        """Record one rollout; its seed depends only on group and number."""
        seed = zlib.crc32(f"{group} {number}".encode())
        session = await self.g.open(metadata={"group": group}, sampling={"seed": seed})
        await self.g.ask(session.key, "Hi", max_tokens=8)
        await self.g.seal(session.id)
        [turn] = await self.g.turns(session.id)
        await self.client.record(
            session.id, RecordedOutcome(kind="graded", reward=reward(turn["ids"]), group=group, task="t")
        )

    async def group(self, name: str, reward: Callable[[list[int]], float]) -> None:
        await asyncio.gather(*(self.rollout(name, number, reward) for number in range(N)))


@asynccontextmanager
async def training_gateway(
    data: Path | None = None, engine: LocalEngine | None = None
) -> AsyncIterator[TrainingGateway]:
    engine = engine or LocalEngine(_model(), slots=8, flush_s=0.0)
    async with gateway(engine=engine, data=data) as g, GatewayClient(g.root, g.app.admin_key) as client:
        yield TrainingGateway(g, client, engine)


def _model() -> Model:
    """A model with a peaked distribution that can be changed in a few steps."""
    made = model(vocabulary=VOCABULARY)
    with torch.no_grad():
        made.embedding.weight.mul_(2)
    return made


def share_of_even(ids: list[int]) -> float:
    """Reward: the share of even ids."""
    return sum(i % 2 == 0 for i in ids) / len(ids)


@asynccontextmanager
async def sampled_group() -> AsyncIterator[tuple[TrainingGateway, list[Row]]]:
    """Sample one group and yield its rows."""
    async with training_gateway() as here, await Feed.open(here.client, "f", FeedConfig(n=N)) as feed:
        await here.group("g", share_of_even)
        delivery = await feed.next(10)
        assert delivery is not None
        yield here, delivery.rows()


async def test_recomputed_logprobs_match_recorded() -> None:
    async with sampled_group() as (here, rows):
        measured = Learner(here.engine.model, GrpoSettings()).gradients(rows, version=0)
    assert measured.compared == len(rows) == N and measured.refused == ()
    assert measured.difference is not None and measured.difference < 1e-5
    assert measured.divergence == pytest.approx(0.0, abs=1e-8) and measured.clipped == 0.0
    assert measured.tokens == sum(int(row.mask.sum()) for row in rows) and measured.entropy > 0


@pytest.mark.parametrize("field", ["ids", "logprobs"])
async def test_corrupted_row_is_rejected_without_gradient(field: str) -> None:
    async with sampled_group() as (here, rows):
        position = int(np.flatnonzero(rows[1].mask)[2])
        corrupted = getattr(rows[1], field).copy()
        corrupted[position] += 1 if field == "ids" else 0.5
        bad = [rows[0], msgspec.structs.replace(rows[1], **{field: corrupted}), *rows[2:]]
        learner = Learner(here.engine.model, GrpoSettings())
        measured = learner.gradients(bad, version=0)
        found = _gradient(learner)
        # The same as an advantage of 0: the row's tokens still count in the divisor.
        learner.gradients([rows[0], msgspec.structs.replace(rows[1], advantage=0.0), *rows[2:]], version=0)
    [why] = measured.refused
    assert f"branch {rows[1].branch}" in why and measured.compared == N
    assert torch.allclose(found, _gradient(learner), atol=1e-6)


async def test_wrong_temperature_raises_logprob_mismatch() -> None:
    async with sampled_group() as (here, rows):
        with pytest.raises(LogprobMismatch, match="temperature"):
            Learner(here.engine.model, GrpoSettings(temperature=0.5)).gradients(rows, version=0)


async def test_rows_of_older_weights_are_not_compared() -> None:
    async with sampled_group() as (here, rows):
        measured = Learner(here.engine.model, GrpoSettings(temperature=0.5)).gradients(rows, version=1)
    assert measured.compared == 0 and measured.difference is None and measured.divergence > 0


@pytest.mark.parametrize("recorded", [-math.inf, math.inf, math.nan, -200.0, -60.0])
async def test_corrupted_older_row_is_rejected_without_gradient(recorded: float) -> None:
    async with sampled_group() as (here, rows):
        position = int(np.flatnonzero(rows[1].mask)[2])
        corrupted = rows[1].logprobs.copy()
        corrupted[position] = recorded
        bad = msgspec.structs.replace(rows[1], logprobs=corrupted, advantage=-1.0)
        learner = Learner(here.engine.model, GrpoSettings())
        measured = learner.gradients([rows[0], bad, *rows[2:]], version=1)
        found = _gradient(learner)
        learner.gradients([rows[0], msgspec.structs.replace(rows[1], advantage=0.0), *rows[2:]], version=1)
    [why] = measured.refused
    assert f"branch {bad.branch}: the log-probability of token {position} differs by " in why
    assert "more than later weight updates can explain" in why
    assert measured.compared == 0 and measured.signal
    assert math.isfinite(measured.loss) and math.isfinite(measured.divergence)
    assert torch.allclose(found, _gradient(learner), atol=1e-6)


async def test_corrupted_older_rows_do_not_affect_comparison() -> None:
    async with sampled_group() as (here, rows):
        bad = []
        for row in rows[:2]:
            spans = tuple(msgspec.structs.replace(span, version_start=-1, version_end=-1) for span in row.spans)
            bad.append(msgspec.structs.replace(row, spans=spans, logprobs=row.logprobs - 200))
        measured = Learner(here.engine.model, GrpoSettings()).gradients([*bad, *rows[2:]], version=0)
    assert len(measured.refused) == measured.compared == 2
    assert measured.largest is not None and measured.largest < 1e-3


async def test_batch_size_does_not_change_gradients() -> None:
    async with sampled_group() as (here, rows):
        one, all_of_them = (Learner(here.engine.model, GrpoSettings(batch_tokens=tokens)) for tokens in (1, 100_000))
        one.gradients(rows, version=0)
        apart = _gradient(one)
        all_of_them.gradients(rows, version=0)
    assert torch.allclose(apart, _gradient(all_of_them), atol=1e-5) and float(apart.norm()) > 0


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns if a CPU multiplies bfloat16 slowly
async def test_bfloat16_hardly_changes_gradients() -> None:
    async with sampled_group() as (here, rows):
        exact = gradient_of(here, rows)
        rounded = gradient_of(here, rows, bfloat16=True, tolerance=1.0)
        assert here.engine.model.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert torch.nn.functional.cosine_similarity(exact, rounded, dim=0) > 0.98


async def test_reference_penalty_pulls_back_to_the_initial_weights() -> None:
    async with sampled_group() as (here, rows):
        silent = [msgspec.structs.replace(row, advantage=0.0) for row in rows]
        model = here.engine.model
        learner = Learner(model, GrpoSettings(reference_kl=0.5, learning_rate=1e-3))
        start = learner.gradients(silent, version=0)
        assert start.signal and start.reference_divergence == pytest.approx(0.0, abs=1e-9)
        assert float(_gradient(learner).norm()) < 1e-5
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        found = []
        for _ in range(6):
            measured = learner.gradients(silent, version=1)
            assert measured.reference_divergence is not None
            found.append(measured.reference_divergence)
            learner.step()
        assert found[0] > 1e-4 and found[-1] < 0.7 * found[0]
        assert Learner(model, GrpoSettings()).gradients(silent, version=1).reference_divergence is None


def split_turns(row: Row, *advantages: float | None) -> Row:
    """Split the only turn of a row into two turns with these advantages."""
    [span] = row.spans
    middle = (span.start + span.end) // 2
    spans = (
        msgspec.structs.replace(span, end=middle),
        msgspec.structs.replace(span, node=span.node + 2, start=middle),
    )
    return msgspec.structs.replace(row, spans=spans, turn_advantages=advantages)


def gradient_of(here: TrainingGateway, rows: list[Row], **settings: Any) -> torch.Tensor:
    learner = Learner(here.engine.model, GrpoSettings(**settings))
    learner.gradients(rows, version=0)
    return _gradient(learner).clone()


async def test_turn_advantages_of_the_rollout_change_no_gradient() -> None:
    async with sampled_group() as (here, rows):
        same = [split_turns(row, row.advantage, row.advantage) for row in rows]
        assert torch.equal(gradient_of(here, rows), gradient_of(here, same, advantages="turn"))
        assert torch.equal(gradient_of(here, rows), gradient_of(here, same))  # not used unless set


async def test_each_turn_is_trained_with_its_own_advantage() -> None:
    async with sampled_group() as (here, rows):
        row = rows[0]
        first, second, both = (
            gradient_of(here, [split_turns(row, *values)], advantages="turn")
            for values in ((1.0, 0.0), (0.0, 1.0), (0.5, -2.0))
        )
    # The sampling policy is the current one, so the gradient is linear in the advantages.
    assert torch.allclose(both, 0.5 * first - 2.0 * second, atol=1e-6) and float(first.norm()) > 0
    assert not torch.allclose(first, second)


async def test_turn_without_an_advantage_is_not_trained() -> None:
    async with sampled_group() as (here, rows):
        row = split_turns(rows[0], 1.0, None)
        mask = rows[0].mask.copy()
        mask[row.spans[1].start :] = False
        cut = msgspec.structs.replace(rows[0], mask=mask, advantage=1.0)
        assert torch.equal(gradient_of(here, [row], advantages="turn"), gradient_of(here, [cut]))


async def test_rows_without_turn_advantages_are_named_and_not_trained() -> None:
    async with sampled_group() as (here, rows):
        good = split_turns(rows[0], 1.0, -1.0)
        learner = Learner(here.engine.model, GrpoSettings(advantages="turn"))
        measured = learner.gradients([good, *rows[1:]], version=0)
        assert measured.refused == tuple(f"branch {row.branch}: its turns have no advantages" for row in rows[1:])
        assert measured.rows == 1 and torch.equal(_gradient(learner), gradient_of(here, [good], advantages="turn"))
        nothing = Learner(here.engine.model, GrpoSettings(advantages="turn")).gradients(rows, version=0)
        assert (nothing.rows, nothing.signal) == (0, False)


def test_shared_prefix_is_packed_once() -> None:
    rows = [_row(10, ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 9]), _row(9, ids=[1, 2, 3, 9, 5, 6, 7, 8, 8])]
    pack = pack_rows(rows)
    assert pack.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 5, 6, 7, 8, 8]
    assert pack.positions.tolist() == [*range(10), *range(3, 9)]
    assert pack.at.tolist() == [7, 8, 13, 14]
    assert np.flatnonzero((np.arange(16) <= 15) & (pack.until > 15)).tolist() == [
        0,
        1,
        2,
        10,
        11,
        12,
        13,
        14,
        15,
    ]  # the shared prefix and its own tokens


def test_split_batches_fills_batches() -> None:
    rows = [_row(size) for size in (40, 50, 60, 400, 30)]
    # All rows share a prefix, which is packed once.
    assert [[row.ids.size for row in batch] for batch in split_batches(rows, 80)] == [[40, 50, 60], [400], [30]]


def test_row_of_two_versions_matches_neither() -> None:
    assert is_of_version(_row(8, (3, 3)), 3)
    assert not is_of_version(_row(8, (3, 4)), 4) and not is_of_version(_row(8, (3, 4)), 3)


def test_invalid_settings_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="learning_rate"):
        GrpoSettings(learning_rate=0.0)


# ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.full
async def test_model_learns_rewarded_behaviour() -> None:
    async with training_gateway() as here:
        steps = await _train(here, 10, settings=GrpoSettings(groups=2, learning_rate=2e-2))
    first, last = ([step.reward or 0.0 for step in part] for part in (steps[:3], steps[-3:]))
    assert sum(last) / 3 > sum(first) / 3 + 0.2, [step.reward for step in steps]
    had_signal = [step.measured.signal for step in steps]  # no signal once all rewards are equal
    assert [step.version for step in steps] == list(itertools.accumulate(had_signal)) and {
        step.stale for step in steps
    } == {0}
    assert all(step.measured.difference is not None and step.measured.difference < 1e-3 for step in steps)
    assert not any(step.measured.refused for step in steps)


async def test_call_spanning_update_records_both_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would be compared with weights that did not sample all of it."""
    async with training_gateway() as here:
        session = await here.g.open(sampling={"min_tokens": 150})
        calls, paused = [], here.client.pause

        async def pause(mode: PauseMode) -> Json:
            calls.append(asyncio.create_task(here.g.ask(session.key, "Hi", max_tokens=150)))
            await until(lambda: here.engine._worker._drawn.max() > 20)
            return await paused(mode)

        monkeypatch.setattr(here.client, "pause", pause)
        [step] = await _train(here, 1)
        [call] = calls
        await call
        [turn] = await here.g.turns(session.id)
        assert step.version == 1 and len(turn["ids"]) == 150
        assert (turn["version_start"], turn["version_end"]) == (0, 1)


async def test_group_without_signal_changes_no_weights() -> None:
    async with training_gateway() as here:
        before = [parameter.detach().clone() for parameter in here.engine.model.parameters()]
        [step] = await _train(here, 1, settings=GrpoSettings(groups=1), reward=lambda ids: 1.0)
        assert not step.measured.signal and step.version == 0 and step.reward == step.passed == 1.0
        assert all(torch.equal(a, b) for a, b in zip(before, here.engine.model.parameters(), strict=True))


async def test_non_finite_gradient_fails_step_and_keeps_state(tmp_path: Path) -> None:
    """Weights, version and feed are unchanged, and the gateway is not paused."""
    async with training_gateway(tmp_path / "data") as here:
        await _train(here, 1, folder=tmp_path / "checkpoints")
        before = [parameter.detach().clone() for parameter in here.engine.model.parameters()]
        corrupted = here.engine.model.embedding.weight.register_hook(lambda gradient: gradient * math.nan)
        with pytest.raises(
            NonFiniteGradient,
            match=r"step 2 failed: .* nan; .* step 1, and after a restart, feed f will repeat .* number 2",
        ):
            await _train(here, 2, folder=tmp_path / "checkpoints")
        corrupted.remove()
        assert all(torch.equal(a, b) for a, b in zip(before, here.engine.model.parameters(), strict=True))
        fence = await here.client.fence()
        assert fence.version == 1 and not fence.paused
        assert (await here.client.show_feed("f")).committed == 1
        found = checkpoint.find_newest(tmp_path / "checkpoints")
        assert found is not None and (found.state.step, found.state.number) == (1, 1)
        steps = await _train(here, 2, folder=tmp_path / "checkpoints")  # retries the same delivery
    assert [(step.first, step.last, step.version) for step in steps] == [(1, 1, 1), (2, 2, 2)]


async def test_non_finite_gradient_changes_no_weights() -> None:
    async with sampled_group() as (here, rows):
        learner = Learner(here.engine.model, GrpoSettings())
        before = [parameter.detach().clone() for parameter in here.engine.model.parameters()]
        learner.gradients(rows, version=0)
        gradient = here.engine.model.embedding.weight.grad
        assert gradient is not None
        gradient[0, 0] = math.inf
        with pytest.raises(RuntimeError, match="non-finite"):
            learner.step()
        assert all(torch.equal(a, b) for a, b in zip(before, here.engine.model.parameters(), strict=True))


async def test_learning_rate_warms_up_and_continues_after_restore() -> None:
    """The optimizer counts the updates, so a restored one does not warm up again. Between updates it has the rate of the settings."""
    settings, rates = GrpoSettings(learning_rate=1e-3, warm_up=4), []
    async with sampled_group() as (here, rows):
        learner = Learner(here.engine.model, settings)
        for version in range(6):
            if version == 2:
                restored = Learner(here.engine.model, settings)
                restored.optimizer.load_state_dict(learner.optimizer.state_dict())
                learner = restored
            learner.optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
            learner.gradients(rows, version=version + 1)
            learner.step()
            assert learner.optimizer.param_groups[0]["lr"] == 1e-3
    assert list(dict.fromkeys(rates)) == [2.5e-4, 5e-4, 7.5e-4, 1e-3]


async def test_training_resumes_from_checkpoint(tmp_path: Path) -> None:
    """Weights, optimizer state, delivery number and version are restored together."""
    async with training_gateway(tmp_path / "data") as here:
        steps = await _train(here, 3, folder=tmp_path / "checkpoints")
        weights = [parameter.detach().clone() for parameter in here.engine.model.parameters()]
    found = checkpoint.find_newest(tmp_path / "checkpoints")
    assert found is not None and (found.state.step, found.state.number, found.state.version) == (3, 3, 3)
    assert [one.name for one in (tmp_path / "checkpoints").iterdir()] == ["step-00003"]
    async with training_gateway(tmp_path / "data") as here:
        trainer = _trainer(here, tmp_path / "checkpoints")
        await trainer.restore()
        assert all(torch.equal(a, b) for a, b in zip(weights, here.engine.model.parameters(), strict=True))
        assert len(trainer.learner.optimizer.state) == len(weights)
        assert trainer.steps == steps
        more = await _train(here, 5, folder=tmp_path / "checkpoints")
    assert [(step.first, step.last) for step in more] == [(n, n) for n in range(1, 6)]


async def test_backup_of_a_checkpoint_is_neither_loaded_nor_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    async with training_gateway(tmp_path / "data") as here:
        await _train(here, 1, folder=folder)
        shutil.copytree(folder / "step-00001", folder / "step-00001.bak")
        (folder / "step-notes").write_text("mine")
        found = checkpoint.find_newest(folder)
        assert found is not None and found.folder.name == "step-00001"
        await _train(here, 2, folder=folder)
    assert sorted(entry.name for entry in folder.iterdir()) == ["step-00001.bak", "step-00002", "step-notes"]


async def test_resume_with_other_optimizer_settings(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    chosen = GrpoSettings(groups=1, learning_rate=1e-3, betas=(0.8, 0.9), weight_decay=0.1)
    async with training_gateway(tmp_path / "data") as here:
        await _train(here, 2, folder=folder, settings=GrpoSettings(groups=1, learning_rate=1e-5))
    async with training_gateway(tmp_path / "data") as here:
        trainer = _trainer(here, folder, chosen)
        await trainer.restore()
        [group] = trainer.learner.optimizer.param_groups
        assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-3, (0.8, 0.9), 0.1)
        assert trainer.earlier_rate == 1e-5
        memory = trainer.learner.optimizer.state[group["params"][0]]
        assert float(memory["step"]) == 2 and float(memory["exp_avg_sq"].abs().sum()) > 0
        await _train(here, 3, folder=folder, settings=chosen)
    found = checkpoint.find_newest(folder)
    assert found is not None
    assert found.restore(model(vocabulary=VOCABULARY), Learner(_model(), GrpoSettings()).optimizer) == 1e-3


@pytest.mark.parametrize("change", [{"hidden": 16}, {"layers": 1}, {"layers": 3}])
async def test_checkpoint_of_other_model_is_rejected(tmp_path: Path, change: dict[str, int]) -> None:
    async with training_gateway() as here:
        await _train(here, 1, folder=tmp_path)
    found = checkpoint.find_newest(tmp_path)
    other = model(vocabulary=VOCABULARY, **change)
    before = [parameter.detach().clone() for parameter in other.parameters()]
    with pytest.raises(
        ConfigError,
        match=r"model_folder: the model does not match the checkpoint .*--model-folder .*, or choose another --out",
    ):
        assert found is not None
        found.restore(other, Learner(other, GrpoSettings()).optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))


@pytest.mark.parametrize("file", ["optimizer.pt", "model.safetensors"])
@pytest.mark.parametrize("content", [b"", b"garbage"])
async def test_damaged_checkpoint_is_a_config_error(tmp_path: Path, file: str, content: bytes) -> None:
    async with training_gateway() as here:
        await _train(here, 1, folder=tmp_path)
    found = checkpoint.find_newest(tmp_path)
    assert found is not None
    (found.folder / file).write_bytes(content)
    with pytest.raises(ConfigError, match=r"checkpoint: cannot resume from .*; restore the folder from a backup"):
        found.restore(model(vocabulary=VOCABULARY), Learner(_model(), GrpoSettings()).optimizer)


@pytest.mark.parametrize("moment", ["before the checkpoint", "after the checkpoint"])
async def test_crash_around_checkpoint_trains_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    written = checkpoint.write_checkpoint

    def killed(*given: object) -> None:
        if moment == "after the checkpoint":
            written(*given)  # type: ignore[arg-type]
        raise RuntimeError("killed")

    async with training_gateway(tmp_path / "data") as here:
        await _train(here, 1, folder=tmp_path / "checkpoints")
        monkeypatch.setattr(checkpoint, "write_checkpoint", killed)
        with pytest.raises(RuntimeError, match="killed"):
            await _train(here, 2, folder=tmp_path / "checkpoints")
        monkeypatch.setattr(checkpoint, "write_checkpoint", written)
        assert (await here.client.fence()).version == 2
    async with training_gateway(tmp_path / "data") as here:
        steps = await _train(here, 4, folder=tmp_path / "checkpoints")
        view = await here.client.show_feed("f")
    assert [(step.first, step.last) for step in steps] == [(n, n) for n in range(1, 5)]
    # Version 2 is lost if it was not in a checkpoint, and its number is not reused.
    again = 2 if moment == "after the checkpoint" else 4
    assert [step.version for step in steps] == [1, again, again + 1, again + 2]
    assert view.committed == 4


async def test_checkpoint_every_second_step(tmp_path: Path) -> None:
    async with training_gateway(tmp_path / "data") as here:
        await _train(here, 5, folder=tmp_path / "checkpoints", every=2)
        assert (await here.client.show_feed("f")).committed == 5
    found = checkpoint.find_newest(tmp_path / "checkpoints")
    assert found is not None and found.state.step == 5


# ── helpers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _trainer(
    here: TrainingGateway, folder: Path | None, settings: GrpoSettings | None = None, every: int = 1
) -> Trainer:
    return Trainer(here.engine, here.client, settings or GrpoSettings(groups=1), folder=folder, every=every)


async def _train(
    here: TrainingGateway,
    steps: int,
    *,
    settings: GrpoSettings | None = None,
    reward: Callable[[list[int]], float] = share_of_even,
    folder: Path | None = None,
    every: int = 1,
) -> list[Step]:
    """Train up to `steps`, producing groups for one update at a time with the newest weights."""
    trainer = _trainer(here, folder, settings, every)
    await trainer.restore()
    async with await Feed.open(here.client, "f", FeedConfig(n=N), after=trainer.state.number) as feed:
        while trainer.state.step < steps:
            wanted = trainer.learner.settings.groups - (
                (await here.client.show_feed("f")).newest - trainer.state.number
            )
            for n in range(wanted):
                await here.group(f"{trainer.state.step}.{trainer.state.version}.{n}", reward)
            await trainer.run(feed, trainer.state.step + 1)
    return trainer.steps


def _gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in learner.model.parameters() if p.grad is not None])


def _row(size: int, versions: tuple[int, int] = (0, 0), ids: list[int] | None = None) -> Row:
    mask = np.zeros(size, np.bool_)
    mask[-2:] = True
    span = RowSpan(1, size - 2, size, "main", True, "", *versions)
    return Row(
        ids=np.array(ids or [0] * size, np.int32),
        mask=mask,
        logprobs=np.where(mask, -1.0, np.nan).astype(np.float32),
        spans=(span,),
        branch=1,
        weight=1.0,
        advantage=1.0,
    )
