"""Test that trainers' own packages read exports: TRL the SFT and DPO ones, verl, miles, AReaL and tinker each its own format."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.kit import real_tokenizer
from tests.speed import scaled
from tests.trainers.test_export import Recording, record_rollouts
from tools import parts
from turngate.trainers.export.areal import FIELDS
from turngate.types import Json

# The trainers share the Python of `trl`.
pytestmark = [pytest.mark.needs("trl", "trainers", "tokenizers"), pytest.mark.full]

# Each program makes `result`, what the trainer makes of the records.
LOADERS = {
    "trl": """
from trl.data_utils import is_conversational, maybe_apply_chat_template
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from transformers import AutoTokenizer

tokenizer, result = AutoTokenizer.from_pretrained(TOKENIZER), {}
for name, fields in (("messages", ("messages",)), ("completions", ("prompt", "completion")), ("dpo", ("prompt", "chosen", "rejected"))):
    made = []
    for record in records[name]:
        example = {field: record[field] for field in (*fields, "tools")}
        assert is_conversational(example)
        made.append(maybe_apply_chat_template(example, tokenizer))
    result[name] = made
rows = [{field: row[field] for field in ("input_ids", "labels", "assistant_masks")} for row in records["tokens"]]
batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
result["labels"] = [got.tolist()[: len(row["labels"])] == row["labels"] for got, row in zip(batch["labels"], rows)]
result["rest"] = [set(got.tolist()[len(row["labels"]) :]) <= {-100} for got, row in zip(batch["labels"], rows)]
""",
    "verl": """
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
names = AgentLoopOutput.model_fields.keys()
for record in records:
    output = AgentLoopOutput(**{name: record[name] for name in names & record.keys()}, metrics={}).as_dict()
    result.append({name: output[name].tolist() for name in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")})
    result[-1]["session"] = output["extra_fields"]["session"]
""",
    "slime": """
from miles.utils.types import Sample
for record in records:
    sample = Sample.from_dict(record)
    sample.validate()
    result.append({name: getattr(sample, name) for name in ("tokens", "response_length", "loss_mask", "rollout_log_probs", "reward")})
    result[-1] |= {"status": sample.status.name, "trained": sample.effective_response_length, "versions": sample.weight_versions}
""",
    "areal": """
import torch
from areal.utils.data import concat_padded_tensors
batch = concat_padded_tensors([{name: torch.tensor([record[name]]) for name in FIELDS} for record in records])
result = {name: batch[name].tolist() for name in FIELDS}
""",
    "tinker": """
from tinker import Datum, ModelInput
for record in records:
    datum = Datum(model_input=ModelInput.from_ints(record["model_input"]), loss_fn_inputs=record["loss_fn_inputs"])
    assert datum.model_input.length == len(record["model_input"])
    result.append({name: data.tolist() for name, data in datum.loss_fn_inputs.items()} | {"inputs": datum.model_input.to_ints()})
""",
}


# One process runs all programs, because they share slow imports such as that of torch.
LOAD_ALL = """
import json, sys, traceback
exports, programs, names = json.load(sys.stdin)
loaded = {}
for format, program in programs.items():
    scope = {"records": exports[format], "result": [], **names}
    try:
        exec(program, scope)
        loaded[format] = {"result": scope["result"]}
    except BaseException:
        loaded[format] = {"error": traceback.format_exc()}
json.dump(loaded, sys.stdout)
"""


Load = Callable[[str], tuple[list[Json], Any, Json]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return the rows with a reward of a recording, its records in a format, and what the trainer's own package made of them."""
    folder = tmp_path_factory.mktemp("loaders")
    recording = Recording(folder / "data", folder / "out", {})
    recording.out.mkdir()
    asyncio.run(record_rollouts(recording))
    rows, _ = recording.export("rows", unscored="drop")
    exports: Json = {name: recording.export(name, unscored="drop")[0] for name in ("verl", "slime", "areal", "tinker")}
    exports["trl"] = {form: recording.export("sft", form=form)[0] for form in ("messages", "completions", "tokens")}
    exports["trl"]["dpo"], _ = recording.export("dpo", form="messages")
    done = subprocess.run(
        [str(parts.ensure("trl") / "bin" / "python"), "-c", LOAD_ALL],
        input=json.dumps([exports, LOADERS, {"FIELDS": FIELDS, "TOKENIZER": str(real_tokenizer("qwen3"))}]),
        capture_output=True,
        text=True,
        timeout=scaled(240),
        env={**os.environ, "PYTHONPATH": str(parts.ensure("trainers")), "HF_HUB_OFFLINE": "1", "HOME": str(folder)},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded = json.loads(done.stdout[done.stdout.rindex("\n") + 1 if "\n" in done.stdout else 0 :])

    def get(format: str) -> tuple[list[Json], Any, Json]:
        assert "error" not in loaded[format], loaded[format]["error"]
        return rows, exports[format], loaded[format]["result"]

    return get


def test_trl_reads_exports(load: Load) -> None:
    _, _, read = load("trl")
    whole = next(record["text"] for record in read["messages"] if "It says hello." in record["text"])
    assert '{"name": "read_file", "arguments": {"path": "a"}}' in whole and "<tool_response>\nhello" in whole
    assert any(record["completion"].endswith("It says hello.<|im_end|>\n") for record in read["completions"])
    assert any("I do not know." in record["rejected"] and "read_file" in record["chosen"] for record in read["dpo"])
    assert len(read["labels"]) == 6 and all(read["labels"]) and all(read["rest"])


def find_row(rows: list[Json], record: Json, field: str) -> Json:
    """Return the exported row of a record, whose session and branch are in a field."""
    [row] = [
        row for row in rows if (row["session"], row["branch"]) == (record[field]["session"], record[field]["branch"])
    ]
    return row


def fill(row: Json) -> list[float]:
    """Return the log-probabilities of a row, with 0 for tokens that are not trained."""
    return [logprob if trained else 0.0 for logprob, trained in zip(row["logprobs"], row["mask"], strict=True)]


def test_verl_loads_export(load: Load) -> None:
    rows, records, loaded = load("verl")
    assert len(loaded) == len(records) == len(rows) > 3
    for record, output in zip(records, loaded, strict=True):
        row = find_row(rows, record, "extra_fields")
        first, end = len(output["prompts"]), len(output["prompts"]) + len(output["responses"])
        assert output["prompts"] + output["responses"] == row["ids"][:end] and not any(row["mask"][end:])
        assert output["response_mask"] == [int(trained) for trained in row["mask"][first:end]]
        assert output["rollout_log_probs"] == pytest.approx(fill(row)[first:end], abs=1e-6)
        assert (
            output["rm_scores"] == [0.0] * (end - first - 1) + [row["reward"]] and output["session"] == row["session"]
        )


def test_miles_loads_slime_export(load: Load) -> None:
    rows, records, loaded = load("slime")
    assert len(loaded) == len(records) == len(rows) > 3
    for record, sample in zip(records, loaded, strict=True):
        row = find_row(rows, record, "metadata")
        end = len(sample["tokens"])
        first = end - sample["response_length"]
        assert sample["tokens"] == row["ids"][:end] and sample["trained"] == sum(row["mask"])
        assert sample["loss_mask"] == [int(trained) for trained in row["mask"][first:end]]
        assert sample["rollout_log_probs"] == pytest.approx(fill(row)[first:end], abs=1e-6)
        assert (sample["reward"], sample["status"]) == (row["reward"], "COMPLETED")
        assert sample["versions"] == [str(span["version_start"]) for span in row["spans"] if span["trained"]]


def test_areal_loads_export(load: Load) -> None:
    rows, records, loaded = load("areal")
    assert len(loaded["rewards"]) == len(records) == len(rows) > 3
    for n, record in enumerate(records):
        row = find_row(rows, record, "metadata")
        size = len(row["ids"])
        of = {name: loaded[name][n] if name == "rewards" else loaded[name][n][:size] for name in FIELDS}
        assert of["input_ids"] == row["ids"] and of["attention_mask"] == [1] * size
        assert not any(loaded["attention_mask"][n][size:]), "AReaL pads the shorter rows"
        assert of["loss_mask"] == [int(trained) for trained in row["mask"]]
        assert of["logprobs"] == pytest.approx(fill(row), abs=1e-6) and of["rewards"] == row["reward"]
        assert {version for version, trained in zip(of["versions"], row["mask"], strict=True) if not trained} <= {-1}
        for span in row["spans"]:
            if span["trained"]:
                assert {*of["versions"][span["start"] : span["end"]]} == {span["version_start"]}


def test_tinker_loads_export(load: Load) -> None:
    rows, records, loaded = load("tinker")
    assert len(loaded) == len(records) == len(rows) > 3
    for record, datum in zip(records, loaded, strict=True):
        row = find_row(rows, record, "metadata")
        assert datum["inputs"] == row["ids"][:-1] and datum["target_tokens"] == row["ids"][1:]
        assert datum["logprobs"] == pytest.approx(fill(row)[1:], abs=1e-6)
        assert record["mask"] == [int(trained) for trained in row["mask"][1:]]
        expected = [row["advantage"] * trained for trained in row["mask"][1:]]
        assert datum["advantages"] == pytest.approx(expected, abs=1e-6)
    assert {*loaded[0]} == {"inputs", "target_tokens", "logprobs", "advantages"}, "what its policy losses take"
