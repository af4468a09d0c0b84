"""A stand-in for the programs that the documentation uses as engines: `vllm serve NAME`, and the providers of hosted models.

    python -m tests.docs.engine serve Qwen/Qwen3-8B --port 8000

It is the Gauntlet's mock engine with any model name, with adapters and with scores for `turngate verify`. The model solves the task
`fix-add` with its first call if it has a tool called `bash`, submits as mini-SWE-agent wants it, and otherwise answers "Done.".
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence

import orjson
from aiohttp import web

from gauntlet import proof
from gauntlet.engine import MAX_MODEL_LEN, Api
from gauntlet.sampler import Behavior, Engine, Generation, Sample
from gauntlet.tokens import Model
from tests.docs.warm_tokenizer import load_engine_model

SOLUTION = "sed -i 's/a - b/a + b/' main.py; echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_CALL = {"name": "bash", "arguments": {"command": SOLUTION, "description": "Fix the task and submit"}}
_SOLVING = f"<tool_call>\n{json.dumps(_CALL)}\n</tool_call>"


class SolvingEngine(Engine):
    """Ends every task soon. Its answers differ, as those of a model that samples do."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._answers = itertools.cycle(("Done.", "Done!"))

    def start_generation(self, prompt: list[int], max_tokens: int | None, temperature: float = 1.0) -> Sample:
        asked = self.model.decode(prompt)
        is_unsolved = '"name": "bash"' in asked and "s/a - b/a + b/" not in asked
        behavior = Behavior(text=_SOLVING if is_unsolved else next(self._answers))
        return self._build_sample(prompt, behavior, Generation("", 0, 0, 0, []), max_tokens)


class StandInApi(Api):
    """The routes of vLLM that the documentation reaches."""

    def __init__(self, engine: Engine, model: str) -> None:
        super().__init__(engine)
        self._served = [model]

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes(
            [
                web.post("/v1/load_lora_adapter", self.load_adapter),
                web.post("/v1/unload_lora_adapter", self.unload_adapter),
                web.post("/abort_requests", self.acknowledge),
            ]
        )
        return app

    async def models(self, _: web.Request) -> web.Response:
        cards = [{"id": name, "object": "model", "max_model_len": MAX_MODEL_LEN} for name in self._served]
        return web.json_response({"object": "list", "data": cards})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if body.get("prompt_logprobs") is None:
            return await super().completions(request)
        ids = body["prompt"]
        values = proof.logprobs(ids[:1], ids[1:])
        scores = [None, *({str(token): {"logprob": value}} for token, value in zip(ids[1:], values, strict=True))]
        return web.json_response({"choices": [{"prompt_logprobs": scores}]})

    async def load_adapter(self, request: web.Request) -> web.Response:
        self._served.append((await request.json())["lora_name"])
        return web.Response()

    async def unload_adapter(self, request: web.Request) -> web.Response:
        self._served.remove((await request.json())["lora_name"])
        return web.Response()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="vllm")
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--logprobs-mode", choices=["processed_logprobs"], required=True)
    parser.add_argument("--enable-lora", action="store_true")
    args = parser.parse_args(arguments)
    app = StandInApi(SolvingEngine(load_engine_model()), args.model).app()
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None, handler_cancellation=True)


if __name__ == "__main__":
    main()
