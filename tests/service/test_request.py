"""Validation of rollout requests: errors name the argument, before anything starts."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest

from turngate.errors import BadRequest
from turngate.service import request
from turngate.service.request import RolloutRequest, SweRolloutRequest, parse_arguments, parse_mode

GOOD: dict[str, Any] = {"model_key": "scripted://m", "instruction": "Do it."}


def test_minimal_request() -> None:
    found = parse_arguments(GOOD, RolloutRequest).check()
    assert (found.agent, found.mode, found.test_script, found.thinking, found.agent_timeout_s) == (
        "",
        "",
        "",
        None,
        600,
    )


@pytest.mark.parametrize(
    ("wrong", "param", "word"),
    [
        ({"instruction": "  "}, "instruction", "empty"),
        ({"instruction": "a\0b"}, "instruction", "NUL"),
        ({"instruction": "x" * (request.MAX_INSTRUCTION + 1)}, "instruction", "400,001 characters"),
        ({"instruction": "\ud800"}, "instruction", "UTF-8"),
        ({"instruction": 7}, "instruction", "must be a string, not an integer"),
        ({"test_script": "exit\0 0"}, "test_script", "NUL"),
        ({"test_script": "x" * (request.MAX_SCRIPT + 1)}, "test_script", "the limit is 1,000,000"),
        ({"setup_shell": "\0"}, "setup_shell", "NUL"),
        ({"task_id": "../../etc"}, "task_id", "letters"),
        ({"model_key": ""}, "model_key", "catalog"),
        ({"model_key": "x\n"}, "model_key", "characters"),
        ({"agent": "x" * 600}, "agent", "at most 512 printable"),
        ({"mode": "exakt"}, "mode", "interception_gate"),
        ({"thinking": "yes"}, "thinking", "must be true or false, not a string"),
        ({"max_tokens_cap": 0}, "max_tokens_cap", "between 1 and 10,000,000"),
        ({"max_tokens_cap": 10_000_001}, "max_tokens_cap", "between 1 and 10,000,000"),
        ({"agent_timeout_s": -1}, "agent_timeout_s", "seconds greater than 0, not -1"),
        ({"agent_timeout_s": float("nan")}, "agent_timeout_s", "seconds greater than 0, not nan"),
        ({"agent_timeout_s": float("inf")}, "agent_timeout_s", "finite"),
        ({"sandbox": "local"}, "sandbox", "sandbox is not a known argument"),
        ({"api_key": "sk-1"}, "api_key", "api_key is not a known argument"),
        ({"upload_files": ["a"]}, "upload_files", "must be an object, not a list"),
        ({"upload_files": {"/etc/passwd": ""}}, "upload_files", "must be the relative path"),
        ({"upload_files": {"a/../../b": ""}}, "upload_files", "without '..'"),
        ({"upload_files": {"": ""}}, "upload_files", "path of a file"),
        ({"upload_files": {"a\0": ""}}, "upload_files", "path of a file"),
        ({"upload_files": {"a/": ""}}, "upload_files", "path of a file"),
        ({"upload_files": {"a": "", "a/b": ""}}, "upload_files", "needs a folder with that name"),
        ({"upload_files": {"a/b": "", "a//b": ""}}, "upload_files", "same path"),
        ({"upload_files": {"x" * 300: ""}}, "upload_files", "which file systems reject"),
        ({"upload_files": {"a": {"base64": "%%%"}}}, "upload_files", "is not valid base64"),
        ({"upload_files": {"a": {"base64": "", "mode": "0777"}}}, "upload_files", "is not a known argument"),
        ({"upload_files": {"a": "x" * (request.MAX_FILE + 1)}}, "upload_files", "too large"),
        ({"upload_files": {str(n): "" for n in range(request.MAX_FILES + 1)}}, "upload_files", "at most 500"),
    ],
)
def test_invalid_argument_is_named(wrong: dict[str, Any], param: str, word: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_arguments({**GOOD, **wrong}, RolloutRequest).check()
    assert (raised.value.param or "").split("[")[0].split(".")[0] == param
    assert param in raised.value.message and word in raised.value.message


def test_files_are_text_or_bytes() -> None:
    found = parse_arguments(
        {**GOOD, "upload_files": {"a/b.txt": "é", "c.bin": {"base64": "AAH/"}}}, RolloutRequest
    ).check()
    data = {path: b"".join(request.decode_content(content)) for path, content in found.files_by_path().items()}
    assert data == {
        "a/b.txt": "é".encode(),
        "c.bin": b"\x00\x01\xff",
    }


def test_base64_validation_matches_decoding() -> None:
    chance = random.Random(3)
    for _ in range(20_000):
        text = "".join(chance.choices("AZaz09+/=", k=chance.randrange(9))) + chance.choice(
            ("", "", "=", "==", "\n", "é")
        )
        try:
            size: int | None = len(base64.b64decode(text, validate=True))
        except ValueError:
            size = None
        found = RolloutRequest(**GOOD, upload_files={"a": request.Base64File(text)})
        if size is None or len(text) != (size + 2) // 3 * 4:  # Python accepts too much padding
            with pytest.raises(BadRequest, match="is not valid base64"):
                found.check()
        else:
            assert (
                len(b"".join(request.decode_content(found.check().files_by_path()["a"])))
                == size
                <= found.size()
                <= size + 2
            )


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("", None),
        ("exact", "exact"),
        ("transparent_proxy", "observe"),
        ("black_box", "direct"),
        ("interception_gate", "gate"),
    ],
)
def test_mode_aliases(name: str, mode: str | None) -> None:
    assert parse_mode(name) == mode


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"task": {}}, "task"),
        ({"task": "row"}, "task"),
        ({"task": {"x": "y" * request.MAX_ROW}}, "task"),
        ({"mode": "?"}, "mode"),
    ],
)
def test_invalid_swe_argument_is_named(wrong: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_arguments({"task": {"instance_id": "a"}, "model_key": "scripted://m", **wrong}, SweRolloutRequest).check()
    assert raised.value.param == param
