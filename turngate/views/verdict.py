"""How a verdict on a session is come by: `verify`, given the rows that the gateway's own code hands to a trainer.

In the foreground for the command line; in its own process, `python -m turngate.views.verdict DATA`, for a gateway that verifies while it
serves: rendering a long session anew takes seconds, which no call may wait for.
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
from turngate.store.sqlite import Store
from turngate.verify import Renderers, RowSource, SpotChecker, StoreReader, Verdict, VerifyOptions, verify
from turngate.views.session import load_session_view

_LOWEST_PRIORITY = 19  # as `nice` counts


@contextmanager
def open_row_source(data: Path) -> Iterator[RowSource]:
    """The rows that the gateway's own code hands to a trainer, whether a gateway serves the folder or not."""
    store = Store.reading(data)
    try:
        yield lambda session_id, everything: load_session_view(store, session_id).samples(keep_empty=everything)
    finally:
        store.close()


class VerdictReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the process says of one session: a verdict, or why there is none."""

    verdict: Verdict | None = None
    error: str = ""


class VerifierProcess:
    """Verifies in a process of its own, which gives way to everything else. Begun with the first session, again if it ended."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._over = False

    def __call__(self, session_id: str) -> Verdict:
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(session_id) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # gone, or closed meanwhile
            line = b""
        if not line:
            self._end()
            raise StoreError("the process that verifies came to an end; the next session begins another")
        answer = msgspec.json.decode(line, type=VerdictReply)
        if answer.verdict is None:
            raise StoreError(answer.error)
        return answer.verdict

    def _running(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._over:
                raise StoreError("the gateway is being stopped")
            if self._process is None:
                self._process = self._begun()
            return self._process

    def _begun(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # ourselves
            # -P: an agent may be able to write to the current folder, and nothing is imported from there.
            [sys.executable, "-P", "-m", "turngate.views.verdict", str(self._data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the gateway's affair
        )

    def close(self) -> None:
        """For good, and now: called from another thread, which does not want to wait for a verdict."""
        self._over = True
        self._end()

    def _end(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what was not flushed is not wanted
                        pipe.close()


class BackgroundVerifier:
    """Every n-th session that ends, verified while the gateway serves."""

    def __init__(self, data: Path, every: int, report: Callable[[Verdict], None]) -> None:
        self._reader = VerifierProcess(data)
        self._sampler = SpotChecker(every, self._reader, report)

    def start(self) -> None:
        self._sampler.start()

    def ended(self, session_id: str) -> None:
        self._sampler.ended(session_id)

    def stop(self) -> None:
        """What is being looked at is left; `turngate verify` can look at it any time."""
        self._sampler.stop(self._reader.close)


def main(data: Path) -> None:
    """Ids come in, one JSON string to a line; answers go out. Ends with its input, so never outlives the gateway."""
    with suppress(OSError, AttributeError):
        os.nice(_LOWEST_PRIORITY)
    renderers = Renderers()  # each tokenizer is loaded once
    for line in sys.stdin.buffer:
        try:
            with StoreReader(data) as folder, open_row_source(data) as rows:
                verdict = verify(
                    folder, msgspec.json.decode(line, type=str), VerifyOptions(rows=rows, renderers=renderers)
                )
            answer = VerdictReply(verdict)
        except TurngateError as error:
            answer = VerdictReply(error=error.message)
        except Exception as error:  # a fault of ours in a check must not end the checks
            answer = VerdictReply(error=f"{type(error).__name__}: {error}")
        try:
            sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(0)  # the gateway is gone, and with it whoever wanted to know


if __name__ == "__main__":
    main(Path(sys.argv[1]))
