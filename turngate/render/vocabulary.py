"""Read a vocabulary: its added and special tokens, the bytes of each id, and the merges in the form that tiktoken accepts.

The vocabulary is defined in `tokenizer.json`. Some folders declare special tokens only in `tokenizer_config.json`. Those tokens are added.

Reading the file and ordering its merges takes most of a second, so `certificate_cache.py` caches the result.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec
import orjson

from turngate.errors import ConfigError
from turngate.types import Json


class Merges(msgspec.Struct, frozen=True):
    """The parts of a byte-level BPE that the fast encoder needs: how text is split and normalized, and the order of the merges."""

    pattern: str
    nfc: bool
    order: list[int]  # token ids in merge order


class Vocabulary(msgspec.Struct, frozen=True):
    digest: str  # digest of tokenizer.json
    added: dict[str, int]
    special: list[int]
    table: list[bytes] | None  # the bytes of each id; None if the vocabulary is not byte-level
    merges: Merges | None
    declared: list[str] = []  # added tokens that only tokenizer_config.json declares


def read_vocabulary(path: Path, config: Json) -> Vocabulary:
    """Read a vocabulary. `path` is the path of `tokenizer.json`, and `config` is the content of `tokenizer_config.json`."""
    spec = read_json(path)
    try:
        declared = add_declared_tokens(spec, config)
        return _parse_vocabulary(spec, blake2b(path.read_bytes(), digest_size=16).hexdigest(), declared)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"tokenizer: {path} or the tokenizer_config.json beside it is not valid ({type(error).__name__}: {error}); "
            "download the tokenizer again, or choose a different --tokenizer",
            param="tokenizer",
        ) from None


def add_declared_tokens(spec: Json, config: Json) -> list[str]:
    """Extend `spec`, the content of `tokenizer.json`, with the tokens that only `tokenizer_config.json` declares. Return the added tokens.

    Each token gets its declared id. If a placeholder (a token of several characters that no merge uses) has this id, the declared
    token replaces it. If an ordinary token has this id, the declared token is left out, and `markers.py` rejects a template that needs it.
    A token that the vocabulary contains with a different id is left out too.
    """
    known = {token["content"] for token in spec.get("added_tokens", [])}
    vocab = spec["model"]["vocab"]
    if not isinstance(vocab, dict):
        return []
    used: set[str] | None = None
    names: dict[int, str] = {}
    out = []
    for content, token_id, flags in _read_declared_tokens(config, vocab):
        if content in known or vocab.get(content, token_id) != token_id:
            continue
        if content not in vocab:
            names = names or {number: name for name, number in vocab.items()}
            used = _find_merged_tokens(spec["model"]) if used is None else used
            if (placeholder := names.get(token_id)) is not None:
                if placeholder in used or len(placeholder) == 1:
                    continue
                del vocab[placeholder]
            vocab[content] = token_id
        spec.setdefault("added_tokens", []).append({**flags, "id": token_id, "content": content})
        known.add(content)
        out.append(content)
    # An encoder assigns new ids to added tokens that are not in the vocabulary. Add such tokens to it, so that they keep their ids.
    for token in spec["added_tokens"] if out else ():
        vocab.setdefault(token["content"], token["id"])
    return out


def _read_declared_tokens(config: Json, vocab: dict[str, int]) -> list[tuple[str, int, dict[str, bool]]]:
    """Return the tokens that `tokenizer_config.json` declares, with their ids and flags.

    A token that is declared without an id gets its id from the vocabulary. If the vocabulary lacks the token, it is left out.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    out = []
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        own = {name: bool(token.get(name, default)) for name, default in flags.items()}
        out.append((str(token["content"]), int(token_id), own))
    return out + [(name, vocab[name], flags) for name in read_declared_texts(config) if name in vocab]


def read_declared_texts(config: Json) -> list[str]:
    """Return the texts of all tokens that `tokenizer_config.json` declares."""
    entries = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)]
    extra = config.get("additional_special_tokens") or []
    entries += list(extra.values()) if isinstance(extra, dict) else extra
    decoder = config.get("added_tokens_decoder") or {}
    entries += list(decoder.values())
    texts = (entry.get("content") if isinstance(entry, dict) else entry for entry in entries)
    return [text for text in texts if text]


def _find_merged_tokens(model: Json) -> set[str]:
    """Return all tokens that are an input or the result of a merge."""
    out: set[str] = set()
    for merge in model.get("merges", []):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        out |= {left, right, left + right}
    return out


def _parse_vocabulary(spec: Json, digest: str, declared: list[str]) -> Vocabulary:
    tokens = spec.get("added_tokens", [])
    added = {token["content"]: int(token["id"]) for token in tokens}
    table = _byte_table(spec, added)
    return Vocabulary(
        digest=digest,
        added=added,
        special=[int(token["id"]) for token in tokens if token.get("special")],
        table=table,
        merges=_parse_merges(spec) if table is not None else None,
        declared=declared,
    )


def _parse_merges(spec: Json) -> Merges | None:
    model = spec["model"]
    pattern = _single_pattern(spec.get("pre_tokenizer"))
    nfc = _is_nfc(spec.get("normalizer"))
    if model.get("type") != "BPE" or pattern is None or nfc is None or model.get("dropout"):
        return None
    if any(t.get("lstrip") or t.get("rstrip") or t.get("single_word") for t in spec.get("added_tokens", [])):
        return None
    order = _merge_order(model)
    return None if order is None else Merges(pattern, nfc, order)


def _merge_order(model: Json) -> list[int] | None:
    """Return the token ids in merge order: first the base symbols, then the result of each merge.

    Return None if the result of a merge is not in the vocabulary. If several merges produce the same token, the token gets the rank of the
    first merge. tiktoken then gives the other merges too high a priority. The fast encoder is therefore used only if it returns the right
    ids for the probe corpus.
    """
    vocab: dict[str, int] = model["vocab"]
    merged: dict[int, None] = {}
    for merge in model["merges"]:
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        token = vocab.get(left + right)
        if token is None:
            return None
        merged.setdefault(token)
    base = sorted(i for token, i in vocab.items() if i not in merged and len(token) == 1)
    return base + list(merged)


def _single_pattern(pre: Json) -> str | None:
    """Return the regular expression with which the pre-tokenizer splits text. Return None for an unsupported pre-tokenizer."""
    if pre is None:
        return None
    stages = pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    gpt2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    match stages:
        case [{"type": "ByteLevel", "add_prefix_space": False, **rest}] if rest.get("use_regex", True):
            return gpt2
        case [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return str(pattern)
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, **rest},
        ] if rest.get("use_regex", True):
            # Each digit is split off first, so white space before a digit is not joined with the digit.
            return r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
        case _:
            return None


def _is_nfc(normalizer: Json) -> bool | None:
    """Return whether text is normalized to NFC, or None if the fast encoder does not support the normalizer."""
    if normalizer is None or (normalizer["type"] == "Sequence" and not normalizer["normalizers"]):
        return False
    return True if normalizer["type"] == "NFC" else None


def _byte_table(spec: Json, added: dict[str, int]) -> list[bytes] | None:
    """Return the bytes of each id of a byte-level vocabulary, or None if the vocabulary is not byte-level."""
    decoder = spec.get("decoder") or {}
    kinds = (
        [d["type"] for d in decoder.get("decoders", [])] if decoder.get("type") == "Sequence" else [decoder.get("type")]
    )
    if "ByteLevel" not in kinds or spec["model"].get("type") != "BPE":
        return None
    # Translate the whole vocabulary as one text, because 150,000 separate translations would take most of a second.
    vocab: dict[str, int] = spec["model"]["vocab"]
    to_latin = str.maketrans({char: chr(byte) for byte, char in _byte_chars().items()})
    mapped = "\uffff".join(vocab).translate(to_latin).split("\uffff")
    table = {i: _encode_latin(text, token) for (token, i), text in zip(vocab.items(), mapped, strict=True)}
    for token, token_id in added.items():
        table[token_id] = token.encode()
    return [table.get(i, b"") for i in range(max(table) + 1)]


def _encode_latin(mapped: str, token: str) -> bytes:
    try:
        return mapped.encode("latin-1")
    except UnicodeEncodeError:  # a token with characters outside the byte alphabet is not encoded
        return token.encode()


def _byte_chars() -> dict[int, str]:
    """Return the printable character with which GPT-2 represents each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    for shift, byte in enumerate(b for b in range(256) if b not in chars):
        chars[byte] = chr(256 + shift)
    return chars


def read_json(path: Path, *, optional: bool = False) -> Json:
    try:
        return orjson.loads(path.read_bytes())
    except FileNotFoundError:
        if optional:
            return {}
        raise ConfigError(
            f"tokenizer: {path} does not exist; choose a folder that contains tokenizer.json", param="tokenizer"
        ) from None
    except OSError as error:
        raise ConfigError(f"tokenizer: {path} cannot be read ({error.strerror})", param="tokenizer") from None
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"tokenizer: {path} is not valid JSON ({error})", param="tokenizer") from None
