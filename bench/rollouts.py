"""Measure what a rollout costs in addition to its agent.

    python bench/rollouts.py [--rollouts 60] [--concurrency 8] [--only local …] [--agent pi] [--json FILE]

Runs batches of rollouts whose agent does nothing (`true`), for each sandbox with and without a grader, against a gateway with the scripted
engine in a separate process. So all of the cost is ours: the runner, the sandbox, the relay and the gateway. With `--agent`, a real agent
makes one call. Compare the result with a run without `--agent` to see the cost of starting that agent.

    python bench/rollouts.py --parts mini-swe-agent pi … [--alone 5] [--only local …]

Runs real agents one at a time, and splits their CPU time into the agent's start-up, the agent, sandbox, relay and grading. Also measures
the agent's own command without Turngate, for comparison. An agent with warm starts or a code cache is measured without them, too.

    rollouts/min     of the whole machine, with --concurrency agents
    runner           CPU ms per rollout of the process that runs the batch, all threads
    sandboxes        CPU ms per rollout of its ended child processes: supervisors, relays, shells, docker's client.
                     Processes in a container are the daemon's children, and not included
    gateway          CPU ms per rollout of the gateway
    alone, s         seconds of a rollout that runs alone, by stage

If any rollout of a batch does not end as expected, no numbers are printed. On a shared machine, results vary by half.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from overhead import calibrate
from processes import Process, free_port
from rollout_parts import Parts, measure_alone, measure_parts, show_parts

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import base_image
from turngate.agents.install import ensure_installed
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.client.gateway import GatewayClient
from turngate.rollout.batch import BatchResult, run_batch
from turngate.rollout.concurrency import Bounds
from turngate.rollout.connection import GatewayConnector
from turngate.rollout.plan import BatchPlan
from turngate.sandboxes import get_backend, warm_start
from turngate.tasks.task import Script, Task

NOTHING = "shell"  # runs the command `true`
SANDBOXES: dict[str, Callable[[], str | None]] = {
    "local": lambda: None,
    "bubblewrap": base_image.missing_bubblewrap,
    "docker": base_image.missing_docker,
}


class Result(msgspec.Struct):
    sandbox: str
    graded: bool
    per_minute: float
    runner_ms: float
    sandboxes_ms: float
    gateway_ms: float
    alone_s: float
    stages: dict[str, float]
    calibration_ms: float


def _plan(folder: Path, sandbox: str, agent: str, *, graded: bool, count: int, running: int) -> BatchPlan:
    grader = Script(command=("true",), decides="exit code") if graded else None
    spec = find_agent(agent).spec
    is_nothing = agent == NOTHING
    return BatchPlan(
        tasks=(Task(id="nothing", instruction="Do nothing.", grader=grader),),
        agent=spec,
        installed=Installation() if is_nothing else ensure_installed(spec),
        backend=get_backend(sandbox),
        model="bench",
        folder=folder,
        n=count,
        bounds=Bounds(running=running, starting=running, grading=running, warm=0 if running == 1 else 2),
        image=base_image.IMAGE if sandbox == "docker" else "",
        options={"command": "true"} if is_nothing else {},
        retries=0,
    )


def _check(result: BatchResult, *, graded: bool) -> None:
    expected = "graded" if graded else "not graded"
    failed = [rollout for rollout in result.finished if rollout.kind != expected or rollout.status != "finished"]
    if failed or not result.complete:
        raise SystemExit(f"bench: a rollout did not end as expected: {failed[:1] or result.stopped}")


async def measure(
    gateway: Process, key: str, folder: Path, sandbox: str, *, graded: bool, args: argparse.Namespace
) -> Result:
    async with (
        GatewayClient(f"http://127.0.0.1:{gateway.port}", key) as client,
        GatewayConnector(f"http://127.0.0.1:{gateway.port}") as connector,
    ):

        async def batch(name: str, count: int, running: int) -> BatchResult:
            plan = _plan(folder / name, sandbox, args.agent, graded=graded, count=count, running=running)
            result = await run_batch(plan, client, connector)
            _check(result, graded=graded)
            return result

        await batch("first", 2, 1)  # one-time setup
        speed = calibrate()
        alone = await batch("alone", args.alone, 1)
        before, began = _read_cpu(gateway), time.perf_counter()
        await batch("many", args.rollouts, args.concurrency)
        wall, after = time.perf_counter() - began, _read_cpu(gateway)
        runner, children, serving = ((b - a) * 1000 / args.rollouts for a, b in zip(before, after, strict=True))
    return Result(
        sandbox=sandbox,
        graded=graded,
        per_minute=args.rollouts * 60 / wall,
        runner_ms=runner,
        sandboxes_ms=children,
        gateway_ms=serving,
        alone_s=statistics.median(sum(rollout.seconds.values()) for rollout in alone.finished),
        stages=dict(alone.summary.overall.stages),
        calibration_ms=(speed + calibrate()) / 2,
    )


def _read_cpu(gateway: Process) -> tuple[float, float, float]:
    """Return the CPU seconds so far of this process, of ended children, and of the gateway."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time(), children.ru_utime + children.ru_stime, gateway.cpu_s()


async def measure_agent(
    gateway: Process, key: str, folder: Path, sandbox: str, name: str, alone: int, *, plain: bool
) -> Parts:
    """Measure the cost of a real agent's rollouts, by part. `plain` means without warm starts and code caches."""
    os.environ[warm_start.SETTING] = "off" if plain else "on"
    root, spec = f"http://127.0.0.1:{gateway.port}", find_agent(name).spec
    installed = ensure_installed(spec)
    async with GatewayClient(root, key) as client, GatewayConnector(root) as connector:

        async def batch(part: str, graded: bool) -> list[str]:
            count = 1 if part == "first" else alone
            plan = _plan(folder / part, sandbox, name, graded=graded, count=count, running=1)
            result = await run_batch(plan, client, connector)
            _check(result, graded=graded)
            return [rollout.session for rollout in result.finished]

        costs = await measure_parts(client, installed, batch, gateway.cpu_s, gateway.pid)
        counts = warm_start.counts
        starts = "code cache" if installed.code_cache else f"warm {counts['warm']}/{counts.total()}"
        host = installed.use_host_python()
        alone_ms = await measure_alone(client, root, spec, host, alone)
    return Parts(agent=name, sandbox=sandbox, starts="plain" if plain else starts, alone_ms=alone_ms, **costs)


def show(results: list[Result]) -> None:
    names = (
        "sandbox",
        "grader",
        "rollouts/min",
        "runner ms",
        "sandboxes ms",
        "gateway ms",
        "alone s",
        "calibration ms",
    )
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    for r in results:
        cells = (
            r.sandbox,
            "script" if r.graded else "none",
            f"{r.per_minute:.0f}",
            f"{r.runner_ms:.0f}",
            f"{r.sandboxes_ms:.0f}",
            f"{r.gateway_ms:.0f}",
            f"{r.alone_s:.2f}",
            f"{r.calibration_ms:.0f}",
        )
        print("| " + " | ".join(cells) + " |")
    stages = list(results[-1].stages)
    print("\nms of a rollout that runs alone, by stage\n")
    print("| sandbox | grader | " + " | ".join(stages) + " |\n|" + "---|" * (len(stages) + 2))
    for r in results:
        cells = tuple(f"{r.stages[stage] * 1000:.0f}" if stage in r.stages else "–" for stage in stages)
        print(f"| {r.sandbox} | {'script' if r.graded else 'none'} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--alone", type=int, default=5, help="rollouts that run one after another")
    parser.add_argument("--only", nargs="*", choices=list(SANDBOXES), default=list(SANDBOXES))
    parser.add_argument("--agent", default=NOTHING, help="run this agent, which makes one call [none]")
    parser.add_argument("--no-grader", action="store_true", help="skip the batches with a grader")
    parser.add_argument(
        "--parts", nargs="+", metavar="AGENT", help="measure these agents by part, one rollout at a time"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: list[Result] = []
    parts: list[Parts] = []
    with tempfile.TemporaryDirectory(prefix="turngate-bench-") as name:
        script = Path(name) / "script.json"
        script.write_text('["Done."]', encoding="utf-8")
        key, port = secrets.token_hex(16), free_port()
        command = [sys.executable, "-m", "turngate", "serve", "--port", str(port), "--data", f"{name}/data"]
        command += ["--engine", "scripted", "--script", str(script), "--model", "bench"]
        gateway = Process(command, port, Path(name) / "gateway.log", {"TURNGATE_ADMIN_KEY": key})
        try:
            for sandbox in args.only:
                if reason := SANDBOXES[sandbox]():
                    print(f"bench: skipping {sandbox}: {reason}", file=sys.stderr)
                    continue
                for agent in args.parts or ():
                    spec = find_agent(agent).spec
                    for plain in (True, False) if spec.preload or spec.code_cache else (True,):
                        folder = Path(name) / f"{sandbox}-{agent}-{plain}"
                        measured = measure_agent(gateway, key, folder, sandbox, agent, args.alone, plain=plain)
                        parts.append(asyncio.run(measured))
                if args.parts:
                    continue
                for graded in (False,) if args.no_grader else (False, True):
                    folder = Path(name) / f"{sandbox}-{graded}"
                    measuring = measure(gateway, key, folder, sandbox, graded=graded, args=args)
                    results.append(asyncio.run(measuring))
        finally:
            gateway.stop()
    if args.parts:
        show_parts(parts)
    else:
        show(results)
    if args.json:
        args.json.write_bytes(msgspec.json.encode(parts or results))


if __name__ == "__main__":
    main()
