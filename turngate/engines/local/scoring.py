"""Score tokens (`engines/scoring.py`) with a model in this process, such as a teacher or a reference model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turngate.engines.local.model import Model
from turngate.engines.local.weights import load
from turngate.engines.scoring import Span, TokenScores, check_scores
from turngate.errors import ContextOverflow, EngineError, EngineRejected
from turngate.render import Tokenizer
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, Ids

_PLACES = 256  # tokens per matrix of scores, to limit its size


class LocalScoring:
    """A scorer of token ids that uses the model in a folder. Calls from several threads run one after the other."""

    name = "local"

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._folder = folder
        self._model: Model = load(folder, device, dtype).requires_grad_(False)
        self._lock = threading.Lock()

    def find_model(self) -> str:
        return str(self._folder.absolute())

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._folder)

    def score(self, ids: Ids, spans: Sequence[Span], top_k: int = 0) -> list[TokenScores]:
        shape = self._model.shape
        if len(ids) > shape.context:
            raise ContextOverflow(
                f"{self.name}: the row has {len(ids)} tokens, but the model has a context of {shape.context} tokens; "
                "use a model with a longer context"
            )
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < shape.vocabulary:
            wrong = int(ids[(ids < 0) | (ids >= shape.vocabulary)][0])
            raise EngineRejected(
                f"{self.name}: id {wrong} is outside the model's vocabulary of {shape.vocabulary} tokens; use a model with the "
                "tokenizer that produced the ids"
            )
        if any(start < 1 for start, _ in spans):
            raise EngineRejected(f"{self.name}: the first token of a row has no context, so it cannot be scored")
        if top_k > shape.vocabulary:
            raise EngineRejected(
                f"{self.name}: top_k is {top_k}, but the vocabulary has {shape.vocabulary} tokens; use a smaller top_k"
            )
        try:
            with self._lock, torch.no_grad():
                row = torch.from_numpy(ids.astype(np.int64)).to(self._model.device)
                hidden = self._model.compute_hidden(row[None])[0]
                found = [self._score_span(hidden, row, span, top_k) for span in spans]
        except RuntimeError as error:  # out of memory, for example
            raise EngineError(f"{self.name}: scoring failed: {error}") from error
        check_scores(self.name, spans, found, top_k)
        return found

    def _score_span(self, hidden: Tensor, ids: Tensor, span: Span, top_k: int) -> TokenScores:
        logprobs, top_ids, top_logprobs = [], [], []
        for start in range(span[0], span[1], _PLACES):
            end = min(start + _PLACES, span[1])
            likely = torch.log_softmax(self._model.scores(hidden[start - 1 : end - 1]).float(), dim=-1)
            logprobs.append(likely.gather(-1, ids[start:end, None])[:, 0])
            best = likely.topk(top_k, dim=-1)
            top_ids.append(best.indices)
            top_logprobs.append(best.values)
        return TokenScores(_join(logprobs, LOGPROB_DTYPE), _join(top_ids, ID_DTYPE), _join(top_logprobs, LOGPROB_DTYPE))


def _join(parts: Sequence[Tensor], dtype: type[np.generic]) -> np.ndarray:
    return torch.cat(list(parts)).cpu().numpy().astype(dtype)
