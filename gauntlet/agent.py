"""Plays a scenario: an agent that speaks one dialect to a gateway, with the scenario's habits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import aiohttp
import orjson

from gauntlet.sampler import MODEL, Behaviour
from gauntlet.scenario import (
    Answer,
    Call,
    Edit,
    Fault,
    Habit,
    Results,
    Say,
    Scenario,
    Start,
    Step,
    System,
    Together,
    Tools,
)
from gauntlet.voices.base import TOOLS, Broken, Called, Conversation, Event, Json, Said, Voice, further_tool

_ATTEMPTS = 5  # after which an agent takes a gateway for broken


class GaveUp(Exception):
    """The gateway would not answer: the rollout ends here."""


@dataclass
class Played:
    """What the agent lived through."""

    taken: dict[int, int] = field(
        default_factory=dict
    )  # of each call that was answered, the attempt whose answer it took
    latencies: list[tuple[str, float]] = field(default_factory=list)  # cue and seconds of each answer that it took
    errors_right: int = 0  # faults that it was told of in a way it can act on, or was spared
    trouble: str = ""  # why it could not go on


def script(scenario: Scenario, rollout: str) -> dict[str, list[Json]]:
    """What the engine has to know beforehand."""
    steps = {}
    for n, call in enumerate(scenario.calls()):
        steps[f"{rollout}.{n}"] = [asdict(_behaviour(attempt)) for attempt in call.attempts]
    return steps


def _behaviour(attempt: Answer | Fault) -> Behaviour:
    if isinstance(attempt, Fault):
        cut = attempt.cut_after or None
        spelled = attempt.answer.spelled()
        return Behaviour(spelled, status=attempt.status, drop=attempt.drop, cut_after=cut, pace_s=0.01)
    return Behaviour(
        attempt.spelled(),
        attempt.odd,
        attempt.finish,
        delay_s=attempt.delay_s,
        pace_s=attempt.pace_s,
        sees=attempt.sees,
    )


class Agent:
    """One rollout under way."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        voice: Voice,
        scenario: Scenario,
        rollout: str,
        base_url: str,
        key: str,
        *,
        stream: bool,
    ) -> None:
        self.played = Played()
        self._http, self._voice, self._scenario = http, voice, scenario
        self._rollout, self._base_url, self._key, self._stream = rollout, base_url, key, stream
        self._lines: dict[str, Conversation] = {}
        self._numbers = {id(call): n for n, call in enumerate(scenario.calls())}
        self._renamed = 0

    async def play(self) -> Played:
        try:
            await self._steps(self._scenario.steps)
        except GaveUp as trouble:
            self.played.trouble = str(trouble)
        except ExceptionGroup as group:
            self.played.trouble = str(group.exceptions[0])
        return self.played

    async def _steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Together):
                async with asyncio.TaskGroup() as group:
                    for each in step.lists:
                        group.create_task(self._steps(each))
            elif isinstance(step, Call):
                await self._call(step)
            else:
                self._tell(step)

    def _tell(self, step: Start | Say | Results | System | Tools | Edit) -> None:
        if isinstance(step, Start):
            self._lines[step.line] = Conversation(step.system, _tools(step), [Said("user", step.task)])
            return
        line = self._lines[step.line]
        if isinstance(step, Say):
            line.said.append(Said("user", step.text))
        elif isinstance(step, System):
            line.system = step.text
        elif isinstance(step, Tools):
            line.tools = tuple(tool for tool in TOOLS if tool["name"] in step.names)
        elif isinstance(step, Edit):
            answers = [said for said in line.said if said.role == "assistant"]
            answers[step.turn].text = step.text
            answers[step.turn].reasoning = ""
        else:
            calls = line.said[-1].calls
            if len(calls) != len(step.texts):
                raise GaveUp(f"the gateway told of {len(calls)} tool calls, and the model made {len(step.texts)}")
            for call, text in zip(calls, step.texts, strict=True):
                line.said.append(Said("tool", text, answers=call))

    async def _call(self, call: Call) -> None:
        line = self._lines[call.line]
        number = self._numbers[id(call)]
        cue = f"{self._rollout}.{number}"
        _mark(line, cue)
        for attempt in range(_ATTEMPTS):
            planned = call.attempts[min(attempt, len(call.attempts) - 1)]
            began = time.perf_counter()
            try:
                async with asyncio.timeout(call.hang_up_s if call.hang_up_s and attempt == 0 else None):
                    said = await self._ask(line, attempt)
            except TimeoutError:
                if call.gives_up:
                    return
                continue
            except Broken as broken:
                if isinstance(planned, Fault):
                    self.played.errors_right += not broken.status or broken.status in planned.told
                elif attempt == _ATTEMPTS - 1 or (400 <= broken.status < 500 and broken.status != 429):
                    raise GaveUp(f"{cue}: {broken.status} {broken}") from None
                if call.gives_up:
                    return
                await asyncio.sleep(0.05)
                continue
            spent = time.perf_counter() - began
            # A gateway that asked the engine again itself has spared the agent what was planned.
            self.played.errors_right += sum(isinstance(each, Fault) for each in call.attempts[attempt:])
            self.played.taken[number] = _which(call, said)
            self.played.latencies.append((cue, spent))
            line.said.append(self._kept(said))
            return
        raise GaveUp(f"{cue}: no answer after {_ATTEMPTS} attempts")

    async def _ask(self, line: Conversation, attempt: int) -> Said:
        request = self._voice.request(line, model=MODEL, key=self._key, stream=self._stream)
        headers = {**request.headers, "x-stainless-retry-count": str(attempt)}
        body = orjson.dumps(request.body)
        headers["content-type"] = "application/json"
        try:
            async with self._http.post(self._base_url + request.path, data=body, headers=headers) as response:
                if response.status != 200:
                    raise Broken((await response.text())[:300], response.status)
                if not self._stream:
                    return self._voice.whole(orjson.loads(await response.read()))
                events: list[Event] = []
                async for event in _events(response):
                    events.append(event)
                    if self._voice.ended(event):
                        break
                return self._voice.streamed(events)
        except aiohttp.ClientError as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise Broken(f"a reply that is none: {type(error).__name__}: {error}") from None

    def _kept(self, said: Said) -> Said:
        """The answer, as this agent will send it back."""
        habits = self._scenario.habits
        if "drop_thinking" in habits:
            said.reasoning = ""
        if "trim" in habits:
            said.text, said.reasoning = said.text.strip(), said.reasoning.strip()
        for call in said.calls:
            self._change(call, habits)
        return said

    def _change(self, call: Called, habits: tuple[Habit, ...]) -> None:
        if "respell" in habits:
            arguments = json.loads(call.arguments)
            call.arguments = json.dumps(dict(reversed(arguments.items())), indent=1, ensure_ascii=True)
        if "rename_ids" in habits:
            self._renamed += 1
            call.id = f"mine_{self._renamed}"
            call.opaque = {name: value for name, value in call.opaque.items() if name != "id"}


def _which(call: Call, said: Said) -> int:
    """The attempt that an answer belongs to: a gateway may give one to a question that was asked again."""
    for n, attempt in enumerate(call.attempts):
        if isinstance(attempt, Answer) and [each.arguments for each in attempt.calls] == [
            json.loads(each.arguments) for each in said.calls
        ]:
            return n
    return len(call.attempts) - 1


def _mark(line: Conversation, cue: str) -> None:
    """The cue goes into everything that was said since the last answer."""
    for said in _since_answer(line):
        if "[cue " not in said.text:
            said.text += f"\n[cue {cue}]"


def _since_answer(line: Conversation) -> Iterator[Said]:
    for said in reversed(line.said):
        if said.role == "assistant":
            return
        yield said


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    name, data = "", b""
    async for raw in _lines(response):
        if raw.startswith(b"event:"):
            name = raw[6:].strip().decode()
        elif raw.startswith(b"data:"):
            data += raw[5:].strip()
        elif not raw and data:
            if data != b"[DONE]":
                with suppress(ValueError):
                    yield Event(name, orjson.loads(data))
            name, data = "", b""


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        rest += chunk
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest.rstrip(b"\r")
    yield b""


def _tools(step: Start) -> tuple[Json, ...]:
    return (*TOOLS, *(further_tool(n) for n in range(step.more_tools))) if step.tools else ()
