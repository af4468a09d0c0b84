"""Data folders for tests of the web page: many rollouts, a long one, a hostile one. Written directly into a store, in seconds.

    add_rollouts(data, 10_000)               # groups of 8 in every state; ids `r00000` …, groups `first.0a1b2c3d.task-0001` …
    add_long_rollout(data)                   # `long`: 200 turns, 100,000 tokens, sub-agent, side call, retry, compaction
    add_hostile_rollouts(data)               # `hostile`: every text that an agent, a task or a runner can choose is markup
    async with serve(data) as g: …           # a gateway on it; `g.root` is its address, `g.app.admin_key` its key

Call them before a gateway opens the folder: they lock it. The traces are well formed (checksums, prefix chains) and use the builtin
tokenizer, but no renderer produced them, so `serve` hides them from `tests/verify/everywhere.py`. Used by `tests/server/test_page*.py`, the
browser tests and `bench/page.py`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests import kit
from turngate.engines.base import Engine
from turngate.engines.scripted import Script, ScriptedTurn
from turngate.store.events import NewEvent, insert_event
from turngate.store.outcomes import RecordedOutcome
from turngate.store.store import _INSERT_CONTEXT, _INSERT_SAMPLED, Store, _node_row
from turngate.trace.message_equality import DIGEST_SIZE
from turngate.trace.session import SessionConfig
from turngate.trace.tree import Cause, Context, ContextInfo, Node, Sampled, SampledInfo, Trace
from turngate.types import ID_DTYPE, LOGPROB_DTYPE, CallSignals, Limits

Json = Any
BATCH = "first.0a1b2c3d"
MODEL = "Qwen/Qwen3-8B"
MARKUP = '<img src=x onerror="window.__ran=1"><script>window.__ran=1</script></textarea>\'"&lt;b&gt;\u202e javascript:alert(1)'
STAGES = (
    "sandbox",
    "files",
    "setup",
    "session",
    "relay",
    "launch",
    "agent",
    "seal",
    "collect",
    "clean",
    "grade",
    "record",
)


@asynccontextmanager
async def serve(
    data: Path, script: Script | Sequence[ScriptedTurn] = (), *, engine: Engine | None = None, **config: Any
) -> AsyncIterator[kit.Running]:
    """Run a gateway on such a folder, then rename its database: handwritten traces must not be verified."""
    async with kit.gateway(script, engine=engine, data=data, **config) as running:
        try:
            yield running
        finally:
            (data / "turngate.db").rename(data / "looked-at.db")


class Builder:
    """Writes sessions in one transaction, with given times and unique ids."""

    def __init__(self, store: Store, db: Any) -> None:
        self._store, self._db = store, db
        self.vocabulary = kit.tokenizer().digest

    def session(
        self,
        name: str,
        opened: float,
        *,
        status: str = "sealed",
        closed: float | None = None,
        stop: str = "",
        with_event: bool = True,
        **config: Json,
    ) -> int:
        """Add a session and return its key. `config`: fields of `SessionConfig`."""
        settings = SessionConfig(**{"model": MODEL, **config})
        row = (name, name.encode() * 2, msgspec.json.encode(settings), opened, closed, status, self.vocabulary, stop)
        key = self._db.execute(
            "INSERT INTO sessions (id, secret, config, opened, closed, status, vocabulary, stop) VALUES (?,?,?,?,?,?,?,?)"
            " RETURNING key",
            row,
        ).fetchone()[0]
        if with_event:
            self.event(name, "opened", {"mode": settings.mode, "model": settings.model}, opened)
        return int(key)

    def event(self, name: str, kind: str, data: Json, at: float) -> None:
        insert_event(self._db, NewEvent(name, kind, msgspec.json.encode(data), at))

    def node(self, key: int, node: Node, messages: Json) -> None:
        row = _node_row(key, node, msgspec.json.encode(messages))
        if isinstance(node, Context):
            self._db.execute(_INSERT_CONTEXT, row)
        else:
            self._db.execute(_INSERT_SAMPLED, (*row, key))

    def outcome(self, key: int, name: str, outcome: RecordedOutcome, at: float) -> None:
        written = outcome.encode()
        self._db.execute("INSERT INTO outcomes VALUES (?,?,?)", (key, at, written))
        self.event(name, "outcome", outcome.event_data(), at)
        for completed in self._store.feeds.enter_outcome(self._db, key, name, written):
            insert_event(self._db, completed)


@contextmanager
def open_builder(data: Path) -> Iterator[Builder]:
    data.mkdir(parents=True, exist_ok=True)
    tokenizer = kit.tokenizer()
    store = Store(data)
    try:
        store.set_setting(f"tokenizer:{tokenizer.digest}", str(tokenizer.folder.absolute()))
        with store._writing() as db:
            yield Builder(store, db)
    finally:
        store.close()


class TraceBuilder:
    """Writes a growing trace."""

    def __init__(self, builder: Builder, key: int, name: str, at: float) -> None:
        self._builder, self._key, self._name = builder, key, name
        self._trace = Trace()
        self.at = at
        self.tokens = 0

    def ask(
        self,
        messages: Sequence[Json],
        parent: Sampled | None = None,
        *,
        cause: Cause | None = None,
        signals: CallSignals = CallSignals(),
        tools: bool = True,
        ids: Sequence[int] | None = None,
    ) -> Context:
        """Add messages and the generation prompt."""
        rendered = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        before = "<|im_end|>\n" if parent is not None else ""
        if ids is None:
            ids = kit.tokenizer().encode(f"{before}{rendered}<|im_start|>assistant\n")
        number = self._trace.reserve_id()
        roles = "".join(m["role"][0] for m in messages)
        info = ContextInfo(
            b"p" * DIGEST_SIZE,
            bytes([number % 251]) * DIGEST_SIZE * len(messages),
            roles,
            tools,
            cause,
            "chat",
            signals,
        )
        node = Context(number, parent, np.array(ids, ID_DTYPE), info)
        self._trace.add_context(node)
        self._builder.node(self._key, node, list(messages))
        self.tokens += node.size
        return node

    def answer(
        self,
        context: Context,
        text: str = "",
        *,
        message: Json = None,
        ids: Sequence[int] | None = None,
        logprobs: Sequence[float] | bool | None = True,
        cause: Cause | None = None,
        finish: str = "stop",
        version: int = 0,
        seconds: float = 1.0,
        **info: Json,
    ) -> Sampled:
        if ids is None:
            ids = [*kit.tokenizer().encode(text), kit.renderer().stop_ids[0]]
        known = [-((i * 37 + token) % 97) / 32 for i, token in enumerate(ids)] if logprobs is True else logprobs or None
        number = self._trace.reserve_id()
        meaning = bytes([number % 251]) * DIGEST_SIZE
        facts = SampledInfo(
            meaning,
            b"",
            meaning,
            finish,
            version,
            version,
            self.at,
            self.at + seconds,
            cause=cause,
            **info,  # type: ignore[arg-type]
        )
        scores = None if known is None else np.array(known, LOGPROB_DTYPE)
        node = Sampled(number, context, np.array(ids, ID_DTYPE), scores, facts)
        self._trace.add_sampled(node)
        self._builder.node(self._key, node, {"role": "assistant", "content": text, **(message or {})})
        self.at += seconds
        data = {
            "node": number,
            "finish": finish,
            "prompt_tokens": context.length,
            "sampled_tokens": node.size,
            "cause": cause,
        }
        self._builder.event(self._name, "turn", data, self.at)
        self.tokens += node.size
        return node


def add_rollouts(data: Path, rollouts: int = 10_000, *, n: int = 8, start: float | None = None) -> None:
    """Add groups of `n`, one rollout every two seconds until now: graded, failed in every class and cancelled.

    The newest are still running, and one is starting. The policy's version rises every 500 rollouts.
    """
    first = time.time() - 2.0 * rollouts if start is None else start
    with open_builder(data) as builder:
        versions = 0
        for number in range(rollouts):
            opened = first + 2.0 * number
            if number and number % 500 == 0:
                versions += 1
                builder.event("", "fence", {"paused": False, "version": versions}, opened)
            _rollout(builder, number, n, opened, versions, running=number >= rollouts - min(12, rollouts // 4))
        name = f"{BATCH}.task-{rollouts // n:04}"
        begun = {"rollout": f"{name}.{rollouts % n}", "attempt": 1, "task": f"task-{rollouts // n:04}", "group": name}
        builder.event(
            "starting", "stage", {"stage": "setup", **begun, "agent": "pi", "model": MODEL}, first + 2.0 * rollouts
        )


def _rollout(builder: Builder, number: int, n: int, opened: float, version: int, *, running: bool) -> None:
    name, task, index = f"r{number:05}", f"task-{number // n:04}", number % n
    group = f"{BATCH}.{task}"
    agent = ("pi", "codex", "claude-code")[number % 3]
    metadata = {
        "task": task,
        "agent": agent,
        "agent_version": "1.0",
        "sandbox": "docker",
        "group": group,
        "batch": BATCH,
        "rollout": f"{group}.{index}",
        "attempt": 1,
    }
    about = {"rollout": metadata["rollout"], "attempt": 1}
    for position, stage in enumerate(STAGES[:7]):
        builder.event(name, "stage", {"stage": stage, **about}, opened - 1 + position * 0.1)
    cancelled = number % 13 == 12
    ended = None if running else opened + 1.8
    status = "open" if running else "cancelled" if cancelled else "sealed"
    stop = "cancelled" if status == "cancelled" else ""
    key = builder.session(
        name, opened, status=status, closed=ended, stop=stop, metadata=metadata, limits=Limits(turns=50)
    )
    trace = TraceBuilder(builder, key, name, opened)
    context = trace.ask([{"role": "user", "content": f"Mend {task}."}])
    trace.answer(context, f"Done, number {number}.", version=version, seconds=0.5)
    if ended is None:
        return
    builder.event(name, status, {"stop": stop, "turns": 1}, ended)
    if cancelled:
        builder.event(
            name, "stage", {"stage": "done", **about, "status": "cancelled", "class": None, "reward": None}, ended
        )
        return
    outcome = _outcome(number, group, task, metadata["rollout"], agent)
    builder.event(name, "stage", {"stage": "grade", **about}, ended + 0.05)
    builder.outcome(key, name, outcome, ended + 0.1)
    done = {"stage": "done", **about, "status": "finished", "class": outcome.kind, "reward": outcome.reward}
    builder.event(name, "stage", done, ended + 0.11)


def _outcome(number: int, group: str, task: str, rollout: str, agent: str) -> RecordedOutcome:
    data = {"rollout": rollout, "status": "finished", "agent": agent, "sandbox": "docker"}
    about: Json = {"group": group, "task": task}
    match number % 20:
        case 3:
            fault = {"stage": "setup", "boundary": "sandbox"}
            logs = {"stderr": f"no space left on device\nline {number}\n"}
            message = f"setup: no space left on device (job {number})"
            return RecordedOutcome(
                kind="infrastructure fault",
                message=message,
                data={**data, "status": "error", "fault": fault, "logs": logs},
                **about,
            )
        case 7:
            logs = {"stdout": "began\n", "stderr": "Traceback: boom\n"}
            return RecordedOutcome(
                kind="agent failed",
                message="it ended with exit code 2",
                data={**data, "status": "failed", "exit_code": 2, "logs": logs},
                **about,
            )
        case 11:
            return RecordedOutcome(kind="invalid task", message="tests/test.sh: not found", data=data, **about)
        case _:
            reward = float((number // 3) % 2)
            return RecordedOutcome(
                kind="graded", reward=reward, resolved=reward == 1.0, data={**data, "seconds": {"agent": 1.5}}, **about
            )


def add_long_rollout(
    data: Path, turns: int = 200, tokens: int = 100_000, *, name: str = "long", running: bool = False
) -> None:
    """Add one rollout with every kind of branch."""
    opened = time.time() - turns * 2.0
    rng = np.random.default_rng(7)
    words = ["def", " value", " return", "\n    ", " naïve", " 漢字", " 🙂", "(self)", " == ", " 3.14", "\n", " café"]
    vocabulary = [i for word in words for i in kit.tokenizer().encode(word)]
    metadata = {
        "task": "long-task",
        "agent": "claude-code",
        "sandbox": "docker",
        "group": f"{BATCH}.long-task",
        "batch": BATCH,
        "rollout": f"{BATCH}.long-task.0",
    }
    with open_builder(data) as builder:
        for position, stage in enumerate(STAGES[:7]):
            builder.event(
                name, "stage", {"stage": stage, "rollout": metadata["rollout"], "attempt": 1}, opened - 7 + position
            )
        key = builder.session(
            name,
            opened,
            status="open" if running else "sealed",
            closed=None if running else opened + turns * 2.0,
            metadata=metadata,
        )
        trace = TraceBuilder(builder, key, name, opened)
        each = max(4, tokens // turns)
        sampled = max(2, each // 8)
        side = trace.ask([{"role": "user", "content": "Give this a title."}], tools=False)
        trace.answer(side, "Mending a parser")
        last: Sampled | None = None
        first: list[int] = []
        for turn in range(turns - 4):
            messages: list[Json] = [
                {"role": "tool", "tool_call_id": f"call_{turn - 1}", "content": f"output {turn}\n" * 60}
            ]
            cause: Cause | None = None
            if last is None:
                messages = [
                    {"role": "system", "content": "You mend code."},
                    {"role": "user", "content": "Mend the parser."},
                ]
            elif turn == turns // 2:
                cause, last = "compaction", None
                messages = [
                    {"role": "system", "content": "You mend code."},
                    {"role": "user", "content": "So far: half of it is mended."},
                ]
            ids = rng.choice(vocabulary, each - sampled).tolist()
            if cause is not None:
                ids[:8] = first[:8]
            context = trace.ask(messages, last, cause=cause, ids=ids)
            if turn == 0:
                first = ids
            message = {
                "reasoning": f"Step {turn}: look.",
                "tool_calls": [{"id": f"call_{turn}", "name": "bash", "arguments": '{"command": "ls"}'}],
            }
            if turn == 10:
                trace.answer(context, "Lost.", finish="abort")
            last = trace.answer(
                context,
                f"I look at part {turn}.",
                ids=rng.choice(vocabulary, sampled).tolist(),
                message=message,
                finish="tool_calls",
                version=turn * 4 // turns,
                cause="retry" if turn == 10 else None,
            )
        helper = trace.ask(
            [{"role": "user", "content": "Search for uses."}],
            cause="subagent",
            signals=CallSignals("t2", "t1", "subagent"),
        )
        trace.answer(helper, "There are three.", version=3)
        if not running:
            builder.event(name, "sealed", {"stop": "", "turns": turns}, trace.at)
            details: Json = {
                "rollout": metadata["rollout"],
                "status": "finished",
                "logs": {"stdout": "ok\n", "verifier": "3 passed\n"},
            }
            outcome = RecordedOutcome(
                kind="graded", reward=1.0, resolved=True, group=metadata["group"], task="long-task", data=details
            )
            builder.outcome(key, name, outcome, trace.at + 1)


def add_hostile_rollouts(data: Path, *, name: str = "hostile") -> None:
    """Add two rollouts of one group with markup in every name, message, tool, reasoning, log and error."""
    opened = time.time() - 60
    group = f"evil.{MARKUP}"
    metadata = {
        "task": MARKUP,
        "agent": MARKUP,
        "agent_version": MARKUP,
        "sandbox": MARKUP,
        "group": group,
        "rollout": f"{group}.0",
        "batch": MARKUP,
    }
    with open_builder(data) as builder:
        for number, own in enumerate((name, f"{name}-2")):
            key = builder.session(
                own, opened + number, closed=opened + 10, stop=MARKUP, model=MARKUP, metadata=metadata
            )
            builder.event(own, "stage", {"stage": MARKUP, "rollout": MARKUP, "attempt": 1}, opened)
            trace = TraceBuilder(builder, key, own, opened)
            context = trace.ask([{"role": "system", "content": MARKUP}, {"role": "user", "content": MARKUP}])
            call = {"id": MARKUP, "name": MARKUP, "arguments": MARKUP}
            turn = trace.answer(
                context, MARKUP, message={"reasoning": MARKUP, "tool_calls": [call]}, finish="tool_calls", fault=MARKUP
            )
            trace.answer(
                trace.ask([{"role": "tool", "tool_call_id": MARKUP, "content": MARKUP * 3}], turn),
                MARKUP,
                cause="retry",
            )
            trace.answer(trace.ask([{"role": "user", "content": MARKUP}], turn, cause="edited"), MARKUP)
            builder.event(own, "sealed", {"stop": MARKUP, "turns": 3}, opened + 10)
            logs = {"stdout": MARKUP, "stderr": MARKUP, "verifier": MARKUP}
            fault = {"stage": MARKUP, "boundary": MARKUP}
            details: Json = {
                "status": MARKUP,
                "rollout": MARKUP,
                "logs": logs,
                "fault": fault,
                "seconds": {MARKUP: 1.0},
                MARKUP: MARKUP,
            }
            builder.outcome(
                key,
                own,
                RecordedOutcome(
                    kind="agent failed", reward=0.0, message=MARKUP, group=group, task=MARKUP, data=details
                ),
                opened + 11,
            )
