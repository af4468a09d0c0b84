"""The tokenizer that the programs of the pages use: loaded once, before the programs are forked, as a gateway and an engine load it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from gauntlet.tokens import Model, model_folder
from turngate import render
from turngate.render.certificate_cache import record_name

_load_renderer = render.load_renderer
_loaded: dict[
    str, tuple[render.Renderer, render.Certificate]
] = {}  # by the name of the record, which depends on all files


def _load_once(
    folder: Path, *, model: str = "", family: str = "auto", recertify: bool = False
) -> tuple[render.Renderer, render.Certificate]:
    if recertify:
        return _load_renderer(folder, model=model, family=family, recertify=True)
    name = record_name(folder, model, family)
    if name not in _loaded:
        _loaded[name] = _load_renderer(folder, model=model, family=family)
    return _loaded[name]


@cache
def load_engine_model() -> Model:
    """Load the tokenizer of the stand-in for vLLM."""
    return Model(model_folder())


def load(folder: Path, model: str) -> None:
    """Load the renderer of a tokenizer folder and the engine's tokenizer. Modules that are imported later share them."""
    render.load_renderer = _load_once
    _load_once(folder, model=model)
    load_engine_model()
