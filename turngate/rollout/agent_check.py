"""Check that the gateway captures an agent completely: run it on a small task with the scripted engine, and compare the results.

The engine replies with the `[[check]]` steps from the agent's description (read, edit, run, finish), so the expected result is known.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from turngate.agents.install import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec, CheckStep
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import DecodedTrace, SampleRow, TraceNode, TraceTurn
from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted, derive_logprobs
from turngate.errors import AgentError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, ProgressCallback
from turngate.rollout.playbook import Playbook, Scene, fill_steps
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend, Network
from turngate.server.asgi import App
from turngate.server.run import run_embedded
from turngate.tasks.task import Task
from turngate.types import LOGPROB_DTYPE, Json

MODEL = "checked"
INSTRUCTION = "In the file notes.txt, change the word colour to color. Show the file, then write a file done.txt that holds the word done."
BEFORE = "alpha\ncolour\nomega\n"
AFTER = "alpha\ncolor\nomega\n"


class PromiseResult(msgspec.Struct, frozen=True):
    """The result of checking one promise."""

    name: str
    ok: bool
    detail: str = ""


class CheckReport(msgspec.Struct, frozen=True):
    """The results of a check, and the data they are based on."""

    outcome: Outcome
    results: tuple[PromiseResult, ...]
    trace: DecodedTrace | None  # None if no session was opened
    samples: list[SampleRow]
    folder: Path

    @property
    def passed(self) -> bool:
        return all(result.ok for result in self.results)


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a check."""

    image: str = ""
    network: Network = "none"
    scenes: Callable[[str], tuple[Scene, ...]] | None = (
        None  # a function of the working folder; None: the agent's own steps
    )
    instruction: str = INSTRUCTION
    model: str = MODEL
    model_limits: ModelLimits = ModelLimits()
    max_context: int | None = None  # the model's context length; None: as in `model_limits`
    session: Mapping[str, Json] = {}  # more session settings
    timeout_s: float = 240.0
    around: Callable[[App], App] = lambda app: app  # middleware between agent and gateway


class AgentCheck(msgspec.Struct, frozen=True):
    """A check that is ready to run. Its parts are public, so that tests can observe and modify it."""

    engine: Scripted
    gateway: GatewayClient
    rollout: Rollout
    folder: Path
    usual: bool  # the engine replies with the agent's own steps

    async def run(self) -> CheckReport:
        """Run the rollout, and return the report."""
        await self.rollout.run()
        return await self.build_report()

    async def build_report(self) -> CheckReport:
        """Evaluate the recording so far."""
        outcome = self.rollout.outcome
        trace = await self.gateway.trace(outcome.session) if outcome.session else None
        samples = await self.gateway.samples(outcome.session, everything=True) if outcome.session else []
        folder = self.folder / "rollouts" / outcome.session
        results = tuple(_evaluate(outcome, trace, samples, self.engine, folder, usual=self.usual))
        return CheckReport(outcome, results, trace, samples, folder)


async def check_agent(
    agent: AgentSpec,
    installed: Installation,
    backend: Backend,
    folder: Path,
    options: CheckOptions = CheckOptions(),
    watch: ProgressCallback = lambda progress: None,
) -> CheckReport:
    """Run a check. The recording and the agent's files are kept in `folder`."""
    async with prepare_check(agent, installed, backend, folder, options, watch) as prepared:
        return await prepared.run()


@asynccontextmanager
async def prepare_check(
    agent: AgentSpec,
    installed: Installation,
    backend: Backend,
    folder: Path,
    options: CheckOptions = CheckOptions(),
    watch: ProgressCallback = lambda progress: None,
) -> AsyncIterator[AgentCheck]:
    """Start a gateway with the scripted engine, and yield a check that is ready to run on it."""
    if not agent.check and options.scenes is None:
        raise AgentError(f"{agent.name}: the agent's description has no [[check]] steps; add some", param="check")
    renderer, certificate = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    scenes: list[Scene] = []
    engine = Scripted(
        Playbook(renderer, scenes),
        model=options.model,
        max_context=options.max_context or options.model_limits.context_tokens,
        keep=100_000,
    )
    config = ServeConfig(data=str(folder / "data"), model=options.model, port=0, alive_s=2.0)

    def set_up(workdir: str) -> None:
        if options.scenes is not None:
            scenes[:] = options.scenes(workdir)
        else:
            scenes[:] = [Scene(INSTRUCTION[:40], fill_steps(agent.check, {"workdir": workdir}))]

    async with AsyncExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-check-")))
        (files / "notes.txt").write_text(BEFORE)
        address = await stack.enter_async_context(
            run_embedded(config, engine=engine, renderer=(renderer, certificate), wrap=options.around)
        )
        gateway = await stack.enter_async_context(GatewayClient(address.url, address.admin_key))
        connector = await stack.enter_async_context(GatewayConnector(address.url))
        spec = RolloutSpec(
            task=Task(id="check", instruction=options.instruction, files=files),
            agent=agent,
            installed=installed,
            backend=backend,
            model=options.model,
            timeout_s=options.timeout_s,
            image=options.image,
            network=options.network,
            session=options.session,
            model_limits=options.model_limits,
            folder=folder / "rollouts",
        )
        rollout = Rollout(spec, gateway, connector, watch, on_sandbox_ready=set_up)
        yield AgentCheck(engine, gateway, rollout, folder, options.scenes is None)


def _evaluate(
    outcome: Outcome,
    trace: DecodedTrace | None,
    samples: list[SampleRow],
    engine: Scripted,
    folder: Path,
    *,
    usual: bool,
) -> list[PromiseResult]:
    nodes = trace.nodes if trace is not None else []
    turns = [node for node in nodes if isinstance(node, TraceTurn)]
    fault = f"{outcome.fault.stage}: {outcome.fault.message}" if outcome.fault else _describe_end(outcome)
    results = [
        PromiseResult(
            "the agent ran and exited on its own", outcome.status == "finished", outcome.status + ": " + fault
        )
    ]
    if usual:
        results.append(_check_work(folder))
        results.append(_check_rows(samples))
    results += [
        PromiseResult(
            "the trace contains every model call",
            bool(turns) and len(engine.received) == len(turns) and outcome.calls in (None, len(turns)),
            f"{outcome.calls} calls by the agent, {len(engine.received)} at the engine, {len(turns)} in the trace",
        ),
        _check_exactness(nodes, turns, engine),
        _check_side_calls(samples),
    ]
    collected = outcome.collected
    if collected.transcript_turns is not None:
        agrees = not collected.differences and collected.transcript_turns > 0
        results.append(
            PromiseResult(
                "the agent's own transcript matches, turn by turn",
                agrees,
                "; ".join(collected.differences) or f"{collected.transcript_turns} turns",
            )
        )
    return results


def _check_work(folder: Path) -> PromiseResult:
    notes, done = folder / "work" / "notes.txt", folder / "work" / "done.txt"
    written = notes.read_text() if notes.is_file() else "missing"
    ok = written == AFTER and done.is_file() and done.read_text().strip() == "done"
    return PromiseResult(
        "the task is done", ok, f"notes.txt {written!r}, done.txt {'exists' if done.is_file() else 'missing'}"
    )


def _check_rows(samples: list[SampleRow]) -> PromiseResult:
    main = [row for row in samples if any(span.role == "main" for span in row.spans)]
    trained = [row for row in main if any(row.mask)]
    turns = [len(row.spans) for row in main]
    return PromiseResult(
        "the main conversation is exactly one row", len(main) == len(trained) == 1, f"rows of {turns} turns"
    )


def _check_exactness(nodes: list[TraceNode], turns: list[TraceTurn], engine: Scripted) -> PromiseResult:
    """Compare the recorded prompts and log-probabilities with those of the engine."""
    by_id = {node.id: node for node in nodes}
    sent = sorted(request.prompt.tobytes() for request in engine.received)
    recorded, scored = [], True
    for turn in turns:
        path = []
        parent: int | None = turn.parent
        while parent is not None:
            path.append(by_id[parent].ids)
            parent = by_id[parent].parent
        prompt = np.concatenate(path[::-1])
        recorded.append(prompt.tobytes())
        expected = np.array(derive_logprobs(prompt, turn.ids.tolist()), LOGPROB_DTYPE)
        scored = scored and turn.logprobs is not None and np.array_equal(turn.logprobs, expected)
    ok = sorted(recorded) == sent and scored
    return PromiseResult("every recorded id was received or sampled by the engine", ok, f"{len(turns)} turns")


def _check_side_calls(samples: list[SampleRow]) -> PromiseResult:
    wrong = [
        span.role
        for row in samples
        for span in row.spans
        if span.trained != (span.role in ("main", "subagent")) and not span.reason.startswith("trained in")
    ]
    sides = sum(span.role == "side" for row in samples for span in row.spans)
    return PromiseResult("side calls are labelled and excluded from training", not wrong, f"{sides} side calls")


def _describe_end(outcome: Outcome) -> str:
    printed = outcome.collected.stderr.strip() or outcome.collected.stdout.strip()
    return printed[-300:] if outcome.status != "finished" else f"exit code {outcome.exit_code}"


__all__ = ["AgentCheck", "CheckOptions", "CheckReport", "CheckStep", "PromiseResult", "check_agent", "prepare_check"]
