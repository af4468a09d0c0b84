"""The contract of every sandbox backend. Subclass it to test a backend:

    class TestMine(Contract):
        @pytest.fixture
        def backend(self) -> Backend: …

The fixture `sandbox` (in `conftest.py`) creates a sandbox whose commands have FROM_SPEC=yes. Commands are plain shell, so that any image
can run them.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from tests.speed import paced, scaled
from turngate.errors import SandboxError, SandboxFileMissing
from turngate.sandboxes.base import Backend, Sandbox, SandboxSpec


async def sh(sandbox: Sandbox, script: str, *arguments: str, **options: object) -> str:
    """Run a script that must succeed, and return its output."""
    done = await sandbox.exec(["/bin/sh", "-c", script, "sh", *arguments], **options)  # type: ignore[arg-type]
    assert done.exit_code == 0, done
    return done.stdout.decode()


async def is_running(sandbox: Sandbox, word: str) -> bool:
    """Check whether a process in the sandbox has a word in its command line."""
    # The word is passed in two parts, and the processes are listed before the others start, so that the script does not match itself.
    script = 'word=$1$2; set -- /proc/[0-9]*/cmdline; cat "$@" 2>/dev/null | tr "\\0" " " | grep -qF "$word"'
    done = await sandbox.exec(["/bin/sh", "-c", script, "sh", word[:3], word[3:]])
    return done.exit_code == 0


async def wait_until_running(sandbox: Sandbox, *words: str) -> None:
    """Wait until a process runs for each word."""
    async with asyncio.timeout(scaled(20)):
        for word in words:
            while not await is_running(sandbox, word):
                await asyncio.sleep(0.05)


async def wait_until_ended(sandbox: Sandbox, word: str, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + scaled(within_s)
    while await is_running(sandbox, word):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


class Contract:
    # ── exec ──

    async def test_command_returns_output_and_exit_code(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"])
        assert (done.exit_code, done.stdout, done.stderr, done.timed_out) == (7, b"out\n", b"err\n", False)

    async def test_arguments_are_not_parsed_by_shell(self, sandbox: Sandbox) -> None:
        words = ["a b", "$HOME", "`id`", "*", "it's", 'a"b', "", "-n", "\\", "é ☃ 🎉", "two\nlines", "; exit 3"]
        done = await sandbox.exec(["/bin/sh", "-c", 'for word; do printf "%s\\0" "$word"; done', "sh", *words])
        assert done.stdout.decode().split("\0")[:-1] == words

    async def test_environment_has_only_given_variables(
        self, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SECRET_OF_THE_HOST", "x")
        tricky = "two\nlines 'quoted' \"twice\" $HOME `id` é 🎉 = # \\ \t end "
        env = {"TRICKY": tricky, "EMPTY": "", "LONG": "x" * 100_000}
        printed = await sh(sandbox, 'printf "%s|%s|%s|%s" "$FROM_SPEC" "$TRICKY" "${EMPTY-unset}" "${#LONG}"', env=env)
        assert printed == f"yes|{tricky}||100000"
        assert await sh(sandbox, 'printf "%s" "$FROM_SPEC"', env={"FROM_SPEC": "no"}) == "no"
        assert "SECRET_OF_THE_HOST" not in await sh(sandbox, "env")

    async def test_home_is_empty_and_commands_run_in_workdir(self, sandbox: Sandbox) -> None:
        assert (await sh(sandbox, "echo $HOME; pwd; ls -A ~")).split() == [sandbox.home, sandbox.workdir]
        await sh(sandbox, "echo a >~/a && echo b >b && mkdir sub")
        assert await sandbox.read(f"{sandbox.home}/a") == b"a\n"
        assert await sh(sandbox, "pwd", cwd=f"{sandbox.workdir}/sub") == f"{sandbox.workdir}/sub\n"

    async def test_stdin_is_delivered_and_closed(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 5000
        done = await sandbox.exec(["cat"], stdin=data)
        assert done.stdout == data
        assert (await sandbox.exec(["cat"], timeout_s=scaled(20))).stdout == b""

    async def test_large_output_is_complete(self, sandbox: Sandbox) -> None:
        done = await sandbox.exec(["/bin/sh", "-c", "head -c 20000000 /dev/zero; head -c 3000000 /dev/zero >&2"])
        assert (len(done.stdout), len(done.stderr)) == (20_000_000, 3_000_000)

    async def test_unrunnable_command_fails_as_in_shell(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["no-such-program"])).exit_code == 127
        await sandbox.write("plain", b"no program", mode=0o644)
        assert (await sandbox.exec([f"{sandbox.workdir}/plain"])).exit_code == 126
        assert (await sandbox.exec(["true"], cwd="/no/such/folder")).exit_code == 126
        for wrong in ([], ["a\0b"]):
            with pytest.raises(SandboxError):
                await sandbox.exec(wrong)

    async def test_exit_code_of_signal_is_128_plus_number(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["/bin/sh", "-c", "kill -KILL $$"])).exit_code == 137
        assert (await sandbox.exec(["/bin/sh", "-c", "kill -TERM $$"])).exit_code == 143

    async def test_timeout_kills_everything_and_keeps_output(self, sandbox: Sandbox) -> None:
        script = "trap '' TERM; echo before; (setsid sleep 3177 &) ; sleep 3178"
        async with asyncio.timeout(scaled(15)):  # the command itself would take an hour
            done = await sandbox.exec(["/bin/sh", "-c", script], timeout_s=paced(0.5))
        assert (done.timed_out, done.stdout) == (True, b"before\n")
        assert done.exit_code != 0
        assert await wait_until_ended(sandbox, "sleep 3177")
        assert await wait_until_ended(sandbox, "sleep 3178")

    async def test_cancelled_exec_leaves_no_process(self, sandbox: Sandbox) -> None:
        task = asyncio.create_task(sandbox.exec(["/bin/sh", "-c", "sleep 3179"]))
        await wait_until_running(sandbox, "sleep 3179")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await wait_until_ended(sandbox, "sleep 3179")

    async def test_daemon_does_not_block_exec(self, sandbox: Sandbox) -> None:
        async with asyncio.timeout(scaled(10)):  # the daemon runs for an hour
            assert await sh(sandbox, "sleep 3180 & echo started") == "started\n"
        assert await is_running(sandbox, "sleep 3180")

    async def test_commands_run_concurrently(self, sandbox: Sandbox) -> None:
        # Each command ends only when all of them run.
        script = 'n=$1; touch "at-$n"; while set -- at-*; [ $# -lt 10 ]; do sleep 0.2; done; echo "$n"'
        async with asyncio.timeout(scaled(20)):
            printed = await asyncio.gather(*(sh(sandbox, script, str(n)) for n in range(10)))
        assert printed == [f"{n}\n" for n in range(10)]

    # ── background jobs ──

    async def test_job_exit_code_and_output_files(self, sandbox: Sandbox) -> None:
        script = 'echo "$FROM_SPEC $MINE"; echo err >&2; exit 9'
        out, err = f"{sandbox.home}/logs/out", f"{sandbox.home}/logs/err"
        job = await sandbox.start(["/bin/sh", "-c", script], env={"MINE": "x"}, stdout=out, stderr=err)
        assert await job.wait() == 9
        assert await job.wait() == 9
        assert await sandbox.read(out) == b"yes x\n"
        assert await sandbox.read(err) == b"err\n"
        both = await sandbox.start(
            ["/bin/sh", "-c", "echo a; echo b >&2"], cwd=sandbox.home, stdout="one", stderr="one"
        )
        assert await both.wait() == 0
        assert await sandbox.read(f"{sandbox.home}/one") == b"a\nb\n"
        assert await (await sandbox.start(["/bin/sh", "-c", "echo a; echo b >&2; exit 4"])).wait() == 4

    async def test_job_runs_alongside_exec(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.1; done; exit 5"])
        waiting = asyncio.create_task(job.wait())
        await wait_until_running(sandbox, "while [ ! -e go ]")  # a container takes a moment to start
        assert not waiting.done()
        await sandbox.write("go", b"")
        assert await asyncio.wait_for(waiting, scaled(20)) == 5

    async def test_kill_ends_all_processes_of_job(self, sandbox: Sandbox) -> None:
        script = "sleep 3181 & (setsid sleep 3182 &); setsid sh -c 'sleep 3183 & wait' & sleep 3184"
        job = await sandbox.start(["/bin/sh", "-c", script])
        words = ("sleep 3181", "sleep 3182", "sleep 3183", "sleep 3184")
        await wait_until_running(sandbox, *words)
        await job.kill()
        assert await asyncio.wait_for(job.wait(), scaled(20)) in (137, 143)
        for word in words:
            assert await wait_until_ended(sandbox, word), word
        await job.kill()

    async def test_kill_sends_sigterm_then_sigkill(self, sandbox: Sandbox) -> None:
        polite = await sandbox.start(
            ["/bin/sh", "-c", "trap 'echo bye >said; exit 3' TERM; touch a; while :; do sleep 0.1; done"]
        )
        stubborn = await sandbox.start(["/bin/sh", "-c", "trap '' TERM; touch b; while :; do sleep 0.1; done"])
        await sh(sandbox, "while [ ! -e a ] || [ ! -e b ]; do sleep 0.1; done", timeout_s=scaled(20))
        await polite.kill(grace_s=scaled(10))
        assert await polite.wait() == 3
        assert await sandbox.read("said") == b"bye\n"
        await stubborn.kill(grace_s=0.3)
        assert await stubborn.wait() == 137

    async def test_job_killed_from_inside_reports_signal(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["/bin/sh", "-c", "echo $$ >pid; exec sleep 3185"])
        await sh(sandbox, "while [ ! -s pid ]; do sleep 0.1; done; kill -KILL $(cat pid)", timeout_s=scaled(20))
        assert await asyncio.wait_for(job.wait(), scaled(20)) == 137

    async def test_cancelled_wait_keeps_job_running(self, sandbox: Sandbox) -> None:
        job = await sandbox.start(["/bin/sh", "-c", "while [ ! -e go ]; do sleep 0.1; done; exit 6"])
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(job.wait(), 0.1)
        await sandbox.write("go", b"")
        assert await asyncio.wait_for(job.wait(), scaled(20)) == 6

    # ── files ──

    async def test_file_round_trip(self, sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 2000
        for path in ("file", f'{sandbox.home}/deep/er/it\'s a "name" $HOME é', "-n", f"{sandbox.workdir}/empty"):
            content = b"" if path.endswith("empty") else data
            await sandbox.write(path, content)
            assert await sandbox.read(path) == content
        await sandbox.write("file", b"shorter")
        assert await sandbox.read("file") == b"shorter"

    async def test_file_mode(self, sandbox: Sandbox) -> None:
        await sandbox.write("run", b"#!/bin/sh\necho ran\n", mode=0o755)
        await sandbox.write("secret", b"x", mode=0o600)
        assert await sh(sandbox, "./run && stat -c %a run secret") == "ran\n755\n600\n"

    async def test_unreadable_and_unwritable_paths_are_errors(self, sandbox: Sandbox) -> None:
        await sh(sandbox, "mkdir folder && mkfifo pipe && ln -s nowhere dangling && head -c 1001 /dev/zero >big")
        for missing in ("no-such-file", "dangling", "no/such/folder/file"):
            with pytest.raises(SandboxFileMissing):
                await sandbox.read(missing)
        for unreadable in ("folder", "pipe", ""):
            with pytest.raises(SandboxError):
                await sandbox.read(unreadable)
        with pytest.raises(SandboxError):
            await sandbox.read("big", limit=1000)
        assert len(await sandbox.read("big", limit=1001)) == 1001
        with pytest.raises(SandboxError):
            await sandbox.write("folder", b"x")
        with pytest.raises(SandboxError):
            await sandbox.write("big/file", b"x")

    async def test_folder_upload_and_download(self, sandbox: Sandbox, tmp_path: Path) -> None:
        source = tmp_path / "in"
        (source / "sub" / "empty").mkdir(parents=True)
        (source / "sub" / "data.bin").write_bytes(bytes(range(256)) * 100)
        (source / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (source / "run.sh").chmod(0o755)
        (source / "é ☃").write_text("x")
        (source / "link").symlink_to("sub/data.bin")
        await sandbox.upload(source, f"{sandbox.workdir}/a/b")
        assert await sh(sandbox, "a/b/run.sh; cat a/b/link | wc -c; ls -A a/b/sub") == "ran\n25600\ndata.bin\nempty\n"
        await sh(sandbox, "echo new >a/b/sub/new; rm a/b/run.sh")
        await sandbox.download(f"{sandbox.workdir}/a/b", tmp_path / "out")
        out = tmp_path / "out"
        found = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
        assert found == sorted(["sub", "sub/empty", "sub/data.bin", "sub/new", "é ☃", "link"])
        assert (out / "link").read_bytes() == (source / "sub" / "data.bin").read_bytes()
        with pytest.raises(SandboxError):
            await sandbox.upload(tmp_path / "none", "x")
        with pytest.raises(SandboxFileMissing):
            await sandbox.download("no-such-folder", tmp_path / "other")

    async def test_upload_copies_links_without_their_targets(self, sandbox: Sandbox, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("of the host")
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
        await sandbox.upload(tmp_path / "in", "up")
        assert (await sh(sandbox, "test -L up/link && echo link")) == "link\n"

    async def test_download_stays_in_target_folder(self, sandbox: Sandbox, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        script = """
        mkdir -p d/sub && cd d
        ln -s "$1" away && ln -s /etc/passwd absolute && ln -s ../../outside up && ln -s . here && ln -s here/here/../.. chain
        ln -s sub inside && echo good >sub/file && mkfifo pipe
        """
        await sh(sandbox, script, str(outside))
        await sandbox.download("d", tmp_path / "out")
        out = tmp_path / "out"
        assert sorted(os.listdir(out)) == ["here", "inside", "sub"]
        assert (out / "inside" / "file").read_text() == "good\n"
        assert all(path.resolve().is_relative_to(out) for path in out.rglob("*"))
        # A second download does not follow an existing link in the target folder.
        (tmp_path / "again").mkdir()
        (tmp_path / "again" / "sub").symlink_to(outside)
        with pytest.raises(SandboxError):
            await sandbox.download("d", tmp_path / "again")
        assert not os.listdir(outside)

    # ── the end ──

    async def test_stop_ends_everything_and_is_idempotent(self, backend: Backend) -> None:
        sandbox = await backend.create(SandboxSpec())
        job = await sandbox.start(["/bin/sh", "-c", "(setsid sleep 3186 &); sleep 3187"])
        other = asyncio.create_task(sandbox.exec(["sleep", "3188"]))
        await wait_until_running(sandbox, "sleep 3186", "sleep 3187", "sleep 3188")
        await sandbox.stop()
        await sandbox.stop()
        assert await asyncio.wait_for(job.wait(), scaled(20)) != 0
        assert (await asyncio.wait_for(other, scaled(20))).exit_code != 0
        await job.kill()
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        with pytest.raises(SandboxError):
            await sandbox.read("x")

    async def test_sandboxes_are_separate(self, backend: Backend) -> None:
        first, second = await asyncio.gather(backend.create(SandboxSpec()), backend.create(SandboxSpec()))
        try:
            assert first.id != second.id
            await first.write(f"{first.home}/mine", b"1")
            await first.write("work", b"1")
            assert (
                await sh(second, "ls -A ~ .") == f".:\n\n{second.home}:\n" or await sh(second, "ls -A ~; ls -A .") == ""
            )
        finally:
            await asyncio.gather(first.stop(), second.stop())

    async def test_sweep_keeps_sandboxes_in_use(self, backend: Backend, sandbox: Sandbox) -> None:
        await backend.sweep()
        assert await sh(sandbox, "echo alive") == "alive\n"
