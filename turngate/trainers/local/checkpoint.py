"""Checkpoints: weights, optimizer state, and the position in the feed.

A checkpoint is a folder `step-00012`: a Hugging Face model folder with two more files. It is written under another name, synced and
renamed, so that it is complete or absent; then older ones are removed. It holds the number of the last delivery, so that a trainer that
resumes from these weights continues exactly after the deliveries they were trained on.
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

from turngate.engines.local import Model, list_weights, save
from turngate.errors import ConfigError
from turngate.types import Json

_OPTIMIZER, _STATE = "optimizer.pt", "trainer.json"
_MAKING = ".making-"


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a trainer."""

    step: int = 0  # updates in the weights
    number: int = 0  # of the last delivery in the weights
    mark: str = ""  # identifies the feed
    version: int = 0  # of the policy
    history: tuple[Json, ...] = ()  # the steps so far


class Checkpoint(msgspec.Struct, frozen=True):
    folder: Path
    state: TrainerState

    def restore(self, model: Model, optimizer: torch.optim.Optimizer) -> float:
        """Load weights and optimizer state in place. Returns the learning rate of the checkpoint.

        The optimizer keeps its own settings, which may have changed since.
        """
        try:
            weights = load_file(self.folder / "model.safetensors")
            saved = torch.load(self.folder / _OPTIMIZER, weights_only=True)
            self._check_shapes(model, weights)
            with torch.no_grad():
                for name, own in list_weights(model):
                    own.copy_(weights[name])
            optimizer.load_state_dict({**optimizer.state_dict(), "state": saved["state"]})
            return float(saved["param_groups"][0]["lr"])
        except (OSError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
            raise ConfigError(f"checkpoint: {self.folder} cannot be resumed ({error})", param="out") from None

    def _check_shapes(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        own, there = (
            {name: tuple(one.shape) for name, one in given} for given in (list_weights(model), weights.items())
        )
        for name in {**own, **there}:
            if own.get(name) != there.get(name):
                raise ConfigError(
                    f"model_folder: its model is of another shape than the one in {self.folder} ({name}: {own.get(name, 'none')}, "
                    f"there {there.get(name, 'none')}); use the --model-folder that the run started with, or choose another "
                    "--out folder",
                    param="model_folder",
                )


def find_newest(folder: Path) -> Checkpoint | None:
    """Find the newest complete checkpoint."""
    found = sorted(folder.glob("step-*"), key=lambda one: int(one.name.removeprefix("step-")))
    if not found:
        return None
    file = found[-1] / _STATE
    try:
        return Checkpoint(found[-1], msgspec.json.decode(file.read_bytes(), type=TrainerState))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"checkpoint: {file} cannot be read ({error})", param="out") from None


def write_checkpoint(
    folder: Path, state: TrainerState, model: Model, optimizer: torch.optim.Optimizer, source: str | Path | None
) -> Checkpoint:
    """Write a checkpoint. `source`: the model folder that training started from, for its tokenizer and settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(f"{_MAKING}*"):
        shutil.rmtree(stale)
    place = folder / f"step-{state.step:05d}"
    new = folder / f"{_MAKING}{place.name}"
    save(model, new, source)
    torch.save(optimizer.state_dict(), new / _OPTIMIZER)
    (new / _STATE).write_bytes(msgspec.json.encode(state))
    for file in (*new.iterdir(), new):
        _fsync(file)
    if place.exists():  # from an earlier run in this folder
        shutil.rmtree(place)
    new.rename(place)
    _fsync(folder)
    for older in folder.glob("step-*"):
        if older != place:
            shutil.rmtree(older)
    return Checkpoint(place, state)


def _fsync(path: Path) -> None:
    """Sync a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
