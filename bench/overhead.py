"""Measure what a turn costs in the gateway: `make bench`, or `python bench/overhead.py [--json FILE] [--profile]`. See README.md.

    calibrate → start engine and gateway → per scenario: run in lockstep rounds, check the recordings, call the engine directly
    → measure memory, each scenario in a new gateway → print the table

If the recordings are wrong (a prompt does not chain, a session does not have exactly one row), the run ends with an error and no numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import uvloop
from agent import Agent, Http, tools
from processes import Gateway, start_engine

from turngate.render import TemplateRenderer, Tokenizer

QWEN3 = Path.home() / ".cache" / "turngate" / "tokenizers" / "qwen3"
BUILTIN = Path(__file__).parents[1] / "turngate" / "render" / "builtin"
SAMPLED_IDS = 64  # ids per turn, including the stop id
SHOWN_TURNS = (5, 20, 50, 100)  # turns whose cost is shown
PACE_MS = 4.0  # between tokens, in the scenario that streams them singly


class Scenario(msgspec.Struct, frozen=True):
    sessions: int
    turns: int
    stream: bool = False
    paced: bool = False  # the engine sends its tokens singly, with pauses
    repeats: int = 3
    target_cpu_ms: float | None = None

    @property
    def name(self) -> str:
        how = "streamed, token by token" if self.paced else "streamed" if self.stream else "whole"
        return f"{self.sessions}×{self.turns} {how}"


SCENARIOS = (
    Scenario(16, 20, target_cpu_ms=2.0),
    Scenario(16, 20, stream=True, target_cpu_ms=2.0),
    Scenario(4, 100, target_cpu_ms=3.0),
    Scenario(4, 100, stream=True, target_cpu_ms=3.0),
    Scenario(8, 10, stream=True, paced=True, repeats=1),
    Scenario(1, 20),
)
MEMORY = ((Scenario(64, 20), 1.0), (Scenario(8, 100), 2.5))  # with the target in MB per open session
READY_S = 3.0
REFERENCE_MS = 24.0  # result of `calibrate` on the idle machine of the published numbers
MAX_GROWTH = 2.5  # target for the cost of turn 100 relative to turn 5


class Result(msgspec.Struct):
    """The result of one scenario. `cpu_ms` and `cpu_ms_at` are the best of the repeats; the rest are medians."""

    name: str
    cpu_ms: float
    cpu_ms_repeats: list[float]
    cpu_ms_at: dict[int, float]
    cpu_ms_scaled: float  # scaled to a machine that calibrates in REFERENCE_MS
    calibration_ms: list[float]
    turns_per_s: float
    added_ms_p50: float
    added_ms_p99: float
    gateway_ms_p50: float
    engine_ms_p50: float
    request_kb_at: dict[int, float]
    prompt_tokens_at: dict[int, int]
    target_cpu_ms: float | None


class Run(msgspec.Struct):
    """The measurements of one repeat."""

    cpu_ms: list[float]  # CPU of the gateway per turn, for each round
    wall_s: float
    cpu_s: float
    calibration_ms: float
    agents: list[Agent]


class Bench:
    """The tokenizer, the engine and the answers that all scenarios share."""

    def __init__(self, folder: Path, tokenizer: Path, *, omit_prompt_ids: bool = False) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.renderer = TemplateRenderer(Tokenizer(tokenizer))
        self.answers = make_answers(self.renderer)
        path = folder / f"answers-{tokenizer.name}.json"
        path.write_bytes(orjson.dumps(self.answers))
        self.engine = start_engine(folder, path, omit_prompt_ids=omit_prompt_ids)

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.stop()

    @contextmanager
    def gateway(self, name: str, profile: Path | None = None) -> Iterator[Gateway]:
        gateway = Gateway(self.folder, self.engine, self.tokenizer, name, profile)
        try:
            yield gateway
        finally:
            gateway.stop()

    # ── running ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def measure(self, gateway: Gateway, scenario: Scenario) -> Result:
        runs: list[Run] = []
        direct: list[list[float]] = []
        for _ in range(scenario.repeats):
            run = await self.run(gateway, scenario)
            rows = await self.check(gateway, scenario, run.agents)
            if not direct:  # once is enough, because the engine's times do not vary
                direct = await self.call_engine_directly(scenario, rows)
            await self.close_sessions(gateway, run.agents)
            runs.append(run)
        return _build_result(scenario, runs, direct, [span["start"] for span in rows[0]["spans"]])

    async def run(self, gateway: Gateway, scenario: Scenario) -> Run:
        await _get(self.engine.port, f"/bench/pace/{PACE_MS if scenario.paced else 0}")
        agents = [await self.agent(gateway, scenario, seed) for seed in range(scenario.sessions)]
        rounds: list[float] = []
        speed = calibrate()
        first = before = gateway.cpu_s()
        began = time.perf_counter()
        for _ in range(scenario.turns):
            await asyncio.gather(*(agent.turn() for agent in agents))
            after = gateway.cpu_s()
            rounds.append((after - before) * 1000 / scenario.sessions)
            before = after
        wall = time.perf_counter() - began
        await asyncio.sleep(0.05)  # include work done after the last byte
        return Run(rounds, wall, gateway.cpu_s() - first, (speed + calibrate()) / 2, agents)

    async def agent(self, gateway: Gateway, scenario: Scenario, seed: int) -> Agent:
        http = await Http.connect(gateway.port)
        opened = await _admin(gateway, "POST", "/admin/sessions", 201, b'{"model":"bench"}')
        return Agent(http, opened["id"], opened["api_key"], stream=scenario.stream, seed=seed)

    async def close_sessions(self, gateway: Gateway, agents: Sequence[Agent]) -> None:
        for agent in agents:
            agent.close()
            await _admin(gateway, "POST", f"/admin/sessions/{agent.session}/seal", 200, b"{}")

    async def call_engine_directly(self, scenario: Scenario, rows: Sequence[dict[str, Any]]) -> list[list[float]]:
        """Send the same prompts directly to the engine, with the same concurrency. Return seconds by round and session."""
        connections = [await Http.connect(self.engine.port) for _ in rows]
        rounds = []
        for turn in range(scenario.turns):
            bodies = [_build_completion(row, turn, scenario.stream) for row in rows]
            rounds.append(await asyncio.gather(*map(_time_call, connections, bodies)))
        for connection in connections:
            connection.close()
        return [list(seconds) for seconds in rounds]

    # ── checking ────────────────────────────────────────────────────────────────────────────────────────────────

    async def check(self, gateway: Gateway, scenario: Scenario, agents: Sequence[Agent]) -> list[dict[str, Any]]:
        """Check that each session has exactly one correct row, and return the rows."""
        seen = await _get(self.engine.port, "/bench/report")
        rows = []
        for n, agent in enumerate(agents):
            shown = await _admin(gateway, "GET", f"/admin/sessions/{agent.session}", 200)
            found = (await _admin(gateway, "GET", f"/admin/sessions/{agent.session}/samples", 200))["samples"]
            session = seen[agent.session]
            _require(session["turns"] == shown["turns"] == scenario.turns, "a turn is missing or was repeated", session)
            _require(session["broken"] == 0, "prompts do not chain", session)
            _require(shown["forks"] == [], "the trace has forks", shown["forks"])
            _require(len(found) == 1, "not exactly one row", len(found))
            self._check_sampled(found[0], scenario.turns)
            if n < 2:  # rendering is slow, and the other sessions' prompts are known to chain
                self._check_context(found[0], agent)
            rows.append(found[0])
        return rows

    def _check_sampled(self, row: dict[str, Any], turns: int) -> None:
        """Check that the row trains exactly what the engine sampled, with the log-probabilities that it sent."""
        trained = [i for i, is_trained in enumerate(row["mask"]) if is_trained]
        answers = [self.answers[turn % len(self.answers)] for turn in range(turns)]
        _require(
            [row["ids"][i] for i in trained] == [i for a in answers for i in a["ids"]],
            "the trained ids differ from the sampled ones",
        )
        expected = [p for a in answers for p in a["logprobs"]]
        _require(
            [_float32(row["logprobs"][i]) for i in trained] == expected, "the log-probabilities differ from those sent"
        )

    def _check_context(self, row: dict[str, Any], agent: Agent) -> None:
        """Check that the row equals the chat template's rendering of the whole conversation."""
        _require(
            self.has_context(row, agent),
            "the row differs from the template's rendering",
            (agent.session, len(row["ids"])),
        )

    def has_context(self, row: dict[str, Any], agent: Agent) -> bool:
        """Return whether the row equals the chat template's rendering of the whole conversation."""
        whole = self.renderer.render(agent.conversation[:-1], tools(), {}, generate=False)
        size = len(row["ids"])
        return bool(whole[:size] == row["ids"]) and len(whole) - size <= 1

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def memory(self, gateway: Gateway, scenario: Scenario) -> tuple[float, float]:
        """Return the MB per open session of a first batch, and of two more batches.

        The first batch also allocates the buffers for its concurrent calls, which later batches reuse.
        """
        growth: list[float] = []
        agents: list[Agent] = []
        for _ in range(3):
            before = gateway.rss_mb()
            agents += (await self.run(gateway, scenario)).agents
            growth.append((gateway.rss_mb() - before) / scenario.sessions)
        await self.check(gateway, scenario, agents)
        await self.close_sessions(gateway, agents)
        return growth[0], statistics.mean(growth[1:])


def _build_result(
    scenario: Scenario, runs: Sequence[Run], direct: Sequence[Sequence[float]], prompt_tokens: Sequence[int]
) -> Result:
    medians = [statistics.median(seconds) for seconds in direct]
    latencies = [[(turn, s) for a in run.agents for turn, s in enumerate(a.latencies)] for run in runs]
    added = [sorted((s - medians[turn]) * 1000 for turn, s in run) for run in latencies]
    watched = [turn for turn in SHOWN_TURNS if turn <= scenario.turns]
    agent = runs[0].agents[0]
    per_turn = [run.cpu_s * 1000 / (scenario.sessions * scenario.turns) for run in runs]
    return Result(
        name=scenario.name,
        cpu_ms=min(per_turn),
        cpu_ms_repeats=per_turn,
        cpu_ms_at={turn: min(_mean_around(run.cpu_ms, turn) for run in runs) for turn in watched},
        cpu_ms_scaled=statistics.median(
            cpu * REFERENCE_MS / run.calibration_ms for cpu, run in zip(per_turn, runs, strict=True)
        ),
        calibration_ms=[run.calibration_ms for run in runs],
        turns_per_s=statistics.median(scenario.sessions * scenario.turns / run.wall_s for run in runs),
        added_ms_p50=statistics.median(_quantile(values, 0.5) for values in added),
        added_ms_p99=statistics.median(_quantile(values, 0.99) for values in added),
        gateway_ms_p50=statistics.median(s * 1000 for run in latencies for _, s in run),
        engine_ms_p50=statistics.median(s * 1000 for seconds in direct for s in seconds),
        request_kb_at={turn: agent.sizes[turn - 1] / 1000 for turn in watched},
        prompt_tokens_at={turn: prompt_tokens[turn - 1] for turn in watched},
        target_cpu_ms=scenario.target_cpu_ms,
    )


def _mean_around(rounds: Sequence[float], turn: int) -> float:
    """Return the mean of five rounds around a turn, or of the last five."""
    first = min(turn - 3, len(rounds) - 5)
    return statistics.mean(rounds[first : first + 5])


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


def _build_completion(row: dict[str, Any], turn: int, stream: bool) -> bytes:
    prompt = row["ids"][: row["spans"][turn]["start"]]
    return orjson.dumps({"prompt": prompt, "return_tokens_as_token_ids": True, "stream": stream})


async def _time_call(http: Http, body: bytes) -> float:
    began = time.perf_counter()
    status, _ = await http.send("POST", "/v1/completions", body)
    _require(status == 200, "the mock engine failed", status)
    return time.perf_counter() - began


async def _admin(gateway: Gateway, method: str, path: str, expected: int, body: bytes = b"") -> Any:
    http = await Http.connect(gateway.port)
    status, reply = await http.send(method, path, body, gateway.admin_key)
    http.close()
    _require(status == expected, f"{method} {path} answered {status}", reply[:500])
    return orjson.loads(reply)


async def _get(port: int, path: str) -> Any:
    http = await Http.connect(port)
    _, reply = await http.send("GET", path)
    http.close()
    return orjson.loads(reply)


def _require(holds: bool, text: str, evidence: object = "") -> None:
    if not holds:
        raise SystemExit(f"bench: the recordings are wrong, so there are no numbers: {text} {evidence}")


# ── answers of the engine ───────────────────────────────────────────────────────────────────────────────────────


def make_answers(renderer: TemplateRenderer, count: int = 100) -> list[dict[str, Any]]:
    """Build one answer per turn: a thought and a tool call in Hermes format, exactly SAMPLED_IDS ids long."""
    rng = random.Random(0)
    return [_build_answer(renderer, turn, rng) for turn in range(count)]


def _build_answer(renderer: TemplateRenderer, turn: int, rng: random.Random) -> dict[str, Any]:
    tokenizer = renderer.tokenizer
    call = f'{{"name": "read_file", "arguments": {{"path": "src/module_{turn}.py"}}}}'
    thought = "Let me look at the next file first, since the test that fails imports it"
    more = itertools.cycle(("and", "see", "what", "it", "does"))
    while True:
        text = f"<think>\n{thought}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
        ids = [*tokenizer.encode(text), renderer.stop_ids[0]]
        if len(ids) == SAMPLED_IDS:
            break
        if len(ids) > SAMPLED_IDS:
            raise SystemExit(f"bench: no answer of {SAMPLED_IDS} ids with this tokenizer; {len(ids)} for {text!r}")
        thought += f" {next(more)}"
    logprobs = [_float32(-rng.expovariate(3)) for _ in ids]
    return {"ids": ids, "logprobs": logprobs, "tokens": [tokenizer.decode(i) for i in ids]}


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


# ── the machine ─────────────────────────────────────────────────────────────────────────────────────────────────


def calibrate() -> float:
    """Measure the current speed of this machine: the CPU milliseconds of a fixed loop, best of three."""

    def work() -> float:
        began = time.process_time()
        table: dict[int, str] = {}
        for i in range(150_000):
            table[i % 997] = str(i * 7)
        return (time.process_time() - began) * 1000

    return min(work() for _ in range(3))


# ── reporting ───────────────────────────────────────────────────────────────────────────────────────────────────


def _describe_target(value: float, target: float | None) -> str:
    if target is None:
        return ""
    return f"≤ {target:g}  {'PASS' if value <= target else 'miss'}"


def print_table(report: dict[str, Any]) -> None:
    scenarios: list[Result] = report["scenarios"]
    speeds = [ms for r in scenarios for ms in r.calibration_ms]
    print(f"\ntokenizer {report['tokenizer']} · {report['cores']} cores · load {report['load'][0]:.1f} at the start")
    print(f"calibration {min(speeds):.0f} to {max(speeds):.0f} ms, {REFERENCE_MS:.0f} on the reference machine\n")
    _print_row("sessions × turns", "CPU ms/turn", "scaled", "turns/s", "added ms p50", "p99")
    for r in scenarios:
        cells = (f"{r.cpu_ms:.2f}", f"{r.cpu_ms_scaled:.2f}", f"{r.turns_per_s:.0f}")
        added = (f"{r.added_ms_p50:.1f}", f"{r.added_ms_p99:.1f}")
        _print_row(r.name, *cells, *added, note=_describe_target(r.cpu_ms, r.target_cpu_ms))
    print()
    _print_row("CPU ms at turn", *map(str, SHOWN_TURNS))
    for r in scenarios:
        cells = tuple(f"{r.cpu_ms_at[t]:.2f}" if t in r.cpu_ms_at else "" for t in SHOWN_TURNS)
        growth = r.cpu_ms_at[100] / r.cpu_ms_at[5] if 100 in r.cpu_ms_at else None
        note = "" if growth is None else f"turn 100 / turn 5: {growth:.2f}  {_describe_target(growth, MAX_GROWTH)}"
        _print_row(r.name, *cells, note=note)
    longest = max(scenarios, key=lambda r: len(r.request_kb_at))
    _print_row("request, KB", *(f"{kb:.0f}" for kb in longest.request_kb_at.values()))
    _print_row("prompt, tokens", *map(str, longest.prompt_tokens_at.values()))
    print()
    for m in report["memory"]:
        name = f"MB per live {m['turns']}-turn session"
        _print_row(
            name,
            f"{m['mb']:.2f}",
            note=f"{_describe_target(m['mb'], m['target'])}   (the first batch {m['mb_first']:.2f})",
        )
    _print_row("MB after startup", f"{report['start_mb']:.0f}")
    _print_row("seconds until ready", f"{report['ready_s']:.2f}", note=_describe_target(report["ready_s"], READY_S))
    print(
        "\nCPU and ready time are the best of their repeats (other work on the machine only adds); the rest are medians."
    )


def _print_row(name: str, *cells: str, note: str = "") -> None:
    print(f"{name:32}" + "".join(f"{cell:>13}" for cell in cells) + (f"   {note}" if note else ""))


AREAS = (  # a sample belongs to the area of its innermost matching frame; the first match wins
    ("reading the request", ("turngate/dialects/", "turngate/server/request_body.py:read_body")),
    (
        "locating the request in the tree",
        ("turngate/trace/", "turngate/gateway/prompt.py:locate", "turngate/gateway/prompt.py:_build_preamble"),
    ),
    (
        "tokenizing and rendering new messages",
        ("turngate/render/renderer", "turngate/render/template", "tiktoken/", "jinja2/"),
    ),
    (
        "tokenizing and rendering new messages",
        ("turngate/render/tokenizer.py:encode", "turngate/render/tokenizer.py:_encode"),
    ),
    ("parsing the sampled text", ("turngate/render/",)),
    ("calling the engine", ("turngate/engines/", "aiohttp/")),
    (
        "recording",
        (
            "turngate/store/",
            "turngate/gateway/recording.py",
            "turngate/gateway/events.py",
            "turngate/gateway/sessions.py",
        ),
    ),
    ("HTTP server", ("uvicorn/", "turngate/server/")),
    ("the pipeline itself", ("turngate/",)),
)


def print_profile(path: Path, scenario: Scenario, cpu_ms: float) -> None:
    stacks = [line.rsplit(" ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    total = sum(int(count) for _, count in stacks)
    own: Counter[str] = Counter()
    areas: Counter[str] = Counter()
    for stack, count in stacks:
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        areas[_find_area(frames)] += int(count)
    print(f"\n{scenario.name}: {cpu_ms:.2f} ms of CPU per turn, {total} samples\n")
    for counted in (areas, own):
        for name, count in counted.most_common(25):
            print(f"{count / total:6.1%}  {count / total * cpu_ms * 1000:6.0f} µs/turn  {name}")
        print()


def _find_area(frames: list[str]) -> str:
    for frame in reversed(frames):
        for name, marks in AREAS:
            if frame.startswith(marks):
                return name
    return "event loop and the rest"


# ── main ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def bench_all(bench: Bench) -> dict[str, Any]:
    load = os.getloadavg()
    ready = []
    for n in range(2):
        with bench.gateway(f"ready-{n}") as gateway:
            ready.append(gateway.ready_s)
    with bench.gateway("cpu") as gateway:
        ready.append(gateway.ready_s)
        rss = gateway.rss_mb()
        warm_up = await bench.run(gateway, Scenario(4, 20, stream=True))
        await bench.close_sessions(gateway, warm_up.agents)
        scenarios = []
        for scenario in SCENARIOS:
            _log(scenario.name)
            scenarios.append(await bench.measure(gateway, scenario))
    memory = []
    # The large tokenizer leaves so much free heap behind that hundreds of sessions would not be visible, so use the small one.
    with Bench(bench.folder, BUILTIN) as small:
        for scenario, target in MEMORY:
            _log(f"memory, {scenario.name}")
            with small.gateway(f"memory-{scenario.turns}") as gateway:
                first, mb = await small.memory(gateway, scenario)
            memory.append({"turns": scenario.turns, "mb": mb, "mb_first": first, "target": target})
    return {
        "tokenizer": str(bench.tokenizer),
        "load": load,
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "scenarios": scenarios,
        "memory": memory,
        "start_mb": rss,
        "ready_s": min(ready),
        "ready_s_repeats": ready,
    }


async def profile_one(bench: Bench, scenario: Scenario, keep: Path | None) -> None:
    path = bench.folder / "profile"
    with bench.gateway("profiled", path) as gateway:
        warm_up = await bench.run(gateway, Scenario(2, 5, stream=scenario.stream))
        await bench.close_sessions(gateway, warm_up.agents)
        gateway.send_signal(signal.SIGUSR1)
        runs = [await bench.run(gateway, scenario) for _ in range(5)]
        gateway.send_signal(signal.SIGUSR2)
        cpu_ms = sum(run.cpu_s for run in runs) * 1000 / (len(runs) * scenario.sessions * scenario.turns)
        while not path.exists():
            await asyncio.sleep(0.05)
    print_profile(path, scenario, cpu_ms)
    if keep is not None:
        keep.write_bytes(path.read_bytes())


def _log(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


def _choose_tokenizer(tokenizer: Path | None) -> Path:
    if tokenizer is not None:
        return tokenizer
    if QWEN3.exists():
        return QWEN3
    print(
        f"note: no Qwen3 tokenizer at {QWEN3} (python tools/parts.py tokenizers); using the small built-in one instead"
    )
    return BUILTIN


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a turn costs in the gateway.")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json and a chat template [Qwen3's]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all results to this file")
    parser.add_argument("--omit-prompt-ids", action="store_true", help="do not let the engine return the prompts' ids")
    names = {f"{s.sessions}x{s.turns}{'-stream' if s.stream else ''}": s for s in SCENARIOS if s.target_cpu_ms}
    parser.add_argument("--profile", nargs="?", const="16x20", choices=names, help="profile one scenario instead")
    parser.add_argument(
        "--flame",
        type=Path,
        metavar="FILE",
        help="with --profile: write the stacks to this file, for a flame graph viewer",
    )
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="turngate-bench-") as folder,
        Bench(Path(folder), _choose_tokenizer(args.tokenizer), omit_prompt_ids=args.omit_prompt_ids) as bench,
    ):
        if args.profile:
            uvloop.run(profile_one(bench, names[args.profile], args.flame))
            return
        report = uvloop.run(bench_all(bench))
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)))
    print_table(report)


if __name__ == "__main__":
    main()
