"""The mock model: what it samples at which prompt, and the log of it, which is the truth.

Prompts carry cues such as `[cue 3fa9.2]` in what the agent said last. The last cue in a prompt names the step; `learn` told
beforehand what is sampled at it, attempt by attempt. So no gateway has to pass anything on, and a request is answered rightly in
whatever order it comes. Prompts without a known cue (probes) get a short standard answer and are not logged.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field

from gauntlet import proof
from gauntlet.tokens import Json, Model

MODEL = "gauntlet"
_CUE = re.compile(r"\[cue ([0-9a-z]+\.[0-9]+)\]")
_TAIL = 256  # tokens in which the last cue is looked for first


@dataclass(frozen=True)
class Behaviour:
    """What happens at one attempt of one step."""

    text: str = ""
    odd: bool = False  # tokenised as no tokenizer would
    finish: str = "stop"  # or "length": the model was cut off
    status: int = 0  # refuse with this status
    drop: bool = False  # hang up without a word
    cut_after: int | None = None  # hang up after so many tokens
    delay_s: float = 0.0  # before the first token
    pace_s: float = 0.0  # between tokens
    sees: tuple[str, ...] = ()  # what must stand in the prompt


@dataclass
class Generation:
    """One call, as the engine saw it."""

    cue: str
    attempt: int  # which of the step's behaviours it was
    prompt_tokens: int
    prompt_digest: int
    ids: list[int]
    state: str = "open"  # then whole, cut, aborted or refused
    unseen: list[str] = field(default_factory=list)
    seconds: float = 0.0  # the engine's own time, rendering and reading included


@dataclass(frozen=True)
class Told:
    """Everything about a generation that a reply may be made of."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str
    behaviour: Behaviour
    generation: Generation


class Refused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(str(status))


class Dropped(Exception):
    """The connection is closed without an answer."""


class Engine:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: dict[str, list[Behaviour]] = {}
        self._attempts: dict[str, int] = {}
        self._log: dict[str, list[Generation]] = {}
        self._ids: dict[Behaviour, list[int]] = {}
        self._names: dict[int, str] = {}
        self._serial = itertools.count(1)

    # -- the script and the truth -------------------------------------------------

    def learn(self, steps: dict[str, list[Json]]) -> None:
        for cue, behaviours in steps.items():
            self._steps[cue] = [Behaviour(**{**each, "sees": tuple(each.get("sees", ()))}) for each in behaviours]

    def log(self, rollout: str) -> list[Json]:
        return [asdict(generation) for generation in self._log.get(rollout, [])]

    def forget(self, rollout: str) -> None:
        self._log.pop(rollout, None)
        for cue in [cue for cue in self._steps if cue.startswith(f"{rollout}.")]:
            del self._steps[cue]
            self._attempts.pop(cue, None)

    # -- generating ---------------------------------------------------------------

    def begin(self, prompt: list[int], max_tokens: int | None) -> Told:
        """Find the step, log the call, and say what will be sampled. Raises what goes wrong before the first token."""
        cue, text = self._cue(prompt)
        behaviours = self._steps.get(cue)
        if behaviours is None:
            return self._told(prompt, Behaviour(text="Hello."), Generation("", 0, 0, 0, []), max_tokens)
        attempt = self._attempts.get(cue, 0)
        self._attempts[cue] = attempt + 1
        attempt = min(attempt, len(behaviours) - 1)
        behaviour = behaviours[attempt]
        generation = Generation(cue, attempt, len(prompt), proof.digest(prompt), [])
        if behaviour.sees:
            text = self.model.decode(prompt)
            generation.unseen = [said for said in behaviour.sees if said not in text]
        self._log.setdefault(cue.partition(".")[0], []).append(generation)
        if behaviour.drop or behaviour.status:
            generation.state = "refused"
            raise Dropped if behaviour.drop else Refused(behaviour.status)
        return self._told(prompt, behaviour, generation, max_tokens)

    def _told(self, prompt: list[int], behaviour: Behaviour, generation: Generation, max_tokens: int | None) -> Told:
        ids, finish = self._sampled(behaviour), behaviour.finish
        if max_tokens is not None and max_tokens < len(ids):
            ids, finish = ids[:max_tokens], "length"
        return Told(prompt, ids, proof.logprobs(prompt, ids), finish, behaviour, generation)

    def _sampled(self, behaviour: Behaviour) -> list[int]:
        known = self._ids.get(behaviour)
        if known is None:
            encode = self.model.encode
            known = self.model.encode_oddly(behaviour.text, behaviour.text) if behaviour.odd else encode(behaviour.text)
            if behaviour.finish == "stop":
                known = [*known, self.model.stop]
            self._ids[behaviour] = known
        return known

    def _cue(self, prompt: list[int]) -> tuple[str, str]:
        """The last cue in the prompt. It stands near the end, so most of a long prompt need not be decoded."""
        size = _TAIL
        while True:
            text = self.model.decode(prompt[-size:])
            found = _CUE.findall(text)
            if found or size >= len(prompt):
                return (found[-1] if found else ""), text
            size *= 8

    async def tokens(self, told: Told) -> AsyncIterator[int]:
        """Indexes of the tokens as they are sampled. What the log says about the end is decided here."""
        generation, behaviour = told.generation, told.behaviour
        try:
            for n in range(len(told.ids)):
                pause = behaviour.delay_s if n == 0 else behaviour.pace_s
                if pause:
                    await asyncio.sleep(pause)
                if behaviour.cut_after is not None and n >= behaviour.cut_after:
                    generation.state = "cut"
                    raise Dropped
                generation.ids.append(told.ids[n])
                yield n
            generation.state = "whole"
        finally:
            if generation.state == "open":
                generation.state = "aborted"

    def name(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = self.model.token(token)
        return self._names[token]

    def serial(self, kind: str) -> str:
        return f"{kind}-{next(self._serial):032x}"
