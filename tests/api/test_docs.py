"""docs/python.md and examples/evaluate.py do what they say: every piece of code of the page is run, in its order, with the model played."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import turngate as tg
from examples import evaluate
from tests.api.kit import scripted
from tests.cli.kit import ROOT
from tests.sandboxes.kit import need

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("bubblewrap")]

WRITTEN = "vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pi is a small program here, which takes no time to start."""
    need("bubblewrap")
    monkeypatch.setenv("TURNGATE_AGENTS", str(Path(__file__).parent / "pi.toml"))
    monkeypatch.chdir(ROOT)


async def test_every_piece_of_code_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pieces = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    assert len(pieces) >= 8
    seen: dict[str, object] = {}
    for piece in pieces:
        # Only what would need an engine is exchanged, and what takes longer the more there is of it.
        text = re.sub(r"\bn=\d", "n=1", piece.replace(WRITTEN, scripted(tmp_path, ["Done."])))
        text = text.replace('"examples/tasks"', '["examples/tasks/fix-add"]')
        code = compile(text, "docs/python.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(ran := eval(code, seen)):
            await ran
    assert isinstance(seen["results"], tg.Results) and seen["results"].rewards == [1.0]
    told = capsys.readouterr().out
    assert "timeout is not a known argument; did you mean timeout_s? timeout" in told


def test_the_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    words = ["examples/tasks/fix-add", "--agent", "pi", "--n", "2", "--out", str(out)]
    assert evaluate.main([*words, "--model", scripted(tmp_path, ["Done."])]) == 0
    told = capsys.readouterr().out
    assert "pass@1: 1.000\npass@2: 1.000\n2 graded\n" in told
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 1.0]
    assert evaluate.main([*words, "--model", "Qwen3"]) == 2
    assert capsys.readouterr().err.startswith("evaluate: model: 'Qwen3' is neither")
