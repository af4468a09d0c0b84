# mypy: ignore-errors
"""Load exported rows with the trainers' own packages, in their environment, and print what they made of them.

Arguments: FORMAT=FILE … (verl, slime, areal or tinker, and a file of JSON lines). The output is one line of JSON: for each format, rows
with `ids`, `mask` and `logprobs`.
"""

import json
import sys


def load_verl(records: list[dict]) -> list[dict]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    rows = []
    for record in records:
        fields = AgentLoopOutput.model_fields.keys() & record.keys()
        output = AgentLoopOutput(**{name: record[name] for name in fields}, metrics={}).as_dict()
        prompt, response = output["prompts"].tolist(), output["responses"].tolist()
        mask, logprobs = output["response_mask"].tolist(), output["rollout_log_probs"].tolist()
        rows.append(build_row(prompt + response, mask, logprobs))
    return rows


def load_slime(records: list[dict]) -> list[dict]:
    from miles.utils.types import Sample

    rows = []
    for record in records:
        sample = Sample.from_dict(record)
        sample.validate()
        rows.append(build_row(sample.tokens, sample.loss_mask, sample.rollout_log_probs))
    return rows


def load_areal(records: list[dict]) -> list[dict]:
    import torch
    from areal.utils.data import concat_padded_tensors

    fields = ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask", "rewards")
    batch = concat_padded_tensors([{name: torch.tensor([record[name]]) for name in fields} for record in records])
    rows = []
    for n in range(len(records)):
        size = int(batch["attention_mask"][n].sum())
        values = [batch[name][n][:size].tolist() for name in ("input_ids", "loss_mask", "logprobs")]
        rows.append(build_row(*values))
    return rows


def load_tinker(records: list[dict]) -> list[dict]:
    from tinker import Datum, ModelInput

    rows = []
    for record in records:
        inputs = ModelInput.from_ints(record["model_input"])
        datum = Datum(model_input=inputs, loss_fn_inputs=record["loss_fn_inputs"])
        targets, logprobs = datum.loss_fn_inputs["target_tokens"].tolist(), datum.loss_fn_inputs["logprobs"].tolist()
        ids = [*datum.model_input.to_ints()[:1], *targets]
        if datum.model_input.to_ints() != ids[:-1]:
            raise ValueError("targets are not the tokens that follow the inputs")
        rows.append(build_row(ids, record["mask"], logprobs))
    return rows


def build_row(ids: list, mask: list, logprobs: list) -> dict:
    """Build a row from values of its last tokens. The tokens before them are not trained."""
    before = len(ids) - len(mask)
    mask = [0] * before + [int(trained) for trained in mask]
    return {"ids": ids, "mask": mask, "logprobs": [0.0] * before + list(logprobs)}


LOADERS = {"verl": load_verl, "slime": load_slime, "areal": load_areal, "tinker": load_tinker}


def main(files: list[str]) -> None:
    loaded = {}
    for argument in files:
        name, _, file = argument.partition("=")
        with open(file, encoding="utf-8") as lines:
            loaded[name] = LOADERS[name]([json.loads(line) for line in lines])
    print(json.dumps(loaded))


if __name__ == "__main__":
    main(sys.argv[1:])
