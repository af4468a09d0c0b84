"""Measure how long routed experts delay the event loop: `python bench/routed_experts.py [--layers 48] [--experts 8] [--prompt 32000]`.

A conversation whose first prompt has `prompt` tokens, and which grows by `step` tokens per call, is read from a stand-in for vLLM or SGLang
in another process, and recorded in a store in memory. A timer on the same event loop notes how late it fires.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import uvloop

from turngate.engines.base import Generate
from turngate.engines.sglang import SGLang
from turngate.engines.vllm import VLLM
from turngate.store.journal import Journal
from turngate.store.store import NewTurn, Store
from turngate.trace.session import SessionConfig
from turngate.trace.side_data import describe_arrays, find_first_missing, select_new
from turngate.trace.tree import Context, ContextInfo, Sampled, SampledInfo
from turngate.types import Sampling

REPLY = 200  # tokens per call


def serve(port: object, layers: int, experts: int, kind: str) -> None:
    """Answer each call with ids and random routed experts for all tokens that it asks for, as the engine would."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line[:15] == b"Content-Length:"))
                body = json.loads(await reader.readexactly(size))
                writer.write(_make_reply(body, layers, experts, kind))
                await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        await server.serve_forever()

    asyncio.run(run())


def _make_reply(body: dict, layers: int, experts: int, kind: str) -> bytes:  # type: ignore[type-arg]
    ids = [7] * REPLY
    prompt = body["token_ids" if kind == "vllm" else "input_ids"]
    if kind == "vllm":
        start = body["sampling_params"].get("routed_experts_prompt_start", 0)
        values = np.random.default_rng(0).integers(0, 128, (len(prompt) + REPLY - 1 - start, layers, experts), np.uint8)
        file = io.BytesIO()
        np.save(file, values)
        content = [{"token_id": 7, "logprob": -0.5}] * REPLY
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
        event: dict[str, object] = {
            "choices": [{**choice, "routed_experts": base64.b64encode(file.getvalue()).decode()}]
        }
    else:
        rows = len(prompt) + REPLY - 1 - body["routed_experts_start_len"]
        values = np.random.default_rng(0).integers(0, 128, (rows, layers, experts), np.int32)
        meta = {
            "completion_tokens": REPLY,
            "finish_reason": {"type": "length"},
            "output_token_logprobs": [[-0.5, 7]] * REPLY,
        }
        event = {
            "output_ids": ids,
            "meta_info": {**meta, "routed_experts": base64.b64encode(values.tobytes()).decode()},
        }
    data = b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(data)
    return head + data


class Timer:
    """Notes how late a timer of one millisecond fires, and how long the event loop computed meanwhile.

    On a busy machine, only the second number says something about the program.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.latest_ms = self.busiest_ms = 0.0

    async def run(self) -> None:
        while True:
            began, cpu = time.perf_counter(), time.thread_time()
            await asyncio.sleep(0.001)
            self.latest_ms = max(self.latest_ms, 1000 * (time.perf_counter() - began) - 1)
            self.busiest_ms = max(self.busiest_ms, 1000 * (time.thread_time() - cpu))


async def measure(kind: str, port: int, args: argparse.Namespace, folder: Path) -> None:
    shape, url = (args.layers, args.experts), f"http://127.0.0.1:{port}"
    engine: VLLM | SGLang = VLLM(url, "m", api="generate") if kind == "vllm" else SGLang(url, expert_shape=shape)
    store = Store(folder)
    journal, timer = Journal(store), Timer()
    key = store.add_session("s", b"s", SessionConfig(), 0.0)
    await engine.start()
    watch = asyncio.create_task(timer.run())
    parent: Sampled | None = None
    for call in range(args.calls):
        added = np.ones(args.prompt if parent is None else args.step, np.int32)
        context = Context(2 * call + 1, parent, added, ContextInfo(b"p", b"m" * 16, "u", False))
        prompt = np.ones(context.length, np.int32)
        start = min(find_first_missing(parent, "routed_experts"), len(prompt) - 1)
        request = Generate(prompt=prompt, max_tokens=REPLY, sampling=Sampling(), routed_experts=start)
        timer.reset()
        began, cpu = time.perf_counter(), time.process_time()
        async with engine.generate(request) as chunks:
            side = [array async for chunk in chunks for array in chunk.side]
        kept = tuple(select_new(side, parent, len(prompt), REPLY))
        info = SampledInfo(b"m", b"", b"", "length", 0, 0, 0.0, 1.0, side=describe_arrays(kept))
        parent = Sampled(2 * call + 2, context, np.full(REPLY, 7, np.int32), np.zeros(REPLY, np.float32), info)
        await journal.commit(NewTurn(key, context, b"[]", parent, b"{}", side=kept))
        await asyncio.sleep(0.01)
        size = sum(array.values.nbytes for array in kept) / 1e6
        took, cpu = 1000 * (time.perf_counter() - began) - 10, 1000 * (time.process_time() - cpu)
        print(
            f"{kind:8}{len(prompt):8,}{size:10.1f}{took:10.0f}{cpu:8.0f}{timer.busiest_ms:10.1f}{timer.latest_ms:10.1f}",
            flush=True,
        )
    watch.cancel()
    await engine.close()
    store.close()


@contextmanager
def run_engine(kind: str, args: argparse.Namespace) -> Iterator[int]:
    port = multiprocessing.Value("i", 0)
    process = multiprocessing.Process(target=serve, args=(port, args.layers, args.experts, kind), daemon=True)
    process.start()
    try:
        while not port.value:
            time.sleep(0.05)
        yield port.value
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 48), ("experts", 8), ("prompt", 32_000), ("step", 2_000), ("calls", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(f"{'engine':8}{'prompt':>8}{'new MB':>10}{'ms':>10}{'CPU ms':>8}{'step ms':>10}{'late ms':>10}")
    for kind in ("vllm", "sglang"):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, run_engine(kind, args) as port:
            uvloop.run(measure(kind, port, args, Path(folder)))


if __name__ == "__main__":
    main()
