"""The mock model: it decides what to sample for each prompt, and keeps a log, which is the ground truth.

The agent's last messages contain cues such as `[cue 3fa9.2]`. The last cue in a prompt names the step, and `add_steps` has set what to
sample for it, attempt by attempt. So gateways need not forward anything, and requests may arrive in any order. Prompts without a known cue
(probes) get a short standard answer and are not logged.
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
UNSERVED_MODEL = "gauntlet-small"  # for agents that ask for a model that the engine does not have
_CUE = re.compile(r"\[cue ([0-9a-z]+\.[0-9]+)\]")
_TAIL = 256  # tokens at the end of the prompt that are searched for a cue first


@dataclass(frozen=True)
class Behavior:
    """The engine's behavior for one attempt of one step."""

    text: str = ""
    odd: bool = False  # encoded to tokens that a tokenizer would not choose
    finish: str = "stop"  # or "length": the model was cut off
    status: int = 0  # refuse with this status
    drop: bool = False  # close the connection without a reply
    cut_after: int | None = None  # close the connection after this many tokens
    delay_s: float = 0.0  # before the first token
    pace_s: float = 0.0  # between tokens
    sees: tuple[str, ...] = ()  # text that the prompt must contain


@dataclass
class Generation:
    """One call in the engine's log."""

    cue: str
    attempt: int  # index of the step's behavior
    prompt_tokens: int
    prompt_digest: int
    ids: list[int]
    state: str = "open"  # later: whole, cut, aborted or refused
    unseen: list[str] = field(default_factory=list)
    temperature: float = 1.0
    versions: list[str] = field(default_factory=list)  # the engine's weight version at each sampled token
    seconds: float = 0.0  # the engine's own time, including rendering and parsing


@dataclass(frozen=True)
class Sample:
    """A generation with everything that a reply may contain."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    finish: str
    behavior: Behavior
    generation: Generation


@dataclass(frozen=True)
class Extras:
    """What replies of `/inference/v1/generate` contain besides ids and log-probabilities."""

    experts: str = ""  # "npy": as vLLM sends routed experts; "raw": as prime-rl's server sends them; empty: none
    masks: bool = False  # sampling masks


class RequestRefused(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(str(status))


class ConnectionDropped(Exception):
    """The connection is closed without an answer."""


class Engine:
    def __init__(self, model: Model) -> None:
        self.model = model
        self._steps: dict[str, list[Behavior]] = {}
        self._attempts: dict[str, int] = {}
        self._log: dict[str, list[Generation]] = {}
        self._ids: dict[Behavior, list[int]] = {}
        self._names: dict[int, str] = {}
        self._serial = itertools.count(1)
        self.extras = Extras()
        self.version = "default"  # the label of the weights that sample now
        self.running = asyncio.Event()  # cleared while the engine is paused for an update of its weights
        self.running.set()

    # -- the script and the log ----------------------------------------------------

    def add_steps(self, steps: dict[str, list[Json]]) -> None:
        for cue, behaviors in steps.items():
            self._steps[cue] = [Behavior(**{**each, "sees": tuple(each.get("sees", ()))}) for each in behaviors]

    def log(self, rollout: str) -> list[Json]:
        return [asdict(generation) for generation in self._log.get(rollout, [])]

    def forget(self, rollout: str) -> None:
        self._log.pop(rollout, None)
        for cue in [cue for cue in self._steps if cue.startswith(f"{rollout}.")]:
            del self._steps[cue]
            self._attempts.pop(cue, None)

    # -- generating ---------------------------------------------------------------

    def start_generation(self, prompt: list[int], max_tokens: int | None, temperature: float = 1.0) -> Sample:
        """Find the step, log the call, and return what will be sampled. Raise faults that occur before the first token."""
        cue, text = self._find_cue(prompt)
        behaviors = self._steps.get(cue)
        if behaviors is None:
            return self._build_sample(prompt, Behavior(text="Hello."), Generation("", 0, 0, 0, []), max_tokens)
        attempt = self._attempts.get(cue, 0)
        self._attempts[cue] = attempt + 1
        attempt = min(attempt, len(behaviors) - 1)
        behavior = behaviors[attempt]
        generation = Generation(cue, attempt, len(prompt), proof.digest(prompt), [], temperature=temperature)
        if behavior.sees:
            text = self.model.decode(prompt)
            generation.unseen = [expected for expected in behavior.sees if expected not in text]
        self._log.setdefault(cue.partition(".")[0], []).append(generation)
        if behavior.drop or behavior.status:
            generation.state = "refused"
            raise ConnectionDropped if behavior.drop else RequestRefused(behavior.status)
        return self._build_sample(prompt, behavior, generation, max_tokens)

    def _build_sample(
        self, prompt: list[int], behavior: Behavior, generation: Generation, max_tokens: int | None
    ) -> Sample:
        ids, finish = self._encode_answer(behavior), behavior.finish
        if max_tokens is not None and max_tokens < len(ids):
            ids, finish = ids[:max_tokens], "length"
        return Sample(prompt, ids, proof.logprobs(prompt, ids), finish, behavior, generation)

    def _encode_answer(self, behavior: Behavior) -> list[int]:
        known = self._ids.get(behavior)
        if known is None:
            encode = self.model.encode
            known = self.model.encode_oddly(behavior.text, behavior.text) if behavior.odd else encode(behavior.text)
            if behavior.finish == "stop":
                known = [*known, self.model.stop]
            self._ids[behavior] = known
        return known

    def _find_cue(self, prompt: list[int]) -> tuple[str, str]:
        """Find the last cue in the prompt. It is near the end, so most of a long prompt need not be decoded."""
        size = _TAIL
        while True:
            text = self.model.decode(prompt[-size:])
            found = _CUE.findall(text)
            if found or size >= len(prompt):
                return (found[-1] if found else ""), text
            size *= 8

    async def sample_tokens(self, sample: Sample) -> AsyncIterator[int]:
        """Yield the indexes of the tokens as they are sampled, and log how the generation ended."""
        generation, behavior = sample.generation, sample.behavior
        try:
            for n in range(len(sample.ids)):
                pause = behavior.delay_s if n == 0 else behavior.pace_s
                if pause:
                    await asyncio.sleep(pause)
                if behavior.cut_after is not None and n >= behavior.cut_after:
                    generation.state = "cut"
                    raise ConnectionDropped
                await self.running.wait()
                generation.ids.append(sample.ids[n])
                generation.versions.append(self.version)
                yield n
            generation.state = "whole"
        finally:
            if generation.state == "open":
                generation.state = "aborted"

    def name(self, token: int) -> str:
        if token not in self._names:
            self._names[token] = self.model.token(token)
        return self._names[token]

    def new_id(self, kind: str) -> str:
        return f"{kind}-{next(self._serial):032x}"
