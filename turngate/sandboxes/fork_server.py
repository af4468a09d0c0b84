"""A process that imports an agent's libraries, checks that forks can share them, and forks the agent's processes, to save the imports.

`warm_start.py` runs it as `python fork_server.py FD`, with the agent's Python. FD is one end of a socket pair. The first message says what
to import. The server is not used if the imports have effects that forked processes would wrongly share or lack, such as threads, open
files, signal handlers, child processes, printed output or new files. It is also not used if the imports store paths below the server's own
HOME, TMPDIR or working folder in places where a forked process cannot correct them. The server reports which environment variables the
imports have read, so that it is used only for processes in which these variables have the same values. Then it handles these requests
(`supervisor.py` explains supervisors and guards):

- {"do": "supervise"}: fork another supervisor for a local sandbox; its guards can run the agent without an exec
- {"do": "guard"}: fork a guard inside the namespaces of a bubblewrap sandbox; the sandbox's supervisor becomes its parent
- {"do": "hold"}: ignore the limit on idle time until the other end of the passed descriptor closes

The server itself never reads which command to run; only the forked processes do. It exits when the other end of FD closes, or when it has
been idle for too long.

Standard library only, Python 3.8 and newer, one thread.
"""

# Lint rules that do not suit a dependency-free file for Python 3.8:
# ruff: noqa: PTH103, PTH109, PTH120, PTH208, S606, SIM105, UP006, UP035

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import types
from typing import Any, Dict, List, Optional, Tuple

MEMORY = 4 << 30  # limit on the server's own data, in bytes
REAP_S = 5.0  # how often ended children are reaped
FDS = 7  # maximum number of descriptors in one message
CLOSE_ON_EXEC = 0x40000000  # MSG_CMSG_CLOEXEC
SET_DUMPABLE, SET_MM, SET_MM_MAP, CAPBSET_DROP, CAP_AMBIENT, CAP_AMBIENT_CLEAR = 4, 35, 14, 24, 47, 4  # for prctl(2)
CAP_VERSION = 0x20080522  # for capset(2)
# CLONE_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET
NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
FOLDERS = ("HOME", "TMPDIR")  # imports may read these variables, because `_find_traces` finds their values
LIBC = ctypes.CDLL(None, use_errno=True)


class State:
    """Server data that the forked processes need."""

    supervisor: Any = None  # the module supervisor.py
    control: Optional[socket.socket] = None
    limits: Tuple[int, int] = (0, 0)  # the original RLIMIT_DATA, before the server lowered it
    writes: Dict[str, Optional[str]] = {}
    relocated: List[Tuple[Any, str, str, str]] = []


# ---- imports ----


class WatchedEnvironment(type(os.environ)):  # type: ignore[misc]
    """The class of `os.environ` while modules are imported. It records which variables the imports read and write."""

    reads: Dict[str, Optional[str]] = {}
    faults: List[str] = []

    def __getitem__(self, name: str) -> Any:
        try:
            value: Any = super().__getitem__(name)
        except KeyError:
            self._note(name, None)
            raise
        self._note(name, value)
        return value

    def _note(self, name: Any, value: Any) -> None:
        if name not in State.writes and name not in (*FOLDERS, *map(os.fsencode, FOLDERS)):
            self.reads.setdefault(os.fsdecode(name), value if value is None else os.fsdecode(value))

    def __iter__(self) -> Any:
        self.faults.append("an import reads the whole environment")
        return super().__iter__()

    def __setitem__(self, name: str, value: str) -> None:
        State.writes[os.fsdecode(name)] = os.fsdecode(value)
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        State.writes[os.fsdecode(name)] = None
        super().__delitem__(name)


def import_modules(folder: str, modules: List[str], scratch: str) -> Dict[str, Any]:
    """Import modules. Return every fault that makes forking unsafe, and the environment variables that were read, except HOME and TMPDIR.

    During the imports, the folders `home`, `tmp` and `work` in `scratch` take the place of a rollout's folders.
    """
    sys.path[0] = folder
    os.chdir(f"{scratch}/work")
    before = _describe_process()
    gc.set_threshold(50_000, 50, 50)
    plain = os.environ.__class__
    os.environ.__class__ = os.environb.__class__ = WatchedEnvironment
    try:
        for name in modules:
            importlib.import_module(name)
    finally:
        os.environ.__class__ = os.environb.__class__ = plain  # type: ignore[assignment]
    faults = [*WatchedEnvironment.faults]
    faults += [
        f"an import changed the process's {what}"
        for what, value in _describe_process().items()
        if value != before[what]
    ]
    before.clear()
    faults += _find_files(scratch)
    os.chdir("/")
    _forget_folders()
    gc.collect()
    faults += _find_traces(scratch)
    return {"fault": "; ".join(sorted(set(faults))), "reads": WatchedEnvironment.reads}


def _describe_process() -> Dict[str, Any]:
    """Return the state of this process that imports must not change, because forked processes would share it or lack it."""
    try:
        has_children = os.waitpid(-1, os.WNOHANG) is not None
    except ChildProcessError:
        has_children = False
    return {
        "threads": threading.active_count(),
        "open files": [fd for fd in range(256) if _is_open(fd)],
        "signal handlers": [signal.getsignal(number) for number in range(1, signal.NSIG)],
        "child processes": has_children,
        "working folder": os.getcwd(),
        "file mode mask": _read_umask(),
    }


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _read_umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _find_files(scratch: str) -> List[str]:
    for parent, _, files in os.walk(scratch):
        if files or os.path.dirname(parent) not in (scratch, os.path.dirname(scratch)):
            return ["an import wrote files"]
    return []


def _forget_folders() -> None:
    """Reset standard library modules that have cached HOME or TMPDIR, so that they read the variables again."""
    for module, values in (
        ("tempfile", {"tempdir": None, "_name_sequence": None}),
        ("sysconfig", {"_CONFIG_VARS": None, "_CONFIG_VARS_INITIALIZED": False}),
    ):
        for name, value in values.items():
            if name in vars(sys.modules.get(module, types)):
                setattr(sys.modules[module], name, value)


def _find_traces(scratch: str) -> List[str]:
    """Find the strings in memory that contain a path below `scratch`, and describe those that make forking unsafe.

    A module's variable whose whole value is such a path is safe: it is recorded, and the forked process corrects it.
    """
    modules = {id(vars(one)): one for one in list(sys.modules.values()) if isinstance(one, types.ModuleType)}
    expected = {id(scratch), id(os.environ._data)}  # type: ignore[attr-defined]
    raw = os.fsencode(scratch)
    faults = []
    for owner in gc.get_objects():
        if id(owner) in expected:
            continue
        for item in gc.get_referents(owner):
            found = _trace_in(item, scratch, raw)
            if found is None or id(item) in expected:
                continue
            module: Any = modules.get(id(owner))
            names = [name for name, value in owner.items() if value is item] if module is not None else []
            folder, _, rest = found[len(scratch) + 1 :].partition("/")
            if names and item is found and found.startswith(scratch) and folder in ("home", "tmp", "work"):
                State.relocated += [(module, name, folder, "/" + rest if rest else "") for name in names]
            else:
                where = ", ".join(f"{module.__name__}.{name}" for name in names) or _describe_owner(owner, item)
                faults.append(f"an import stored the server's HOME, TMPDIR or working folder in {where}")
    return faults


def _describe_owner(owner: Any, item: Any) -> str:
    keys = [repr(key) for key, value in owner.items() if value is item] if type(owner) is dict else []
    return f"a {type(owner).__name__}{' at ' if keys else ''}{', '.join(keys)[:100]}"


def _trace_in(item: Any, scratch: str, raw: bytes) -> Optional[str]:
    kind = type(item)
    if kind is str:
        return item if scratch in item else None
    if kind is bytes:
        return os.fsdecode(item) if raw in item else None
    if kind in (tuple, dict) and not gc.is_tracked(item):  # `gc.get_objects` does not return it
        values = [*item, *item.values()] if kind is dict else item
        return next((found for value in values if (found := _trace_in(value, scratch, raw)) is not None), None)
    return None


# ---- the server ----


def serve(control: socket.socket, idle_s: float) -> None:
    """Fork processes on request until the other end of `control` closes, or the server has been idle for `idle_s` seconds."""
    leases: List[int] = []
    idle_since = time.monotonic()
    while leases or time.monotonic() - idle_since < idle_s:
        ready, _, _ = select.select([control.fileno(), *leases], [], [], min(idle_s, REAP_S))
        _reap()
        for lease in [fd for fd in leases if fd in ready]:
            leases.remove(lease)
            os.close(lease)
            idle_since = time.monotonic()
        if control.fileno() in ready:
            text, fds = _receive(control)
            if not text:
                return
            idle_since = time.monotonic()
            message = json.loads(text)
            if message["do"] == "hold":
                leases += fds
                continue
            if os.fork() == 0:
                for lease in leases:
                    os.close(lease)
                _become(message, fds)
            for fd in fds:
                os.close(fd)


def _receive(control: socket.socket) -> Tuple[bytes, List[int]]:
    text, ancillary, _, _ = control.recvmsg(65536, socket.CMSG_SPACE(FDS * 4), CLOSE_ON_EXEC)
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return text, list(fds)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# ---- a forked process ----


def _become(message: Dict[str, Any], fds: List[int]) -> None:
    """Run as a supervisor or a guard, then exit. In a process forked to run the agent, raise `TakeOver` instead. Never return."""
    resource.setrlimit(resource.RLIMIT_DATA, State.limits)
    if State.control is not None:
        State.control.close()
    handshake = socket.socket(fileno=fds[0])
    try:
        if message["do"] == "supervise":
            _become_supervisor(message, handshake, *fds[1:])
        else:
            _become_guard(handshake, *fds[1:])
    except State.supervisor.TakeOver:
        raise
    except BaseException as error:
        try:
            handshake.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        except OSError:
            pass
    os._exit(1)


def _become_supervisor(message: Dict[str, Any], handshake: socket.socket, control: int, log: int) -> None:
    os.setsid()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    replace_environment(message["env"])
    describe_process(message["argv"], message["env"])
    handshake.send(json.dumps({"pid": os.getpid()}).encode())
    handshake.close()
    State.supervisor.supervise(socket.socket(fileno=control), message["life_s"], message["folders"], run_command)
    os._exit(0)


def _become_guard(handshake: socket.socket, sandbox: int, *fds: int) -> None:
    """Enter the namespaces of a sandbox, become a child of its first process, and guard one command."""
    _check(LIBC.setns(sandbox, NAMESPACES), "setns")
    os.close(sandbox)
    # The new process is inside the namespace, but its parent is not. Its own children have a parent inside.
    inside = os.fork()
    if inside:
        os.waitpid(inside, 0)
        os._exit(0)
    if os.fork():
        os._exit(0)  # process 1 of the namespace then becomes the parent
    while os.getppid() != 1:
        time.sleep(0.0005)
    _drop_capabilities()
    handshake.send(json.dumps({"pid": os.getpid()}).encode())
    if handshake.recv(16) != b"go":
        os._exit(1)
    handshake.close()
    State.supervisor.run_guard(list(fds), run_command)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _drop_capabilities() -> None:
    """Drop all capabilities, which were granted on entering the user namespace. Programs executed later get none either."""
    number = 0
    while LIBC.prctl(CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1
    LIBC.prctl(CAP_AMBIENT, CAP_AMBIENT_CLEAR, 0, 0, 0)
    header, nothing = (ctypes.c_uint32 * 2)(CAP_VERSION, 0), (ctypes.c_uint32 * 6)()
    _check(LIBC.capset(header, nothing), "capset")


def run_command(order: Dict[str, Any], stdin: int, stdout: int, stderr: int) -> None:
    """Run a command with an exec or, for the preloaded agent, prepare this process and raise `TakeOver`.

    If the preparation fails, run the agent with an exec, too.
    """
    if "preloaded" not in order:
        State.supervisor.exec_command(order, stdin, stdout, stderr)
    State.supervisor.prepare_process(order, stdin, stdout, stderr)
    try:
        _redirect(order["preloaded"])
        describe_process(order["preloaded"]["argv"], order["env"])
    except OSError:  # fall back to the plain command, which reports the error or succeeds
        os.execvpe(order["command"][0], order["command"], order["env"])
    raise State.supervisor.TakeOver(order)


def _redirect(preloaded: Dict[str, Any]) -> None:
    """Redirect standard output and standard error to files, as the shell does in a plain start."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        path = preloaded[name]
        if fd == 2 and path and path == preloaded["stdout"]:
            os.dup2(1, 2)
        elif path:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.dup2(opened, fd)
            os.close(opened)


def run_agent(order: Dict[str, Any]) -> None:
    """Run the agent in this process, as if Python had just started with the agent's arguments and environment."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and _is_open(int(name)):
            os.close(int(name))
    replace_environment(order["env"])
    for name, value in State.writes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    folders = {"home": order["env"]["HOME"], "tmp": order["env"].get("TMPDIR", "/tmp"), "work": order["cwd"]}  # noqa: S108
    for module, attribute, folder, rest in State.relocated:
        setattr(module, attribute, folders[folder] + rest)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)  # as Python does when it starts
    _renew_randomness()
    gc.set_threshold(700, 10, 10)
    argv = order["preloaded"]["argv"]
    sys.argv[:] = argv[1:]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = argv
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__dict__["__builtins__"] = sys.modules["builtins"]
    LIBC.prctl(SET_DUMPABLE, 1, 0, 0, 0)
    try:
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    except Exception as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


def _renew_randomness() -> None:
    """Renew numpy's random state and multiprocessing's authentication key. `random` and OpenSSL renew their state after each fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def replace_environment(env: Dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def describe_process(argv: List[str], env: Dict[str, str]) -> None:
    """Make /proc show these arguments and environment variables, as it would after an exec.

    Turngate finds a sandbox's processes by their environment variables.
    """
    words = b"".join(os.fsencode(word) + b"\0" for word in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    LIBC.malloc.restype, LIBC.sbrk.restype = ctypes.c_void_p, ctypes.c_void_p
    block = LIBC.malloc(ctypes.c_size_t(len(words) + len(variables) + 1))  # never freed
    ctypes.memmove(block, words + variables, len(words) + len(variables))
    with open("/proc/self/stat", "rb") as file:
        field = dict(enumerate(file.read().rpartition(b") ")[2].split(), 3))  # numbered as in proc(5)
    layout = (ctypes.c_uint64 * 13)(
        *(int(field[26]), int(field[27]), int(field[45]), int(field[46]), int(field[47]), LIBC.sbrk(0), int(field[28])),
        *(block, block + len(words), block + len(words), block + len(words) + len(variables)),
        *(0, 0xFFFFFFFF << 32),  # no auxiliary vector; the executable file stays the same
    )
    _check(LIBC.prctl(SET_MM, SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0), "PR_SET_MM_MAP")


# ---- start ----


def load_supervisor(path: str) -> Any:
    """Load supervisor.py without making it importable by the agent."""
    spec = importlib.util.spec_from_file_location("turngate_supervisor", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    control = State.control = socket.socket(fileno=int(sys.argv[1]))
    # Agents of local sandboxes run as the same user, and must not inspect this process.
    LIBC.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    State.limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, State.limits[1]))
    order = json.loads(control.recv(65536))
    State.supervisor = load_supervisor(order["supervisor"])
    try:
        report = import_modules(order["folder"], order["modules"], order["scratch"])
    except Exception as error:
        report = {"fault": f"an import failed: {type(error).__name__}: {error}", "reads": {}}
    sys.stdout.flush()
    sys.stderr.flush()
    control.send(json.dumps(report).encode())
    if not report["fault"]:
        gc.freeze()
        serve(control, order["idle_s"])
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException as ended:
        if State.supervisor is None or not isinstance(ended, State.supervisor.TakeOver):
            raise
        agent_order = ended.args[0]
    run_agent(agent_order)
