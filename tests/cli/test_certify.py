"""`turngate certify`: whether turns of a template can be extended, case by case."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit import gateway, say, user
from turngate.cli import app
from turngate.render import BUILTIN_TOKENIZER

# Each message contains the number of messages, so every turn rewrites the history.
REWRITING_TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }} of {{ messages | length }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }} of {{ messages | length + 1 }}
{% endif %}"""


@pytest.fixture
def rewriting_tokenizer(tmp_path: Path) -> Path:
    """A tokenizer folder whose template rewrites history."""
    folder = tmp_path / "nasty"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    (folder / "chat_template.jinja").write_text(REWRITING_TEMPLATE)
    return folder


def certify(*arguments: str | Path) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["certify", *map(str, arguments)], env={"COLUMNS": "200"})
    assert isinstance(outcome.exception, SystemExit | None), repr(outcome.exception)
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_builtin_tokenizer_is_certified() -> None:
    code, out, _ = certify(BUILTIN_TOKENIZER)
    assert code == 0 and "Certified" in out and "parallel calls" in out and "differs" not in out


def test_template_that_rewrites_history_fails_named_cases(rewriting_tokenizer: Path) -> None:
    code, out, _ = certify(rewriting_tokenizer)
    assert code == 1 and "Not certified" in out
    [line] = [line for line in out.splitlines() if "two turns " in line]
    assert "differs" in line


def test_json_verdict(rewriting_tokenizer: Path) -> None:
    code, out, _ = certify(rewriting_tokenizer, "--json")
    verdict = json.loads(out)
    assert code == 1 and verdict["passed"] is False and verdict["tokenizer"] == str(rewriting_tokenizer)
    failed = {case["case"]: case["detail"] for case in verdict["cases"] if case["verdict"] == "differs"}
    assert "1 of 3" in failed["two turns"] or "of 3" in failed["two turns"]
    code, out, _ = certify(BUILTIN_TOKENIZER, "--json")
    assert code == 0 and json.loads(out)["passed"] is True


def test_missing_tokenizer_is_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in (str(tmp_path / "none"), "Nobody/Nothing"):
        code, out, error = certify(name)
        assert (code, out) == (2, "") and error.startswith("turngate: tokenizer: ") and len(error.splitlines()) == 1


def test_model_name_is_found_in_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(BUILTIN_TOKENIZER, snapshot)
    code, out, _ = certify("Some/Model", "--json")
    assert code == 0 and json.loads(out)["tokenizer"] == str(snapshot)


async def test_uncertified_template_is_served_with_forks(rewriting_tokenizer: Path) -> None:
    """Every turn is rendered from scratch, and each sample keeps the prompt it was sampled on."""
    async with gateway([say("One."), say("Two.")], tokenizer=str(rewriting_tokenizer)) as g:
        assert g.app.certificate is not None and not g.app.certificate.passed
        session = await g.open()
        reply = await g.ask(session.key, "Hi")
        await g.ask(session.key, [user("Hi"), reply.message(), user("More")])
        contexts = [n for n in (await g.trace(session.id))["nodes"] if n["kind"] == "context"]
        assert [(c["parent"], c["cause"]) for c in contexts] == [(None, None), (None, "template")]
        assert [c["ids"] for c in contexts] == [r.prompt.tolist() for r in g.engine.received]
        assert len(await g.samples(session.id)) == 2


def test_template_text_with_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    """Text such as [/INST] is not terminal markup."""
    folder = tmp_path / "brackets"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>"
        "{% else %}[INST]{{ m.content }}{% if loop.last %} [last]{% endif %}[/INST]{% endif %}{% endfor %}"
    )
    code, out, _ = certify(folder)
    assert code == 1 and "[/INST]" in out and "[last]" in out
    assert "the template has" in out and "identical tokens" in out
