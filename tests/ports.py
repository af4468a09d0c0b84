"""Ports for servers that tests start, or start again."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux gives to clients and to servers without a fixed port, which could take the port of a server that is restarting.
_FIRST, _LAST = 20_000, 32_000
_random = random.Random()  # not the generator that pytest plug-ins seed equally in each process


def free_port() -> int:
    """Find a port that nothing listens on."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Find different ports that nothing listens on."""
    found: list[int] = []
    while len(found) < count:
        port = _random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found
