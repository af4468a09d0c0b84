"""Tests of every remote sandbox beyond the contract: broken connections, a failing service, a dead owner."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.sandboxes.standins.machine import Fault, Machine, StandIn
from tests.speed import paced, scaled
from turngate.errors import SandboxError, SandboxFileMissing, SandboxUnavailable
from turngate.sandboxes.base import Backend, Mount, Sandbox, SandboxSpec


@dataclass
class Remote:
    """One service: its stand-in, its backend, and the requests to inject faults into."""

    standin: StandIn
    make: Callable[..., Backend]
    key: str  # the name of the variable with the key
    secret: str
    sdk: str
    start: str  # requests that start a command in the background
    follow: str  # requests that wait for its end
    read: str  # requests that read a file
    remove: str

    @asynccontextmanager
    async def sandbox(self, settings: dict[str, Any] | None = None, **spec: Any) -> AsyncIterator[Sandbox]:
        created = await self.make(**(settings or {})).create(SandboxSpec(**spec))
        try:
            yield created
        finally:
            await created.stop()

    def machine(self, sandbox: Sandbox) -> Machine:
        return self.standin.machines[sandbox.id]


async def until(condition: Callable[[], Awaitable[bool]] | Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + scaled(seconds)
    while time.monotonic() < end:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the condition did not hold in time")


def sleepers(machine: Machine) -> list[str]:
    found = []
    for pid in machine.pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"sleep"):
            found.append(b" ".join(words).decode().strip())
    return found


class RemoteSuite:
    """Subclasses provide a fixture `remote`."""

    # ---- commands

    async def test_stdin_output_and_exit_code_are_exact(self, remote: Remote) -> None:
        data = bytes(range(256)) * 300
        async with remote.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", "cat; printf '\\377' >&2; exit 7"], stdin=data)
        assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (7, data, b"\xff", False)

    async def test_environment_overrides_login_shell(self, remote: Remote) -> None:
        awkward = "a b\n'\"$HOME`id`\\"
        async with remote.sandbox(env={"FIRST": awkward, "BOTH": "spec"}) as sandbox:
            done = await sandbox.exec(
                ["python3", "-c", "import os; print(ascii([os.environ[k] for k in ('FIRST','BOTH','PATH','HOME')]))"],
                env={"BOTH": "call", "PATH": "/nowhere:/usr/local/bin:/usr/bin:/bin"},
            )
            assert done.stderr == b""
            assert eval(done.stdout) == [awkward, "call", "/nowhere:/usr/local/bin:/usr/bin:/bin", sandbox.home]
            with pytest.raises(SandboxError, match="use only letters"):
                await sandbox.exec(["true"], env={"no-name": "x"})

    async def test_secret_is_in_no_argument_or_file(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sleep", "60"], env={"SECRET": "swordfish"})
            machine = remote.machine(sandbox)
            await until(lambda: "sleep 60" in sleepers(machine))
            assert not any("swordfish" in word for process in machine.processes.values() for word in process.argv)
            assert not any(b"swordfish" in f.read_bytes() for f in machine.folder.rglob("*") if f.is_file())
            await job.kill(0)

    async def test_command_longer_than_argument_limit(self, remote: Remote) -> None:
        words = ["'" * 60_000] * 8
        async with remote.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", 'echo $# "$8"', "sh", *words])
            assert done.stdout == b"8 " + words[0].encode() + b"\n"

    async def test_timeout_kills_command_and_its_processes(self, remote: Remote) -> None:
        script = "sleep 61 & setsid sleep 62 & (trap '' TERM; sleep 63) & echo so far; wait"
        async with remote.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", script], timeout_s=paced(0.5))
            assert (done.exit_code, done.stdout, done.timed_out) == (137, b"so far\n", True)
            assert sleepers(remote.machine(sandbox)) == []

    async def test_cancelled_command_is_killed(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            machine = remote.machine(sandbox)
            running = asyncio.create_task(sandbox.exec(["sleep", "61"]))
            await until(lambda: "sleep 61" in sleepers(machine))
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert sleepers(machine) == []

    async def test_finished_command_leaves_nothing_behind(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            for _ in range(3):
                await sandbox.exec(["true"])
            assert list((remote.machine(sandbox).folder / "turngate/jobs").iterdir()) == []
            await until(lambda: remote.machine(sandbox).pids() == [])

    # ---- jobs

    @pytest.mark.parametrize(
        ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $$", 143), ("nosuch", 127)]
    )
    async def test_job_exit_code(self, remote: Remote, script: str, code: int) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sh", "-c", script])
            assert await job.wait() == code
            assert await job.wait() == code
            await job.kill()

    @pytest.mark.parametrize(
        ("command", "code"),
        [
            (["sh", "-c", "touch begun; exec sleep 61"], 143),
            (["sh", "-c", "trap '' TERM; touch begun; while :; do sleep 0.1; done"], 137),
            (["env", "-i", "sh", "-c", "touch begun; exec sleep 61"], 143),
            (["sh", "-c", "trap 'exit 0' TERM; touch begun; while :; do sleep 0.1; done"], 0),
        ],
    )
    async def test_killed_job_exit_code(self, remote: Remote, command: list[str], code: int) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(command)
            await until(lambda: Path(sandbox.workdir, "begun").exists())
            await job.kill(paced(0.5))
            assert await job.wait() == code
            assert sleepers(remote.machine(sandbox)) == []

    async def test_job_can_be_killed_before_it_starts(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sleep", "61"])
            await job.kill(0)
            assert await job.wait() == 137

    async def test_cancelled_wait_keeps_job_running(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sh", "-c", "while [ ! -e go ]; do sleep 0.1; done; exit 4"])
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(job.wait(), 0.1)
            await sandbox.write("go", b"")
            assert await job.wait() == 4

    async def test_output_files_in_missing_folders(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            shared_file, stderr_file = f"{sandbox.workdir}/a/one", f"{sandbox.workdir}/b/two"
            both = await sandbox.start(
                ["sh", "-c", "echo x; echo y >&2; echo z"], stdout=shared_file, stderr=shared_file
            )
            separate = await sandbox.start(["sh", "-c", "echo x; echo y >&2"], stderr=stderr_file)
            assert (await both.wait(), await separate.wait()) == (0, 0)
            assert (await sandbox.read(shared_file), await sandbox.read(stderr_file)) == (b"x\ny\nz\n", b"y\n")

    # ---- broken connections and a failing service

    async def test_job_survives_broken_connection(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            remote.standin.fail(Fault(remote.start, cut_s=0.1))
            remote.standin.fail(Fault(remote.follow, times=2, status=503))
            job = await sandbox.start(["sh", "-c", "sleep 1.5; exit 5"])
            assert await job.wait() == 5

    async def test_exit_code_of_job_that_ends_while_disconnected(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            remote.standin.fail(Fault(remote.start, cut_s=0.1))
            remote.standin.fail(Fault(remote.follow, status=503))
            job = await sandbox.start(["sh", "-c", "sleep 0.3; kill -9 $$"])
            assert await job.wait() == 137

    async def test_unreachable_job_is_error_not_exit_code(self, remote: Remote) -> None:
        async with remote.sandbox({"patience_s": 0.5}) as sandbox:
            remote.standin.fail(Fault(remote.start, cut_s=0.1))
            remote.standin.fail(Fault(remote.follow, times=1000, status=503))
            job = await sandbox.start(["sleep", "61"])
            with pytest.raises(SandboxError):
                await job.wait()

    async def test_start_without_reply_is_not_retried(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            await sandbox.write("count", b"")
            remote.standin.fail(Fault(remote.start, lose=True))
            with pytest.raises(SandboxError):
                await sandbox.start(["sh", "-c", "echo x >>count; sleep 61"])
            assert len(await sandbox.read("count")) <= 2
            assert sleepers(remote.machine(sandbox)) == []

    async def test_file_read_is_retried(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            await sandbox.write("file", b"x" * 100_000)
            remote.standin.fail(Fault(remote.read, status=503))
            assert await sandbox.read("file") == b"x" * 100_000
            remote.standin.fail(Fault(remote.read, lose=True))
            assert await sandbox.read("file") == b"x" * 100_000

    async def test_persistent_service_failure_is_sandbox_error(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            remote.standin.fail(Fault(remote.read, times=20, status=500))
            with pytest.raises(SandboxError):
                await sandbox.read("file")
            remote.standin.faults.clear()

    async def test_slow_service_is_tolerated(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            remote.standin.fail(Fault(remote.start, wait_s=1.0))
            assert (await sandbox.exec(["echo", "late"])).stdout == b"late\n"

    async def test_vanished_sandbox_is_sandbox_error(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sleep", "61"])
            await self.vanish(remote, sandbox.id)
            with pytest.raises(SandboxError):
                await asyncio.wait_for(job.wait(), scaled(10))
            for call in (sandbox.read("file"), sandbox.exec(["true"]), sandbox.write("file", b"")):
                with pytest.raises(SandboxError) as error:
                    await call
                assert not isinstance(error.value, SandboxFileMissing)

    async def vanish(self, remote: Remote, id: str) -> None:
        raise NotImplementedError

    # ---- files

    async def test_file_content_and_mode(self, remote: Remote) -> None:
        data = bytes(range(256)) * 20_000
        async with remote.sandbox() as sandbox:
            path = f"{sandbox.workdir}/deep/er/it's a file"
            await sandbox.write(path, b"longer than nothing", mode=0o644)
            await sandbox.write(path, data, mode=0o750)
            assert await sandbox.read(path) == data
            assert (await sandbox.exec(["stat", "-c", "%a", path])).stdout == b"750\n"
            with pytest.raises(SandboxError, match="larger"):
                await sandbox.read(path, limit=len(data) - 1)
            with pytest.raises(SandboxFileMissing):
                await sandbox.read(f"{sandbox.workdir}/none")
            for call in (sandbox.write(f"{sandbox.workdir}/deep", b""), sandbox.read(f"{sandbox.workdir}/deep")):
                with pytest.raises(SandboxError):
                    await call

    async def test_folder_upload_and_download(self, remote: Remote, tmp_path: Path) -> None:
        source, back = tmp_path / "there", tmp_path / "back"
        (source / "sub").mkdir(parents=True)
        (source / "sub/run").write_bytes(b"\x00\xff")
        (source / "sub/run").chmod(0o755)
        (source / "link").symlink_to("sub/run")
        async with remote.sandbox() as sandbox:
            target = f"{sandbox.workdir}/it's here"
            await sandbox.upload(source, target)
            await sandbox.exec(["ln", "-s", "/etc/passwd", f"{target}/out"])
            await sandbox.download(target, back)
            with pytest.raises(SandboxFileMissing):
                await sandbox.download(f"{sandbox.workdir}/none", back)
        assert (back / "sub/run").read_bytes() == b"\x00\xff"
        assert (back / "sub/run").stat().st_mode & 0o777 == 0o755
        assert (back / "link").readlink() == Path("sub/run")
        assert not (back / "out").is_symlink()

    async def test_mounts_are_copied_in(self, remote: Remote, tmp_path: Path) -> None:
        (tmp_path / "host").mkdir()
        (tmp_path / "host/file").write_text("from the host")
        async with remote.sandbox(mounts=(Mount(str(tmp_path / "host"), str(tmp_path / "guest")),)) as sandbox:
            assert await sandbox.read(str(tmp_path / "guest/file")) == b"from the host"
            assert sandbox.shared is None

    # ---- lifetime

    async def test_stop_ends_everything_and_is_idempotent(self, remote: Remote) -> None:
        async with remote.sandbox() as sandbox:
            machine = remote.machine(sandbox)
            job = await sandbox.start(["sh", "-c", "setsid sleep 61 & sleep 62"])
            await until(lambda: len(sleepers(machine)) >= 2)
            await sandbox.stop()
            assert await job.wait() == 137
            await job.kill()
            await sandbox.stop()
            assert not machine.alive
            assert machine.pids() == []
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"])

    async def test_failing_stop_is_error_and_can_be_repeated(self, remote: Remote) -> None:
        sandbox = await remote.make().create(SandboxSpec())
        remote.standin.fail(Fault(remote.remove, times=40, status=500))
        with pytest.raises(SandboxError):
            await sandbox.stop()
        remote.standin.faults.clear()
        await sandbox.stop()
        assert not remote.machine(sandbox).alive

    async def test_sandbox_with_failing_setup_is_removed(self, remote: Remote) -> None:
        with pytest.raises(SandboxError):
            await remote.make().create(SandboxSpec(mounts=(Mount("/no/such/folder", "/x"),)))
        assert [m for m in remote.standin.machines.values() if m.alive] == []

    async def test_lease_is_renewed_until_life_ends(self, remote: Remote) -> None:
        async with remote.sandbox({"lease_s": paced(0.5)}, life_s=paced(2)) as sandbox:
            began, machine = time.monotonic(), remote.machine(sandbox)
            while time.monotonic() - began < paced(1.1):
                assert machine.alive
                await asyncio.sleep(0.05)
            await until(lambda: not machine.alive, 3)

    async def test_sandbox_ends_with_its_owner_despite_running_job(self, remote: Remote) -> None:
        async with remote.sandbox({"lease_s": paced(0.5)}, life_s=paced(1)) as sandbox:
            job = await sandbox.start(["sleep", "3661"])
            for task in asyncio.all_tasks():  # as if the owner was killed
                if task.get_coro().__qualname__ in ("ShellSandbox._renew", "ShellJob._watch_until_end"):  # type: ignore[union-attr]
                    task.cancel()
            await until(lambda: not remote.machine(sandbox).alive, 6)
            del job

    async def test_sweep_removes_only_sandboxes_of_dead_owners(self, remote: Remote) -> None:
        backend = remote.make()
        mine, dead, other = [await backend.create(SandboxSpec(labels={"who": str(i)})) for i in range(3)]
        machine = remote.machine(mine)
        assert machine.labels["who"] == "0"
        remote.machine(dead).labels["turngate-process"] = "4194305-1"
        remote.machine(other).labels.update({"turngate-process": "4194305-1", "turngate-host": "elsewhere"})
        assert await backend.sweep() == 1
        assert [remote.machine(sandbox).alive for sandbox in (mine, dead, other)] == [True, False, True]
        for sandbox in (mine, dead, other):
            await sandbox.stop()

    async def test_job_ends_when_sandbox_life_ends(self, remote: Remote) -> None:
        async with remote.sandbox(life_s=paced(1)) as sandbox:
            job = await sandbox.start(["sleep", "3661"])
            assert await asyncio.wait_for(job.wait(), scaled(10)) == 137
            with pytest.raises(SandboxError):
                await sandbox.exec(["true"])

    async def test_cancelled_stop_still_stops(self, remote: Remote) -> None:
        sandbox = await remote.make().create(SandboxSpec())
        stopping = asyncio.create_task(sandbox.stop())
        await asyncio.sleep(0)
        stopping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopping
        assert not remote.machine(sandbox).alive

    @pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03, 0.06, 0.1, 0.3])
    async def test_cancelled_creation_leaves_nothing_behind(self, remote: Remote, after_s: float) -> None:
        creating = asyncio.create_task(remote.make().create(SandboxSpec()))
        await asyncio.sleep(after_s)
        creating.cancel()
        with suppress(asyncio.CancelledError):
            await (await creating).stop()  # the creation finished first
        await asyncio.sleep(0.2)  # for a request in flight
        await until(lambda: not any(machine.alive for machine in remote.standin.machines.values()))

    async def test_fork_bomb_is_killed_with_its_job(self, remote: Remote) -> None:
        bomb = "n=0; while [ $n -lt 40 ]; do (setsid sh -c 'while :; do sleep 61 & sleep 0.2; done' &); n=$((n+1)); done; sleep 62"
        async with remote.sandbox() as sandbox:
            job = await sandbox.start(["sh", "-c", bomb])
            await until(lambda: len(sleepers(remote.machine(sandbox))) >= 100, 20)
            await job.kill(0)
            assert await job.wait() == 137
            await asyncio.sleep(0.5)
            await until(lambda: sleepers(remote.machine(sandbox)) == [])

    # ---- keys

    async def test_valid_key_passes_check(self, remote: Remote) -> None:
        await remote.make().check()

    async def test_missing_and_wrong_key_are_unavailable(self, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(remote.key, "wrong-and-secret")
        for refused in (remote.make().check(), remote.make().create(SandboxSpec())):
            with pytest.raises(SandboxUnavailable, match=f"; check {remote.key}") as error:
                await refused
            assert "wrong-and-secret" not in str(error.value)
            assert error.value.__cause__ is None
        monkeypatch.delenv(remote.key)
        with pytest.raises(SandboxUnavailable, match=remote.key):
            await remote.make().check()

    async def test_missing_sdk_error_names_install_command(
        self, remote: Remote, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, remote.sdk, None)
        for refused in (remote.make().check(), remote.make().create(SandboxSpec()), remote.make().sweep()):
            with pytest.raises(SandboxUnavailable, match=r"pip install 'turngate\["):
                await refused

    async def test_unreachable_service_is_unavailable(self, remote: Remote) -> None:
        remote.standin.fail(Fault("", times=1000, status=503))
        with pytest.raises(SandboxUnavailable, match=r"could not .*network connection, or try again later"):
            await remote.make().check()

    async def test_error_for_unusable_home_names_it(self, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
        environ = Machine.environ
        monkeypatch.setattr(
            Machine, "environ", lambda machine, env: {**environ(machine, env), "HOME": f"{machine.folder}/jane doe"}
        )
        with pytest.raises(SandboxError, match=r"jane doe/turngate' contains characters other than .*different HOME"):
            await remote.make().create(SandboxSpec())
        assert not any(machine.alive for machine in remote.standin.machines.values())

    async def test_unknown_image_and_dockerfile_are_errors(self, remote: Remote) -> None:
        with pytest.raises(SandboxError, match="nothing"):
            await remote.make().create(SandboxSpec(image="nothing"))
        with pytest.raises(SandboxUnavailable, match="Dockerfile"):
            await remote.make().create(SandboxSpec(dockerfile="/somewhere"))
