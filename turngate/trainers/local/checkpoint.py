"""What a killed trainer goes on from: weights, the optimizer's memory, and how far the feed was read. Called by `grpo.py`.

A checkpoint is a folder `step-00012`, a Hugging Face model folder with two files more. It is written under another name, made durable
and renamed, so that it is there whole or not at all; then older ones are removed. The number of the last delivery is in it, and not
only at the gateway: whoever goes on from these weights goes on past exactly the deliveries that made them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from turngate.engines.local import Model, named, save
from turngate.errors import ConfigError
from turngate.types import Json

_OPTIMIZER, _STATE = "optimizer.pt", "trainer.json"
_MAKING = ".making-"


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Where a trainer is."""

    step: int = 0  # updates that are in the weights
    number: int = 0  # of the last delivery that is
    mark: str = ""  # of the feed that it is of
    version: int = 0  # of the policy
    history: tuple[Json, ...] = ()  # what each step measured


class Checkpoint(msgspec.Struct, frozen=True):
    folder: Path
    state: State

    def restore(self, model: Model, optimizer: torch.optim.Optimizer) -> float:
        """Weights and the optimizer's memory, into those that are there. How the optimizer was set up when it was made stays: whoever
        goes on may have chosen otherwise. The learning rate that the checkpoint was made with."""
        try:
            weights = load_file(self.folder / "model.safetensors")
            memory = torch.load(self.folder / _OPTIMIZER, weights_only=True)
            self._fits(model, weights)
            with torch.no_grad():
                for name, own in named(model):
                    own.copy_(weights[name])
            optimizer.load_state_dict({**optimizer.state_dict(), "state": memory["state"]})
            return float(memory["param_groups"][0]["lr"])
        except (OSError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
            raise ConfigError(f"checkpoint: {self.folder} cannot be gone on from ({error})", param="out") from None

    def _fits(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        own, there = ({name: tuple(one.shape) for name, one in given} for given in (named(model), weights.items()))
        for name in {**own, **there}:
            if own.get(name) != there.get(name):
                raise ConfigError(
                    f"model_folder: its model is of another shape than the one in {self.folder} ({name}: {own.get(name, 'none')}, "
                    f"there {there.get(name, 'none')}); go on with the --model-folder that the run began with, or choose another "
                    "--out folder",
                    param="model_folder",
                )


def newest(folder: Path) -> Checkpoint | None:
    """The last one that was finished, if there is any."""
    found = sorted(folder.glob("step-*"), key=lambda one: int(one.name.removeprefix("step-")))
    if not found:
        return None
    file = found[-1] / _STATE
    try:
        return Checkpoint(found[-1], msgspec.json.decode(file.read_bytes(), type=State))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"checkpoint: {file} cannot be read ({error})", param="out") from None


def write(
    folder: Path, state: State, model: Model, optimizer: torch.optim.Optimizer, source: str | Path | None
) -> Checkpoint:
    """`source`: the model folder that training began with, for its tokenizer and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_MAKING}*"):
        shutil.rmtree(stale)
    place = folder / f"step-{state.step:05d}"
    new = folder / f"{_MAKING}{place.name}"
    save(model, new, source)
    torch.save(optimizer.state_dict(), new / _OPTIMIZER)
    (new / _STATE).write_bytes(msgspec.json.encode(state))
    for file in (*new.iterdir(), new):
        _settle(file)
    if place.exists():  # of a run that was started over in this folder
        shutil.rmtree(place)
    new.rename(place)
    _settle(folder)
    for older in folder.glob("step-*"):
        if older != place:
            shutil.rmtree(older)
    return Checkpoint(place, state)


def _settle(path: Path) -> None:
    """To the disk, with its name."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
