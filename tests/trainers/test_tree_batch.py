"""Tests for training on prefix trees: gradients equal those of flat rows, with every token weighed as there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.engines.local_kit import model, torch  # skips if torch is missing
from turngate.client.feed import Row
from turngate.engines.local import Model
from turngate.errors import ConfigError
from turngate.trace.prefix_tree import build_tree, find_shared_prefixes
from turngate.trace.roles import ROLES
from turngate.trace.sample import Sample, TrainingPolicy, build_samples
from turngate.trace.side_data import SideColumn
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo, Trace
from turngate.trainers.export.tree import ExportedTree
from turngate.trainers.local.attention import attend_densely, attend_flexibly
from turngate.trainers.local.grpo import GrpoSettings, Learner
from turngate.trainers.local.loss import LossTerms, Normalise, compute_divisor, compute_loss
from turngate.trainers.local.packing import count_packed_tokens
from turngate.trainers.tree_attention import make_block_mask, make_dense_mask, make_mask_mod
from turngate.trainers.tree_batch import list_rows, pack_trees, read_trees

pytestmark = pytest.mark.needs("torch")

VOCABULARY = 300


class Conversations:
    """A trace with random ids, whose log-probabilities are close to those of a model, so that some ratios are clipped."""

    def __init__(self, seed: int = 0) -> None:
        self.trace = Trace()
        self._rng = np.random.default_rng(seed)

    def draw(self, count: int) -> np.ndarray:
        return self._rng.integers(0, VOCABULARY, count, np.int32)

    def turn(
        self, parent: Sampled | None, *prompt: np.ndarray, reply: int = 4, again: Context | None = None
    ) -> Sampled:
        """Record a call: the ids that it adds, or the context that it answers again, and a reply."""
        context = again or Context(
            self.trace.reserve_id(), parent, np.concatenate(prompt), ContextInfo(b"p", b"m" * 16, "u", True)
        )
        if again is None:
            self.trace.add_context(context)
        info = SampledInfo(b"m", b"", b"", "stop", 0, 0, 0.0, 1.0)
        turn = Sampled(self.trace.reserve_id(), context, self.draw(reply), np.zeros(reply, np.float32), info)
        self.trace.add_sampled(turn)
        return turn

    def rows(self) -> list[Sample]:
        return build_samples(self.trace, TrainingPolicy(roles=ROLES))

    def score(self, learner: Learner) -> None:
        turns = {turn.id: turn for turn in self.trace.turns()}
        for row in list_rows(self.export(1.0)):
            with torch.no_grad():
                now = learner.logprobs([row])[0].numpy()
            noisy = np.zeros(len(row.ids), np.float32)
            noisy[row.mask] = now + self._rng.normal(0, 0.4, len(now))
            for span in row.spans:
                if span.trained:
                    turns[span.node].logprobs = noisy[span.start : span.end]

    def export(self, advantage: float | None) -> ExportedTree:
        rows = self.rows()
        return ExportedTree("s", advantage, 1 / len(rows), build_tree(rows))


def eight_sub_agents() -> Conversations:
    """A main conversation, and eight sub-agents that begin with the same system prompt and work for two turns each."""
    made = Conversations()
    system = made.draw(40)
    main = made.turn(None, system, made.draw(5))
    for _ in range(8):
        made.turn(made.turn(None, system, made.draw(3)), made.draw(4))
    made.turn(main, made.draw(8))
    return made


def compaction() -> Conversations:
    """A conversation that is summarized after three turns, and continues with the same system prompt."""
    made = Conversations(1)
    system = made.draw(20)
    turn = made.turn(None, system, made.draw(6))
    for _ in range(2):
        turn = made.turn(turn, made.draw(5))
    made.turn(made.turn(None, system, made.draw(9)), made.draw(3))
    return made


def forks() -> Conversations:
    """Two continuations of one turn, which only one row trains, and two answers to one prompt."""
    made = Conversations(2)
    turn = made.turn(None, made.draw(10))
    first = made.turn(turn, made.draw(5), reply=9)
    made.turn(turn, made.draw(3))
    made.turn(None, again=first.parent)
    return made


TRACES: list[Callable[[], Conversations]] = [eight_sub_agents, compaction, forks]


def gradients(made: Model, settings: GrpoSettings, rows: Sequence[Row]) -> tuple[float, torch.Tensor]:
    learner = Learner(made, settings)
    measured = learner.gradients(rows, version=1)
    assert measured.refused == () and 0 < measured.clipped < 1
    return measured.loss, collect(made)


def collect(made: Model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in made.parameters() if parameter.grad is not None])


def check_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32 and expected.abs().max() > 1e-3
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))


def flat(normalise: Normalise) -> GrpoSettings:
    """One row per forward pass."""
    return GrpoSettings(batch_tokens=1, normalise=normalise)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
@pytest.mark.parametrize("trace", TRACES)
def test_trainer_computes_gradients_of_flat_rows(trace: Callable[[], Conversations], normalise: Normalise) -> None:
    made, conversations = model(), trace()
    conversations.score(Learner(made, flat(normalise)))
    rows = list_rows(conversations.export(-0.7))
    tokens = sum(row.ids.size for row in rows)
    loss, expected = gradients(made, flat(normalise), rows)
    packed = count_packed_tokens(rows, tree=True)
    assert packed < tokens
    without_paths = [msgspec.structs.replace(row, path=None) for row in rows]
    for batch_tokens, same in ((packed, rows), (tokens // 3, rows), (packed, without_paths)):
        settings = GrpoSettings(prefix_tree=True, batch_tokens=batch_tokens, normalise=normalise)
        found_loss, found = gradients(made, settings, same)
        assert found_loss == pytest.approx(loss, abs=1e-5)
        check_equal(found, expected)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_batch_of_trees_has_gradients_of_flat_rows(normalise: Normalise) -> None:
    made = model()
    trees: list[ExportedTree] = []
    for trace, advantage in zip(TRACES, (1.0, -0.5, 0.3), strict=True):
        conversations = trace()
        conversations.score(Learner(made, flat(normalise)))
        trees.append(conversations.export(advantage))
    rows = [row for exported in trees for row in list_rows(exported)]
    loss, expected = gradients(made, flat(normalise), rows)

    made.zero_grad()
    batch = pack_trees(trees)
    assert len(batch.ids) == sum(len(exported.tree.ids) for exported in trees)
    assert batch.row_tokens.tolist() == [int(row.mask.sum()) for row in rows]
    mask = batch.dense_mask()

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return output.transpose(1, 2)

    hidden = made.run(batch.ids[None], batch.positions, attend)[0]
    trained = batch.trained
    likely = torch.log_softmax(made.scores(hidden[batch.previous[trained]]), dim=-1)
    terms = LossTerms(
        now=likely.gather(-1, batch.ids[trained][:, None])[:, 0],
        then=batch.logprobs[trained],
        advantage=batch.advantages[trained],
        weight=batch.weights[trained],
        row=batch.rows[trained],
    )
    by = compute_divisor([row.weight for row in rows], batch.row_tokens.tolist(), normalise)
    value = compute_loss(terms, batch.row_tokens, by=by, low=0.2, high=0.28, normalise=normalise)
    value.backward()
    assert value.item() == pytest.approx(loss, abs=1e-5)
    check_equal(collect(made), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_dense_mask() -> None:
    """Without a backward pass, which FlexAttention does not have on a CPU."""
    batch = pack_trees([made().export(1.0) for made in TRACES] * 3)
    size = len(batch.ids)
    assert size > 5 * 128, "several blocks"
    q, k, v = (torch.randn(1, size, heads, 16) for heads in (4, 2, 2))
    found, expected = (attend(batch.until)(0, q, k, v) for attend in (attend_flexibly, attend_densely))
    assert (found - expected).abs().max() <= 1e-5
    segment = eight_sub_agents().export(1.0).tree.segments[-1]
    visible = [token for start, end in (*segment.attends, (segment.start, segment.end)) for token in range(start, end)]
    seen = batch.dense_mask()[segment.end - 1].nonzero()[:, 0].tolist()
    assert seen == visible, "a token attends to its ancestors and itself"


@pytest.mark.parametrize("size", [63, 64, 192])
def test_dense_attention_avoids_sizes_with_wrong_gradients(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's gradients can be NaN for 64 tokens more than a multiple of 128. The result is that of all tokens without padding."""
    attention, sizes = torch.nn.functional.scaled_dot_product_attention, []

    def record(q: torch.Tensor, *others: torch.Tensor, **settings: object) -> torch.Tensor:
        sizes.append(q.shape[2])
        return attention(q, *others, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    until = torch.tensor([size] * 20 + [40] * 20 + [size] * (size - 40))
    inputs = [torch.randn(1, size, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    found = attend_densely(until)(0, *inputs)
    assert sizes == [size + (size % 128 == 64)]
    mask, turned = make_dense_mask(until), [x.transpose(1, 2) for x in inputs]
    expected = attention(*turned, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(found, expected, atol=1e-6)
    weights = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), inputs) for x in (found, expected)), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("size", [1, 127, 128, 129, 700])
def test_block_mask_has_the_blocks_of_pytorch(size: int) -> None:
    """It is computed from ranges; PyTorch computes it from the values of all pairs of tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    rng = np.random.default_rng(size)
    rows = [rng.integers(0, 2, int(n)) for n in rng.integers(1, 90, 40)]
    layout = find_shared_prefixes([[row] for row in [*rows, rng.integers(0, 2, 300)]])
    until = torch.from_numpy(np.minimum(layout.until(), size)[:size])
    assert len(until) == size
    ours, theirs = make_block_mask(until), create_block_mask(make_mask_mod(until), None, None, size, size, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_flex_attention_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"flex_attention needs a CUDA device, but the model is on cpu"):
        Learner(model(), GrpoSettings(flex_attention=True))


def add_side_data(rows: list[Sample], dtype: str) -> list[Sample]:
    """Return rows that have a number for every token except the first, which depends on the tokens before it."""
    return [
        row.with_side({"sums": SideColumn(((1, len(row.ids)),), np.cumsum(row.ids)[1:, None].astype(dtype))})
        for row in rows
    ]


def test_batch_has_side_data_of_all_trees() -> None:
    rows = [add_side_data(made().rows(), "int32") for made in (forks, compaction)]
    plain = eight_sub_agents().export(1.0)
    with_side = [ExportedTree("s", 1.0, 1.0, build_tree(each)) for each in rows]
    trees = [with_side[0], plain, with_side[1]]
    batch = pack_trees(trees)
    packed = batch.side["sums"]
    value_of = dict(zip(packed.tokens.tolist(), packed.values[:, 0].tolist(), strict=True))
    offset = 0
    for exported, expected in zip(trees, (rows[0], [], rows[1]), strict=True):
        for path, row in zip(exported.tree.rows, expected, strict=False):
            parts = [exported.tree.segments[index] for index in path.segments]
            places = [offset + place for part in parts for place in range(part.start, part.end)]
            assert [value_of.get(place) for place in places] == [None, *np.cumsum(row.ids)[1:].tolist()]
        offset += len(exported.tree.ids)
    assert not pack_trees([plain]).side
    other = ExportedTree("s", 1.0, 1.0, build_tree(add_side_data(forks().rows(), "float32")))
    with pytest.raises(
        ConfigError,
        match="the side data 'sums' must have the same type and shape in all trees of a batch; pack trees",
    ):
        pack_trees([trees[0], other])


def test_unknown_advantage_is_rejected() -> None:
    exported = forks().export(None)
    with pytest.raises(
        ConfigError, match=r"session s has no advantage; .*, export with `--unscored drop`; .* leave_one_out"
    ):
        pack_trees([exported])
    with pytest.raises(ConfigError, match="has no advantage"):
        list_rows(exported)


def test_file_that_is_not_json_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "trees.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"line 1: .*not a tree that `turngate export tree` wrote: .*`session`"):
        list(read_trees(path))
    path.write_text("\nids")
    with pytest.raises(ConfigError, match="line 1 cannot be read as JSON"):
        list(read_trees(path))
    path.write_text("[" * 5000)
    with pytest.raises(ConfigError, match="line 1 cannot be read as JSON: a value is nested too deeply"):
        list(read_trees(path))
    path.write_text("[]")
    with pytest.raises(ConfigError, match="line 1 is not a JSON object"):
        list(read_trees(path))
    path.write_bytes(b"{}\xff\n")
    with pytest.raises(ConfigError, match=r"line 1 cannot be read as JSON: .*can't decode byte 0xff"):
        list(read_trees(path))
    with pytest.raises(ConfigError, match="at least one tree"):
        pack_trees([])


def test_file_that_is_not_parquet_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "trees.parquet"
    path.write_bytes(b"PAR")
    with pytest.raises(ConfigError, match=r"trees\.parquet: it cannot be read as a Parquet file: .*3 bytes"):
        list(read_trees(path))
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"ids": [[1], [2]]}), path)
    with pytest.raises(ConfigError, match=r"row 1: .*not a tree that `turngate export tree` wrote: .*`session`"):
        list(read_trees(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(ConfigError, match=rf"trees{suffix} cannot be read \(No such file or directory\); pass a file"):
        list(read_trees(tmp_path / f"trees{suffix}"))


def test_sub_agents_are_computed_once() -> None:
    exported = eight_sub_agents().export(1.0)
    tokens = [len(row.ids) for row in exported.tree.rebuild_rows()]
    assert len(tokens) == 9 and len(exported.tree.ids) == sum(tokens) - 8 * 40
