"""Checkpoints: weights, optimizer state, and the position in the feed.

A checkpoint is a folder such as `step-00012`: a Hugging Face model folder with two extra files. It is written under a temporary name,
synced and renamed, so it is either complete or absent. All other checkpoints are then removed. A checkpoint also contains the number of the
last delivery that its weights were trained on, so a resumed trainer continues with the next delivery.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

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
    """The progress of a trainer, as stored in a checkpoint."""

    step: int = 0  # steps done, including those that did not change the weights
    number: int = 0  # of the last delivery that the weights were trained on
    mark: str = ""  # identifies the feed
    version: int = 0  # policy version
    history: tuple[Json, ...] = ()  # all steps so far


class Checkpoint(msgspec.Struct, frozen=True):
    folder: Path
    state: TrainerState

    def restore(self, model: Model, optimizer: torch.optim.Optimizer) -> float:
        """Load the weights into `model` and the optimizer state into `optimizer`. Return the checkpoint's learning rate.

        The optimizer keeps its own settings, such as its learning rate, even if the checkpoint contains different ones.
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
        except (OSError, EOFError, UnpicklingError, SafetensorError, RuntimeError, ValueError, LookupError) as error:
            why = str(error).partition("\n")[0] or "a file is empty"
            raise ConfigError(
                f"checkpoint: cannot resume from {self.folder} ({why}); restore the folder from a backup, or choose another --out folder",
                param="out",
            ) from None

    def _check_shapes(self, model: Model, weights: Mapping[str, torch.Tensor]) -> None:
        own, saved = (
            {name: tuple(tensor.shape) for name, tensor in tensors}
            for tensors in (list_weights(model), weights.items())
        )
        for name in {**own, **saved}:
            if own.get(name) != saved.get(name):
                raise ConfigError(
                    f"model_folder: the model does not match the checkpoint in {self.folder} "
                    f"(shape of {name}: {own.get(name, 'missing')} in the model, {saved.get(name, 'missing')} in the checkpoint); "
                    "use the --model-folder that the run started with, or choose another --out folder",
                    param="model_folder",
                )


def find_newest(folder: Path) -> Checkpoint | None:
    """Return the newest checkpoint in a folder, or None if there is none. Raise `ConfigError` if the checkpoint cannot be read."""
    newest = max(_list_checkpoints(folder), key=_read_step, default=None)
    if newest is None:
        return None
    file = newest / _STATE
    try:
        return Checkpoint(newest, msgspec.json.decode(file.read_bytes(), type=TrainerState))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"checkpoint: {file} cannot be read ({error}); restore the file from a backup, or choose another --out folder",
            param="out",
        ) from None


def write_checkpoint(
    folder: Path, state: TrainerState, model: Model, optimizer: torch.optim.Optimizer, source: str | Path | None
) -> Checkpoint:
    """Write a checkpoint, and remove all others.

    `source` is the model folder that training started from. Its config and tokenizer files are copied.
    """
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
    for older in _list_checkpoints(folder):
        if older != place:
            shutil.rmtree(older)
    return Checkpoint(place, state)


def _list_checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder. Folders with other names, such as a user's copy `step-00012.bak`, are ignored."""
    return [path for path in folder.glob("step-*") if re.fullmatch("step-[0-9]+", path.name)]


def _read_step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
