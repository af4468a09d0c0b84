"""`turngate certify`: may turns of this template be extended, case by case?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.kit import gateway, say, user
from turngate.cli import app
from turngate.render import BUILTIN_TOKENIZER

# It counts the messages of the whole conversation in every turn: what was said before reads differently each time.
NASTY = """{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.index }} of {{ messages | length }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length + 1 }} of {{ messages | length + 1 }}
{% endif %}"""


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    """A tokenizer folder whose template rewrites history."""
    folder = tmp_path / "nasty"
    shutil.copytree(BUILTIN_TOKENIZER, folder)
    (folder / "chat_template.jinja").write_text(NASTY)
    return folder


def certify(*arguments: str | Path) -> tuple[int, str, str]:
    outcome = CliRunner().invoke(app, ["certify", *map(str, arguments)], env={"COLUMNS": "200"})
    assert isinstance(outcome.exception, SystemExit | None), repr(outcome.exception)
    return outcome.exit_code, outcome.stdout, outcome.stderr


def test_the_builtin_tokenizer_is_certified() -> None:
    code, out, _ = certify(BUILTIN_TOKENIZER)
    assert code == 0 and "Certified" in out and "parallel calls" in out and "differs" not in out


def test_a_template_that_rewrites_history_is_not_and_the_cases_are_named(nasty: Path) -> None:
    code, out, _ = certify(nasty)
    assert code == 1 and "Not certified" in out
    [line] = [line for line in out.splitlines() if "two turns " in line]
    assert "differs" in line


def test_the_verdict_for_machines(nasty: Path) -> None:
    code, out, _ = certify(nasty, "--json")
    verdict = json.loads(out)
    assert code == 1 and verdict["passed"] is False and verdict["tokenizer"] == str(nasty)
    failed = {case["case"]: case["detail"] for case in verdict["cases"] if case["verdict"] == "differs"}
    assert "1 of 3" in failed["two turns"] or "of 3" in failed["two turns"]
    code, out, _ = certify(BUILTIN_TOKENIZER, "--json")
    assert code == 0 and json.loads(out)["passed"] is True


def test_what_is_not_there_cannot_be_certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in (str(tmp_path / "none"), "Nobody/Nothing"):
        code, out, error = certify(name)
        assert (code, out) == (2, "") and error.startswith("turngate: tokenizer: ") and len(error.splitlines()) == 1


def test_a_name_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    snapshot = tmp_path / "hub" / "models--Some--Model" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(BUILTIN_TOKENIZER, snapshot)
    code, out, _ = certify("Some/Model", "--json")
    assert code == 0 and json.loads(out)["tokenizer"] == str(snapshot)


async def test_a_gateway_with_such_a_template_still_serves_and_forks_visibly(nasty: Path) -> None:
    """Every turn is rendered whole, as the template will have it; what was sampled stays true to what it was sampled on."""
    async with gateway([say("One."), say("Two.")], tokenizer=str(nasty)) as g:
        assert g.app.certificate is not None and not g.app.certificate.passed
        session = await g.open()
        heard = await g.ask(session.key, "Hi")
        await g.ask(session.key, [user("Hi"), heard.message(), user("More")])
        contexts = [n for n in (await g.trace(session.id))["nodes"] if n["kind"] == "context"]
        assert [(c["parent"], c["cause"]) for c in contexts] == [(None, None), (None, "template")]
        assert [c["ids"] for c in contexts] == [r.prompt.tolist() for r in g.engine.received]
        assert len(await g.samples(session.id)) == 2
