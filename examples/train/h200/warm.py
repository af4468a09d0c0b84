"""Starts a Python agent by forking a process that has its packages imported already. Nothing of the agent is changed.

    python3 warm.py serve SOCKET FOLDER MODULE IMPORT …     imports what is named from FOLDER, then waits
    python3 -I -S warm.py run SOCKET ARGUMENT …             is `python3 -m MODULE ARGUMENT …`, from there

mini-swe-agent's own start is three seconds of CPU, nearly all of it litellm's import: more than all else that a rollout of three short
turns costs. Modules that the first run has imported on its way are imported for all further ones too. What is imported before the fork
must not depend on the rollout; the caller's arguments, environment, folder and open files are the new process's own. A caller that is
killed takes what it started with it. Standard library only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback

LARGEST = 1 << 20  # of what a caller says


def serve(place: str, folder: str, module: str, imports: list[str]) -> None:
    sys.path.insert(0, folder)
    for name in (module, *imports):
        importlib.import_module(name)
    del sys.modules[module]  # it is run, as `python3 -m` would
    gc.collect()
    gc.freeze()  # what is here is common to all
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(256)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    print("warm", flush=True)
    callers: dict[int, socket.socket] = {}  # by process
    notes, pen = os.pipe()  # in which the first one names what it has imported
    os.set_blocking(notes, False)
    first = 0
    while True:
        ready, _, _ = select.select([listener, wake, *callers.values()], [], [])
        for one in ready:
            if one is listener:
                caller, _ = listener.accept()
                try:
                    pid = started(caller, module, (listener, wake, woken, *callers.values()), 0 if first else pen)
                except (OSError, ValueError):  # it was killed before it had said all
                    caller.close()
                    continue
                callers[pid] = caller
                first = first or pid
            elif one is wake:
                os.read(wake, 4096)
            else:  # a caller says nothing any more; this one is gone
                for pid in [pid for pid, caller in callers.items() if caller is one]:
                    kill(pid)
        ended(callers)
        if first > 0 and first not in callers:
            first = -1 if learn(notes) else 0


def learn(notes: int) -> bool:
    """Import what the first run has imported. What cannot be imported alone will be when it is wanted. False: it was killed."""
    try:
        names = os.read(notes, LARGEST).decode().split()
    except BlockingIOError:
        return False
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return True


def started(caller: socket.socket, module: str, others: tuple[int | socket.socket, ...], pen: int) -> int:
    size = int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "little")
    first, fds, _, _ = socket.recv_fds(caller, 1, 3)
    said = json.loads(first + caller.recv(size - 1, socket.MSG_WAITALL))
    before = set(sys.modules)
    if pid := os.fork():
        for fd in fds:
            os.close(fd)
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for fd, number in zip(fds, (0, 1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        for other in (caller, *others):
            os.close(other) if isinstance(other, int) else other.close()
        os.environ.clear()
        os.environ.update(said["env"])
        os.chdir(said["cwd"])
        sys.argv = ["", *said["arguments"]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        if pen:
            names = [name for name in sys.modules if name not in before and not name.startswith("__")]
            os.write(pen, "\n".join(["", *names]).encode()[: select.PIPE_BUF * 15])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 0xFF)


def ended(callers: dict[int, socket.socket]) -> None:
    while callers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        kill(pid)  # what it has left running
        with callers.pop(pid) as caller, contextlib.suppress(OSError):  # it is gone
            caller.send(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def run(place: str, arguments: list[str]) -> int:
    said = json.dumps({"arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd()}).encode()
    if len(said) > LARGEST:
        raise SystemExit("warm.py: the environment is too large")
    server = socket.socket(socket.AF_UNIX)
    server.connect(place)
    server.sendall(len(said).to_bytes(4, "little"))
    socket.send_fds(server, [said[:1]], [0, 1, 2])
    server.sendall(said[1:])
    answer = server.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    _, verb, place, *rest = sys.argv
    if verb == "serve":
        serve(place, rest[0], rest[1], rest[2:])
    else:
        raise SystemExit(run(place, rest))
