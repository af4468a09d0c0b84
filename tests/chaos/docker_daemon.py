"""A separate Docker daemon that can be killed, with its own containerd, data and sockets. The machine's daemon is never touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests import needs
from tests.speed import scaled
from tools import base_image
from tools.tier import descendants

PROGRAMS = ("dockerd", "containerd", "containerd-shim-runc-v2", "runc")
START_S = 30.0


def explain_missing() -> str | None:
    """Return why no daemon can be started here, or None if one can."""
    if reason := needs.missing("root"):
        return reason
    absent = [name for name in PROGRAMS if not shutil.which(name)]
    absent += [] if base_image.tarball_path().exists() else ["the base image"]
    return f"{', '.join(absent)}: missing (run: python tools/base_image.py docker)" if absent else None


class DockerDaemon:
    """`dockerd` and its `containerd`, as two services."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._containerd_socket = folder / "containerd.sock"
        self._dockerd: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None
        (folder / "daemon.json").write_text("{}")  # not the machine's settings
        (folder / "containerd.toml").write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which the `docker` command uses this daemon."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        return {**inherited, "DOCKER_HOST": self.host}

    @property
    def pid(self) -> int:
        assert self._dockerd is not None
        return self._dockerd.pid

    def start(self) -> None:
        """Start whichever of the two is not running, without waiting until it responds."""
        folder = self.folder
        if self._containerd is None:
            command = ["containerd", "--config", str(folder / "containerd.toml"), "--root", str(folder / "containerd")]
            command += ["--state", str(folder / "state"), "--address", str(self._containerd_socket)]
            self._containerd = self._launch(command, "containerd.log")
        if self._dockerd is None:
            command = [*base_image.DAEMON, "--host", self.host, "--data-root", str(folder / "data")]
            command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "docker.pid")]
            command += ["--config-file", str(folder / "daemon.json"), "--containerd", str(self._containerd_socket)]
            self._dockerd = self._launch(command, "dockerd.log")

    def wait(self) -> None:
        """Wait until the daemon answers."""
        deadline = time.monotonic() + scaled(START_S)
        while self.run("version").returncode:
            assert self._dockerd is not None and self._dockerd.poll() is None, self.read_log()
            assert time.monotonic() < deadline, self.read_log()
            time.sleep(0.1)

    def set_live_restore(self, enabled: bool) -> None:
        """Choose whether containers outlive dockerd."""
        (self.folder / "daemon.json").write_text(json.dumps({"live-restore": enabled}))
        os.kill(self.pid, signal.SIGHUP)
        deadline = time.monotonic() + scaled(START_S)
        while self.run("info", "--format", "{{.LiveRestoreEnabled}}").stdout.strip() != str(enabled).lower():
            assert time.monotonic() < deadline, self.read_log()
            time.sleep(0.05)

    def end_dockerd(self, number: int = signal.SIGKILL) -> None:
        self._end(self._dockerd, number)
        self._dockerd = None

    def kill_containerd(self) -> None:
        self._end(self._containerd, signal.SIGKILL)
        self._containerd = None

    def list_containers(self) -> list[str]:
        done = self.run("ps", "--all", "--format", "{{.Names}} {{.Status}}")
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def processes(self) -> dict[int, str]:
        """Return the processes in all containers, with their command lines."""
        return {pid: line for shim in self._list_shims() for pid, line in descendants(shim).items()}

    def read_log(self) -> str:
        return (self.folder / "dockerd.log").read_text(errors="replace")[-3000:]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the `docker` command with this daemon."""
        return subprocess.run(
            ["docker", *arguments], env=self.environment, capture_output=True, text=True, timeout=scaled(START_S)
        )

    def stop(self) -> None:
        """Stop the daemon with all its containers, and unmount their file systems."""
        for process in (self._dockerd, self._containerd):
            if process is not None:
                process.send_signal(signal.SIGCONT)
                self._end(process, signal.SIGTERM)
        for pid in [*self.processes(), *self._list_shims()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)

    def _list_shims(self) -> list[int]:
        """Return the processes that hold the containers. They belong to this daemon if they name its containerd."""
        found = []
        for folder in Path("/proc").iterdir():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes().split(b"\0")
                if b"containerd-shim" in words[0] and str(self._containerd_socket).encode() in words:
                    found.append(int(folder.name))
        return found

    def _launch(self, command: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )

    def _end(self, process: subprocess.Popen[bytes] | None, number: int) -> None:
        assert process is not None
        process.send_signal(number)
        try:
            process.wait(scaled(START_S))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@needs.uses("docker", "root")
@contextmanager
def start_docker() -> Iterator[DockerDaemon]:
    """Start a daemon that has the base image, and stop and delete it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="dkr"))  # short: it contains unix sockets
    daemon = DockerDaemon(folder)
    try:
        daemon.start()
        daemon.wait()
        base_image.import_image(daemon.host)
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)
