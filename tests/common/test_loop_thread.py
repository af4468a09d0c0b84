"""Test the loop thread: results, errors, restarts and cancellation."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from turngate.common.loop_thread import LoopThread
from turngate.errors import BadRequest


async def _double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def _fail() -> None:
    raise ValueError("no")


async def _name() -> str:
    return threading.current_thread().name


def test_coroutines_run_in_named_thread() -> None:
    thread = LoopThread("worker")
    thread.start()
    try:
        assert thread.run(_double(21)) == 42
        assert thread.spawn(_double(4)).result(5) == 8
        assert thread.run(_name()) == "worker"
        with pytest.raises(ValueError, match="no"):
            thread.run(_fail())
    finally:
        thread.stop()


def test_stop_is_idempotent_and_thread_restarts() -> None:
    thread = LoopThread("worker", param="client")
    with pytest.raises(BadRequest, match="the client is closed"):
        thread.run(_double(1))
    for _ in range(2):
        thread.start()
        thread.start()
        assert thread.is_running
        assert thread.run(_double(1)) == 2
        thread.stop()
        thread.stop()
        assert not thread.is_running
    assert "worker" not in [running.name for running in threading.enumerate()]
    with pytest.raises(BadRequest, match="the client is closed"):
        thread.spawn(_double(1))


def test_stop_cancels_running_work_and_awaits_cleanup() -> None:
    cleaned_up: list[bool] = []
    started = threading.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned_up.append(True)

    thread = LoopThread("worker")
    thread.start()
    future = thread.spawn(work())
    assert started.wait(5)
    thread.stop()
    assert cleaned_up == [True]
    assert future.cancelled()


def test_interrupt_cancels_run_and_awaits_cleanup() -> None:
    cleaned_up: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            cleaned_up.append(True)

    def interrupt() -> None:
        raise KeyboardInterrupt

    thread = LoopThread("worker")
    thread.start()
    try:
        ticks = iter([interrupt])
        with pytest.raises(KeyboardInterrupt):
            thread.run(work(), lambda: next(ticks, lambda: None)())
        assert cleaned_up == [True]
        assert thread.run(_double(1)) == 2
    finally:
        thread.stop()


def test_run_inside_own_loop_is_refused() -> None:
    thread = LoopThread("worker")
    thread.start()

    async def nested() -> int:
        return thread.run(_double(1))

    try:
        with pytest.raises(BadRequest, match="its own event loop"):
            thread.run(nested())
    finally:
        thread.stop()


@pytest.mark.process
def test_forked_child_must_start_its_own_thread() -> None:
    thread = LoopThread("worker")
    thread.start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if not thread.is_running:
                thread.stop()
                try:
                    thread.run(_double(1))
                except BadRequest as error:
                    if f"opened by process {os.getppid()}" in error.message:
                        thread.start()
                        status = 0 if thread.run(_double(21)) == 42 else 2
                        thread.stop()
        finally:
            os._exit(status)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert thread.run(_double(2)) == 4
    finally:
        thread.stop()
