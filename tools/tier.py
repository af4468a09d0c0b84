#!/usr/bin/env python3
"""Run one tier of the tests, and fail if it leaves anything behind: `python tools/tier.py test`, `test-real`, `test-all` or `soak`.

Install the parts that the tier needs, run the tests that need the machine to themselves, then run the others in parallel. At the end, print
the ten slowest tests, the skipped tests with the reason, the leftovers and one line of counts. A process (with its ports), container,
image, volume or folder that the tests leave behind fails the tier. Cleanup also runs after a failure or Ctrl-C.

Uses only the standard library. This process adopts orphans, so it can find and stop every process that the tests start.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import speed  # noqa: E402
from tools import parts  # noqa: E402
from tools.agent_names import AGENTS, MORE_AGENTS  # noqa: E402

PYTHON = sys.executable
TURNGATE = str(Path(sys.executable).with_name("turngate"))
# The `swe` extra, without the dependencies of SWE-bench's own harness (half a gigabyte).
SWEBENCH = ("swebench==5.0.2", "unidiff==1.0.1")
CYCLONEDX = "cyclonedx-python-lib[json-validation]==11.12.0"  # has the official schema of a bill of materials
ADOPT_ORPHANS = 36  # PR_SET_CHILD_SUBREAPER
SIGNAL_ON_PARENT_DEATH = 1  # PR_SET_PDEATHSIG
MEMORY = "TURNGATE_TEST_MEMORY"  # environment variable: a folder in memory for the databases of the tests
NESTED = MEMORY in os.environ  # a tier that a test started
KEPT_IMAGES = {"turngate-python:bookworm"}  # the base of the images in tests/deploy, built once
LISTENING = "0A"  # in /proc/net/tcp
CORES = os.cpu_count() or 1
COLLECTION_FAILED, NO_TESTS = (2, 3, 4), 5  # exit codes of pytest
HANG_S = 600.0
GRACE_S = 2.0  # time for the kernel and Docker to finish stopping things

LIGHT_PARTS = [
    [PYTHON, "-m", "pip", "install", "--quiet", "--no-deps", *SWEBENCH],
    [PYTHON, "tools/parts.py", "tokenizers"],
    [TURNGATE, "agents", "install", "mini-swe-agent"],
]
ALL_PARTS = [
    *LIGHT_PARTS,
    [PYTHON, "tools/parts.py", "templates", "vllm", "smollm2", "tiny-qwen3", "trl", "verifiers"],
    [PYTHON, "tools/parts.py", "clients", "js-clients", "ray"],
    [PYTHON, "-m", "pip", "install", "--quiet", CYCLONEDX],
    [TURNGATE, "agents", "install", *AGENTS],
    # PostgreSQL does not run as root, and another user cannot read root's cache: root uses Debian's server.
    [PYTHON, "tools/base_image.py" if os.geteuid() == 0 else "tools/parts.py", "postgres"],
    [PYTHON, "tools/base_image.py", "docker", "bubblewrap", "chromium", "pgbouncer", "slurm"],
    [PYTHON, "tools/swe_tasks.py", "--out", ".venv/swe.jsonl"],
]
MORE_PARTS = [
    *ALL_PARTS,
    [PYTHON, "tools/parts.py", "coder", "sglang", "tiny-qwen3-moe", "trainers"],
    [TURNGATE, "agents", "install", *MORE_AGENTS],
]


@dataclass(frozen=True)
class Tier:
    """Which tests to run, the commands that install their parts, and the share of sessions to verify (one in `verify_every`)."""

    description: str
    marks: str
    parts: list[list[str]]
    verify_every: int = 10
    check: bool = False  # run `make check` while the parts are installed
    complete: bool = False  # fail unless every heavy part and every promise has a test
    soak: bool = False  # run the stress tests at full size
    more_workers: int = 1  # pytest workers in addition to one per core, because many tests wait

    @property
    def uses_docker(self) -> bool:
        return self.parts is not LIGHT_PARTS

    @property
    def workers(self) -> int:
        return 1 if NESTED else CORES + self.more_workers


TIERS = {
    "test": Tier(
        "all tests without heavy parts, and one real agent",
        "not real and not full",
        LIGHT_PARTS,
        check=True,
        more_workers=2,
    ),
    "test-real": Tier(
        "at least one test for every real part and every promise",
        "(real or promise and not full) and not repeat",
        ALL_PARTS,
        complete=True,
    ),
    "test-all": Tier(
        "all tests, without the repetitions of make soak",
        "not repeat",
        MORE_PARTS,
        verify_every=1,
        more_workers=2,
    ),
    "soak": Tier("the stress tests at full size, and repetitions", "(soak or repeat)", MORE_PARTS, soak=True),
}


@dataclass
class Results:
    """The combined results of the pytest runs."""

    counts: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[str, float]] = field(default_factory=list)
    exit_code: int = 0

    def add(self, file: Path, exit_code: int) -> None:
        if exit_code != NO_TESTS:
            self.exit_code = self.exit_code or exit_code
        if not file.exists():  # pytest ended before it could write its results
            self.exit_code = self.exit_code or 1
        else:
            found = json.loads(file.read_text())
            self.counts.update(found["counts"])
            self.skips.update(found["skips"])
            self.slowest = sorted([*self.slowest, *map(tuple, found["slowest"])], key=lambda one: -one[1])[:10]
            file.unlink()


# ---- inspect the machine ----


def descendants(of: int) -> dict[int, str]:
    """Return the running descendants of a process, with their command lines."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents.setdefault(int(parent), []).append(int(folder.name))
    found, waiting = {}, [of]
    while waiting:
        for pid in parents.get(waiting.pop(), []):
            found[pid] = _command(pid)
            waiting.append(pid)
    return found


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    return ""


def ports(pid: int) -> list[str]:
    """Return the TCP ports that a process listens on."""
    sockets = set()
    with suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and words[9] in sockets:
                    found.append(str(int(words[1].rpartition(":")[2], 16)))
    return found


def docker_objects() -> set[str] | None:
    """Return our containers, volumes and images, each as its kind and name, or None if Docker does not respond."""
    if not shutil.which("docker"):
        return None
    found: set[str] = set()
    for kind, command in (
        ("container", ["ps", "--all", "--format", "{{.Names}}"]),
        ("volume", ["volume", "ls", "--format", "{{.Name}}"]),
        ("image", ["images", "--format", "{{.Repository}}:{{.Tag}}"]),
    ):
        done = subprocess.run(["docker", *command], capture_output=True, text=True, check=False)
        if done.returncode:
            return None
        found |= {f"{kind} {name}" for name in done.stdout.split() if name.startswith("turngate-")}
    return found - {f"image {name}" for name in KEPT_IMAGES}


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points below a folder, the innermost first."""
    places = [
        line.split()[1].encode().decode("unicode_escape") for line in Path("/proc/mounts").read_text().splitlines()
    ]
    return [place for place in reversed(places) if place.startswith(f"{folder}/")]


# ---- run and clean up ----


class Run:
    """One run of a tier: its temporary folders, its processes, and the state of the machine before it."""

    def __init__(self, uses_docker: bool) -> None:
        # Short names, because the path of a unix socket must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="tg")).resolve()
        self.folder.chmod(0o755)  # some tests run as another user
        memory = os.environ.get(MEMORY) or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.memory = Path(tempfile.mkdtemp(prefix="tg", dir=memory)).resolve()
        self.interrupted = False
        self._uses_docker = uses_docker and not NESTED
        self._docker: set[str] | None = None  # what was there before the tests
        self._exit_codes: dict[int, int] = {}
        self._servers: set[int] = set()  # started with the parts (the Docker daemon); stopped at the end of the run

    def remember(self) -> None:
        """Record the state of the machine before the tests start."""
        self._docker = docker_objects() if self._uses_docker else None
        self._servers = {*descendants(os.getpid())}

    def start(self, command: list[str], **env: str) -> int:
        """Start a command and return its process id."""
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _prctl(SIGNAL_ON_PARENT_DEATH, signal.SIGTERM),
        )
        child.returncode = 0  # `_reap` collects its status, so Popen must not wait for it
        return child.pid

    def wait(self, pid: int) -> int:
        """Return the exit code of a started command. After Ctrl-C, give it time to stop its own processes."""
        while not self._ended(pid) and not self.interrupted:
            time.sleep(0.05)
        if not self._ended(pid):
            os.kill(pid, signal.SIGINT)
            deadline = time.monotonic() + speed.scaled(5 * GRACE_S)
            while not self._ended(pid) and time.monotonic() < deadline:
                time.sleep(0.05)
        return self._exit_codes.get(pid, 130)

    def _ended(self, pid: int) -> bool:
        self._exit_codes |= _reap()
        return pid in self._exit_codes

    def call(self, command: list[str], **env: str) -> int:
        """Run a command and return its exit code."""
        return 130 if self.interrupted else self.wait(self.start(command, **env))

    def interrupt(self, number: int, frame: object) -> None:
        if not self.interrupted:
            print("\ninterrupted; stopping everything that was started", flush=True)
        self.interrupted = True

    def leftovers(self) -> list[str]:
        """Return what the tests left behind, after a grace period for processes that are still stopping."""
        deadline = time.monotonic() + speed.scaled(GRACE_S)
        while (left := self._find_leftovers()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _find_leftovers(self) -> list[str]:
        _reap()
        left = []
        for pid, command in descendants(os.getpid()).items():
            if pid not in self._servers:
                listens = f" (listens on {', '.join(found)})" if (found := ports(pid)) else ""
                left.append(f"process {pid}{listens}: {command}")
        left += self._docker_leftovers()
        for folder in (self.folder, self.memory):
            left += [f"mount {place}" for place in mounts_below(folder)]
            left += [f"folder {path}" for path in _files(folder)]
        return left

    def _docker_leftovers(self) -> list[str]:
        if self._docker is None or (now := docker_objects()) is None:
            return []
        return sorted(now - self._docker)

    def clean(self) -> list[str]:
        """Remove everything that the tests created, stop all descendants of this process, and return what could not be removed."""
        for thing in self._docker_leftovers():
            kind, _, name = thing.partition(" ")
            subprocess.run(["docker", kind, "rm", "--force", name], capture_output=True, check=False)
        for number in (signal.SIGTERM, signal.SIGKILL):
            _stop(number)
        for folder in (self.folder, self.memory):
            for place in mounts_below(folder):
                subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
            if not mounts_below(folder):
                _remove(folder)
        stuck = [f"process {pid}: {command}" for pid, command in descendants(os.getpid()).items()]
        return stuck + [f"folder {folder}" for folder in (self.folder, self.memory) if folder.exists()]


def _stop(number: int) -> None:
    """Send a signal to every descendant of this process, once each, and wait until they have ended."""
    signalled: set[int] = set()
    deadline = time.monotonic() + speed.scaled(GRACE_S)
    while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in alive.keys() - signalled:
            signalled.add(pid)
            with suppress(OSError):
                os.kill(pid, number)
        time.sleep(0.1)
        _reap()


def _remove(folder: Path) -> None:
    """Delete a folder, even if a test left folders in it that are not writable."""

    def unlock(remove: Callable[[str], object], path: str, error: object) -> None:
        with suppress(OSError):
            for place in (Path(path).parent, Path(path)):
                if place.is_relative_to(folder) and place.is_dir() and not place.is_symlink():
                    place.chmod(0o700)
            remove(path)

    if folder.exists():
        shutil.rmtree(folder, onerror=unlock)


def _files(folder: Path) -> list[Path]:
    """List the files in a temporary folder, except those of pytest and the empty folder of the sandboxes."""
    sandboxes = folder / f"turngate-{os.getuid()}"
    return [
        path
        for path in (*folder.iterdir(), *(sandboxes.iterdir() if sandboxes.is_dir() else ()))
        if path != sandboxes and not path.name.startswith("pytest-of-")
    ]


def _reap() -> dict[int, int]:
    """Reap exited children and orphans, as init would, and return their exit codes."""
    ended = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended[found[0]] = os.waitstatus_to_exitcode(found[1])
    return ended


def _lock() -> None:
    """Wait until no other tier on this machine uses Docker: its containers would count as leftovers of this one."""
    folder = parts.cache()
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / ".tier.lock", os.O_CREAT | os.O_RDWR)  # held until this process ends
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("waiting for another tier on this machine to end", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextmanager
def start_run(uses_docker: bool) -> Iterator[Run]:
    """Adopt the orphans of a run, handle its signals, and clean up after it. Runs that use Docker wait for each other."""
    _prctl(ADOPT_ORPHANS, 1)
    if uses_docker and not NESTED:
        _lock()
    run = Run(uses_docker)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, run.interrupt)
    try:
        yield run
    finally:
        run.clean()


# ---- one tier ----


def measure() -> float:
    """Measure how slow the machine is with two cores busy."""
    command = [PYTHON, "-c", "from tests import speed; print(speed.measure())"]
    both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return max(float(one.communicate()[0]) for one in both)


def run_tier(name: str, pytest_options: list[str], make_parts: bool = True) -> int:
    tier, began, results = TIERS[name], time.monotonic(), Results()
    print(f"{name}: {tier.description}", flush=True)
    if speed.SLOWNESS not in os.environ:
        os.environ[speed.SLOWNESS] = f"{measure():.2f}"
    slowness = speed.slowness()
    print(
        f"{name}: this machine takes {slowness:.1f} times as long as the reference; timeouts are scaled to match",
        flush=True,
    )
    with start_run(tier.uses_docker) as run:
        check = run.start(["make", "--no-print-directory", "check"]) if tier.check and not NESTED else None
        made = _install_parts(run, tier.parts) if make_parts else []
        if check is not None and run.wait(check) and not run.interrupted:
            return 1
        if not all(made) and os.environ.get("CI") == "true" and not run.interrupted:
            print(f"{name}: a part could not be installed, which is an error with CI=true")
            return 1
        run.remember()
        for alone in (True, False):
            print(
                f"\n{name}: {'tests that need the machine to themselves' if alone else f'{tier.workers} tests at a time'}",
                flush=True,
            )
            results.add(*_run_pytest(run, tier, alone, pytest_options))
            if run.interrupted or results.exit_code in COLLECTION_FAILED:
                break
        if results.exit_code in COLLECTION_FAILED and not alone and not run.interrupted:
            print(
                f"\n{name}: collecting the tests again in one process, where a wrong mark gives a clear error",
                flush=True,
            )
            run.call([PYTHON, "-m", "pytest", "-qq", "--collect-only", "-p", "tests.tiers", *pytest_options])
        left = [] if run.interrupted else run.leftovers()
        left += [f"{thing} (could not be removed)" for thing in run.clean()]
        return _summarize(name, results, left, run.interrupted, time.monotonic() - began)


def _install_parts(run: Run, commands: list[list[str]]) -> list[bool]:
    """Run the commands that install parts, and return whether each succeeded. The light parts are installed at the same time."""
    light = [run.start(command) for command in commands if command in LIGHT_PARTS]
    others = [command for command in commands if command not in LIGHT_PARTS]
    return [run.wait(pid) == 0 for pid in light] + [run.call(command) == 0 for command in others]


def _run_pytest(run: Run, tier: Tier, alone: bool, options: list[str]) -> tuple[Path, int]:
    marks = " and ".join(filter(None, [tier.marks, "alone" if alone else "not alone"]))
    command = [PYTHON, "-m", "pytest", "-q", "-m", marks, "-p", "tests.tiers", "-p", "tests.verify.everywhere"]
    command += [f"--verify-every={tier.verify_every}", *options]
    if tier.complete and not options:  # with options, the tests may be a part of the tier
        command += ["--complete"]
    # A teardown that hangs after its test has timed out ends the process.
    command += ["-o", f"faulthandler_timeout={speed.scaled(HANG_S):.0f}", "-o", "faulthandler_exit_on_timeout=true"]
    if tier.soak:
        command += ["--soak"]
    if alone and not tier.complete and not options:
        command += _find_alone()  # collecting all tests takes 20 s, with one core idle
    if not alone:
        command += ["-n", str(tier.workers), "--dist", "loadgroup", "--no-loadscope-reorder", "--max-worker-restart=2"]
    report = run.folder / "pytest-of-tier.json"
    env = {"TMPDIR": str(run.folder), MEMORY: str(run.memory), "TURNGATE_TIER_REPORT": str(report)}
    env |= {"TORCHINDUCTOR_CACHE_DIR": str(run.folder / "pytest-of-torch"), "ONEDNN_JIT_PROFILE": "0"}  # torch's files
    env |= {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin take the cores from the other tests
    if not tier.soak:  # its tests download packages
        env |= _trust_one_certificate(run.folder / "pytest-of-tier.pem")
    return report, run.call(command, **env)


def _trust_one_certificate(file: Path) -> dict[str, str]:
    """Return the environment in which programs trust only one of this machine's root certificates, if it has any.

    Loading all of them takes a tenth of the time in which a program such as `turngate` starts. No test connects to another machine.
    """
    if not (roots := ssl.create_default_context().get_ca_certs(binary_form=True)):
        return {}
    file.write_text(ssl.DER_cert_to_PEM_cert(roots[0]))
    return {"SSL_CERT_FILE": str(file)}


def _find_alone() -> list[str]:
    """Return the files with tests that need the machine to themselves."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if "mark.alone" in path.read_text(encoding="utf-8")]


def _summarize(name: str, results: Results, left: list[str], interrupted: bool, seconds: float) -> int:
    """Print the summary, which ends with the line of counts, and return the exit code."""
    print(f"\n{name}: the slowest tests")
    for test, took in results.slowest:
        print(f"  {took:6.1f} s  {test}")
    for reason, count in results.skips.most_common():
        print(f"{name}: skipped {count}: {reason}")
    for thing in left:
        print(f"{name}: left behind: {thing}")
    if not results.counts and not interrupted:
        print(f"{name}: no test ran; does any test match the options?")
    if interrupted:
        print(f"{name}: interrupted; everything it started is stopped")
    else:
        print(
            f"{name}: {'nothing' if not left else len(left)} left behind; {seconds // 60:.0f} min {seconds % 60:.0f} s"
        )
    counts = results.counts
    print(f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True)
    return 130 if interrupted else results.exit_code or bool(left) or not counts["passed"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Run one tier of the tests.", epilog="Other options and paths are passed to pytest."
    )
    parser.add_argument("tier", choices=[*TIERS])
    parser.add_argument("--no-parts", action="store_true", help="do not install missing parts")
    arguments, pytest_options = parser.parse_known_args()
    if not find_spec("pytest") or not find_spec("msgspec"):
        parser.error("run it with the project's own Python: make test, or .venv/bin/python tools/tier.py")
    return run_tier(arguments.tier, pytest_options, make_parts=not arguments.no_parts)


if __name__ == "__main__":
    sys.exit(main())
