"""Rendering: messages to token ids, and sampled ids to messages. `load_renderer` loads and certifies the renderer of a tokenizer folder."""

from __future__ import annotations

import os
import shlex
from importlib.util import find_spec
from pathlib import Path

from turngate.common.validation import path_exists
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
    folder: Path, *, model: str = "", family: str = "auto", recertify: bool = False
) -> tuple[Renderer, Certificate]:
    """Load the renderer of a tokenizer folder, and its certificate.

    If `family` is `auto`, use the hand-written renderer that the `renderers` package has for the exact name `model`, or else derive a
    renderer from the chat template. If `family` is `template`, always derive the renderer from the chat template. Any other value is the
    name of a family in the package. If `recertify` is set, ignore the cached certificate and probe the renderer again.
    """
    name = record_name(folder, model, family)
    record = None if recertify else load_record(name)
    if record is None:
        tokenizer = Tokenizer(folder, name=model)
    else:
        tokenizer = Tokenizer(folder, name=model, vocabulary=record.vocabulary, fast=record.fast)
    derived = TemplateRenderer(tokenizer) if (hand_written := _load_family(tokenizer, model, family)) is None else None
    renderer = hand_written or derived
    assert renderer is not None
    certificate = certify(renderer) if record is None else record.certificate
    if record is None:
        save_record(name, CertificateRecord(tokenizer.vocabulary, tokenizer.fast, certificate))
    # A hand-written renderer is used even where it fails certification, because we trust its author. The failure is only reported.
    if derived is not None:
        if derived.template.without_tools is derived.template:
            derived.uncertified = certificate.uncertified
        else:
            derived.uncertified = certificate.select(has_tools=False).uncertified
            derived.uncertified_with_tools = certificate.select(has_tools=True).uncertified
    return renderer, certificate


def _load_family(tokenizer: Tokenizer, model: str, family: str) -> Renderer | None:
    # In the package, every model name has the form owner/model. For any other name, skip the import, which is slow.
    if family == "template" or (family == "auto" and "/" not in model):
        return None
    if find_spec("renderers") is None:
        if family == "auto":
            return None
        raise ConfigError(
            "family: the `renderers` package is not installed; run `pip install 'turngate[families]'`", param="family"
        )
    from turngate.render.families import FamilyRenderer, family_of

    found = family_of(model) if family == "auto" else family
    return None if found is None else FamilyRenderer(tokenizer, found)


def find_tokenizer(name: str) -> Path:
    """Find a tokenizer folder by path, or by model name in the local Hugging Face cache (the newest snapshot). Nothing is downloaded."""
    folder = Path(os.path.expanduser(name))  # noqa: PTH111  (`Path.expanduser` raises an error for unknown users)
    if path_exists(folder) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        return folder  # if there is a problem with the folder, reading it raises an error
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", str(home / "hub")))
    snapshots = sorted(
        (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/tokenizer.json"),
        key=lambda p: p.stat().st_mtime,
    )
    if not snapshots:
        raise ConfigError(
            f"tokenizer: {name!r} is neither a folder nor a model with a tokenizer.json in the local Hugging Face cache ({hub}); "
            f"pass the path of a tokenizer folder, or download the model with `hf download {shlex.quote(name)}`",
            param="tokenizer",
        )
    return snapshots[-1].parent
