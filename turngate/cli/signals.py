"""Handle Ctrl-C, other signals and closed output: cancel the running work and let it clean up. After further signals, exit at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from turngate.common.terminal import CommandConsole, say

T = TypeVar("T")
INTERRUPTED = 130  # exit code
STOPPING = "Stopping: ending running commands and removing sandboxes …"


async def cancel_on_signal(work: Coroutine[Any, Any, T], console: CommandConsole, *messages: str) -> T:
    """Run the work, and cancel it on Ctrl-C, SIGTERM or SIGHUP, or when the reader of the console's output exits.

    Work may stop in several steps: each signal prints the next of `messages` and cancels the work again. After the last message, the next
    signal only prints that cleanup is still in progress, and the one after it ends the process.
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
                console,
                "Still cleaning up. Press Ctrl-C again to quit immediately and leave the cleanup to the next run.",
                "yellow",
            )
        else:
            console.show_cursor()
            os._exit(INTERRUPTED)  # a regular exit would wait for the cleanup, which may hang

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # `nohup` makes processes ignore SIGHUP
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    console.on_closed_output = partial(loop.call_soon_threadsafe, interrupt)
    try:
        return await task
    finally:
        console.on_closed_output = lambda: None  # the work has ended: closed output no longer changes the exit code
        for number in numbers:
            loop.remove_signal_handler(number)


def absorb_cancellation() -> None:
    """Revoke the cancellation of the current task after catching CancelledError, so that the task can continue."""
    task = asyncio.current_task()
    assert task is not None
    task.uncancel()
