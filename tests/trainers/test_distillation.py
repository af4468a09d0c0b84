"""Tests for on-policy distillation with the reference trainer, and for the local engine as a teacher."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest

from examples.train import distill
from tests.engines.local_kit import torch  # skips if torch is missing
from turngate.client.feed import Row, RowSpan
from turngate.engines.local import load
from turngate.engines.local.scoring import LocalScoring
from turngate.errors import ConfigError, ContextOverflow, EngineRejected
from turngate.render import Tokenizer
from turngate.trace.side_data import SideColumn
from turngate.trainers.local.distillation import compute_mean_kl, compute_teacher_advantages
from turngate.trainers.local.grpo import GrpoSettings, Learner, MissingTeacherScores, Step

pytestmark = pytest.mark.needs("torch")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return distill.create_model(tmp_path_factory.mktemp("models") / "model", seed=3)


def compute_distribution(folder: Path, ids: np.ndarray) -> torch.Tensor:
    """Return the log-probabilities of all tokens after each id, by a plain forward pass."""
    with torch.no_grad():
        return torch.log_softmax(load(folder)(torch.from_numpy(ids.astype(np.int64))[None])[0].float(), -1)


def random_ids(folder: Path, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, load(folder).shape.vocabulary, count).astype(np.int32)


# ── the local engine as a teacher ───────────────────────────────────────────────────────────────────────────────────


def test_local_scores_equal_a_forward_pass(folder: Path) -> None:
    ids = random_ids(folder, 300)
    spans = [(1, 5), (7, 290)]
    found = LocalScoring(folder).score(ids, spans, top_k=3)
    expected = compute_distribution(folder, ids)
    for (start, end), scores in zip(spans, found, strict=True):
        likely = expected[start - 1 : end - 1]
        own = likely.gather(-1, torch.from_numpy(ids[start:end].astype(np.int64))[:, None])[:, 0]
        assert np.abs(scores.logprobs - own.numpy()).max() < 1e-5
        assert np.array_equal(scores.top_ids, likely.topk(3).indices.numpy())
        assert np.abs(scores.top_logprobs - likely.topk(3).values.numpy()).max() < 1e-5


def test_local_teacher_rejects_what_it_cannot_score(folder: Path) -> None:
    teacher, vocabulary = LocalScoring(folder), load(folder).shape.vocabulary
    with pytest.raises(EngineRejected, match=f"id {vocabulary} is outside the model's vocabulary of {vocabulary}"):
        teacher.score(np.array([1, vocabulary], np.int32), [(1, 2)])
    with pytest.raises(ContextOverflow, match="513 tokens, but the model has a context of 512"):
        teacher.score(np.ones(513, np.int32), [(1, 2)])
    with pytest.raises(EngineRejected, match="no context"):
        teacher.score(np.ones(3, np.int32), [(0, 2)])


# ── advantages ──────────────────────────────────────────────────────────────────────────────────────────────────────


def make_row(scores: list[float] | None = None, advantage: float = 2.0) -> Row:
    mask = np.array([False, True, True])
    side = {} if scores is None else {"teacher_logprobs": SideColumn(((1, 3),), np.array(scores, np.float32))}
    return Row(
        ids=np.array([1, 2, 3], np.int32),
        mask=mask,
        logprobs=np.array([math.nan, -1.0, -2.0], np.float32),
        spans=(RowSpan(1, 1, 3, "main", True, "", 0, 0),),
        branch=1,
        weight=1.0,
        advantage=advantage,
        side=side,
        unscored="" if scores is not None else "it is too long",
    )


def test_teacher_advantages() -> None:
    row = make_row([-0.5, -4.0])
    assert compute_mean_kl([row]) == 0.75
    # The teacher finds the first token more likely than the policy does, and the second one less likely.
    assert compute_teacher_advantages([row, row], 0.75).tolist() == [1.25, -1.25, 1.25, -1.25]


def test_reward_and_teacher_add_up(folder: Path) -> None:
    def advantages(**settings: float) -> list[float]:
        learner = Learner(load(folder), GrpoSettings(**settings))  # type: ignore[arg-type]
        found: list[float] = learner._spread_advantages([make_row([-0.5, -4.0])], 0.75).tolist()
        return found

    assert advantages() == [2.0, 2.0]
    assert advantages(teacher_kl=1.0, reward_weight=0.0) == [1.25, -1.25]
    assert advantages(teacher_kl=0.5) == [2.625, 1.375]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"teacher_kl": -1.0}, "teacher_kl must be finite and 0 or greater"),
        ({"reward_weight": math.inf}, "reward_weight must be finite and 0 or greater"),
        ({"teacher_kl": 1.0, "temperature": 0.7}, "temperature must be 1, not 0.7, if teacher_kl is set"),
    ],
)
def test_invalid_settings(fields: dict[str, float], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        GrpoSettings(**fields)  # type: ignore[arg-type]


def test_rows_without_scores_are_rejected(folder: Path) -> None:
    model = load(folder)
    settings = GrpoSettings(teacher_kl=1.0, tolerance=1e9)
    with pytest.raises(
        MissingTeacherScores, match=r"no row can be used \(rejected rows: 1\)\. First reason: .*it is too long"
    ) as error:
        Learner(model, settings).gradients([make_row()], version=0)
    assert error.value.param == "teacher_kl"
    measured = Learner(model, settings).gradients([make_row(), make_row([-0.5, -4.0])], version=0)
    assert measured.refused == ("branch 1: no usable teacher scores: it is too long",) and measured.signal
    assert measured.teacher_divergence == pytest.approx((-1 + 0.5 - 2 + 4) / 2)
    partial = msgspec.structs.replace(
        make_row(), side={"teacher_logprobs": SideColumn(((1, 2),), np.array([-1.0], np.float32))}
    )
    measured = Learner(model, settings).gradients([partial, make_row([-0.5, -4.0])], version=0)
    assert "did not score all trained tokens" in measured.refused[0]


def test_plain_training_does_not_need_scores(folder: Path) -> None:
    measured = Learner(load(folder), GrpoSettings(tolerance=1e9)).gradients([make_row()], version=0)
    assert measured.teacher_divergence is None and measured.refused == () and measured.signal


# ── the example ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.full
async def test_student_approaches_teacher(tmp_path: Path) -> None:
    """The exact divergence from the teacher shrinks, in contexts that were not sampled in training."""
    steps: list[Step] = []
    before, after, teacher = await distill.distill(tmp_path, 8, steps.append)
    assert [step.version for step in steps] == list(range(1, 9))
    assert all(step.measured.refused == () for step in steps)
    letters = Tokenizer(teacher).encode(distill.LETTERS)
    ids = np.random.default_rng(0).choice(letters, 200).astype(np.int32)
    target = compute_distribution(teacher, ids)

    def divergence(folder: Path) -> float:
        policy = compute_distribution(folder, ids)
        return float((policy.exp() * (policy - target)).sum(-1).mean())

    first, last = steps[0].measured.teacher_divergence, steps[-1].measured.teacher_divergence
    assert first is not None and last is not None
    assert last < 0.7 * first, [step.measured.teacher_divergence for step in steps]
    assert divergence(after) < 0.7 * divergence(before), (divergence(before), divergence(after))
