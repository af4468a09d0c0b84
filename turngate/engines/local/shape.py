"""The type and dimensions of the network, read from config.json in the model folder. Only llama, qwen2 and qwen3 are supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from turngate.errors import ConfigError

_MODEL_TYPES = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3")


class Rope(msgspec.Struct, frozen=True):
    """Settings of the rotary position embedding. `kind` determines which of the later fields are used."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0  # llama3: wavelengths above original / low are fully stretched
    high: float = 4.0  # llama3: wavelengths below original / high are unchanged
    original: int = 8192


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The network's type and dimensions."""

    kind: str
    vocabulary: int
    hidden: int
    inner: int  # size of the feed-forward layer
    layers: int
    heads: int
    kv_heads: int
    head: int  # size of a head
    epsilon: float
    context: int  # maximum context length
    rope: Rope
    tied: bool  # the output layer uses the embedding's weights
    qkv_bias: bool
    out_bias: bool
    inner_bias: bool
    head_norm: bool  # queries and keys are normalized (Qwen3)


class _Config(msgspec.Struct, kw_only=True):
    """The fields of config.json that shape the network, as `transformers` 4 and 5 write them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def read_shape(folder: Path) -> Shape:
    """Read the shape of the model in `folder`. Raise `ConfigError` if that fails, or if this engine cannot compute the model exactly."""
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as error:
        raise ConfigError(f"model folder: {path} cannot be read ({error.strerror})", param="model_folder") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"model folder: {path} cannot be read as a model configuration: {error}; check the file, or choose a model of one of these "
            f"types: {', '.join(_MODEL_TYPES)}",
            param="model_folder",
        ) from None
    if config.model_type not in _MODEL_TYPES:
        raise _make_error(path, f"model_type {config.model_type!r} (only {', '.join(_MODEL_TYPES)})")
    if config.hidden_act != "silu":
        raise _make_error(path, f"hidden_act {config.hidden_act!r}")
    if config.use_sliding_window:
        raise _make_error(path, "use_sliding_window")
    qwen2 = config.model_type == "qwen2"
    return Shape(
        kind=config.model_type,
        vocabulary=config.vocab_size,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head=config.head_dim or config.hidden_size // config.num_attention_heads,
        epsilon=config.rms_norm_eps,
        context=config.max_position_embeddings,
        rope=_rope(path, config),
        tied=config.tie_word_embeddings,
        qkv_bias=qwen2 or config.attention_bias,
        out_bias=not qwen2 and config.attention_bias,
        inner_bias=config.mlp_bias,
        head_norm=config.model_type == "qwen3",
    )


def _rope(path: Path, config: _Config) -> Rope:
    options = config.rope_parameters or config.rope_scaling or {}
    kind = options.get("rope_type", options.get("type", "default"))
    if kind not in _ROPES:
        raise _make_error(path, f"rope type {kind!r} (only {', '.join(_ROPES)})")
    if options.get("partial_rotary_factor", 1.0) != 1.0:
        raise _make_error(path, "partial_rotary_factor")
    theta = float(options.get("rope_theta") or config.rope_theta or 10_000.0)
    if kind == "default":
        return Rope(theta)
    factor = float(options.get("factor", 1.0))
    if kind == "linear":
        return Rope(theta, kind, factor)
    return Rope(
        theta,
        kind,
        factor,
        low=float(options.get("low_freq_factor", 1.0)),
        high=float(options.get("high_freq_factor", 4.0)),
        original=int(options.get("original_max_position_embeddings", config.max_position_embeddings)),
    )


def _make_error(path: Path, feature: str) -> ConfigError:
    return ConfigError(
        f"model folder: {path}: the local engine does not support {feature}; choose another model, or serve this one with vLLM or SGLang",
        param="model_folder",
    )
