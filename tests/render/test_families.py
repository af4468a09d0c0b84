"""Test the readers of families whose calls only the `renderers` package can parse, with Gemma 4 as the example."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from turngate.render import BUILTIN_TOKENIZER
from turngate.render.families import FamilyRenderer
from turngate.render.tokenizer import Tokenizer
from turngate.types import Message

_TOKENS = (
    "<bos> <eos> <|channel> <channel|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|tool> <tool|> "
)
_TOKENS += '<|turn> <turn|> <|think|> <|image|> <|image> <image|> <|"|>'
THOUGHT = "<|channel>thought\nhm<channel|>"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> FamilyRenderer:
    """The built-in tokenizer with the special tokens of Gemma 4."""
    folder = tmp_path_factory.mktemp("gemma")
    shutil.copytree(BUILTIN_TOKENIZER, folder, dirs_exist_ok=True)
    _add_tokens(folder / "tokenizer.json", _TOKENS.split())
    return FamilyRenderer(Tokenizer(folder), "gemma4")


def _add_tokens(path: Path, tokens: Sequence[str]) -> None:
    content = json.loads(path.read_text())
    first = max(token["id"] for token in content["added_tokens"]) + 1
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": first + n, "content": token, **flags} for n, token in enumerate(tokens)]
    path.write_text(json.dumps(content))


def _read(gemma: FamilyRenderer, text: str, stop: Sequence[str], size: int) -> tuple[Message, str, str]:
    """Read a reply, `size` ids at a time. Return its message, the content of its events, and the stop string that ended it."""
    reader = gemma.reader(gemma.render_ids([Message("user", "hi")], (), {}), (), stop, None, False)
    ids, events = gemma.tokenizer.encode(text), []
    for start in range(0, len(ids), size):
        events += reader.feed(ids[start : start + size])
        if reader.satisfied:
            break
    rest, parsed = reader.finish()
    content = "".join(one.text for one in [*events, *rest] if getattr(one, "kind", "") == "content")
    return parsed.message, content, reader.stopped_by


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("text", "stop", "content", "reasoning"),
    [
        ("Four. ENDER", "END", "Four. ", ""),
        (THOUGHT + "The answer. ENDER of it", "END", "The answer.", "hm"),
        (
            THOUGHT + "The answer. ENDER of it",
            "swer",
            "The an",
            "hm",
        ),  # the stop string starts in the middle of a token
        (THOUGHT + "Grüße 日本🙂 était", "é", "Grüße 日本🙂", "hm"),
        (THOUGHT + "The answer.", "hm", "", ""),
        (THOUGHT + "The answer.", "END", "The answer.", "hm"),
        ('A call: <|tool_call>call:f{x:<|"|>END<|"|>}<tool_call|>', "ND", "A call: ", ""),
    ],
)
def test_reply_ends_before_stop_string(
    gemma: FamilyRenderer, text: str, stop: str, content: str, reasoning: str, size: int
) -> None:
    message, streamed, stopped_by = _read(gemma, text, [stop], size)
    assert (message.content, message.reasoning, message.tool_calls) == (content, reasoning, ())
    assert streamed == content and stopped_by == (stop if stop in text else "")


def test_call_is_parsed_by_the_package(gemma: FamilyRenderer) -> None:
    message, _, _ = _read(gemma, 'A call: <|tool_call>call:f{x:<|"|>y<|"|>}<tool_call|>', (), 1)
    assert message.content == "A call: " and [(c.name, c.arguments) for c in message.tool_calls] == [("f", '{"x":"y"}')]


def test_stop_string_within_a_character_does_not_depend_on_the_chunks(gemma: FamilyRenderer) -> None:
    text = "日本<channel|>éENER é"
    messages = [_read(gemma, text, ["é"], size)[0] for size in (1, 2, 3, 1000)]
    assert len({message.content for message in messages}) == 1, messages
