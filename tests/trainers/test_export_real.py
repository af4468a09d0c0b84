"""Test that TRL reads the SFT and DPO exports and produces the expected labels."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.kit import real_tokenizer
from tests.speed import scaled
from tests.trainers.test_export import Recording, record_rollouts
from tools import parts

pytestmark = [pytest.mark.needs("trl", "tokenizers"), pytest.mark.full]

PART = "trl"

READER = """
import json, sys
from trl.data_utils import is_conversational, maybe_apply_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from transformers import AutoTokenizer

out, tokenizer = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(tokenizer)
read = lambda name: [json.loads(line) for line in open(f"{out}/{name}.jsonl")]
result = {}
for name, fields in (("messages", ("messages",)), ("completions", ("prompt", "completion")), ("dpo", ("prompt", "chosen", "rejected"))):
    made = []
    for record in read(name):
        example = {field: record[field] for field in (*fields, "tools")}
        assert is_conversational(example)
        made.append(maybe_apply_chat_template(example, tokenizer))
    result[name] = made
rows = [{field: row[field] for field in ("input_ids", "labels", "assistant_masks")} for row in read("tokens")]
batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
result["labels"] = [got.tolist()[: len(row["labels"])] == row["labels"] for got, row in zip(batch["labels"], rows)]
result["rest"] = [set(got.tolist()[len(row["labels"]) :]) <= {-100} for got, row in zip(batch["labels"], rows)]
json.dump(result, sys.stdout)
"""


@pytest.fixture(scope="module")
def python() -> str:
    return str(parts.ensure(PART) / "bin" / "python")


async def test_trl_reads_exports(python: str, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "data", tmp_path / "out", {})
    recording.out.mkdir()
    await record_rollouts(recording)
    for name, format, form in (
        ("messages", "sft", "messages"),
        ("completions", "sft", "completions"),
        ("tokens", "sft", "tokens"),
        ("dpo", "dpo", "messages"),
    ):
        recording.export(format, form=form)
        (recording.out / "out.jsonl").rename(recording.out / f"{name}.jsonl")
    command = [python, "-c", READER, str(recording.out), str(real_tokenizer("qwen3"))]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout)
    whole = next(record["text"] for record in read["messages"] if "It says hello." in record["text"])
    assert '{"name": "read_file", "arguments": {"path": "a"}}' in whole and "<tool_response>\nhello" in whole
    assert any(record["completion"].endswith("It says hello.<|im_end|>\n") for record in read["completions"])
    assert any("I do not know." in record["rejected"] and "read_file" in record["chosen"] for record in read["dpo"])
    assert len(read["labels"]) == 6 and all(read["labels"]) and all(read["rest"])
