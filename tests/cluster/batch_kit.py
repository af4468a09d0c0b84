"""`turngate batch --ray` as a process, a trainer that reads its groups, and checks that nothing was lost, counted twice or left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tests.cluster.ray_kit import ROOT, LocalRay, ray_python
from tests.postgres import PostgresServer
from tests.speed import scaled
from turngate.client.feed import Feed, FeedConfig
from turngate.client.gateway import GatewayClient
from turngate.common import owner
from turngate.common.loop_thread import LoopThread
from turngate.config import ServeConfig
from turngate.rollout.ledger import LEDGER_NAME, read_ledger
from turngate.sandboxes import get_backend, supervisor
from turngate.server.run import run_embedded

LEASE_S = 6
NAME = "storm"  # of the batch
TASK = ROOT / "examples" / "tasks" / "fix-add"
# Pi needs a third of the CPU time of mini-swe-agent to start, so it sleeps for longer: a rollout takes the same time.
AGENT, PROGRAM = "pi", "pi-coding-agent"  # Pi renames its process to "pi" once it runs
# The agent works, and repairs the file in about half of the rollouts, so that groups have a signal.
COMMANDS = (
    "ls && cat main.py",
    "sleep {pause_s}; test $(($$ % 2)) = 0 && sed -i 's/return a - b/return a + b/' main.py; true",
)


def write_script(path: Path, pause_s: int) -> Path:
    """Write the replies of the scripted engine."""
    commands = [command.replace("{pause_s}", str(pause_s)) for command in COMMANDS]
    calls = [json.dumps({"name": "bash", "arguments": {"command": command}}) for command in commands]
    path.write_text(json.dumps([*(f"<tool_call>\n{call}\n</tool_call>" for call in calls), "Done."]))
    return path


def copy_tasks(folder: Path, count: int) -> Path:
    """Make `count` tasks, each of which is a group of the batch."""
    for number in range(count):
        shutil.copytree(TASK, folder / f"fix-add-{number:02d}")
    return folder


class Driver:
    """`turngate batch --ray` as a process."""

    def __init__(
        self,
        cluster: LocalRay,
        url: str,
        out: Path,
        *,
        n: int,
        concurrency: int,
        tasks: Path = TASK,
        pause_s: int = 3,
        **env: str,
    ) -> None:
        """Start it. Each agent sleeps for `pause_s` seconds."""
        config = out.with_suffix(".toml")
        config.write_text(f"lease_s = {LEASE_S}\n")
        self.out, self.started = out, time.monotonic()
        self._log = out.with_suffix(f".{time.monotonic_ns()}.log")
        command = [str(ray_python()), "-m", "turngate", "batch", "--ray", cluster.address, "--data", url]
        command += ["--config", str(config), "--tasks", str(tasks), "--sandbox", "local", "--name", NAME]
        command += ["--script", str(write_script(out.with_suffix(".script.json"), pause_s))]
        command += ["--agent", AGENT, "--n", str(n), "--concurrency", str(concurrency), "--out", str(out)]
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=cluster.environment(**env),
                cwd=cluster.folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def finished(self) -> int:
        """How many rollouts are finished so far."""
        path = self.out / LEDGER_NAME
        return len(read_ledger(self.out).finished) if path.exists() else 0

    def resumed(self) -> int | None:
        """Return the number of rollouts that were finished when this driver started, once it is known."""
        found = re.search(r"rollouts already finished: (\d+) of", self.log())
        return int(found[1]) if found else None

    def wait_for(self, reached: Callable[[], bool], limit_s: float | None = None) -> None:
        deadline = time.monotonic() + (limit_s or scaled(240))
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                self.process.wait()
                raise AssertionError(self.log())
            time.sleep(0.2)

    def wait(self, limit_s: float | None = None) -> None:
        """Wait for a successful end. pytest shows the log if a later check fails."""
        self.wait_for(lambda: self.process.poll() is not None, limit_s)
        assert self.process.returncode == 0, self.log()
        print(self.log())


class GroupTrainer:
    """A trainer that reads the groups of the batch from its own gateway on the shared store, and commits each of them."""

    def __init__(self, url: str, n: int) -> None:
        self._loop = LoopThread("trainer")
        self._config = FeedConfig(n=n, groups=f"{NAME}.")
        self._serve = ServeConfig(data=url, port=0)
        self.groups: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()  # by session
        self._is_open = self._is_ending = False

    def __enter__(self) -> GroupTrainer:
        self._loop.start()
        self._training = self._loop.spawn(self._train())
        deadline = time.monotonic() + scaled(30)
        while not self._is_open:
            assert not self._training.done(), self._training.exception()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_ending = True
        self._training.result(scaled(30))
        self._loop.stop()

    async def _train(self) -> None:
        async with (
            run_embedded(self._serve) as address,
            GatewayClient(address.url, address.admin_key) as gateway,
            await Feed.open(gateway, "storm", self._config) as feed,
        ):
            self._is_open = True
            while not self._is_ending:
                if (delivery := await feed.next(0.5)) is None:
                    continue
                self.groups[delivery.group] += 1
                self.trained.update(rolled.session for rolled in delivery.rollouts)
                await feed.commit(delivery.number)

    def check(self, out: Path, groups: int) -> None:
        """Check that every group was delivered once, with the attempts that count and no others."""
        deadline = time.monotonic() + scaled(30)
        while len(self.groups) < groups and time.monotonic() < deadline:
            assert not self._training.done(), self._training.exception()
            time.sleep(0.2)
        assert len(self.groups) == groups and set(self.groups.values()) == {1}, self.groups
        assert set(self.trained.values()) == {1}, "no attempt is trained twice"
        assert set(self.trained) == {one.session for one in read_ledger(out).finished.values()}


def check_results(server: PostgresServer, url: str, out: Path, total: int) -> Counter[str]:
    """Check that every rollout ended in one class and counts once. Return how many attempts there were of each state."""
    database = url.rpartition("/")[2]
    finished = read_ledger(out).finished
    assert len(finished) == total and {one.kind for one in finished.values()} == {"graded"}, finished
    rows = server.query("SELECT rollout, attempt, state, session FROM attempts", database).splitlines()
    attempts = [line.split("|") for line in rows]
    settled = Counter(rollout for rollout, _, state, _ in attempts if state == "settled")
    wrong = {name for name in {*finished, *settled} if settled[name] != 1 or name not in finished}
    found = [(row, finished.get(row[0])) for row in attempts if row[0] in wrong]
    assert not wrong, f"each rollout has exactly one attempt that counts: {found}"
    sessions = {session for _, _, state, session in attempts if state == "settled"}
    assert sessions == {one.session for one in finished.values()}
    return Counter(state for _, _, state, _ in attempts)


def find_processes(*mentions: Path) -> list[str]:
    """Return the processes of this machine, except our own, whose command line or working folder mentions one of these paths."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            text = f"{entry.name} {command} (in {(entry / 'cwd').readlink()})"
        except OSError:  # it has ended
            continue
        if any(str(path) in text for path in mentions):
            found.append(text)
    return found


def sandbox_folder() -> Path:
    """The folder of all local sandboxes of this user."""
    return Path(tempfile.gettempdir()) / f"turngate-{os.getuid()}"


def check_leftovers(cluster: LocalRay) -> None:
    """Check that no cell, agent or sandbox is left on a live node."""
    deadline = time.monotonic() + scaled(20)
    while left := [*find_processes(sandbox_folder()), *list_cells(cluster)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def list_cells(cluster: LocalRay) -> list[str]:
    """Return the processes of cells on all nodes."""
    lines = (line for node in cluster.nodes.values() for line in node.processes().values())
    return [line for line in lines if "order_runner" in line or "turngate cell" in line]


def wait_for_no_cells(cluster: LocalRay) -> None:
    """Wait until no node has a cell. Ray ends the process of an actor a moment after the call that asks for it."""
    deadline = time.monotonic() + scaled(10)
    while left := list_cells(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def wait_for_end(pids: dict[int, str]) -> None:
    """Wait until processes have ended."""
    deadline = time.monotonic() + scaled(10)
    while left := [command for pid, command in pids.items() if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def list_abandoned_sandboxes() -> list[Path]:
    """Return the local sandboxes whose owner has ended. Other tests may have sandboxes, too."""
    return [folder for folder in sandbox_folder().glob("local-*") if _is_abandoned(folder)]


def sweep_sandboxes() -> None:
    """Remove the sandboxes of killed nodes, as the next cell on their machine would."""
    abandoned = list_abandoned_sandboxes()
    asyncio.run(get_backend("local").sweep())
    assert not [folder for folder in abandoned if folder.exists() or find_processes(folder)]


def _is_abandoned(sandbox: Path) -> bool:
    """Return whether the process that created a sandbox has ended."""
    with suppress(OSError):
        found = owner.parse_owner((sandbox / supervisor.OWNER_FILE).read_text())
        return found is not None and found.gone
    return False
