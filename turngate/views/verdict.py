"""Verify sessions together with the rows that the gateway delivers to trainers.

The command line verifies in its own process. A gateway that verifies sessions while it serves (`verify/spot_checks.py` chooses them) starts
a separate process, `python -m turngate.views.verdict DATA`, because rendering a long session takes seconds and must not delay calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from turngate.errors import StoreError, TurngateError
from turngate.store.location import open_store_for_reading
from turngate.trace.sample import Sample
from turngate.verify import Renderers, RowSource, SessionReader, SpotChecker, Verdict, VerifyOptions, verify
from turngate.views.session import load_session_view

_LOWEST_PRIORITY = 19  # a `nice` value


@contextmanager
def open_row_source(data: str | Path) -> Iterator[RowSource]:
    """Yield a function that builds the rows that the gateway delivers to trainers. A gateway may be serving the folder."""
    store = open_store_for_reading(data)

    def build_rows(session_id: str, everything: bool) -> list[Sample]:
        view = load_session_view(store, session_id)
        return view.samples(keep_empty=everything, side=store.side_data.load(view.session))

    try:
        yield build_rows
    finally:
        store.close()


class VerdictReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reply of the verifier process for one session: a verdict, or the reason why there is none."""

    verdict: Verdict | None = None
    error: str = ""


class VerifierProcess:
    """A low-priority process that verifies sessions. It is started for the first session, and restarted after it exits."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, session_id: str) -> Verdict:
        process = self._ensure_process()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(session_id) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # the process exited or was closed in the meantime
            line = b""
        if not line:
            self._kill_process()
            raise StoreError("the verifier process exited; it will be restarted for the next session")
        reply = msgspec.json.decode(line, type=VerdictReply)
        if reply.verdict is None:
            raise StoreError(reply.error)
        return reply.verdict

    def _ensure_process(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise StoreError("the gateway is stopping")
            if self._process is None:
                self._process = self._spawn()
            return self._process

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # our own module
            # -P prevents imports from the current folder, which an agent may be able to write to.
            [sys.executable, "-P", "-m", "turngate.views.verdict", str(self._data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the gateway handles Ctrl-C
        )

    def close(self) -> None:
        """Kill the process immediately, and never restart it. This does not wait for a verdict."""
        self._closed = True
        self._kill_process()

    def _kill_process(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # unflushed output is not needed
                        pipe.close()


class BackgroundVerifier:
    """Verifies every n-th session that ends while the gateway is serving."""

    def __init__(self, data: Path, every: int, report: Callable[[Verdict], None]) -> None:
        self._process = VerifierProcess(data)
        self._checker = SpotChecker(every, self._process, report)

    def start(self) -> None:
        self._checker.start()

    def submit(self, session_id: str) -> None:
        self._checker.submit(session_id)

    def stop(self) -> None:
        """Stop immediately. Sessions that have not been verified can be verified later with `turngate verify`."""
        self._checker.stop(self._process.close)


def main(data: Path) -> None:
    """Read session ids from stdin, one JSON string per line, and write a reply for each.

    Exit at the end of the input, which is when the gateway exits.
    """
    with suppress(OSError, AttributeError):
        os.nice(_LOWEST_PRIORITY)
    renderers = Renderers()  # each tokenizer is loaded once
    for line in sys.stdin.buffer:
        try:
            with SessionReader(data) as reader, open_row_source(data) as rows:
                verdict = verify(
                    reader, msgspec.json.decode(line, type=str), VerifyOptions(rows=rows, renderers=renderers)
                )
            reply = VerdictReply(verdict)
        except TurngateError as error:
            reply = VerdictReply(error=error.message)
        except Exception as error:  # a bug in one check must not stop the others
            reply = VerdictReply(error=f"{type(error).__name__}: {error}")
        try:
            sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # the gateway has exited, so the reply is not read


if __name__ == "__main__":
    main(Path(sys.argv[1]))
