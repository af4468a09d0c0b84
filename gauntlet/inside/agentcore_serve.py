# mypy: ignore-errors
"""Run agentcore's gateway in its own environment, with two routes to open and finish sessions. Arguments: PORT ENGINE TOKENIZER MODE."""

import hashlib
import sys

from agentcore_rl_toolkit.rollout_gateway import HfTemplateRenderer, RolloutGateway, response_schemas
from agentcore_rl_toolkit.rollout_gateway.sampling_backends.vllm_http import VllmHttpBackend
from aiohttp import web
from transformers import AutoTokenizer


def main(port: int, engine_url: str, folder: str, mode: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # It identifies templates by hash, and has another revision of Qwen3's. Its own documentation says to add the hash.
    template_hash = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    response_schemas._TEMPLATE_HASHES.setdefault(template_hash, "qwen3")
    gateway = RolloutGateway(
        backend=VllmHttpBackend(engine_url),
        renderer=HfTemplateRenderer(tokenizer),
        tokenizer=tokenizer,
        history_mode=mode,
    )

    async def open_session(request: web.Request) -> web.Response:
        gateway.create_session(request.match_info["id"], max_context_tokens=262_144)
        return web.json_response({})

    async def finish_session(request: web.Request) -> web.Response:
        records = await gateway.finish_session(request.match_info["id"])
        return web.json_response([row(record) for record in records])

    async def load_session(request: web.Request) -> web.Response:
        records = [each for each in await gateway.finish_session(request.match_info["id"]) if any(each.loss_mask)]
        rows, loaded = [row(record) for record in records], [load_with_tinker(record) for record in records]
        return web.json_response({"rows": rows, "loaded": loaded})

    gateway.app.router.add_post("/gauntlet/load/{id}", load_session)
    gateway.app.router.add_post("/gauntlet/open/{id}", open_session)
    gateway.app.router.add_post("/gauntlet/finish/{id}", finish_session)
    web.run_app(gateway.app, host="127.0.0.1", port=port, print=None, access_log=None, handler_cancellation=True)


def row(record) -> dict:
    """Convert a record. Its mask and log-probabilities start after the first prompt."""
    before = len(record.token_ids) - len(record.loss_mask)
    return {
        "ids": record.token_ids,
        "mask": [0] * before + record.loss_mask,
        "logprobs": [0.0] * before + record.logprobs,
    }


def load_with_tinker(record) -> dict:
    """Convert a record to tinker's `Datum` as its trainer does, and read it back. Its advantage is 1, so that it shows what is trained."""
    from agentcore_rl_toolkit.backends.tinker_api.data import trace_to_datum

    datum = trace_to_datum(record, 1.0)
    values = {name: data.tolist() for name, data in datum.loss_fn_inputs.items()}
    ids = [*datum.model_input.to_ints()[:1], *values["target_tokens"]]
    mask = [0, *(int(advantage) for advantage in values["advantages"])]
    return {"ids": ids, "mask": mask, "logprobs": [0.0, *values["logprobs"]]}


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
