"""Start a Python program quickly, by forking a process that has already imported its packages. The program itself is unmodified.

    python3 fork_server.py SOCKET FOLDER MODULE IMPORT …   import the modules from FOLDER, then wait for callers
    python3 -I -S fork_client.py SOCKET ARGUMENT …         run `python3 -m MODULE ARGUMENT …` in a fork of that process

If FOLDER is empty, the modules are those of this Python, and the caller's working folder and PYTHONPATH are searched for others. Modules
that are found there are never kept for later runs.

Starting mini-swe-agent takes three seconds of CPU time, nearly all of it for the import of litellm. That is more than the rest of a rollout
of three short turns. Modules that the first run imports are also imported for all later runs. Modules imported before the fork must not
depend on the rollout. The new process has the caller's arguments, environment, working folder and standard files. If the caller is killed,
its agent is killed too. When the server's stdin is closed, it kills all agents and ends. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from types import ModuleType

MAX_REQUEST_BYTES = 1 << 20
STDIN = 0
RECEIVE_S = 5.0  # a caller sends its request at once


def serve(path: str, folder: str, module: str, imports: list[str]) -> None:
    sys.path[0] = folder or os.devnull  # it was the folder of this script
    for name in (module, *imports):
        importlib.import_module(name)
    del sys.modules[module]  # so that it can be run as `python3 -m` would
    gc.collect()
    gc.freeze()  # these objects are shared by all forks
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    wake_reader, wake_writer = os.pipe()
    os.set_blocking(wake_writer, False)
    os.set_blocking(wake_reader, False)
    signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("ready", flush=True)
    callers: dict[int, socket.socket] = {}  # by process id
    notes, pen = os.pipe()  # the first run writes the names of the modules it imported
    os.set_blocking(notes, False)
    first = 0
    while True:
        ready, _, _ = select.select([listener, wake_reader, STDIN, *callers.values()], [], [])
        if STDIN in ready:  # the process that started the server has ended
            for pid in callers:
                kill(pid)
            return
        for source in ready:
            if source is listener:
                caller, _ = listener.accept()
                try:
                    inherited = (listener, wake_reader, wake_writer, *callers.values())
                    pid = fork_agent(caller, module, inherited, 0 if first else pen, own_path=bool(folder))
                except (OSError, ValueError):  # the caller was killed before it had sent everything
                    caller.close()
                    continue
                callers[pid] = caller
                first = first or pid
            elif source is wake_reader:
                os.read(wake_reader, 4096)
            else:  # callers send nothing more, so this one has closed its connection
                for pid in [pid for pid, caller in callers.items() if caller is source]:
                    kill(pid)
        report_exits(callers)
        if first > 0 and first not in callers:
            first = -1 if import_noted(notes) else 0


def import_noted(notes: int) -> bool:
    """Import the modules that the first run noted, except those that fail. Return False if that run was killed."""
    try:
        names = os.read(notes, MAX_REQUEST_BYTES).decode().split()
    except BlockingIOError:
        return False
    for name in names:
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return True


def fork_agent(
    caller: socket.socket, module: str, inherited: tuple[int | socket.socket, ...], pen: int, *, own_path: bool
) -> int:
    """Fork a process that runs the module as the caller asks, and return its process id.

    Unless `own_path`, it also imports from the caller's working folder and PYTHONPATH.
    """
    cwd, arguments, environment, fds = receive_request(caller)
    before = set(sys.modules)
    if pid := os.fork():
        with contextlib.suppress(OSError):  # it is already done, or the process has ended
            os.setpgid(pid, pid)  # so that `kill` finds the process at once
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for fd, number in zip(fds, (0, 1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        for other in (caller, *inherited):
            os.close(other) if isinstance(other, int) else other.close()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        if not own_path:
            sys.path[:1] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        sys.argv = ["", *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        if pen:
            names = [
                name
                for name, loaded in sys.modules.items()
                if name not in before and not name.startswith("__") and (own_path or is_installed(loaded))
            ]
            os.write(pen, "\n".join(["", *names]).encode()[: select.PIPE_BUF * 15])
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the program may have closed it
                stream.flush()
        os._exit(code & 0xFF)


def receive_request(caller: socket.socket) -> tuple[str, list[str], dict[str, str], list[int]]:
    """Return the caller's working folder, arguments, environment and standard files. A caller that sends too little is refused."""
    caller.settimeout(RECEIVE_S)
    header, fds, _, _ = socket.recv_fds(caller, 4, 3)
    try:
        size = int.from_bytes(header, "little")
        if len(fds) != 3 or len(header) != 4 or not 0 < size <= MAX_REQUEST_BYTES:
            raise ValueError("the request is incomplete or too large")
        request = b""
        while len(request) < size:
            part = caller.recv(size - len(request))
            if not part:
                raise ValueError("the request is incomplete")
            request += part
        cwd, count, *fields = map(os.fsdecode, request.split(b"\0"))
        environment = dict(field.split("=", 1) for field in fields[int(count) :])
    except (OSError, ValueError):
        for fd in fds:
            os.close(fd)
        raise
    caller.settimeout(None)
    return cwd, fields[: int(count)], environment, list(fds)


def is_installed(module: ModuleType) -> bool:
    """Return whether a module is one of this Python, not one of the caller's working folder or PYTHONPATH."""
    file = getattr(module, "__file__", None)
    return file is None or file.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))


def report_exits(callers: dict[int, socket.socket]) -> None:
    """Send the exit codes of ended agents to their callers."""
    while callers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        kill(pid)  # processes that the agent left running
        with callers.pop(pid) as caller, contextlib.suppress(OSError):  # the caller is gone
            caller.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
