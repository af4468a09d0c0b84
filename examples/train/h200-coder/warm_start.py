"""Fine-tune the model on an expert's traces before GRPO."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from turngate.engines.local import Model

import torch  # isort: skip  # after turngate.engines.local, which configures how torch's threads wait
from torch.nn import functional as F  # isort: skip

_WARM_UP = 5  # updates


def fine_tune(model: Model, file: Path, *, epochs: int, rate: float, batch: int = 8) -> dict[str, Any]:
    """Train on the rows of an export in the format `sft`. Return what was done."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    chance, began, losses = random.Random(0), time.monotonic(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = []
    for _ in range(epochs):
        mixed = chance.sample(rows, len(rows))
        batches += [mixed[start : start + batch] for start in range(0, len(mixed), batch)]
    for number, chosen in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (number + 1) / _WARM_UP) * (1 - number / len(batches))
        losses.append(_update(model, optimizer, chosen))
    return {
        "rows": len(rows),
        "trained_tokens": sum(label >= 0 for row in rows for label in row["labels"]),
        "updates": len(losses),
        "losses": [round(loss, 4) for loss in losses],
        "seconds": time.monotonic() - began,
    }


def _update(model: Model, optimizer: torch.optim.Optimizer, rows: list[Any]) -> float:
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for n, row in enumerate(rows):
        ids[n, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        labels[n, : len(row["labels"])] = torch.tensor(row["labels"])
    ids, targets = ids.to(model.device), labels.to(model.device).roll(-1, 1)
    targets[:, -1] = -100
    positions = targets >= 0
    loss = F.cross_entropy(model(ids, at=positions).float(), targets[positions])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
