"""Check that a teacher's ids mean the same tokens as the recorded ids.

A teacher with a different vocabulary accepts most ids, but scores a different text. Therefore, the whole vocabularies of the two tokenizers
are compared. If the teacher's tokenizer is unknown, its server instead decodes the ids that have not been compared before, and the text is
compared with the one that the policy's tokenizer returns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from turngate.engines.scoring import ScoringEngine
from turngate.errors import ConfigError, EngineRejected
from turngate.render import Tokenizer
from turngate.types import Ids


class VocabularyMismatch(ConfigError):
    """The teacher's vocabulary differs from that of the recorded ids."""

    kind = "vocabulary_mismatch"


class VocabularyCheck:
    """Checks the vocabulary of one teacher. `tokenizer` is the teacher's tokenizer, if it is known."""

    def __init__(self, engine: ScoringEngine, model: str, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._model = model
        self._tokenizer = tokenizer
        self._known: dict[str, set[int]] = {}  # ids that were compared, by the digest of the policy's vocabulary
        self._lock = threading.Lock()

    def is_same(self, digest: str) -> bool:
        """Return whether the teacher's tokenizer file is known to have this digest."""
        return self._tokenizer is not None and self._tokenizer.digest == digest

    def check(self, policy: Tokenizer | None, ids: Ids) -> None:
        """Raise `VocabularyMismatch` if the teacher has a different token for an id, or `EngineRejected` if its vocabulary is too small.

        Raise `ConfigError` if the teacher's tokenizer is unknown and its server cannot decode ids. `policy` is the tokenizer of the ids, or
        None if the teacher is known to have the same tokenizer.
        """
        with self._lock:
            if self._tokenizer is None:
                assert policy is not None, "the teacher's tokenizer is not known"
                self._compare_texts(policy, ids)
                return
            if policy is not None:
                self._compare_vocabularies(policy, self._tokenizer)
            if len(ids) and int(ids.max()) >= self._tokenizer.vocab_size:
                raise EngineRejected(
                    f"id {int(ids.max())} is outside the teacher's vocabulary of {self._tokenizer.vocab_size} tokens"
                )

    def _compare_vocabularies(self, policy: Tokenizer, teacher: Tokenizer) -> None:
        if policy.digest == teacher.digest or policy.digest in self._known:
            return
        theirs = {token_id: token for token, token_id in teacher.get_vocab().items()}
        for token, token_id in sorted(policy.get_vocab().items(), key=lambda entry: entry[1]):
            if theirs.get(token_id, token) != token:
                raise self._mismatch(policy, token_id, token, theirs[token_id], str(teacher.folder))
        self._known[policy.digest] = set()

    def _compare_texts(self, policy: Tokenizer, ids: Ids) -> None:
        known = self._known.setdefault(policy.digest, set())
        new = sorted(set(ids.tolist()) - known)
        if not new:
            return
        try:
            differs = _normalize(self._engine.decode(new)) != _normalize(policy.decode(new))
        except EngineRejected as error:
            raise ConfigError(
                f"teacher_tokenizer: the teacher cannot decode ids ({error.message}), so its vocabulary cannot be compared; "
                "set teacher_tokenizer to the teacher's tokenizer folder",
                param="teacher_tokenizer",
            ) from None
        if differs:
            token = _find_different(new, self._engine.decode, policy.decode)
            here, there = policy.decode([token]), self._engine.decode([token])
            raise self._mismatch(policy, token, here, there, self._model)
        known.update(new)

    def _mismatch(self, policy: Tokenizer, token: int, here: str, there: str, teacher: str) -> VocabularyMismatch:
        return VocabularyMismatch(
            f"teacher_model: the teacher has a different vocabulary: id {token} is {here!r} in the tokenizer of the rollouts "
            f"({policy.name_or_path}), but {there!r} in {teacher}; choose a teacher with the same tokenizer",
            param="teacher_model",
        )


def _normalize(text: str) -> str:
    """Remove the characters that decoders treat differently: white space, and the replacement character for invalid bytes."""
    return "".join(text.replace("\ufffd", "").split())


def _find_different(
    ids: Sequence[int], one: Callable[[Sequence[int]], str], other: Callable[[Sequence[int]], str]
) -> int:
    """Return an id that `one` and `other` decode differently, found by bisecting the prefixes of `ids`."""
    low, high = 0, len(ids)  # ids[:low] is decoded equally, ids[:high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if _normalize(one(ids[:middle])) == _normalize(other(ids[:middle])):
            low = middle
        else:
            high = middle
    return ids[high - 1]
