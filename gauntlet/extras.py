"""What the mock engine reports about tokens besides ids and log-probabilities, in the formats of real engines."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence

from gauntlet import proof
from gauntlet.sampler import Sample
from gauntlet.tokens import Json

_NPY_HEADER = "{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}"


def encode_experts(sample: Sample, first: int, format: str) -> Json | str:
    """Encode the routed experts of the prompt from token `first` on, and of the reply except its last token.

    `npy` is a `.npy` file in base64, as vLLM sends it. `raw` are the bytes with their shape, as prime-rl's server sends them.
    """
    states = proof.digests([*sample.prompt, *sample.ids])[first:-1]
    data = bytes(expert for state in states for expert in proof.experts(state))
    shape = (len(states), *proof.EXPERT_SHAPE)
    if format == "raw":
        return {"data": base64.b64encode(data).decode(), "shape": list(shape), "start": first, "dtype": "uint8"}
    header = _NPY_HEADER.format(shape=shape)
    header += " " * (63 - (len(header) + 10) % 64) + "\n"
    file = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data
    return base64.b64encode(file).decode()


def sampling_masks(sample: Sample) -> list[list[int]]:
    """Return the ids that were left to sample from, for each token of the reply."""
    state, masks = proof.digest(sample.prompt), []
    for token in sample.ids:
        masks.append(proof.sampling_mask(state, token))
        state = proof.digest((token,), state)
    return masks


def version_spans(versions: Sequence[str]) -> list[Json]:
    """Return the weight versions of a reply as spans of tokens, as vLLM sends them."""
    spans: list[Json] = []
    for n, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = n + 1
        else:
            spans.append({"version": version, "start": n, "end": n + 1})
    return spans


def score_prompt(prompt: Sequence[int]) -> list[Json | None]:
    """Return the log-probability of each token of a prompt under a teacher, in the format of vLLM's `prompt_logprobs`."""
    states = proof.digests(prompt)
    scored: list[Json | None] = [None]
    for token, state in zip(prompt[1:], states[1:], strict=True):
        scored.append({str(token): {"logprob": proof.teacher_logprob(state), "rank": 1, "decoded_token": ""}})
    return scored
