"""One supervised update on rows in the format `sft`, for the warm starts of the examples on a GPU."""

from __future__ import annotations

from typing import Any

from turngate.engines.local import Model

import torch  # isort: skip  # after turngate.engines.local, which configures how torch's threads wait
from torch.nn import functional as F  # isort: skip

_NO_LABEL = -100


def update(
    model: Model, optimizer: torch.optim.Optimizer, rows: list[Any], dtype: torch.dtype = torch.float32
) -> float:
    """Train on rows, padded to one length. `dtype` is the precision of the computation. Return the loss."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    labels = torch.full_like(ids, _NO_LABEL)
    for n, row in enumerate(rows):
        ids[n, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        labels[n, : len(row["labels"])] = torch.tensor(row["labels"])
    ids, targets = ids.to(model.device), labels.to(model.device).roll(-1, 1)
    targets[:, -1] = _NO_LABEL
    positions = targets >= 0
    with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
        scores = model(ids, at=positions)
    loss = F.cross_entropy(scores.float(), targets[positions])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
