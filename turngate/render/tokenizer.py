"""The tokenizer of a Hugging Face folder, which converts between text and ids without `transformers`.

`Tokenizer` reads `tokenizer.json`, `tokenizer_config.json` and the chat template. If tiktoken and `tokenizers` return the same ids for a
probe corpus, it encodes text with tiktoken, which is faster. It decodes the ids of byte-level vocabularies with a table. The `renderers`
package also uses this class as its tokenizer.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
import threading
import unicodedata
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from tokenizers.normalizers import NFC

from turngate.errors import ConfigError
from turngate.render.vocabulary import (
    Vocabulary,
    add_declared_tokens,
    read_declared_texts,
    read_json,
    read_vocabulary,
)
from turngate.types import ID_DTYPE, Ids, Json

# Where `transformers` saves the chat template named tool_use.
TOOL_TEMPLATE_FILE = "additional_chat_templates/tool_use.jinja"
_NFC = NFC()
_NO_TOKEN = -1
_MIN_CACHED_PIECE = 1_000  # characters; shorter segments are not cached
_MAX_CACHED_CHARACTERS = 1_000_000
# Pre-tokenizers (Qwen's and Llama's) with which lines can be encoded separately, because no token contains both the end of one line and
# the start of the next: a match that contains line breaks ends with the last of them, and there is no lookbehind.
# (GPT-2's pre-tokenizer is different: its `\s+` also matches the indentation of the next line.)
_LINE_SAFE_PATTERNS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)
_LINE = re.compile(r"[^\n]*\n(?:\s*[\r\n])?|[^\n]+")  # a line, together with any blank lines after it
_MAX_CACHED_LINES = 16_384  # in each of the two caches, the newer and the older one
_MAX_CACHED_LINE = 400  # characters; longer lines rarely repeat
_MAX_TEXT_BY_LINES = 64_000  # characters; a longer text is encoded in one call, which releases the interpreter lock
# All characters except those that all Unicode versions normalize alike: Latin letters, punctuation, symbols, CJK and Hangul.
_UNSETTLED = re.compile("[^\u0000-\u02ff\u2000-\u9fff\uac00-\ud7a3]")


class Tokenizer:
    """Converts between text and ids for one vocabulary. It also holds the chat templates."""

    def __init__(
        self, folder: Path, *, name: str = "", vocabulary: Vocabulary | None = None, fast: bool | None = None
    ) -> None:
        """Load the tokenizer of `folder`.

        `vocabulary` is the folder's vocabulary if it has already been read. `fast` says whether the fast encoder is known to return the
        right ids. None means that this must still be checked.
        """
        self.folder = folder
        self.name_or_path = name or str(folder)
        config = read_json(folder / "tokenizer_config.json", optional=True)
        self.vocabulary = vocabulary or read_vocabulary(folder / "tokenizer.json", config)
        self._lazy_backend = _LazyBackend(
            folder / "tokenizer.json", self.vocabulary.added, config if self.vocabulary.declared else None
        )
        self.digest = self.vocabulary.digest
        self.declared = frozenset(read_declared_texts(config))
        self.added = self.vocabulary.added
        self.special_ids = frozenset(self.vocabulary.special)
        self.special_tokens = {
            key: text
            for key in ("bos_token", "eos_token", "unk_token", "pad_token")
            if (text := _token_text(config.get(key)))
        }
        self.eos_token_id = self.token_id(self.special_tokens.get("eos_token"))
        self.bos_token_id = self.token_id(self.special_tokens.get("bos_token"))
        self.unk_token_id = self.token_id(self.special_tokens.get("unk_token"))
        self.eos_token = self.special_tokens.get("eos_token")
        self.chat_template, self.tool_template = _load_chat_templates(folder, config)
        self.model_max_length = _parse_length(config.get("model_max_length"))
        self._bytes = self.vocabulary.table
        self._fast = _FastEncoder.build(self.vocabulary) if fast is not False else None
        if self._fast is not None and fast is None and not self._fast.agrees(self._encode_slow, self._bytes or []):
            self._fast = None
        if self._fast is None:
            self._lazy_backend.get()  # if the file is invalid, raise the error now

    @property
    def _backend(self) -> Backend:
        return self._lazy_backend.get()

    @property
    def vocab_size(self) -> int:
        size = int(self._backend.get_vocab_size(with_added_tokens=True))
        # There may be gaps between the ids of tokens that tokenizer_config.json declares.
        return max(size, *(self.added[token] + 1 for token in self.vocabulary.declared), 0)

    @property
    def fast(self) -> bool:
        """Whether the fast encoder is used. It is only used if it returns the right ids."""
        return self._fast is not None

    def encode(self, text: str, *_: Any, remember: bool = False, **__: Any) -> list[int]:
        """Encode `text`. Added tokens in the text are recognized, but no tokens are added before or after it.

        Set `remember` if segments of the text (the parts between added tokens) will be encoded again: the ids of long segments are then
        cached.
        """
        ids: list[int] = self.ids(text, remember=remember).tolist()
        return ids

    def ids(self, text: str, *, remember: bool = False) -> Ids:
        """Return the result of `encode` as an array. Converting cached ids to Python numbers would take longer than looking them up."""
        fast = self._fast.ids(text, remember=remember) if self._fast is not None else None
        return np.array(self._encode_slow(text), ID_DTYPE) if fast is None else fast

    def _encode_slow(self, text: str) -> list[int]:
        # Only the batch call releases the interpreter lock. Without that, a megabyte of text would block all threads for a second.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, token_ids: Sequence[int] | int, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        if skip_special_tokens:
            ids = [i for i in ids if i not in self.special_ids]
        if self._bytes is None:
            return self._backend.decode(ids, skip_special_tokens=False)
        return self.all_bytes_of(ids).decode("utf-8", errors="replace")

    def all_bytes_of(self, ids: Sequence[int]) -> bytes:
        table = self._bytes
        assert table is not None
        if ids and min(ids) >= 0 and max(ids) < len(table):  # the usual case
            return b"".join([table[i] for i in ids])
        return b"".join(map(self.bytes_of, ids))

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one token of a byte-level vocabulary, or no bytes for an id outside the vocabulary, such as padding."""
        assert self._bytes is not None
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decoder(self) -> StreamDecoder:
        return StreamDecoder(self, None if self._bytes is not None else self._backend)

    def token_id(self, text: str | None) -> int | None:
        if text is None or text in self.added:
            return None if text is None else self.added[text]
        found: int | None = self._backend.token_to_id(text)
        return found

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """Return the id of a token, or the ids of several. The `renderers` package requires a method with this name."""
        if isinstance(tokens, str):
            found = self.token_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids


_Utf8 = codecs.getincrementaldecoder("utf-8")


class StreamDecoder:
    """An incremental decoder of ids. It holds back an incomplete character until the character is complete.

    For a byte-level vocabulary, `flush` returns U+FFFD in place of an incomplete character.
    """

    def __init__(self, tokenizer: Tokenizer, backend: Backend | None) -> None:
        """Create a decoder. `backend` must be None for a byte-level vocabulary, which is decoded with the tokenizer's table."""
        self._tokenizer = tokenizer
        self._backend = backend
        self._utf8 = _Utf8("replace")
        self._stream = None if backend is None else DecodeStream(skip_special_tokens=False)

    def feed(self, ids: Sequence[int]) -> str:
        if self._stream is None:
            return self._utf8.decode(self._tokenizer.all_bytes_of(ids))
        assert self._backend is not None
        return "".join([self._stream.step(self._backend, i) or "" for i in ids])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True) if self._stream is None else ""


class _LazyBackend:
    """The slow encoder, from the `tokenizers` package. It is loaded on first use.

    Loading it takes half a second and 100 MB of memory. It may never be needed if the vocabulary is cached and the fast encoder is used.
    """

    def __init__(self, path: Path, added: dict[str, int], config: Json | None) -> None:
        """Prepare to load the file `path`.

        `config` is the content of tokenizer_config.json if it declares tokens that `path` lacks, otherwise None.
        """
        self._path = path
        self._added = added
        self._config = config
        self._lock = threading.Lock()
        self._backend: Backend | None = None

    def get(self) -> Backend:
        with self._lock:
            if self._backend is None:
                backend = _load_backend(self._path, self._config)
                _require_same_ids(self._path, backend, self._added)
                # Never truncate a prompt to the length that is saved with the tokenizer. The gateway checks the context length itself.
                backend.no_truncation()
                backend.no_padding()
                self._backend = backend
            return self._backend


class _FastEncoder:
    """A tiktoken encoder with the tokenizer's vocabulary.

    It supports only byte-level BPE in which a single regular expression splits the text.
    """

    def __init__(self, encoding: tiktoken.Encoding, rank_to_id: list[int], *, nfc: bool, added: dict[str, int]) -> None:
        self._encoding = encoding
        self._id = rank_to_id
        self._identity = rank_to_id == list(range(len(rank_to_id)))
        self._gaps = _NO_TOKEN in rank_to_id
        self._nfc = nfc
        self._added = {token: np.array([token_id], ID_DTYPE).tobytes() for token, token_id in added.items()}
        # Segments and their ids, which are stored as the bytes of an array.
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self._cached_characters = 0
        self._by_lines = encoding._pat_str in _LINE_SAFE_PATTERNS
        # Lines and their ids. Lines repeat often, because rollouts of one task read the same files and get the same errors.
        self._lines: dict[str, bytes] = {}
        self._older_lines: dict[str, bytes] = {}
        self._lock = threading.Lock()  # large prompts are rendered in threads

    def encode(self, text: str) -> list[int] | None:
        ids = self.ids(text)
        return None if ids is None else ids.tolist()

    def ids(self, text: str, *, remember: bool = False) -> Ids | None:
        """Encode `text`. Return None if only the slow encoder can encode it."""
        parts: list[bytes] = []
        # Split the text at added tokens, and encode the segments between them separately.
        for n, piece in enumerate(self._added_pattern.split(text)):
            if not piece:
                continue
            if n % 2:
                parts.append(self._added[piece])
                continue
            part = (
                self._encode_cached(piece)
                if remember and len(piece) >= _MIN_CACHED_PIECE
                else self._encode_piece(piece)
            )
            if part is None:
                return None
            parts.append(part)
        return np.frombuffer(b"".join(parts), ID_DTYPE)

    def _encode_cached(self, piece: str) -> bytes | None:
        with self._lock:
            known = self._cache.get(piece)
            if known is not None:
                self._cache.move_to_end(piece)  # most recently used last
                return known
        known = self._encode_piece(piece)
        if known is None:
            return None
        with self._lock:  # another thread may have added the segment in the meantime
            if piece not in self._cache:
                self._cache[piece] = known
                self._cached_characters += len(piece)
            while self._cached_characters > _MAX_CACHED_CHARACTERS:
                self._cached_characters -= len(self._cache.popitem(last=False)[0])
        return known

    def _encode_piece(self, piece: str) -> bytes | None:
        """Encode a segment that contains no added tokens."""
        if (known := self._lines.get(piece)) is not None:  # a segment is often a single word
            return known
        if self._nfc and not piece.isascii() and not _surely_nfc(piece):
            piece = _NFC.normalize_str(piece)
        if not self._by_lines or len(piece) > _MAX_TEXT_BY_LINES:
            return self._encode_uncached(piece)
        lines = _LINE.findall(piece)
        ids = list(map(self._lines.get, lines))
        if None in ids:
            ids = [found or self._encode_line(line) for line, found in zip(lines, ids, strict=True)]
            if None in ids:
                return None
        return b"".join(ids)  # type: ignore[arg-type]  # all are known by now

    def _encode_line(self, line: str) -> bytes | None:
        """Encode a line that is not in `_lines`. If it is short, add it there. No lock is needed: concurrent calls add the same entries."""
        known = self._older_lines.get(line)
        if known is None:
            known = self._encode_uncached(line)
            if known is None:
                return None
        if len(line) <= _MAX_CACHED_LINE:
            if len(self._lines) >= _MAX_CACHED_LINES:
                self._older_lines, self._lines = self._lines, {}
            self._lines[line] = known
        return known

    def _encode_uncached(self, text: str) -> bytes | None:
        try:
            ranks = self._encoding.encode_ordinary(text)
        except ValueError:  # tiktoken's regex engine fails on some texts, such as half a million spaces in a row
            return None
        ids = ranks if self._identity else [self._id[rank] for rank in ranks]
        return None if self._gaps and _NO_TOKEN in ids else np.array(ids, ID_DTYPE).tobytes()

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        tokens = "|".join(re.escape(t) for t in sorted(self._added, key=len, reverse=True))
        return re.compile(f"({tokens or '(?!)'})")

    def agrees(self, slow: Callable[[str], list[int]], table: list[bytes]) -> bool:
        """Return whether this encoder returns the same ids as the slow one for the probe corpus and for a sample of the vocabulary.

        A text that this encoder cannot encode is ignored, because the slow encoder is used for it.
        """
        words = [token.decode("utf-8", "ignore") for token in table[:: max(1, len(table) // 1500)]]
        return all(
            fast is None or fast == slow(text)
            for text in [*probe_corpus(self._added), *words]
            for fast in [self.encode(text)]
        )

    @classmethod
    def build(cls, vocabulary: Vocabulary) -> _FastEncoder | None:
        merges, table = vocabulary.merges, vocabulary.table
        if merges is None or table is None:
            return None
        ranks = {table[token_id]: rank for rank, token_id in enumerate(merges.order)}
        if len(ranks) != len(merges.order):
            return None
        rank_to_id = list(merges.order)
        for byte in range(256):
            # A few vocabularies lack some bytes. Text with such bytes is left to the slow encoder.
            if bytes([byte]) not in ranks:
                ranks[bytes([byte])] = len(rank_to_id)
                rank_to_id.append(_NO_TOKEN)
        encoding = tiktoken.Encoding("turngate", pat_str=merges.pattern, mergeable_ranks=ranks, special_tokens={})
        return cls(encoding, rank_to_id, nfc=merges.nfc, added=vocabulary.added)


def _surely_nfc(text: str) -> bool:
    """Return whether text is certainly in NFC. The answer holds even if Python and `tokenizers` use different Unicode versions."""
    return _UNSETTLED.search(text) is None and unicodedata.is_normalized("NFC", text)


def probe_corpus(added: Iterable[str] = ()) -> list[str]:
    """Return texts for which two encoders must agree before one may replace the other, such as code and different writing systems."""
    code = Path(__file__).read_text(encoding="utf-8")
    lines = [
        code,
        code.replace("    ", "\t"),
        code.replace("\n", "\r\n"),
        json.dumps({"a": [1, 2.5e-7, None, 'x\n"y"']}),
    ]
    words = [
        "",
        " ",
        "\n",
        "  \n\n  x",
        "a" * 300,
        "1" * 50,
        "12345678.901",
        "don't DON'T I'LL we've",
        "\u00a0\u2003\u3000 x",
        "\x00\x01\x7f",
    ]
    scripts = [
        "Ünïcödé naïve e\u0301 A\u030a \u1e9b\u0323 \ufb01 ½ ² Ⅷ",
        "汉字かなカナ한국어 mixed中文text 全角ＡＢＣ１２３",
        "Ωμέγα русский العربية हिन्दी ไทย עברית १२३",
        "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 e👍🏽 \U0001f9ea",
        "snake_case camelCase SCREAMING_CASE kebab-case a.b.c(d[e]){f}; // x /* y */ #!/bin/sh\n\n\n\t\tx  =  1\n",
    ]
    joined = [
        a + b for a in (" ", "\n", "x", "é", "9", "'s", "中") for b in (" ", "\n", "x", "é", "9", "'s", "中", "\u0301")
    ]
    marks = [f"x{t} y {t}{t}e\u0301\n{t}" for t in sorted(added)[:64]]
    # Include unassigned and rare code points, because regex engines may use different Unicode versions.
    planes = [
        "".join(chr(c) for c in range(start, start + 512) if not 0xD800 <= c < 0xE000)
        for start in range(0, 0x20000, 512)
    ]
    return [*lines, *words, *scripts, *joined, *marks, *planes]


def _load_backend(path: Path, config: Json | None) -> Backend:
    try:
        if config is None:
            return Backend.from_file(str(path))
        spec = read_json(path)
        add_declared_tokens(spec, config)
        return Backend.from_str(json.dumps(spec))
    except Exception as error:  # the package raises no more specific type
        raise ConfigError(
            f"tokenizer: {path} cannot be loaded ({error}); download the tokenizer again, or choose a different --tokenizer",
            param="tokenizer",
        ) from None


def _require_same_ids(path: Path, backend: Backend, added: dict[str, int]) -> None:
    """Raise `ConfigError` if the encoder, which may assign its own ids, does not use the declared id of an added token."""
    for token, declared in added.items():
        if (used := backend.token_to_id(token)) != declared:
            raise ConfigError(
                f"tokenizer: {path} declares the id {declared} for {token!r}, but the encoder uses {used}; "
                "correct the ids in added_tokens (or added_tokens_decoder in tokenizer_config.json)",
                param="tokenizer",
            )


def _token_text(value: Json) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _parse_length(value: Json) -> int | None:
    return int(value) if isinstance(value, int | float) and value < 10**9 else None


def _load_chat_templates(folder: Path, config: Json) -> tuple[str | None, str | None]:
    """Return the chat template and, if there are two, the template for conversations with tools.

    They are read from files or, if chat_template.jinja does not exist, from `config`, the content of tokenizer_config.json. `config`
    contains one template, or a list of named templates such as `default` and `tool_use`. If there is no default template, the template
    for tools is used as the chat template.
    """
    files = {"default": folder / "chat_template.jinja", "tool_use": folder / TOOL_TEMPLATE_FILE}
    if files["default"].exists():
        named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.exists()}
    else:
        template: Json = config.get("chat_template")
        entries = template if isinstance(template, list) else [{"name": "default", "template": template}]
        named = {entry["name"]: str(entry["template"]) for entry in entries if entry["template"] is not None}
    default, with_tools = named.get("default"), named.get("tool_use")
    return (with_tools, None) if default is None else (default, with_tools)
