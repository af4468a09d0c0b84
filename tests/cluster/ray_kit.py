"""A real Ray cluster on this machine: each node is a process tree of its own, with its own resources and folder, and can be killed."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from tests.needs import require, uses
from tests.ports import free_port
from tests.speed import scaled
from tools import parts
from tools.tier import descendants

ROOT = Path(__file__).parents[2]
START_S = 60.0
STOP_S = 20.0


def ray_python() -> Path:
    """The Python of all nodes and drivers."""
    return parts.ensure("ray") / "bin" / "python"


def ray_environment(token: Path, **more: str) -> dict[str, str]:
    """The environment of nodes and drivers: this Turngate, the cluster's own token, and no reports to Ray's authors."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COV_"))}
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    patient = {"RAY_raylet_start_wait_time_s": f"{scaled(START_S):.0f}"}  # else a node on a busy machine gives up
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)}
    return {**inherited, **quiet, **patient, **own, **more}


class RayNode:
    """One node: `ray start --block` in a session of its own."""

    def __init__(self, name: str, folder: Path, arguments: list[str], **env: str) -> None:
        self.name, self.folder = name, folder
        self._log = folder / f"{name}.log"
        data = folder / name
        data.mkdir(exist_ok=True)  # a node that joins again finds the data of its earlier cell
        command = [str(ray_python()), "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        command += ["--node-name", name, "--object-store-memory", "80000000", *arguments]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=ray_environment(folder / "token", TURNGATE_CELL_DATA=str(data), **env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the node has joined the cluster."""
        deadline = time.monotonic() + scaled(START_S)
        while "Ray runtime started" not in (text := self.read_log()):
            assert self.process.poll() is None and time.monotonic() < deadline, f"{self.name}: {text}"
            time.sleep(0.1)

    def processes(self) -> dict[int, str]:
        """Return the processes of this node, with their command lines."""
        return {self.process.pid: "ray start", **descendants(self.process.pid)}

    def kill(self) -> None:
        """End all processes of the node at once, as a power cut would."""
        for _ in range(3):  # a process may be starting another one
            for pid in self.processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(scaled(STOP_S))

    def stop(self) -> None:
        """Stop the node cleanly, then kill its remaining processes."""
        found = self.processes()
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(scaled(STOP_S))
        deadline = time.monotonic() + scaled(STOP_S)
        while (left := [pid for pid in found if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def read_log(self) -> str:
        return self._log.read_text(errors="replace")


class LocalRay:
    """A cluster of nodes on this machine. The node `head` also runs rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, RayNode] = {}
        self.port = free_port()
        (folder / "token").write_text(secrets.token_hex(32))  # else Ray writes one to the home folder

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of a driver."""
        return ray_environment(self.folder / "token", **more)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_head(self, *, slots: int = 4, **env: str) -> None:
        arguments = ["--head", "--port", str(self.port), "--num-cpus", "1", "--include-dashboard", "false"]
        arguments += ["--resources", f'{{"turngate_slots": {slots}}}']
        # The path of a unix socket must be short.
        self.nodes["head"] = RayNode("head", self.folder, [*arguments, "--temp-dir", str(self.folder / "r")], **env)
        self.nodes["head"].wait()

    def add_node(self, name: str, *, slots: int = 4, labels: str = "", **env: str) -> RayNode:
        arguments = ["--address", self.address, "--num-cpus", "1", "--resources", f'{{"turngate_slots": {slots}}}']
        arguments += ["--labels", labels] if labels else []
        node = self.nodes[name] = RayNode(name, self.folder, arguments, **env)
        node.wait()  # two that start at the same time on one machine choose the same ports
        return node

    def drain(self, name: str) -> None:
        """Ask Ray to drain a node, as its autoscaler does before it removes one."""
        find = f"import ray; ray.init('{self.address}', logging_level='ERROR')"
        find += f"; print(next(node['NodeID'] for node in ray.nodes() if node['NodeName'] == '{name}'))"
        node = self._run([str(ray_python()), "-c", find])
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        reason += ["--deadline-remaining-seconds", "3600"]
        ray = [str(ray_python()), "-m", "ray.scripts.scripts"]
        self._run([*ray, "drain-node", "--address", self.address, "--node-id", node, *reason])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1] if done.stdout.split() else ""

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in reversed(list(self.nodes.values())):
            node.stop()


@uses("ray")
@contextmanager
def start_ray(*names: str, slots: int = 4, **env: str) -> Iterator[LocalRay]:
    """Start a cluster with the node `head` and these, and stop and delete it at the end."""
    require("ray")
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    try:
        with LocalRay(folder) as cluster:
            cluster.start_head(slots=slots, **env)
            for name in names:
                cluster.add_node(name, slots=slots, **env)
            yield cluster
    finally:
        shutil.rmtree(folder, ignore_errors=True)
