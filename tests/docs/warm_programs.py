"""Run Python programs as forks of a process that has done their imports, which take most of the time of a short command.

    python -m tests.docs.warm_programs SOCKET                        # the server
    python -I -S tests/docs/warm_programs.py SOCKET MODULE ARGS …    # like `python -m MODULE ARGS …`

A forked program has the files, folder, environment and signals of its client, and the client exits as the program does. If the server has
the environment variable `WARM_TOKENIZER`, the folder and the model name of a tokenizer, its programs also share that.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

TOKENIZER = "WARM_TOKENIZER"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PRELOADED = (
    *(f"turngate.cli.{name}" for name in ("agents", "batch", "certify", "doctor", "export", "run", "show", "tasks")),
    *(f"turngate.cli.{name}" for name in ("gateway_choice", "verify")),
    "turngate.server.run",
    "turngate.api",
    "gauntlet.engine",
)


# ---- the client: imports nothing else, so that it starts fast ----


def run(path: str, words: list[str]) -> None:
    """Run a program, and exit as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    order = repr((words, os.getcwd(), dict(os.environ))).encode()
    socket.send_fds(connection, [len(order).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(order)
    for number in FORWARDED:
        signal.signal(number, lambda got, _: connection.sendall(bytes([got])))
    status = int.from_bytes(connection.recv(4), "big", signed=True)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


# ---- the server ----


def serve(path: str) -> None:
    """Import the libraries, then fork a watcher and a program for each client."""
    import gc
    import importlib

    if place := os.environ.pop(TOKENIZER, ""):
        from pathlib import Path

        from tests.docs import warm_tokenizer

        folder, _, model = place.partition(" ")
        warm_tokenizer.load(Path(folder), model)
    _scale_doctor_timeouts()
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # so that collections in the programs do not touch, and copy, what they share
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    listener.close()
                    _watch(connection)
            while _reap_one():
                pass


def _scale_doctor_timeouts() -> None:
    """Give the checks of `turngate doctor` as much time as a slow machine needs."""
    import msgspec

    from tests.speed import scaled
    from turngate.doctor import checks

    checks.CHECKS = tuple(msgspec.structs.replace(one, timeout_s=scaled(one.timeout_s)) for one in checks.CHECKS)  # type: ignore[assignment]


def _reap_one() -> bool:
    """Reap a watcher that has ended. Return whether there was one."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _watch(connection: socket.socket) -> None:
    """Fork the program, forward its client's signals to it, and report how it ended."""
    import ast
    import select

    size, files, _, _ = socket.recv_fds(connection, 4, 3)
    order = b""
    while len(order) < int.from_bytes(size, "big"):
        order += connection.recv(1 << 20)
    program = os.fork()
    if program == 0:
        connection.close()
        _become(files, *ast.literal_eval(order.decode()))
    ended = os.pidfd_open(program)
    while ended not in select.select([ended, connection], [], [])[0]:
        number = connection.recv(1)
        os.kill(program, number[0] if number else signal.SIGKILL)  # no number: the client was killed
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    try:
        connection.sendall(status.to_bytes(4, "big", signed=True))
    finally:
        os._exit(0)


def _become(files: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    """Turn this process into the program, and run it to its end."""
    import atexit
    import runpy
    import threading
    import traceback

    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    status = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as exit_:
        status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does: waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        run(sys.argv[1], sys.argv[2:])
