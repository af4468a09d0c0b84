"""Run a program in a fork of `fork_server.py`, with our arguments, environment, working folder and standard files.

    python3 -I -S fork_client.py SOCKET ARGUMENT …

Exits with the program's exit code. It runs once per agent and once per test run, so it imports almost nothing: with `socket` and `json`, it
takes three times as long to start.
"""

import _socket
import os
import sys

MAX_REQUEST_BYTES = 1 << 20  # as in fork_server.py


def run(path: str, arguments: list[str]) -> int:
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    fields = [os.getcwd(), str(len(arguments)), *arguments, *environment]
    request = os.fsencode("\0".join(fields))
    if len(request) > MAX_REQUEST_BYTES:
        raise SystemExit("fork_client.py: the arguments and the environment are too large")
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    server.connect(path)
    standard_files = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    server.sendmsg([len(request).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, standard_files)])
    server.sendall(request)
    answer = server.recv(1)
    return answer[0] if answer else 1


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))
