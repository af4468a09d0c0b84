"""Play a scenario: an agent that talks to a gateway in one dialect, with the scenario's habits."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import aiohttp
import orjson

from gauntlet.clients.base import (
    TOOLS,
    Client,
    Conversation,
    Event,
    Json,
    Message,
    ReceivedCall,
    ReplyError,
    extra_tool,
)
from gauntlet.sampler import MODEL, UNSERVED_MODEL, Behavior
from gauntlet.scenario import (
    Answer,
    Call,
    Edit,
    Fault,
    Habit,
    Results,
    Rewind,
    Say,
    Scenario,
    Start,
    Step,
    System,
    Together,
    Tools,
)

_ATTEMPTS = 5  # before the agent gives up on the gateway


class AgentGaveUp(Exception):
    """The gateway did not answer, so the rollout ends."""


@dataclass
class AgentRun:
    """What happened to the agent in a rollout."""

    taken: dict[int, int] = field(default_factory=dict)  # by call: the attempt whose answer the agent used
    latencies: list[tuple[str, float]] = field(
        default_factory=list
    )  # cue and seconds of each answer that the agent used
    errors_right: int = 0  # faults reported in a way the agent can act on, or hidden from it by a retry
    refused: int = 0  # calls for a model that is not served, which the gateway refused
    error: str = ""  # why the agent could not continue


def build_script(scenario: Scenario, rollout: str) -> dict[str, list[Json]]:
    """Build the script for the engine: the behaviors of each step."""
    steps = {}
    for n, call in enumerate(scenario.calls()):
        steps[f"{rollout}.{n}"] = [asdict(_behavior(attempt)) for attempt in call.attempts]
    return steps


def _behavior(attempt: Answer | Fault) -> Behavior:
    if isinstance(attempt, Fault):
        cut = attempt.cut_after or None
        text = attempt.answer.to_text()
        return Behavior(text, status=attempt.status, drop=attempt.drop, cut_after=cut, pace_s=0.01)
    return Behavior(
        attempt.to_text(),
        attempt.odd,
        attempt.finish,
        delay_s=attempt.delay_s,
        pace_s=attempt.pace_s,
        sees=attempt.sees,
    )


class Agent:
    """An agent that plays one rollout."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        client: Client,
        scenario: Scenario,
        rollout: str,
        base_url: str,
        key: str,
        *,
        stream: bool,
    ) -> None:
        self.played = AgentRun()
        self._http, self._client, self._scenario = http, client, scenario
        self._rollout, self._base_url, self._key, self._stream = rollout, base_url, key, stream
        self._lines: dict[str, Conversation] = {}
        self._numbers = {id(call): n for n, call in enumerate(scenario.calls())}
        self._renamed = 0

    async def play(self) -> AgentRun:
        try:
            await self._run_steps(self._scenario.steps)
        except AgentGaveUp as error:
            self.played.error = str(error)
        except ExceptionGroup as group:
            self.played.error = str(group.exceptions[0])
        return self.played

    async def _run_steps(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Together):
                async with asyncio.TaskGroup() as group:
                    for each in step.lists:
                        group.create_task(self._run_steps(each))
            elif isinstance(step, Call):
                await self._call(step)
            else:
                self._apply(step)

    def _apply(self, step: Start | Say | Results | System | Tools | Edit | Rewind) -> None:
        if isinstance(step, Start):
            self._lines[step.line] = Conversation(step.system, _list_tools(step), [Message("user", step.task)])
            return
        line = self._lines[step.line]
        if isinstance(step, Say):
            line.messages.append(Message("user", step.text))
        elif isinstance(step, System):
            line.system = step.text
        elif isinstance(step, Tools):
            line.tools = tuple(tool for tool in TOOLS if tool["name"] in step.names)
        elif isinstance(step, Edit):
            answers = [message for message in line.messages if message.role == "assistant"]
            answers[step.turn].text = step.text
            answers[step.turn].reasoning = ""
        elif isinstance(step, Rewind):
            while line.messages.pop().role != "assistant":
                pass
        else:
            calls = line.messages[-1].calls
            if len(calls) != len(step.texts):
                raise AgentGaveUp(f"the gateway returned {len(calls)} tool calls, but the model made {len(step.texts)}")
            for call, text in zip(calls, step.texts, strict=True):
                line.messages.append(Message("tool", text, answers=call))

    async def _call(self, call: Call) -> None:
        line = self._lines[call.line]
        number = self._numbers[id(call)]
        cue = f"{self._rollout}.{number}"
        _add_cue(line, cue)
        for attempt in range(_ATTEMPTS):
            planned = call.attempts[min(attempt, len(call.attempts) - 1)]
            began = time.perf_counter()
            try:
                async with asyncio.timeout(call.hang_up_s if call.hang_up_s and attempt == 0 else None):
                    message = await self._request(line, attempt, UNSERVED_MODEL if call.unserved else MODEL)
            except TimeoutError:
                if call.gives_up:
                    return
                continue
            except ReplyError as broken:
                if call.unserved and 400 <= broken.status < 500:
                    self.played.refused += 1
                    return
                if isinstance(planned, Fault):
                    self.played.errors_right += not broken.status or broken.status in planned.expected_statuses
                elif attempt == _ATTEMPTS - 1 or (400 <= broken.status < 500 and broken.status != 429):
                    raise AgentGaveUp(f"{cue}: {broken.status} {broken}") from None
                if call.gives_up:
                    return
                await asyncio.sleep(0.05)
                continue
            spent = time.perf_counter() - began
            # A gateway that retried the engine itself has hidden the planned faults from the agent.
            self.played.errors_right += sum(isinstance(each, Fault) for each in call.attempts[attempt:])
            self.played.taken[number] = _find_attempt(call, message)
            self.played.latencies.append((cue, spent))
            line.messages.append(self._apply_habits(message))
            return
        raise AgentGaveUp(f"{cue}: no answer after {_ATTEMPTS} attempts")

    async def _request(self, line: Conversation, attempt: int, model: str) -> Message:
        request = self._client.build_request(
            line, model=model, key=self._key, stream=self._stream, temperature=self._scenario.temperature
        )
        headers = {**request.headers, "x-stainless-retry-count": str(attempt)}
        body = orjson.dumps(request.body)
        headers["content-type"] = "application/json"
        try:
            async with self._http.post(self._base_url + request.path, data=body, headers=headers) as response:
                if response.status != 200:
                    raise ReplyError((await response.text())[:300], response.status)
                if not self._stream:
                    return self._client.read_reply(orjson.loads(await response.read()))
                events: list[Event] = []
                async for event in _read_events(response):
                    events.append(event)
                    if self._client.is_last_event(event):
                        break
                return self._client.read_events(events)
        except aiohttp.ClientError as error:
            raise ReplyError(f"{type(error).__name__}: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ReplyError(f"invalid reply: {type(error).__name__}: {error}") from None

    def _apply_habits(self, message: Message) -> Message:
        """Change the answer as this agent will send it back."""
        habits = self._scenario.habits
        if "drop_thinking" in habits:
            message.reasoning = ""
        if "trim" in habits:
            message.text, message.reasoning = message.text.strip(), message.reasoning.strip()
        for call in message.calls:
            self._change(call, habits)
        return message

    def _change(self, call: ReceivedCall, habits: tuple[Habit, ...]) -> None:
        if "respell" in habits:
            arguments = json.loads(call.arguments)
            call.arguments = json.dumps(dict(reversed(arguments.items())), indent=1, ensure_ascii=True)
        if "rename_ids" in habits:
            self._renamed += 1
            call.id = f"mine_{self._renamed}"
            call.opaque = {name: value for name, value in call.opaque.items() if name != "id"}


def _find_attempt(call: Call, message: Message) -> int:
    """Find the attempt that an answer belongs to. A gateway may answer a retry with an earlier attempt's answer."""
    for n, attempt in enumerate(call.attempts):
        if isinstance(attempt, Answer) and [each.arguments for each in attempt.calls] == [
            json.loads(each.arguments) for each in message.calls
        ]:
            return n
    return len(call.attempts) - 1


def _add_cue(line: Conversation, cue: str) -> None:
    """Add the cue to every message since the last answer."""
    for message in _since_answer(line):
        if "[cue " not in message.text:
            message.text += f"\n[cue {cue}]"


def _since_answer(line: Conversation) -> Iterator[Message]:
    for message in reversed(line.messages):
        if message.role == "assistant":
            return
        yield message


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    name, data = "", b""
    async for raw in _read_lines(response):
        if raw.startswith(b"event:"):
            name = raw[6:].strip().decode()
        elif raw.startswith(b"data:"):
            data += raw[5:].strip()
        elif not raw and data:
            if data != b"[DONE]":
                with suppress(ValueError):
                    yield Event(name, orjson.loads(data))
            name, data = "", b""


async def _read_lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Read lines of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        rest += chunk
        *whole, rest = rest.split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest.rstrip(b"\r")
    yield b""


def _list_tools(step: Start) -> tuple[Json, ...]:
    return (*TOOLS, *(extra_tool(n) for n in range(step.more_tools))) if step.tools else ()
