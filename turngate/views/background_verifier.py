"""In a separate process, verify every n-th session that ends while the gateway is running.

The process, `python -m turngate.views.background_verifier DATA`, checks the rows that the gateway delivers to trainers against the stored
nodes. Rendering a long session takes seconds and must not delay calls. `turngate verify` does not use this process.
"""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from turngate.errors import StoreError, TurngateError
from turngate.verify import Renderers, SessionReader, Verdict, VerifyOptions, verify
from turngate.views.session import open_row_source

log = logging.getLogger("turngate")
_MAX_WAITING = 64  # sessions in the queue; while it is full, further sessions are not verified
_LOWEST_PRIORITY = 19  # a `nice` value


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
            [sys.executable, "-P", "-m", "turngate.views.background_verifier", str(self._data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # the gateway handles Ctrl-C
        )

    def close(self) -> None:
        """Kill the process immediately, without waiting for a verdict, and never restart it."""
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


class SpotChecker:
    """Verifies every n-th submitted session in a thread. The thread calls `verify`, then `report` with the verdict."""

    def __init__(self, every: int, verify: Callable[[str], Verdict], report: Callable[[Verdict], None]) -> None:
        self._every = max(1, every)
        self._verify = verify
        self._report = report
        self._seen = 0
        self._waiting: queue.Queue[str | None] = queue.Queue(_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.verified = 0
        self.dropped = 0  # sessions that were not verified because the queue was full

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="turngate-verify", daemon=True)
        self._thread.start()

    def stop(self, interrupt: Callable[[], None] = lambda: None) -> None:
        """Stop after the current session, or immediately if `interrupt` aborts its verification. Sessions in the queue are dropped."""
        self._stopping = True
        interrupt()
        if self._thread is not None:
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
            self._thread.join()

    def submit(self, session_id: str) -> None:
        """Submit a session that has ended. Only every n-th session is queued, and none while the queue is full."""
        self._seen += 1
        if self._seen % self._every:
            return
        try:
            self._waiting.put_nowait(session_id)
        except queue.Full:
            self.dropped += 1

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # a lower priority is optional
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        while not self._stopping:
            session_id = self._waiting.get()
            if session_id is None:
                return
            try:
                verdict = self._verify(session_id)
            except TurngateError as error:
                if self._stopping:
                    return
                log.warning("session %s could not be verified: %s", session_id, error.message)
                continue
            except Exception:  # a bug in a check must not stop the other checks or the gateway
                log.exception("session %s could not be verified", session_id)
                continue
            self.verified += 1
            if not verdict.ok:
                findings = "; ".join(
                    f"{f.check}: {f.what}" + (f" ({f.where})" if f.where else "") for f in verdict.wrong[:5]
                )
                log.error("session %s failed verification: %s", session_id, findings)
            self._report(verdict)


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


def summarize_verdict(verdict: Verdict) -> dict[str, object]:
    """Return the data of the event that reports a verdict."""
    wrong = [{"check": f.check, "what": f.what, "node": f.node} for f in verdict.wrong[:5]]
    return {"ok": verdict.ok, "wrong": wrong, "notes": len(verdict.notes), "forks": len(verdict.forks)}


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
