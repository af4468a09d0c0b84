"""What a caller asks for: one rollout of an instruction, or of a row of a SWE data set. Checked before anything is made.

Everything here may come from somebody who is not trusted, over MCP or HTTP. So sizes are bounded, paths stay inside, and an error
names the argument. Keys, images, sandboxes and networks are no arguments: they are the server's settings (`config.py`).
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
from turngate.tasks.task import Task
from turngate.types import Json

Mode = Literal["exact", "observe", "gate", "direct"]
MODES: tuple[Mode, ...] = ("exact", "observe", "gate", "direct")
# What others call them.
OTHER_NAMES: Mapping[str, Mode] = {"transparent_proxy": "observe", "black_box": "direct", "interception_gate": "gate"}

MOST_INSTRUCTION = 400_000  # characters
MOST_SCRIPT = 1_000_000  # characters of test_script, and of setup_shell
MOST_FILES = 500
MOST_FILE = 8_000_000  # bytes
MOST_BYTES = 32_000_000  # of all files together
MOST_PATH = 400  # characters
MOST_TOKENS = 10_000_000  # of one turn
MOST_ROW = 4_000_000  # bytes of a SWE row
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")
_BASE64 = (string.ascii_letters + string.digits + "+/").encode()
_PIECE = 1 << 17  # characters; base64 can be cut at fours
_LONGEST = 512  # characters of a key or a URL

T = TypeVar("T", bound=msgspec.Struct)


class Encoded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that is not text."""

    base64: str


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout of an instruction."""

    model_key: str  # an endpoint of the server's catalog, like "vllm://Qwen3-8B"
    instruction: str  # what the agent is to do
    test_script: str = (
        ""  # bash, run on the agent's work in a fresh sandbox; empty: nothing is graded, and there is no reward
    )
    task_id: str = ""  # the caller's name for the task; empty: one that follows from the instruction
    agent: str = ""  # one that the server allows; empty: its default
    setup_shell: str = ""  # sh, run in the working folder before the agent starts
    upload_files: dict[str, str | Encoded] = {}  # path below the working folder → text, or {"base64": …}
    thinking: bool | None = None  # whether the model thinks first; None: as its template has it
    mode: str = ""  # exact, observe, gate, direct; empty: the endpoint's default
    max_tokens_cap: int | None = None  # the most tokens of one turn
    agent_timeout_s: float = 600.0  # the agent's time
    endpoint_url: str = ""  # an endpoint of the caller's own, where the server's policy lists its host

    def check(self) -> Asked:
        """What types cannot say. `BadRequest` names the argument."""
        _plain("instruction", self.instruction, MOST_INSTRUCTION, needed=True)
        _plain("test_script", self.test_script, MOST_SCRIPT)
        _plain("setup_shell", self.setup_shell, MOST_SCRIPT)
        if self.task_id and not _NAME.fullmatch(self.task_id):
            raise BadRequest(
                "task_id: has to be at most 200 letters, digits and . _ : / -, beginning with a letter or digit",
                param="task_id",
            )
        _common(self)
        self.places()
        total = 0
        for name, content in self.upload_files.items():
            where = f"upload_files[{name[:80]!r}]"
            size = _size(content, where)
            total += size
            if size > MOST_FILE or total > MOST_BYTES:
                raise BadRequest(
                    f"{where}: is too large; a file may have {MOST_FILE:,} bytes, all together {MOST_BYTES:,}",
                    param="upload_files",
                )
        return self

    def places(self) -> dict[str, str | Encoded]:
        """The files to lay down, by their path. `BadRequest` where a path leads out, or there are too many."""
        if len(self.upload_files) > MOST_FILES:
            raise BadRequest(
                f"upload_files: there are {len(self.upload_files)} files, and at most {MOST_FILES} are taken",
                param="upload_files",
            )
        found: dict[str, str | Encoded] = {}
        for name, content in self.upload_files.items():
            where = f"upload_files[{name[:80]!r}]"
            path = _path(name, where)
            if path in found:
                raise BadRequest(f"{where}: is the same place as another file", param="upload_files")
            found[path] = content
        for path in found:
            for folder in PurePosixPath(path).parents:
                if str(folder) in found:
                    raise BadRequest(
                        f"upload_files[{str(folder)!r}]: is a file, and {path!r} would lie below it",
                        param="upload_files",
                    )
        return found

    def size(self) -> int:
        """Bytes of what is laid down."""
        return sum(_room(content) for content in self.upload_files.values()) + len(self.test_script)

    def laid(self) -> Asked:
        """The same without what is on disk by now."""
        return msgspec.structs.replace(self, upload_files={}, test_script="")


class AskedSwe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rollout of a row of a SWE data set."""

    task: dict[
        str, Json
    ]  # the row: instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS … (docs/swe.md)
    model_key: str
    agent: str = ""
    thinking: bool | None = None
    mode: str = ""
    max_tokens_cap: int | None = None
    agent_timeout_s: float = 600.0
    endpoint_url: str = ""

    def check(self) -> AskedSwe:
        """What types cannot say. The row itself is checked where its task is made."""
        if not self.task:
            raise BadRequest("task: is empty; give the fields of a row, instance_id, repo and so on", param="task")
        try:
            size = len(msgspec.json.encode(self.task))
        except UnicodeEncodeError:
            raise BadRequest("task: holds characters that UTF-8 does not have", param="task") from None
        if size > MOST_ROW:
            raise BadRequest(f"task: has {size:,} bytes, and at most {MOST_ROW:,} are taken", param="task")
        _common(self)
        return self

    def size(self) -> int:
        """Bytes of the row."""
        return len(msgspec.json.encode(self.task))

    def laid(self) -> AskedSwe:
        """The same without the row, of which the task is made by now."""
        return msgspec.structs.replace(self, task={})


class AskedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a task that the host itself has: for code in this process (the Python API). Never made from what somebody sends."""

    task: Task
    model_key: str
    group: str = ""  # of rollouts that are compared; empty: the task's id
    agent: str = ""
    thinking: bool | None = None
    mode: str = ""
    max_tokens_cap: int | None = None
    agent_timeout_s: float = 600.0
    endpoint_url: str = ""
    session: dict[str, Json] = {}  # further settings of its session, over those of the endpoint

    def check(self) -> AskedTask:
        """What types cannot say."""
        _common(self)
        return self

    def size(self) -> int:
        return 0  # its files are where they are

    def laid(self) -> AskedTask:
        return self


AnyAsked = Asked | AskedSwe | AskedTask


def read(values: Mapping[str, Json], kind: type[T]) -> T:
    """From JSON that somebody sent. `BadRequest` names the argument that is missing, unknown or of another type."""
    try:
        return msgspec.convert(dict(values), kind)
    except msgspec.ValidationError as error:
        message, field = explain_error(error, kind, "argument")
        raise BadRequest(message, param=field) from None


def mode_of(name: str) -> Mode | None:
    """The mode of that name, whatever somebody calls it. None: none was named."""
    if not name:
        return None
    for mode in MODES:
        if name == mode:
            return mode
    if (known := OTHER_NAMES.get(name)) is not None:
        return known
    raise BadRequest(
        f"mode: {name[:80]!r} is none of {', '.join((*MODES, *OTHER_NAMES))}",
        param="mode",
    )


def _common(asked: AnyAsked) -> None:
    if not asked.model_key:
        raise BadRequest("model_key: is empty; the catalog lists the endpoints that there are", param="model_key")
    for name, value in (("model_key", asked.model_key), ("agent", asked.agent), ("endpoint_url", asked.endpoint_url)):
        if len(value) > _LONGEST or not value.isprintable():
            raise BadRequest(
                f"{name}: is too long, or holds characters that no such name has (at most {_LONGEST})", param=name
            )
    mode_of(asked.mode)
    if asked.max_tokens_cap is not None and not 1 <= asked.max_tokens_cap <= MOST_TOKENS:
        raise BadRequest(
            f"max_tokens_cap: {asked.max_tokens_cap} has to be between 1 and {MOST_TOKENS:,}; leave it out for no cap",
            param="max_tokens_cap",
        )
    if not (math.isfinite(asked.agent_timeout_s) and asked.agent_timeout_s > 0):
        raise BadRequest(
            f"agent_timeout_s: {asked.agent_timeout_s} has to be a number of seconds that is more than 0 and finite",
            param="agent_timeout_s",
        )


def _plain(name: str, text: str, most: int, *, needed: bool = False) -> None:
    if needed and not text.strip():
        raise BadRequest(f"{name}: is empty; it has to say what is asked", param=name)
    if len(text) > most:
        raise BadRequest(f"{name}: has {len(text):,} characters, and at most {most:,} are taken", param=name)
    if "\0" in text:
        raise BadRequest(f"{name}: holds a NUL character, which cannot be passed on", param=name)
    if not text.isascii():
        _written(text, name, name)


def _written(text: str, where: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{where}: holds characters that UTF-8 does not have", param=name) from None


def _path(name: str, where: str) -> str:
    """A path below the working folder, in one spelling."""
    path = PurePosixPath(name)
    odd = not name or len(name) > MOST_PATH or "\0" in name or "\\" in name or not name.isprintable()
    if odd or path.is_absolute() or ".." in path.parts or str(path) == "." or name.endswith("/"):
        raise BadRequest(
            f"{where}: has to be the path of a file below the working folder, like src/main.py: not absolute, without .., "
            f"at most {MOST_PATH} characters",
            param="upload_files",
        )
    _written(name, where, "upload_files")
    if any(len(part.encode()) > 255 for part in path.parts):
        raise BadRequest(f"{where}: has a part that no file system takes (255 bytes)", param="upload_files")
    if path.parts[0] == ".turngate":
        raise BadRequest(f"{where}: .turngate is not for callers", param="upload_files")
    return str(path)


def decoded(content: str | Encoded) -> Iterator[bytes]:
    """What a file is to hold, once it was checked. For threads: in pieces, because nobody else runs while one is decoded."""
    text = content if isinstance(content, str) else content.base64
    for at in range(0, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        yield piece.encode() if isinstance(content, str) else base64.b64decode(piece)


def _room(content: str | Encoded) -> int:
    return len(content) if isinstance(content, str) else len(content.base64) // 4 * 3


def _size(content: str | Encoded, where: str) -> int:
    """In bytes, without decoding it: this runs where everybody else waits."""
    if isinstance(content, str):
        return len(content) if content.isascii() else len(_written(content, where, "upload_files"))
    text = content.base64
    if len(text) > 2 * MOST_FILE:
        raise BadRequest(f"{where}: is too large; a file may have {MOST_FILE:,} bytes", param="upload_files")
    padding = 2 if text.endswith("==") else 1 if text.endswith("=") else 0
    if len(text) % 4 or not text.isascii() or text.encode().translate(None, _BASE64) != b"=" * padding:
        raise BadRequest(f"{where}: its base64 cannot be read", param="upload_files")
    return _room(content) - padding
