"""A TCP connection that a test can cut: a port that forwards to another one, until it does not."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType


class CutWire:
    """Forwards connections to a port of this machine. While it is cut, bytes are neither passed on nor refused, as behind a dead switch."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._whole = threading.Event()
        self._whole.set()
        self._sockets: list[socket.socket] = []
        self._closed = False

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        """Pass bytes on again. Connections from before the cut are dropped, as their timeouts would have done."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._whole.set()

    def __enter__(self) -> CutWire:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.mend()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            self._whole.wait()
            if self._closed:
                inner.close()
                return
            outer = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [inner, outer]
            for source, target in ((inner, outer), (outer, inner)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._whole.wait()
                target.sendall(data)
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
