"""Tests for the local model: agreement with `transformers`, packing, selected positions, recomputation, folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engines.local_kit import model, torch
from turngate.engines.local import list_weights, load, save
from turngate.engines.local.shape import Rope, read_shape
from turngate.engines.local.weights import create_random_model, load_into
from turngate.errors import ConfigError

pytestmark = pytest.mark.needs("torch")

SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied, with biases": {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama like SmolLM2": {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    "llama 3": {"rope_parameters": LLAMA3},
    "llama stretched": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3 untied": {"head_dim": 32},
}


@pytest.mark.sample(4)
@pytest.mark.xdist_group("transformers")  # its import takes ten seconds, so one worker does it
@pytest.mark.parametrize("kind", list(KINDS))
def test_logits_match_transformers(kind: str, tmp_path: Path) -> None:
    import transformers

    family = kind.split()[0].capitalize()
    config = getattr(transformers, f"{family}Config")(**SMALL, **KINDS[kind], initializer_range=0.3)
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.normal_(1.0, 0.3)  # their initial values have no effect
    theirs.save_pretrained(tmp_path)
    ours = load(tmp_path)
    ids = torch.randint(0, 200, (2, 150))
    with torch.no_grad():
        expected, found = theirs(ids).logits, ours(ids)
    assert torch.allclose(found, expected, atol=2e-4, rtol=1e-4), (found - expected).abs().max()
    kept = dict(theirs.named_parameters())
    assert all(torch.equal(kept[name], tensor) for name, tensor in list_weights(ours)) and len(kept) == len(
        dict(list_weights(ours))
    )


@pytest.mark.xdist_group("transformers")
def test_load_sharded_folder(tmp_path: Path) -> None:
    import transformers

    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=16))
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.allclose(load(tmp_path)(ids), theirs(ids).logits, atol=1e-5)
    next(tmp_path.glob("model-00002-*")).unlink()
    with pytest.raises(ConfigError, match="model-00002"):
        load(tmp_path)


@pytest.mark.xdist_group("transformers")
def test_saved_model_loads_in_transformers(tmp_path: Path) -> None:
    import transformers

    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)).save_pretrained(tmp_path / "first")
    ours = load(tmp_path / "first")
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1)
    save(ours, tmp_path / "second", source=tmp_path / "first")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids), theirs(ids).logits, atol=1e-4)
    other = load(tmp_path / "first")
    load_into(other, tmp_path / "second")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_packed_samples_do_not_interfere() -> None:
    made, ids = model(), torch.randint(0, 300, (1, 90))
    segments = torch.tensor([[0] * 30 + [1] * 45 + [2] * 15])
    with torch.no_grad():
        packed = made(ids, segments)[0]
        alone = [made(part)[0] for part in ids.split((30, 45, 15), dim=1)]
    assert torch.allclose(packed, torch.cat(alone), atol=1e-4)


def test_padding_and_selected_positions_keep_logits() -> None:
    made, ids = model(), torch.randint(0, 300, (1, 40))
    padded = torch.cat((ids, torch.full((1, 25), 7)), dim=1)
    at = torch.zeros((1, 65), dtype=torch.bool)
    at[0, [3, 17, 39]] = True
    with torch.no_grad():
        whole, chosen = made(ids), made(padded, at=at)
    assert torch.allclose(chosen, whole[0, [3, 17, 39]], atol=1e-5)


@pytest.mark.full
def test_recomputation_gives_same_gradients() -> None:
    made, ids = model(), torch.randint(0, 300, (2, 40))
    gradients = []
    for recompute in (False, True):
        made.recompute = recompute
        made.zero_grad()
        made(ids).log_softmax(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in made.parameters()])
    assert all(grad is not None and grad.abs().sum() > 0 for grad in gradients[0])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-2) for a, b in zip(*gradients, strict=True))


# ── rejections ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mixtral"}, r"model_type 'mixtral' \(only llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"vocab_size": "many"}, "vocab_size"),
    ],
)
def test_unsupported_model_is_rejected(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL, **change}))
    with pytest.raises(ConfigError, match=words):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    "content", [b"[]", b'{"model_type": "\xff"}', b'{"x": ' + b"[" * 5000], ids=["a list", "not UTF-8", "nested"]
)
def test_damaged_configuration_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read as a model configuration"):
        read_shape(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"weight_map": ["x"]}', '{"weight_map": {"x": 1}}', '{"x": ' + "[" * 5000],
    ids=["empty", "a list", "no map", "a list as map", "a number as file", "nested"],
)
def test_damaged_index_of_weights_is_rejected(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read"):
        load(tmp_path)


def test_legacy_rope_settings_are_read(tmp_path: Path) -> None:
    old = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **SMALL, "rope_theta": 500000.0, "rope_scaling": old})
    )
    assert read_shape(tmp_path).rope == Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 64)


@pytest.mark.full
def test_missing_or_mismatched_weights_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    with pytest.raises(ConfigError, match=r"the weights in .* cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="differs from the loaded model in 'kind', 'vocabulary'"):
        load_into(model(), tmp_path)
    save(create_random_model(msgspec.structs.replace(read_shape(tmp_path), tied=True)), tmp_path)
    with pytest.raises(ConfigError, match=r"has no tensor lm_head\.weight"):
        load(tmp_path)


@pytest.mark.parametrize(
    "shapes",
    [
        {"q_proj": (48, 40)},
        {"q_proj": (48, 48, 1)},
        {"q_proj": (40, 48), "k_proj": (24, 48)},  # the joined matrix has the right shape
    ],
)
def test_weights_of_wrong_shape_are_rejected(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    tensors = {name: tensor.contiguous() for name, tensor in list_weights(create_random_model(read_shape(tmp_path)))}
    for name, shape in shapes.items():
        tensors[f"model.layers.1.self_attn.{name}.weight"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    wrong = re.escape(
        f"model.layers.1.self_attn.q_proj.weight has shape {shapes['q_proj']}, but config.json requires (48, 48)"
    )
    with pytest.raises(ConfigError, match=wrong):
        load(tmp_path)
