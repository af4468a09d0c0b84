"""Requests for rollouts of an instruction, of a row of a SWE data set, or of a `Task`. A request is validated before its rollout starts.

A request may come from an untrusted caller, over MCP or HTTP. Sizes are therefore limited, paths must stay inside the working folder, and
each error names the invalid argument. Secret keys, sandboxes, networks and allowed images are not arguments but settings (`config.py`).
"""

from __future__ import annotations

import base64
import math
import re
import string
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Literal, TypeVar

import msgspec

from turngate.common.validation import explain_error
from turngate.errors import BadRequest
from turngate.rollout.sampling import NEUTRAL_CHOICE, parse_sampling
from turngate.tasks.task import Task
from turngate.types import Json

Mode = Literal["exact", "observe", "gate", "direct"]
MODES: tuple[Mode, ...] = ("exact", "observe", "gate", "direct")
# Other projects' names for these modes.
MODE_ALIASES: Mapping[str, Mode] = {"transparent_proxy": "observe", "black_box": "direct", "interception_gate": "gate"}

MAX_INSTRUCTION = 400_000  # characters
MAX_SCRIPT = 1_000_000  # characters of test_script, and of setup_shell
MAX_FILES = 500
MAX_FILE = 8_000_000  # bytes
MAX_BYTES = 32_000_000  # total size of all files
MAX_PATH = 400  # characters
MAX_TOKENS = 10_000_000  # per turn
MAX_ROW = 4_000_000  # bytes of a SWE row
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
_BASE64 = (string.ascii_letters + string.digits + "+/").encode()
_CHUNK = 1 << 17  # characters; base64 can be split after any multiple of four
_MAX_NAME = 512  # characters in a key or a URL

T = TypeVar("T", bound=msgspec.Struct)


class Base64File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a binary file, encoded as base64."""

    base64: str


class RolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for one rollout of an instruction."""

    model_key: str  # an endpoint from the server's catalog, such as "vllm://Qwen3-8B"
    instruction: str  # what the agent should do
    test_script: str = ""  # bash script that grades the work in a fresh sandbox; if empty, there is no reward
    task_id: str = ""  # the caller's name for the task; if empty, derived from the instruction
    agent: str = ""  # one of the server's agents; if empty, the default agent
    setup_shell: str = ""  # sh commands to run in the working folder before the agent starts
    upload_files: dict[str, str | Base64File] = {}  # path below the working folder → text, or {"base64": …}
    thinking: bool | None = None  # whether the model thinks first; None means the chat template's default
    mode: str = ""  # exact, observe, gate or direct; if empty, the endpoint's default
    max_tokens_cap: int | None = None  # how many tokens the model may sample per turn
    sampling: str | dict[str, int | float] = NEUTRAL_CHOICE  # neutral, agent, or the settings to pin
    agent_timeout_s: float = 600.0
    endpoint_url: str = ""  # the caller's own endpoint; its host must be in the server's `allowed_hosts`

    def check(self) -> RolloutRequest:
        """Validate the arguments. Raise `BadRequest` with the name of the first invalid argument."""
        _check_text("instruction", self.instruction, MAX_INSTRUCTION, needed=True)
        _check_text("test_script", self.test_script, MAX_SCRIPT)
        _check_text("setup_shell", self.setup_shell, MAX_SCRIPT)
        if self.task_id and not _NAME.fullmatch(self.task_id):
            raise BadRequest(
                f"invalid task_id {self.task_id[:80]!r}: "
                "use 1 to 200 letters, digits, '.', '_', ':', '/' or '-', and start with a letter or digit",
                param="task_id",
            )
        _check_common(self)
        self.files_by_path()
        total = 0
        for name, content in self.upload_files.items():
            where = f"upload_files[{name[:80]!r}]"
            size = _check_size(content, where)
            total += size
            if size > MAX_FILE:
                raise BadRequest(
                    f"{where} is too large; a file may have at most {MAX_FILE:,} bytes", param="upload_files"
                )
            if total > MAX_BYTES:
                raise BadRequest(
                    f"upload_files is too large; the files may have at most {MAX_BYTES:,} bytes in total",
                    param="upload_files",
                )
        return self

    def files_by_path(self) -> dict[str, str | Base64File]:
        """Return the uploaded files by normalized path. Raise `BadRequest` for too many files, an invalid path or conflicting paths."""
        if len(self.upload_files) > MAX_FILES:
            raise BadRequest(
                f"upload_files contains {len(self.upload_files)} files; send at most {MAX_FILES}",
                param="upload_files",
            )
        files: dict[str, str | Base64File] = {}
        for name, content in self.upload_files.items():
            where = f"upload_files[{name[:80]!r}]"
            path = _normalize_path(name, where)
            if path in files:
                raise BadRequest(f"{where} has the same path as another file; remove one of them", param="upload_files")
            files[path] = content
        for path in files:
            for folder in PurePosixPath(path).parents:
                if str(folder) in files:
                    raise BadRequest(
                        f"upload_files[{str(folder)!r}] is a file, but {path!r} needs a folder with that name; rename one of them",
                        param="upload_files",
                    )
        return files

    def size(self) -> int:
        """Estimate how many bytes of disk space the caller's files and test script need."""
        return sum(_estimate_size(content) for content in self.upload_files.values()) + len(self.test_script)

    def without_files(self) -> RolloutRequest:
        """Return a copy without the files and the test script. The copy replaces the request once the files are on disk."""
        return msgspec.structs.replace(self, upload_files={}, test_script="")


class SweRolloutRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for one rollout of a row of a SWE data set."""

    # The row: instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS … (docs/swe.md)
    task: dict[str, Json]
    model_key: str
    agent: str = ""
    thinking: bool | None = None
    mode: str = ""
    max_tokens_cap: int | None = None
    sampling: str | dict[str, int | float] = NEUTRAL_CHOICE  # neutral, agent, or the settings to pin
    agent_timeout_s: float = 600.0
    endpoint_url: str = ""

    def check(self) -> SweRolloutRequest:
        """Validate the arguments and the size of the row. `build_task` validates the row's fields."""
        if not self.task:
            raise BadRequest(
                "'task' is empty; send the fields of a SWE row, such as instance_id and repo", param="task"
            )
        try:
            size = len(msgspec.json.encode(self.task))
        except UnicodeEncodeError:
            raise BadRequest("'task' contains characters that UTF-8 cannot encode; remove them", param="task") from None
        if size > MAX_ROW:
            raise BadRequest(f"'task' is {size:,} bytes long; the limit is {MAX_ROW:,}", param="task")
        _check_common(self)
        return self

    def size(self) -> int:
        """Return the size of the row in bytes."""
        return len(msgspec.json.encode(self.task))

    def without_files(self) -> SweRolloutRequest:
        """Return a copy without the row. The copy replaces the request once the task is built."""
        return msgspec.structs.replace(self, task={})


class TaskRolloutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An in-process request from the Python API for one rollout of a `Task`. Remote callers cannot make such requests."""

    task: Task
    model_key: str
    group: str = ""  # rollouts of one group are compared; if empty, the task's id
    agent: str = ""
    thinking: bool | None = None
    mode: str = ""
    max_tokens_cap: int | None = None
    sampling: str | dict[str, int | float] = NEUTRAL_CHOICE  # neutral, agent, or the settings to pin
    agent_timeout_s: float = 600.0
    endpoint_url: str = ""
    session: dict[str, Json] = {}  # session settings that override those of the endpoint

    def check(self) -> TaskRolloutRequest:
        """Validate the arguments. Raise `BadRequest` with the name of the first invalid argument."""
        _check_common(self)
        return self

    def size(self) -> int:
        return 0  # its files are not copied

    def without_files(self) -> TaskRolloutRequest:
        return self


AnyRequest = RolloutRequest | SweRolloutRequest | TaskRolloutRequest


def parse_arguments(values: Mapping[str, Json], kind: type[T]) -> T:
    """Convert a caller's JSON to a struct. Raise `BadRequest` if an argument is missing, unknown or of the wrong type."""
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind, "argument")
        raise BadRequest(message, param=field) from None


def parse_mode(name: str) -> Mode | None:
    """Return the mode with this name or alias, or None if the name is empty. Raise `BadRequest` if the name is unknown."""
    if not name:
        return None
    for mode in MODES:
        if name == mode:
            return mode
    if (known := MODE_ALIASES.get(name)) is not None:
        return known
    raise BadRequest(
        f"mode must be one of {', '.join((*MODES, *MODE_ALIASES))}, not {name[:80]!r}",
        param="mode",
    )


def _check_common(request: AnyRequest) -> None:
    if not request.model_key:
        raise BadRequest("model_key is empty; choose an endpoint from the catalog", param="model_key")
    for name, value in (
        ("model_key", request.model_key),
        ("agent", request.agent),
        ("endpoint_url", request.endpoint_url),
    ):
        if len(value) > _MAX_NAME or not value.isprintable():
            raise BadRequest(f"{name} must be at most {_MAX_NAME} printable characters", param=name)
    parse_mode(request.mode)
    parse_sampling(request.sampling)
    if request.max_tokens_cap is not None and not 1 <= request.max_tokens_cap <= MAX_TOKENS:
        raise BadRequest(
            f"max_tokens_cap must be between 1 and {MAX_TOKENS:,}, not {request.max_tokens_cap}; omit it to use the default",
            param="max_tokens_cap",
        )
    if not (math.isfinite(request.agent_timeout_s) and request.agent_timeout_s > 0):
        raise BadRequest(
            f"agent_timeout_s must be a finite number of seconds greater than 0, not {request.agent_timeout_s}",
            param="agent_timeout_s",
        )


def _check_text(name: str, text: str, most: int, *, needed: bool = False) -> None:
    if needed and not text.strip():
        raise BadRequest(f"{name} is empty; describe what the agent should do", param=name)
    if len(text) > most:
        raise BadRequest(f"{name} is {len(text):,} characters long; the limit is {most:,}", param=name)
    if "\0" in text:
        raise BadRequest(f"{name} contains a NUL character; remove it", param=name)
    if not text.isascii():
        _encode(text, name, name)


def _encode(text: str, where: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{where} contains characters that UTF-8 cannot encode; remove them", param=name) from None


def _normalize_path(name: str, where: str) -> str:
    """Normalize a path below the working folder. Raise `BadRequest` if it is invalid. `where` names the argument in errors."""
    path = PurePosixPath(name)
    is_invalid = not name or len(name) > MAX_PATH or "\0" in name or "\\" in name or not name.isprintable()
    if is_invalid or path.is_absolute() or ".." in path.parts or str(path) == "." or name.endswith("/"):
        raise BadRequest(
            f"{where} must be the relative path of a file below the working folder, such as src/main.py, with at most {MAX_PATH} "
            "printable characters and without '..' or backslashes",
            param="upload_files",
        )
    _encode(name, where, "upload_files")
    if any(len(part.encode()) > 255 for part in path.parts):
        raise BadRequest(
            f"{where} has a path component longer than 255 bytes, which file systems reject; shorten it",
            param="upload_files",
        )
    if path.parts[0] == ".turngate":
        raise BadRequest(f"{where} uses the reserved name .turngate; choose a different path", param="upload_files")
    return str(path)


def decode_content(content: str | Base64File) -> Iterator[bytes]:
    """Yield the bytes of a validated file in chunks, so that other threads can run in between. Call this in a thread."""
    text = content if isinstance(content, str) else content.base64
    for at in range(0, len(text), _CHUNK):
        chunk = text[at : at + _CHUNK]
        yield chunk.encode() if isinstance(content, str) else base64.b64decode(chunk)


def _estimate_size(content: str | Base64File) -> int:
    return len(content) if isinstance(content, str) else len(content.base64) // 4 * 3


def _check_size(content: str | Base64File, where: str) -> int:
    """Return a file's size in bytes. Base64 is checked but not decoded, because this runs on the event loop."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(_encode(content, where, "upload_files"))
    text = content.base64
    if len(text) > 2 * MAX_FILE:
        raise BadRequest(f"{where} is too large; the limit is {MAX_FILE:,} bytes per file", param="upload_files")
    padding = 2 if text.endswith("==") else 1 if text.endswith("=") else 0
    if len(text) % 4 or not text.isascii() or text.encode().translate(None, _BASE64) != b"=" * padding:
        raise BadRequest(
            f"{where} is not valid base64; use the standard alphabet, with padding and without line breaks",
            param="upload_files",
        )
    return _estimate_size(content) - padding
