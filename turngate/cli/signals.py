"""Ctrl-C and other signals: cancel the work, let it clean up, and give up at last."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from rich.console import Console

from turngate.cli.terminal import say

T = TypeVar("T")
INTERRUPTED = 130  # exit code
STOPPING = "Stopping: ending the agent and removing its sandbox; the recording is kept …"


async def cancel_on_signal(work: Coroutine[Any, Any, T], console: Console, *messages: str) -> T:
    """Run work, and cancel it on Ctrl-C, SIGTERM or SIGHUP.

    Work that stops in several steps is cancelled once per message. One signal more prints that cleanup is under way; another one
    ends the process.
    """
    steps = messages or (STOPPING,)
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    count = 0

    def interrupt() -> None:
        nonlocal count
        count += 1
        if count <= len(steps):
            say(console, steps[count - 1], "yellow")
            task.cancel()
        elif count == len(steps) + 1:
            say(
                console, "Still cleaning up. Once more quits at once, and leaves the cleanup to the next run.", "yellow"
            )
        else:
            console.show_cursor()
            os._exit(INTERRUPTED)  # a cleanup that hangs would block a regular exit too

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def absorb_cancellation() -> None:
    """End the cancellation of this task: what follows runs normally."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
