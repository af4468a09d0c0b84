"""Load and save models as Hugging Face folders.

The network joins matrices that have the same input (see `model.py`), but a folder stores them separately. `list_weights` yields a model's
parameters under the names that a folder uses, without copying them, so that they can be sent to another engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from turngate.engines.local.model import Model
from turngate.engines.local.shape import Shape, read_shape
from turngate.errors import ConfigError

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_EXTRA_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_LAYER = {
    "before": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "out": ("self_attn.o_proj",),
    "between": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def load(folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    """Load the model in `folder`, which contains config.json and the weights in one or more safetensors files."""
    folder = Path(folder)
    with torch.device("meta"):
        model = Model(read_shape(folder))
    model.load_state_dict(_state(model, folder, dtype), assign=True)
    return model.requires_grad_(True).to(device)


def load_into(model: Model, folder: str | Path) -> None:
    """Replace the weights of a model in place. All tensors are read before the first one is changed."""
    folder = Path(folder)
    if (other := read_shape(folder)) != model.shape:
        wrong = [name for name in Shape.__struct_fields__ if getattr(other, name) != getattr(model.shape, name)]
        raise ConfigError(
            f"model folder: the model in {folder} differs from the loaded model in "
            f"{', '.join(map(repr, wrong))}; load weights of the same model",
            param="model_folder",
        )
    state = _state(model, folder, model.dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])


def _state(model: Model, folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = _Folder(folder)
    shapes = {name: tuple(part.shape) for name, part in list_weights(model)}
    return {ours: _join([tensors.get(n, shapes[n]).to(dtype) for n in theirs]) for ours, theirs in _names(model)}


def create_random_model(shape: Shape, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> Model:
    """Create a model of this shape with random weights, for tests and benchmarks."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Model(shape).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02)
    return model


def list_weights(model: Model) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters under their Hugging Face names. The tensors are views, which change with the model."""
    parameters = dict(model.named_parameters())
    for ours, theirs in _names(model):
        pieces = parameters[ours].detach().split(_sizes(model.shape, len(theirs), ours)) if len(theirs) > 1 else None
        for index, name in enumerate(theirs):
            yield name, parameters[ours].detach() if pieces is None else pieces[index]


def save(model: Model, folder: str | Path, source: str | Path | None = None) -> None:
    """Write the model as a Hugging Face folder. Config and tokenizer files are copied from the folder `source`, if given."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in _EXTRA_FILES if source is not None else ():
        if (file := Path(source or "") / name).is_file() and file.resolve() != (folder / name).resolve():
            shutil.copyfile(file, folder / name)
    new = folder / (_WEIGHTS + ".new")
    save_file({name: tensor.contiguous().cpu() for name, tensor in list_weights(model)}, new, metadata={"format": "pt"})
    new.replace(folder / _WEIGHTS)  # atomic: readers see the old file or the new one


class _Index(msgspec.Struct, frozen=True):
    """The index of a model with several safetensors files."""

    weight_map: dict[str, str]  # the file of each tensor


class _Folder:
    """The tensors of a model folder by name, whichever file contains them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        index = folder / _INDEX
        try:
            if index.is_file():
                self._files = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
            else:
                with safe_open(folder / _WEIGHTS, "pt") as file:
                    self._files = dict.fromkeys(file.keys(), _WEIGHTS)
        except (OSError, SafetensorError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"model folder: the weights in {folder} cannot be read ({error})", param="model_folder"
            ) from None

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raise `ConfigError` if it is missing, cannot be read, or does not have this shape."""
        if name not in self._files:
            raise ConfigError(
                f"model folder: {self._folder} has no tensor {name}; check that the folder is complete",
                param="model_folder",
            )
        try:
            with safe_open(self._folder / self._files[name], "pt") as file:
                tensor = file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"model folder: {self._folder / self._files[name]} cannot be read ({error})", param="model_folder"
            ) from None
        if tensor.shape != shape:
            raise ConfigError(
                f"model folder: {self._folder}: {name} has shape {tuple(tensor.shape)}, but config.json requires {shape}; "
                "check that the weights and config.json belong to the same model",
                param="model_folder",
            )
        return tensor


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _names(model: Model) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the name of each parameter, and the names under which a folder stores its parts."""
    for name, _ in model.named_parameters():
        part, _, rest = name.partition(".")
        if part == "layers":
            index, piece, kind = rest.split(".")
            yield name, tuple(f"model.layers.{index}.{theirs}.{kind}" for theirs in _LAYER[piece])
        else:
            yield (
                name,
                ({"embedding": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}[part] + "." + rest,),
            )


def _sizes(shape: Shape, pieces: int, name: str) -> tuple[int, ...]:
    if pieces == 2:
        return (shape.inner, shape.inner)
    return (shape.heads * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head)
