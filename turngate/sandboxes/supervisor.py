"""The process that the host talks to in a local or bubblewrap sandbox. It starts commands and tracks all their descendants.

`supervised_sandbox.py` runs it as `python3 supervisor.py FD LIFE_S [FOLDER]`, on the host (local) or as process 1 of a namespace
(bubblewrap). FD is one end of a socket pair. Each command has a guard, which is a process that adopts the command's orphaned descendants.
A daemon that has left its session therefore still belongs to the command. If a command kills its guard, the supervisor adopts the remaining
processes and kills them. When the other end of FD closes (because the owner stopped the sandbox or died), or after LIFE_S seconds, every
process of the sandbox is killed and FOLDER is removed.

`python3 supervisor.py --lead COMMAND …` runs one command on the host and kills it when stdin closes. Tunnels use this.

A fork server (`fork_server.py`) also uses the functions of this file, to run a preloaded command without an exec.

Standard library only, Python 3.8 and newer, one thread.
"""

# Lint rules that do not suit a dependency-free file for Python 3.8:
# ruff: noqa: PTH101, PTH106, PTH208, S606, SIM105, UP006, UP035

from __future__ import annotations

import array
import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, Iterable, Set, Tuple

SET_DUMPABLE, SET_CHILD_SUBREAPER = 4, 36  # options of prctl(2)
# Written to the status pipe. A line with the exit code follows, and the pipe closes when all processes have ended.
STARTED = b"+"
FD_COUNT = 5  # descriptors sent with a command: its order, stdin, stdout, stderr and status pipe
CLOSE_ON_EXEC = 0x40000000  # MSG_CMSG_CLOEXEC, which `socket` does not define
CANNOT_RUN, NOT_FOUND = 126, 127  # exit codes, as in a shell
OWNER_FILE = "owner"  # the file in a sandbox's folder that names its owner
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the supervisor ignores them
ORPHANS_S = 5.0  # how long to wait for killed orphans to disappear

Guards = Dict[str, Tuple[int, int]]  # for each job: the guard's process id and our copy of its status pipe
RunCommand = Callable[[Any, int, int, int], None]  # the order, stdin, stdout and stderr; does not return


class TakeOver(BaseException):
    """Raised in a process that was forked to run a preloaded command.

    It unwinds the stack to the fork server's outermost frame, which then runs the command.
    """


def supervise(control: socket.socket, life_s: float, folders: list[str], run: RunCommand) -> None:
    """Start commands with `run` until the other end of `control` closes or `life_s` seconds have passed.

    Then kill all processes of the commands, and remove `folders`.
    """
    deadline = time.monotonic() + life_s
    os.umask(0o022)
    _prctl(SET_CHILD_SUBREAPER, 1)
    _prctl(SET_DUMPABLE, 0)  # commands run as the same user, and must not inspect this process
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    control.send(b"ready")
    guards: Guards = {}
    while time.monotonic() < deadline:
        ready, _, _ = select.select([control.fileno(), wake], [], [], min(deadline - time.monotonic(), 3600))
        if wake in ready:
            os.read(wake, 4096)
            _reap_guards(guards)
        if control.fileno() in ready:
            message, fds = _receive(control)
            if not message:
                break
            order = json.loads(message)
            if "guard" in order:
                _adopt_guard(order["job"], order["guard"], fds, guards)
            elif fds:
                _start_guard(control, order["job"], fds, guards, run)
            elif order["job"] in guards:
                guard = guards[order["job"]][0]
                signal_descendants(guard, order["signal"])
                _send_signal(guard, signal.SIGCONT)  # the command may have stopped its guard
    kill_everything()
    for folder in folders:
        remove_folder(folder)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    message, ancillary, _, _ = control.recvmsg(4096, socket.CMSG_SPACE(FD_COUNT * 4), CLOSE_ON_EXEC)
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return message, list(fds)


def _reap_guards(guards: Guards) -> None:
    """Reap children that have ended. If a guard was killed or failed, kill its command's processes before the job is reported as ended."""
    dead = _reap_children()
    ended = [(job, guard) for job, (guard, _) in guards.items() if guard in dead]
    pipes = [guards.pop(job)[1] for job, _ in ended]
    if any(dead[guard] for _, guard in ended):
        _kill_orphans({guard for guard, _ in guards.values()})
    for pipe in pipes:
        os.close(pipe)


def _reap_children() -> dict[int, int]:
    """Reap the children that have ended, and return their statuses by process id."""
    dead: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return dead
        if not pid:
            return dead
        dead[pid] = status


def _kill_orphans(guards: Set[int]) -> None:
    """Kill the processes that have no guard, and wait up to `ORPHANS_S` seconds for them to disappear."""
    deadline = time.monotonic() + ORPHANS_S
    while time.monotonic() < deadline:
        orphans = _find_orphans(guards)
        if not orphans:
            return
        kill_all(lambda: _find_orphans(guards))
        for pid in orphans:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:  # its parent is another orphan that has not ended yet
                pass
        time.sleep(0.005)


def _find_orphans(guards: Set[int]) -> list[int]:
    roots = [pid for pid in _children_by_parent().get(os.getpid(), []) if pid not in guards]
    return roots + descendants(*roots)


# ---- one command ----


def _start_guard(control: socket.socket, job: str, fds: list[int], guards: Guards, run: RunCommand) -> None:
    """Fork the guard of one command. The supervisor also keeps the status pipe open, because the command may outlive its guard."""
    guard = _fork(*fds[3:])
    if guard == 0:

        def become_guard() -> None:
            control.close()
            for _, pipe in guards.values():
                os.close(pipe)
            run_guard(fds, run)

        _call_and_exit(become_guard, 1)
    for fd in fds[:-1]:
        os.close(fd)
    if guard < 0:
        os.close(fds[-1])
    else:
        guards[job] = guard, fds[-1]


def _adopt_guard(job: str, guard: int, fds: list[int], guards: Guards) -> None:
    """Register a guard that a fork server has forked and made our child, and let it start its command."""
    status, waiting = fds
    try:
        if os.waitpid(guard, os.WNOHANG) == (0, 0):
            guards[job] = guard, status
            os.write(waiting, b"go")
    except OSError:  # it has ended
        pass
    os.close(waiting)
    if job not in guards:
        os.close(status)


def _call_and_exit(call: Callable[[], None], code: int) -> None:
    """Call a function in a forked child, and exit with `code`. This never returns, but lets `TakeOver` propagate."""
    try:
        call()
    except TakeOver:
        raise
    except BaseException:  # noqa: S110  a child must not return into its parent's code
        pass
    os._exit(code)


def _fork(stderr: int, status: int) -> int:
    """Fork. If that fails, report it as a failure of the command, and return -1."""
    try:
        return os.fork()
    except OSError as error:
        os.write(stderr, f"turngate: cannot fork: {error.strerror}\n".encode())
        os.write(status, STARTED + b"%d\n" % CANNOT_RUN)
        return -1


def run_guard(fds: list[int], run: RunCommand) -> None:
    """Start a command, report its exit code, and exit once all its processes have ended."""
    order_fd, stdin, stdout, stderr, status = fds
    signal.set_wakeup_fd(-1)
    _prctl(SET_CHILD_SUBREAPER, 1)
    with os.fdopen(order_fd, "rb") as file:
        order = json.load(file)
    reported, report = os.pipe()
    # The command starts with these signals ignored. A signal that arrives before `prepare_process` restores the default must not be lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    command = _fork(stderr, status)
    if command < 0:
        return
    if command == 0:

        def become_command() -> None:
            os.close(report)
            os.read(reported, 1)  # a command that stops its guard at once would otherwise never be reported as started
            os.close(reported)
            run(order, stdin, stdout, stderr)

        _call_and_exit(become_command, CANNOT_RUN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    os.close(reported)
    os.write(status, STARTED)
    os.close(report)
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)  # the guard's own stderr
    while True:
        try:
            pid, ended = os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)
        if pid == command:
            code = os.WEXITSTATUS(ended) if os.WIFEXITED(ended) else 128 + os.WTERMSIG(ended)
            os.write(status, b"%d\n" % code)


def exec_command(order: Any, stdin: int, stdout: int, stderr: int, *, session: bool = True) -> None:
    """Replace this process with a command, after resetting the state that the command would inherit (see `prepare_process`)."""
    prepare_process(order, stdin, stdout, stderr, session=session)
    command = order["command"]
    try:
        os.execvpe(command[0], command, order["env"])
    except FileNotFoundError:
        _exit_with_error(f"{command[0]}: not found", NOT_FOUND)
    except OSError as error:
        _exit_with_error(f"cannot run {command[0]}: {error.strerror}", CANNOT_RUN)


def prepare_process(order: Any, stdin: int, stdout: int, stderr: int, *, session: bool = True) -> None:
    """Set up the session, signal handlers, resource limits, standard descriptors and working folder of a command."""
    if session:
        os.setsid()
    for number in (*ENDING_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    # This ends the process if one of these signals has arrived since `run_guard` blocked them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    for what, name in ((resource.RLIMIT_FSIZE, "file_bytes"), (resource.RLIMIT_NOFILE, "open_files")):
        if name in order:
            _lower_limit(what, order[name])
    for target, fd in enumerate((stdin, stdout, stderr)):  # all are above 2, because our own 0, 1 and 2 are open
        os.dup2(fd, target)
    where = order["cwd"]
    try:
        os.chdir(where)
    except OSError as error:
        _exit_with_error(f"cannot change to {where}: {error.strerror}", CANNOT_RUN)


def _lower_limit(what: int, value: int) -> None:
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _exit_with_error(why: str, code: int) -> None:
    os.write(2, f"turngate: {why}\n".encode("utf-8", "replace"))
    os._exit(code)


# ---- one command that ends with its owner ----


def run_led_command(command: list[str]) -> None:
    """Run a command and exit with its exit code. Kill it when stdin closes, which also happens if the process that started us is killed."""
    _prctl(SET_CHILD_SUBREAPER, 1)
    for number in ENDING_SIGNALS:  # signals to our process group are meant for the command
        signal.signal(number, signal.SIG_IGN)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = os.fork()
    if started == 0:
        try:
            signal.set_wakeup_fd(-1)
            nothing = os.open(os.devnull, os.O_RDONLY)
            exec_command({"command": command, "cwd": ".", "env": dict(os.environ)}, nothing, 1, 2, session=False)
        finally:
            os._exit(CANNOT_RUN)
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            for pid, status in _reap_children().items():
                if pid == started:
                    kill_everything()
                    os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))
        if 0 in ready and not os.read(0, 4096):
            kill_everything()
            os._exit(1)


# ---- ending processes; also used on the host ----


def signal_descendants(root: int, number: int) -> None:
    """Send a signal to all descendants of a process. SIGKILL also reaches descendants that are forked in the meantime."""
    if number == signal.SIGKILL:
        kill_all(lambda: descendants(root))
    else:
        for pid in descendants(root):
            _send_signal(pid, number)


def kill_everything() -> None:
    """Kill all other processes of the namespace if this is process 1, and all descendants of this process otherwise."""
    if os.getpid() == 1:
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    else:
        kill_all(lambda: descendants(os.getpid()))


def kill_all(find: Callable[[], Iterable[int]]) -> int:
    """Kill the processes that `find` returns, and return their number. They are stopped first, so that none can fork in the meantime."""
    stopped: set[int] = set()
    for _ in range(100):
        fresh = set(find()) - stopped
        if not fresh:
            break
        for pid in fresh:
            _send_signal(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        _send_signal(pid, signal.SIGKILL)
    return len(stopped)


def descendants(*roots: int) -> list[int]:
    """Return the descendants of the given processes, parents first."""
    children = _children_by_parent()
    found = list(roots)
    for pid in found:
        found += children.get(pid, [])
    return found[len(roots) :]


def _children_by_parent() -> dict[int, list[int]]:
    """Map the id of each process to the ids of its children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/" + name + "/stat", "rb") as file:
                    parent = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, IndexError):  # it has ended
                continue
            children.setdefault(parent, []).append(int(name))
    return children


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def remove_folder(folder: str) -> bool:
    """Remove a folder of any depth, even if its permissions were removed. Return whether it no longer exists.

    The owner file is removed last, so that a later sweep can complete a partial removal.
    """
    try:
        os.chmod(folder, 0o700)
        top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        for keep in (OWNER_FILE, ""):
            while _flatten_once(top, keep):
                pass
            if any(name != keep for name in os.listdir(top)):
                return False
    finally:
        os.close(top)
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _flatten_once(top: int, keep: str) -> int:
    """Empty the direct subfolders of `top`: delete their files, move their folders up into `top`, and remove the emptied subfolders.

    Files in `top` are deleted, too. The entry of `top` whose name is `keep` is skipped. Repeated calls empty a folder of any depth. Return
    the number of changes.
    """
    new = os.urandom(8).hex()
    changes = 0
    for name, is_folder in _list_entries(top):
        if name == keep:
            continue
        if not is_folder:
            changes += _try_call(os.unlink, name, dir_fd=top)
            continue
        _try_call(os.chmod, name, 0o700, dir_fd=top)
        try:
            subfolder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
        except OSError:  # it belongs to a different user, but may be empty
            changes += _try_call(os.rmdir, name, dir_fd=top)
            continue
        try:
            for inner, is_deeper in _list_entries(subfolder):
                if is_deeper:
                    _try_call(os.chmod, inner, 0o700, dir_fd=subfolder)  # otherwise it could not be moved
                    to = f"{new}-{changes}"
                    moved = _try_call(os.rename, inner, to, src_dir_fd=subfolder, dst_dir_fd=top)
                    changes += moved or _try_call(os.rmdir, inner, dir_fd=subfolder)
                else:
                    changes += _try_call(os.unlink, inner, dir_fd=subfolder)
        finally:
            os.close(subfolder)
        changes += _try_call(os.rmdir, name, dir_fd=top)
    return changes


def _list_entries(folder: int) -> list[tuple[str, bool]]:
    """Return the name of each entry in a folder, and whether the entry is itself a folder."""
    try:
        with os.scandir(folder) as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    except OSError:
        return []


def _try_call(call: Callable[..., object], *args: Any, **kwargs: Any) -> int:
    """Call a function. Return 1 on success, or 0 if it raises `OSError`."""
    try:
        call(*args, **kwargs)
    except OSError:
        return 0
    return 1


def main() -> None:
    """Run a sandbox's supervisor with the arguments FD, LIFE_S and, optionally, FOLDER."""
    supervise(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), sys.argv[3:], exec_command)


if __name__ == "__main__":
    if sys.argv[1] == "--lead":
        run_led_command(sys.argv[2:])
    main()
