"""The settings of a teacher, for exports and feeds."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args
from urllib.parse import urlsplit

import msgspec

from turngate.client.keys import read_key
from turngate.common.validation import reject_credentials
from turngate.engines.scoring import ScoringEngine, SGLangScoring, VLLMScoring
from turngate.errors import ConfigError

TeacherEngine = Literal["vllm", "sglang", "local"]
TEACHER_KEY = "TURNGATE_TEACHER_KEY"
MAX_TOP_K = 1000
_MAX_CONCURRENCY = 256


class TeacherConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a teacher, a model that scores recorded ids.

    An API key is read from TURNGATE_TEACHER_KEY, or from the file that TURNGATE_TEACHER_KEY_FILE names.
    """

    engine: TeacherEngine
    url: str = ""  # of a vLLM or SGLang server
    model: str = ""  # name of the model on the server (empty: the one that it serves), or a model folder for `local`
    version: str = ""  # names the weights; scores of other versions are not reused. Empty for `local`: derived from the folder's files
    top_k: int = 0  # number of most likely tokens to score at each position
    tokenizer: str = ""  # the teacher's tokenizer folder, for servers that cannot decode ids
    concurrency: int = 8  # maximum number of concurrent calls

    def __post_init__(self) -> None:
        if self.engine not in get_args(TeacherEngine):
            raise ConfigError(
                f"teacher must be one of {', '.join(get_args(TeacherEngine))}, not {self.engine!r}", param="teacher"
            )
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise ConfigError(
                f"teacher_top_k must be between 0 and {MAX_TOP_K}, not {self.top_k}", param="teacher_top_k"
            )
        if not 1 <= self.concurrency <= _MAX_CONCURRENCY:
            raise ConfigError(
                f"teacher_concurrency must be between 1 and {_MAX_CONCURRENCY}, not {self.concurrency}",
                param="teacher_concurrency",
            )
        if self.engine == "local":
            if self.url:
                raise ConfigError("teacher_url does not apply to a local teacher; leave it out", param="teacher_url")
            if not Path(self.model, "config.json").is_file():
                raise ConfigError(
                    f"for a local teacher, teacher_model must be a folder with a config.json, not {self.model!r}",
                    param="teacher_model",
                )
        else:
            _check_url(self.url)


def _check_url(url: str) -> None:
    reject_credentials(url, "teacher_url", f"set {TEACHER_KEY} in the environment")
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # invalid port or address
        is_valid = False
    if not is_valid:
        raise ConfigError(f"teacher_url must be an http(s) URL, not {url!r}", param="teacher_url")


def _read_teacher_key() -> str:
    key = read_key(TEACHER_KEY)
    if not (key.isascii() and key.isprintable()):  # the HTTP client's error would contain the key
        raise ConfigError(f"{TEACHER_KEY} must be printable ASCII; set it to the teacher's API key", param=TEACHER_KEY)
    return key


def open_engine(config: TeacherConfig) -> ScoringEngine:
    """Create a client for the teacher's server, or load a local teacher."""
    match config.engine:
        case "vllm":
            return VLLMScoring("vllm", config.url, config.model, key=_read_teacher_key())
        case "sglang":
            return SGLangScoring("sglang", config.url, config.model, key=_read_teacher_key())
        case "local":
            try:
                from turngate.engines.local.scoring import LocalScoring
            except ImportError as error:
                raise ConfigError(
                    f"teacher: a local teacher needs torch ({error}); run `pip install 'turngate[local]'`",
                    param="teacher",
                ) from None
            return LocalScoring(Path(config.model))


def find_version(config: TeacherConfig) -> str:
    """Return the version of the teacher's weights.

    For a local teacher without a configured version, derive one from the names, sizes and modification times of the folder's .safetensors
    and .json files.
    """
    if config.version or config.engine != "local":
        return config.version
    known = blake2b(digest_size=8)
    for file in sorted(Path(config.model).iterdir()):
        if file.suffix in (".safetensors", ".json"):
            facts = file.stat()
            known.update(f"{file.name}/{facts.st_size}/{facts.st_mtime_ns}/".encode())
    return known.hexdigest()
