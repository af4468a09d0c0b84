"""The certificate cache: results are reused only for exactly the same tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER, certificate_cache, load_renderer
from turngate.render import tokenizer as module

TEXTS = ["Hello, <|im_end|> wörld 汉字 👩‍👩‍👧\n\n    x = 1", " " * 50, "\ud7ff\x00", "don't"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(BUILTIN_TOKENIZER, tmp_path / "tokenizer"))


def records(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "certified").glob("*"))


def test_second_load_uses_cached_certificate(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, certificate = load_renderer(folder)
    assert len(records(tmp_path)) == 1
    for name in ("read_vocabulary", "_load_backend"):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("not read from the cache"))
    second, again = load_renderer(folder)
    assert again == certificate and second.uncertified == first.uncertified
    assert second.tokenizer.fast and second.tokenizer.digest == first.tokenizer.digest
    for text in TEXTS:
        ids = second.tokenizer.encode(text)
        assert ids == first.tokenizer.encode(text)
        assert second.tokenizer.decode(ids) == first.tokenizer.decode(ids)
    monkeypatch.undo()
    assert second.tokenizer.vocab_size == first.tokenizer.vocab_size  # loads the slow encoder
    assert second.tokenizer._encode_slow("Hello") == second.tokenizer.encode("Hello")


@pytest.mark.full
def test_vocabulary_is_cached_for_any_model(folder: Path, tmp_path: Path) -> None:
    assert certificate_cache.load_any_record(folder) is None
    renderer, _ = load_renderer(folder, model="some-model", family="template")
    found = certificate_cache.load_any_record(folder)
    assert found is not None and found.vocabulary == renderer.tokenizer.vocabulary and found.fast
    records(tmp_path)[0].write_bytes(b"nonsense")
    assert certificate_cache.load_any_record(folder) is None
    load_renderer(folder)
    assert certificate_cache.load_any_record(folder) == found
    (folder / "tokenizer_config.json").write_text("{}")
    assert certificate_cache.load_any_record(folder) is None


@pytest.mark.sample(1)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_changed_file_is_another_tokenizer(folder: Path, tmp_path: Path, file: str) -> None:
    load_renderer(folder)
    path = folder / file
    path.write_bytes((path.read_bytes() if path.exists() else (folder / "x").read_bytes()) + b"\n")
    load_renderer(folder)
    assert len(records(tmp_path)) == 2
    load_renderer(folder, family="template")
    assert len(records(tmp_path)) == 3


def test_stop_tokens_in_generation_config_are_certified_again(folder: Path, tmp_path: Path) -> None:
    before, _ = load_renderer(folder)
    other = next(token for token in before.tokenizer.special_ids if token not in before.stop_ids)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [other]}))
    after, _ = load_renderer(folder)
    assert other in after.stop_ids and len(records(tmp_path)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"eos_token_id": "</s>"}', "eos_token_id must be an integer or a list, not a string"),
        (b'{"eos_token_id": [null]}', "must be an integer, not null"),
        (b'{"eos_token_id": true}', "eos_token_id must be an integer or a list, not a boolean"),
        (b'{"eos_token_id": -1}', "eos_token_id must be an integer of at least 0"),
    ],
    ids=range(8),
)
def test_damaged_generation_config_is_reported(folder: Path, text: bytes, problem: str) -> None:
    (folder / "generation_config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=f"generation_config.json is .*{problem}"):
        load_renderer(folder)


def test_damaged_record_is_ignored(folder: Path, tmp_path: Path) -> None:
    _, certificate = load_renderer(folder)
    (record,) = records(tmp_path)
    for damage in (b"", b"nonsense", record.read_bytes()[:-100]):
        record.write_bytes(damage)
        assert load_renderer(folder)[1] == certificate
    assert len(records(tmp_path)) == 1


def test_unwritable_cache_is_ignored(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert load_renderer(folder)[1].passed


def test_invalid_tokenizer_folder_is_reported(folder: Path) -> None:
    for text in ("{}", "[]", '{"model": {"type": "BPE"}}', '{"model": 3, "added_tokens": [{}]}'):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=r"tokenizer\.json or the tokenizer_config\.json beside it is not valid"):
            load_renderer(folder)
    with pytest.raises(ConfigError, match="does not exist"):
        load_renderer(folder / "nowhere")


def test_failed_certificate_is_cached(folder: Path, tmp_path: Path) -> None:
    """A template that rewrites history is not certified the second time either."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}{{ loop.length }}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    first, certificate = load_renderer(folder)
    second, again = load_renderer(folder)
    assert not certificate.passed and again == certificate
    assert first.uncertified == second.uncertified == certificate.uncertified


@pytest.mark.full
def test_cache_size_is_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate_cache, "_MAX_RECORDS", 2)
    for model in ("a", "b", "c", "d"):
        load_renderer(folder, model=model)
    assert len(records(tmp_path)) == 2
