"""Messages between a cell actor and the process that runs its orders, one JSON line each."""

from __future__ import annotations

import msgspec

from turngate.rollout.executor import AttemptResult


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the process that runs orders. They are the first line of its input."""

    shared: str  # URL of the shared store, without a password
    name: str  # the name of the cell, shown to people
    folder: str  # the folder on the machine for the data of all its cells
    sandbox: str  # the kind of sandbox whose backend is checked and swept at the start
    sandbox_settings: dict[str, object] = {}
    gateway: dict[str, object] = {}  # settings of the cell's gateway, as in a configuration file
    script: str = ""  # content of the scripted engine's file
    environment: dict[str, str] = {}  # variables of the cell's gateway, such as an engine's key; may be secret


class RunOrder(msgspec.Struct, frozen=True, tag="run"):
    order: msgspec.Raw


class CancelOrder(msgspec.Struct, frozen=True, tag="cancel"):
    session: str


RunnerCommand = RunOrder | CancelOrder


class RunnerReady(msgspec.Struct, frozen=True, tag="ready"):
    """Reports that the cell serves calls and can create sandboxes."""

    version: str  # Turngate's version
    url: str  # URL of the cell's gateway
    pid: int


class RunnerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Reports why the process cannot run orders. The process is about to exit or has exited."""

    message: str


class OrderProgress(msgspec.Struct, frozen=True, tag="progress"):
    session: str
    stage: str
    turns: int
    sampled_tokens: int


class OrderEnded(msgspec.Struct, frozen=True, tag="ended"):
    session: str
    result: AttemptResult | None  # None if the order was cancelled or raised an unexpected error


RunnerReply = RunnerReady | RunnerFailed | OrderProgress | OrderEnded
