"""The code blocks of docs/python.md run in order with a scripted model, and so does examples/evaluate.py."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path

import pytest

import turngate as tg
from examples import evaluate
from tests.api.kit import write_script
from tests.cli.kit import ROOT
from tests.sandboxes.kit import need

pytestmark = [pytest.mark.process, pytest.mark.full, pytest.mark.needs("bubblewrap")]

MODEL = "vllm://Qwen/Qwen3-8B@http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def use_scripted_pi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pi by a small program that starts quickly."""
    need("bubblewrap")
    monkeypatch.setenv("TURNGATE_AGENTS", str(Path(__file__).parent / "pi.toml"))
    monkeypatch.chdir(ROOT)


async def test_code_blocks_of_python_page_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "python.md").read_text(), re.M | re.S)
    assert len(blocks) >= 8
    namespace: dict[str, object] = {}
    for block in blocks:
        # Replace the engine, and reduce the number of rollouts and tasks.
        text = re.sub(r"\bn=\d", "n=1", block.replace(MODEL, write_script(tmp_path, ["Done."])))
        text = text.replace('"examples/tasks"', '["examples/tasks/fix-add"]')
        code = compile(text, "docs/python.md", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if inspect.iscoroutine(awaitable := eval(code, namespace)):
            await awaitable
    assert isinstance(namespace["results"], tg.Results) and namespace["results"].rewards == [1.0]
    output = capsys.readouterr().out
    assert "timeout is not a known argument; did you mean timeout_s? timeout" in output


def test_evaluate_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    arguments = ["examples/tasks/fix-add", "--agent", "pi", "--n", "2", "--out", str(out)]
    assert evaluate.main([*arguments, "--model", write_script(tmp_path, ["Done."])]) == 0
    output = capsys.readouterr().out
    assert "pass@1: 1.000\npass@2: 1.000\n2 graded\n" in output
    assert [json.loads(line)["reward"] for line in out.read_text().splitlines()] == [1.0, 1.0]
    assert evaluate.main([*arguments, "--model", "Qwen3"]) == 2
    assert capsys.readouterr().err.startswith("evaluate: model 'Qwen3' is neither")
