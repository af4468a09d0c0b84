"""A password in a URL is refused everywhere, and the error does not repeat it."""

from __future__ import annotations

from pathlib import Path

import pytest

import turngate as tg
from tests.cli.kit import run_rejected
from tests.secrets.kit import Evidence, Planted
from turngate.errors import TurngateError
from turngate.service.config import load_config

WORDS: dict[str, tuple[str, ...]] = {
    "engine_url": ("serve", "--engine", "openai", "--engine-url", "{url}"),
    "engine_url of the doctor": ("doctor", "--engine", "openai", "--engine-url", "{url}"),
    "engine_url of a run": ("run", "--agent", "shell", "--prompt", "x", "--engine", "openai", "--engine-url", "{url}"),
    "gateway of a run": ("run", "--agent", "shell", "--prompt", "x", "--set", "command=true", "--gateway", "{url}"),
    "gateway": ("show", "last", "--gateway", "{url}"),
    "gateway of the doctor": ("doctor", "--gateway", "{url}"),
    "engine_url of verify": ("verify", "x", "--engine", "vllm", "--engine-url", "{url}", "--model", "m"),
}
KEY = {"TURNGATE_ADMIN_KEY": "one of the tests, long enough"}


@pytest.mark.parametrize("shape", ["https://me:{}@127.0.0.1:9/v1", "http://{}@127.0.0.1:9"])
@pytest.mark.parametrize("what", WORDS)
def test_url_password_is_refused_on_command_line(what: str, shape: str, tmp_path: Path) -> None:
    planted, evidence = Planted(), Evidence()
    url = shape.format(planted.new("a password"))  # contains a slash
    words = [url if word == "{url}" else word for word in WORDS[what]]
    data = () if "--gateway" in words else ("--data", tmp_path)
    message = run_rejected(*words, *data, env=KEY)
    evidence.add("the refusal", message)
    field = what.split()[0]
    assert (
        message.startswith((field, f"--{field.replace('_', '-')}"))
        and "password" in message
        and planted.find(evidence) == []
    )


def test_url_password_is_refused_in_config_and_python(tmp_path: Path) -> None:
    planted, evidence = Planted(), Evidence()
    url = f"http://me:{planted.new('a password')}@127.0.0.1:9"
    file = tmp_path / "service.toml"
    file.write_text(f'[endpoints."openai://x"]\nurl = "{url}"\n')
    for attempt in (
        lambda: load_config(file),
        lambda: tg.open("x", gateway=url),
        lambda: tg.open(f"openai://x@{url}"),
        lambda: tg.open(url),
    ):
        with pytest.raises(TurngateError) as error:
            attempt()
        evidence.add("the refusal", f"{error.value} {error.value.message} {error.value!r} {error.value.param}")
    assert planted.find(evidence) == []
