"""Fine-tune the model on an expert's traces before GRPO."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from supervised import update  # of the parent folder

from turngate.engines.local import Model

import torch  # isort: skip  # after turngate.engines.local, which configures how torch's threads wait

_WARM_UP = 10  # updates
_POOL = 32  # batches whose rows are sorted by length, so that little is padded


def fine_tune(
    model: Model, files: Sequence[Path], *, rate: float, batch_tokens: int, seed: int, updates: int = 0
) -> dict[str, Any]:
    """Train on the rows of all files once, in the format `sft`. The weights stay in float32; the computation is in bfloat16.

    With `updates`, make only this many.
    """
    rows = [json.loads(line) for file in files for line in file.open()]
    began, losses = time.monotonic(), []
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=model.device.type == "cuda"
    )
    batches = list(split_batches(rows, batch_tokens, random.Random(seed)))[: updates or None]
    used = [row for batch in batches for row in batch]
    for number, chosen in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / _WARM_UP) * (1 - number / len(batches))
        losses.append(update(model, optimizer, chosen, torch.bfloat16))
    return {
        "rows": len(used),
        "tokens": sum(len(row["input_ids"]) for row in used),
        "trained_tokens": sum(label >= 0 for row in used for label in row["labels"]),
        "updates": len(losses),
        "losses": [round(loss, 4) for loss in losses],
        "seconds": time.monotonic() - began,
    }


def split_batches(rows: list[Any], tokens: int, chance: random.Random) -> Iterator[list[Any]]:
    """Split shuffled rows into batches of at most `tokens` tokens, padding included. A longer row gets its own batch."""
    mixed = chance.sample(rows, len(rows))
    mean = sum(len(row["input_ids"]) for row in rows) / max(1, len(rows))
    pool = max(1, int(_POOL * tokens / max(1.0, mean)))
    for start in range(0, len(mixed), pool):
        batches: list[list[Any]] = []
        for row in sorted(mixed[start : start + pool], key=lambda row: len(row["input_ids"])):
            if batches and len(row["input_ids"]) * (len(batches[-1]) + 1) <= tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
        chance.shuffle(batches)
        yield from batches
