"""Check that the gateway records an agent's calls completely, by running the agent on a small task with the scripted engine.

By default, the engine replies with the `[[check]]` steps from the agent's description, so the expected result is known.
The report contains a result for each promise that was checked, such as that the trace contains every model call. If a promise is broken,
its result names the cause where possible, such as greedy sampling or a tool that the agent does not offer.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from turngate.agents.installation import Installation
from turngate.agents.launch import ModelLimits
from turngate.agents.spec import AgentSpec, CheckStep
from turngate.client.gateway import GatewayClient
from turngate.client.protocol import DecodedTrace, SampleRow, TraceNode, TraceTurn
from turngate.config import ServeConfig
from turngate.engines.scripted import Scripted, derive_logprobs
from turngate.errors import AgentError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.rollout.call_log import CallLog
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.outcome import Outcome, ProgressCallback
from turngate.rollout.playbook import Playbook, Scene, fill_steps
from turngate.rollout.rollout import Rollout
from turngate.rollout.spec import RolloutSpec
from turngate.sandboxes.base import Backend, Network
from turngate.server.asgi import App
from turngate.server.run import run_embedded
from turngate.tasks.task import Task
from turngate.trace.sample import RowSpan, TrainingPolicy
from turngate.types import LOGPROB_DTYPE, NEUTRAL, Json

MODEL = "checked"
INSTRUCTION = "In the file notes.txt, change the word colour to color. Show the file, then write a file done.txt that holds the word done."
BEFORE = "alpha\ncolour\nomega\n"
AFTER = "alpha\ncolor\nomega\n"


class PromiseResult(msgspec.Struct, frozen=True):
    """Whether one promise of an agent check was kept, such as that the trace contains every model call."""

    name: str
    ok: bool
    detail: str = ""


class CheckReport(msgspec.Struct, frozen=True):
    """The results of a check, with the outcome, trace and training rows that they are based on."""

    outcome: Outcome
    results: tuple[PromiseResult, ...]
    trace: DecodedTrace | None  # None if no session was opened
    samples: list[SampleRow]
    folder: Path
    tools: tuple[str, ...]  # the names of the tools that the agent offered

    @property
    def passed(self) -> bool:
        return all(result.ok for result in self.results)


class CheckOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to check an agent: its sandbox, its task, the model's limits, and the replies of the scripted engine."""

    image: str = ""
    network: Network = "none"
    # Returns the replies for a working folder; None: the replies are the agent's [[check]] steps.
    scenes: Callable[[str], tuple[Scene, ...]] | None = None
    instruction: str = INSTRUCTION
    model: str = MODEL
    model_limits: ModelLimits = ModelLimits()
    max_context: int | None = None  # the engine's context length; None: as in `model_limits`
    session: Mapping[str, Json] = {}  # additional session settings
    options: Mapping[str, str] = {}  # values of the agent's own options
    timeout_s: float = 240.0
    around: Callable[[App], App] = lambda app: app  # middleware between agent and gateway


class AgentCheck(msgspec.Struct, frozen=True):
    """A check that is ready to run. Its fields are public so that tests can inspect and control them."""

    engine: Scripted
    gateway: GatewayClient
    rollout: Rollout
    folder: Path
    log: CallLog
    # The agent whose [[check]] steps are the engine's replies; None if `CheckOptions.scenes` returns the replies.
    steps: AgentSpec | None

    async def run(self) -> CheckReport:
        """Run the rollout, and return the report."""
        await self.rollout.run()
        return await self.build_report()

    async def build_report(self) -> CheckReport:
        """Check the promises against what has been recorded so far, and return the report."""
        outcome = self.rollout.outcome
        trace = await self.gateway.trace(outcome.session) if outcome.session else None
        samples = await self.gateway.samples(outcome.session, everything=True) if outcome.session else []
        folder = self.folder / "rollouts" / outcome.session
        results = tuple(self._evaluate(outcome, trace, samples, folder))
        return CheckReport(outcome, results, trace, samples, folder, tuple(tool.name for tool in self.log.tools))

    def _evaluate(
        self, outcome: Outcome, trace: DecodedTrace | None, samples: list[SampleRow], folder: Path
    ) -> Iterator[PromiseResult]:
        nodes = trace.nodes if trace is not None else []
        turns = [node for node in nodes if isinstance(node, TraceTurn)]
        spans = [span for row in samples for span in row.spans]
        yield _check_end(outcome)
        if self.steps is not None:
            yield _check_refusals(self.log)
            if self.steps.check_task:
                yield _check_work(folder, self.steps, self.log)
            yield _check_rows(samples, nodes)
        yield _check_calls(outcome, turns, self.engine)
        yield _check_exactness(nodes, turns, self.engine)
        yield _check_training(spans, self.log)
        yield _check_side_calls(spans)
        if outcome.collected.transcript_turns is not None:
            yield _check_transcript(outcome)


async def check_agent(
    agent: AgentSpec,
    installed: Installation,
    backend: Backend,
    folder: Path,
    options: CheckOptions = CheckOptions(),
    watch: ProgressCallback = lambda progress: None,
) -> CheckReport:
    """Check an agent, and return the report. The recorded data and the agent's files are kept in `folder`."""
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
    """Start a gateway with the scripted engine, and yield a check that is ready to run. The gateway stops at the end of the block."""
    if not agent.check and options.scenes is None:
        raise AgentError(
            f"{agent.name}: the agent's description has no [[check]] steps; add at least one", param="check"
        )
    renderer, certificate = load_renderer(BUILTIN_TOKENIZER, model="", family="auto")
    scenes: list[Scene] = []
    engine = Scripted(
        Playbook(renderer, scenes),
        model=options.model,
        max_context=options.max_context or options.model_limits.context_tokens,
        keep=100_000,
    )
    config = ServeConfig(data=str(folder / "data"), model=options.model, port=0, alive_s=2.0)
    log = CallLog()

    def set_up(workdir: str) -> None:
        if options.scenes is not None:
            scenes[:] = options.scenes(workdir)
        else:
            has_calls = any(step.calls for step in agent.check)
            scenes[:] = [Scene(INSTRUCTION[:40], fill_steps(agent.check, {"workdir": workdir}), tools=has_calls)]

    async with AsyncExitStack() as stack:
        files = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="turngate-check-")))
        (files / "notes.txt").write_text(BEFORE)
        address = await stack.enter_async_context(
            run_embedded(
                config, engine=engine, renderer=(renderer, certificate), wrap=lambda app: log.wrap(options.around(app))
            )
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
            options=options.options,
            model_limits=options.model_limits,
            folder=folder / "rollouts",
        )
        rollout = Rollout(spec, gateway, connector, watch, on_sandbox_ready=set_up)
        yield AgentCheck(engine, gateway, rollout, folder, log, agent if options.scenes is None else None)


def _check_end(outcome: Outcome) -> PromiseResult:
    fault = f"{outcome.fault.stage}: {outcome.fault.message}" if outcome.fault else _describe_end(outcome)
    return PromiseResult(
        "the agent ran and exited on its own", outcome.status == "finished", outcome.status + ": " + fault
    )


def _check_refusals(log: CallLog) -> PromiseResult:
    return PromiseResult(
        "the gateway accepted every call", not log.refused, log.describe_refusals() or f"calls: {len(log.model_calls)}"
    )


def _check_work(folder: Path, agent: AgentSpec, log: CallLog) -> PromiseResult:
    notes, done = folder / "work" / "notes.txt", folder / "work" / "done.txt"
    written = notes.read_text() if notes.is_file() else "missing"
    ok = written == AFTER and done.is_file() and done.read_text().strip() == "done"
    seen = f"notes.txt {written!r}, done.txt {'exists' if done.is_file() else 'missing'}"
    cause = "" if ok else _explain_unfinished_work(agent, log)
    return PromiseResult("the task is done", ok, f"{seen}; {cause}" if cause else seen)


def _explain_unfinished_work(agent: AgentSpec, log: CallLog) -> str:
    """Return why the agent could not follow the [[check]] steps, or "" if no reason is known."""
    if not log.model_calls:
        return "the agent made no model call; check that it reads the base URL and the key that its description sets"
    called = {call.tool: None for step in agent.check for call in step.calls}
    offered = {tool.name for tool in log.tools}
    if called and not offered:
        return (
            f"the agent offers no tools, but its [[check]] steps call {', '.join(called)}; write steps with only `say`, "
            "and set check_task = false if the agent cannot change files"
        )
    if missing := [name for name in called if name not in offered]:
        return (
            f"the [[check]] steps call {', '.join(missing)}, but the agent offers only {', '.join(sorted(offered))}; "
            "change the steps to call only the offered tools"
        )
    return ""


def _check_rows(samples: list[SampleRow], nodes: list[TraceNode]) -> PromiseResult:
    main = [row for row in samples if any(span.role == "main" for span in row.spans)]
    turns = [len(row.spans) for row in main]
    seen = f"turns per row: {', '.join(map(str, turns)) or 'none'}"
    cause = _explain_rows(nodes) if len(main) > 1 else ""
    return PromiseResult(
        "the main conversation is exactly one row", len(main) == 1, f"{seen}; {cause}" if cause else seen
    )


def _explain_rows(nodes: list[TraceNode]) -> str:
    """Describe each turn of the main conversation that begins a branch, with the cause of the fork."""
    by_id = {node.id: node for node in nodes}
    turns = [node for node in nodes if isinstance(node, TraceTurn)]
    number_of = {turn.id: number for number, turn in enumerate(turns, 1)}
    reasons = []
    for turn in turns:
        if turn.role != "main" or not turn.cause:
            continue
        reason = f"turn {number_of[turn.id]} begins a branch ({turn.cause})"
        start = by_id[turn.parent].parent
        replaced = [other for other in turns if other.id < turn.id and by_id[other.parent].parent == start]
        if turn.cause == "edited" and replaced:
            reason += _explain_edit(replaced[-1], number_of[replaced[-1].id])
        reasons.append(reason)
    return "; ".join(reasons)


def _explain_edit(replaced: TraceTurn, number: int) -> str:
    """Say which turn's answer the agent changed, and suggest a fix if the answer has several tool calls."""
    calls = len(replaced.decode_message().tool_calls)
    changed = f": the agent changed the answer of turn {number} in its history"
    hint = f"; turn {number} has {calls} tool calls: if the agent runs one tool per reply, write [[check]] steps with one call each"
    return changed + hint if calls > 1 else changed


def _check_calls(outcome: Outcome, turns: list[TraceTurn], engine: Scripted) -> PromiseResult:
    made = "an unknown number" if outcome.calls is None else outcome.calls
    return PromiseResult(
        "the trace contains every model call",
        bool(turns) and len(engine.received) == len(turns) and outcome.calls in (None, len(turns)),
        f"calls: {made} by the agent, {len(engine.received)} at the engine, {len(turns)} in the trace",
    )


def _check_exactness(nodes: list[TraceNode], turns: list[TraceTurn], engine: Scripted) -> PromiseResult:
    """Check that the recorded prompts and log-probabilities equal the engine's."""
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
    return PromiseResult("every recorded token id was received or sampled by the engine", ok, f"turns: {len(turns)}")


def _check_training(spans: list[RowSpan], log: CallLog) -> PromiseResult:
    """Check that every turn with a trained role is trained, and give the reasons for those that are not."""
    due = [span for span in spans if span.role in TrainingPolicy().roles and not span.reason.startswith("trained in")]
    reasons = list(dict.fromkeys(span.reason for span in due if not span.trained))
    seen = f"turns: {len(due)}" if not reasons else f"not trained: {'; '.join(reasons)}"
    asks = _describe_sampling(log)
    return PromiseResult(
        "every turn of the agent can be trained", bool(due) and not reasons, f"{seen}; {asks}" if asks else seen
    )


def _describe_sampling(log: CallLog) -> str:
    """Return the sampling settings that the agent asked for and that would bias its samples, or "" if there are none."""
    asked = {
        f"{name} {value:g}": None
        for call in log.model_calls
        for name, value in call.sampling.items()
        if name != "seed" and value is not None and value != getattr(NEUTRAL, name)
    }
    return f"the agent asks for {', '.join(asked)}" if asked else ""


def _check_side_calls(spans: list[RowSpan]) -> PromiseResult:
    sides = [span for span in spans if span.role not in TrainingPolicy().roles]
    return PromiseResult(
        "side calls are labeled and excluded from training",
        not any(span.trained for span in sides),
        f"side calls: {sum(span.role in ('side', 'summary') for span in sides)}",
    )


def _check_transcript(outcome: Outcome) -> PromiseResult:
    collected = outcome.collected
    return PromiseResult(
        "the agent's own transcript matches the trace, turn by turn",
        not collected.differences and bool(collected.transcript_turns),
        "; ".join(collected.differences) or f"turns: {collected.transcript_turns}",
    )


def _describe_end(outcome: Outcome) -> str:
    """Return the agent's exit code or the reason why it was stopped and, if it failed, the end of its output."""
    ended = outcome.stop if outcome.exit_code is None else f"exit code {outcome.exit_code}"
    if outcome.status == "finished":
        return ended
    output = outcome.collected.stderr.strip() or outcome.collected.stdout.strip()
    printed = f"it printed: {output[-300:]}" if output else "it printed nothing"
    return f"{ended}; {printed}" if ended else printed


__all__ = ["AgentCheck", "CheckOptions", "CheckReport", "CheckStep", "PromiseResult", "check_agent", "prepare_check"]
