"""Chat templates ⇄ token ids. `load` finds the renderer for a tokenizer folder and certifies it. No network, no engine."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from turngate.errors import ConfigError
from turngate.render.certificate_cache import CertificateRecord, load_record, record_name, save_record
from turngate.render.certify import Certificate, certify
from turngate.render.renderer import LastTurn, Renderer, ReplyReader, TemplateRenderer
from turngate.render.tokenizer import Tokenizer

__all__ = [
    "BUILTIN_TOKENIZER",
    "Certificate",
    "LastTurn",
    "Renderer",
    "ReplyReader",
    "TemplateRenderer",
    "Tokenizer",
    "find_tokenizer",
    "load_renderer",
]

BUILTIN_TOKENIZER = Path(__file__).parent / "builtin"


def load_renderer(
    folder: Path, *, model: str = "", family: str = "auto", anew: bool = False
) -> tuple[Renderer, Certificate]:
    """The renderer for a tokenizer folder.

    `family`: `auto` takes a hand-written one where the `renderers` package knows the model's very name, `template` always
    derives, anything else names a family. `anew`: probe again what is known.
    """
    name = record_name(folder, model, family)
    known = None if anew else load_record(name)
    if known is None:
        tokenizer = Tokenizer(folder, name=model)
    else:
        tokenizer = Tokenizer(folder, name=model, vocabulary=known.vocabulary, fast=known.fast)
    derived = TemplateRenderer(tokenizer) if (hand_written := _load_family(tokenizer, model, family)) is None else None
    renderer = hand_written or derived
    assert renderer is not None
    certificate = certify(renderer) if known is None else known.certificate
    if known is None:
        save_record(name, CertificateRecord(tokenizer.vocabulary, tokenizer.fast, certificate))
    if derived is not None:  # else reported, not acted upon: a family's bridge is its author's word
        derived.bridges = certificate.passed
    return renderer, certificate


def _load_family(tokenizer: Tokenizer, model: str, family: str) -> Renderer | None:
    # The package's names are all of the form owner/model; anything else saves us importing it.
    if family == "template" or (family == "auto" and "/" not in model):
        return None
    if find_spec("renderers") is None:
        if family == "auto":
            return None
        raise ConfigError(
            "family: the `renderers` package is not installed; pip install 'turngate[families]'", param="family"
        )
    from turngate.render.families import FamilyRenderer, family_of

    found = family_of(model) if family == "auto" else family
    return None if found is None else FamilyRenderer(tokenizer, found)


def find_tokenizer(name: str) -> Path:
    """A folder as it is, or a model's newest snapshot in the local Hugging Face cache. Nothing is downloaded."""
    folder = Path(name).expanduser()
    if folder.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return folder  # whatever is wrong with it is said when it is read
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub")))
    snapshots = sorted(
        (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/tokenizer.json"),
        key=lambda p: p.stat().st_mtime,
    )
    if not snapshots:
        raise ConfigError(
            f"tokenizer: {name!r} is neither a folder nor a model in the local Hugging Face cache ({hub})",
            param="tokenizer",
        )
    return snapshots[-1].parent
