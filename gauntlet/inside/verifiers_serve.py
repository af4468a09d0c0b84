# mypy: ignore-errors
"""Run verifiers' interception server and one of its clients in their own environment, with a port to open and finish sessions.

Arguments: PORT ENGINE TOKENIZER MODEL CLIENT. CLIENT is `train` or `eval`.
"""

import asyncio
import sys

import verifiers.v1 as vf
from aiohttp import web
from renderers import Qwen3RendererConfig
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import Sampling


class Sessions:
    def __init__(self, engine_url: str, folder: str, model: str, client: str) -> None:
        endpoint = {"base_url": f"{engine_url}/v1", "api_key_var": "GAUNTLET_NO_KEY"}
        if client == "train":
            config = TrainClientConfig(**endpoint, renderer=Qwen3RendererConfig(), renderer_model_name=folder)
        else:
            config = EvalClientConfig(**endpoint)
        # Sampling settings come only from here, never from the agent; a trainer sets the length.
        self.context = ModelContext(model=model, client=config, sampling=Sampling(max_tokens=4096, temperature=1.0))
        self.server = InterceptionServer()
        self.open_sessions: dict[str, tuple[RolloutSession, str, str]] = {}

    async def open(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        task = TraceTask(type="Gauntlet", data=vf.TaskData(idx=0, prompt="gauntlet"), key=name, hash=name)
        trace = Trace(task=task, agent=AgentInfo(config=vf.AgentConfig()))
        session = RolloutSession(ctx=self.context, trace=trace)
        self.open_sessions[name] = (session, *self.server.register(session))
        return web.json_response({"base_url": self.server.base_url, "key": self.open_sessions[name][1]})

    async def finish(self, request: web.Request) -> web.Response:
        session, model_secret, state_secret = self.open_sessions.pop(request.match_info["id"])
        self.server.unregister(model_secret, state_secret)
        nodes = session.trace.nodes
        numbers = {id(node): n for n, node in enumerate(nodes)}
        rows = [
            {
                "ids": branch.token_ids,
                "mask": [int(m) for m in branch.sampled_mask],
                "logprobs": branch.logprobs,
                "leaf": numbers[id(branch.nodes[-1])],
                "experts": list_experts(branch),
                "masks": list_masks(branch),
            }
            for branch in session.trace.branches
            if branch.trainable
        ]
        answered = sum(call.node is not None for call in session.trace.calls)
        tree = [{"parent": node.parent, "ids": node.token_ids} for node in nodes]
        return web.json_response({"rows": rows, "answered": answered, "nodes": tree})


def list_experts(branch) -> list | None:
    """Return the routed experts of each token, over all layers."""
    return None if branch.routed_experts is None else [token.ravel().tolist() for token in branch.routed_experts]


def list_masks(branch) -> list | None:
    """Return the ids of each token's sampling mask, or None for tokens without one."""
    if branch.sampling_mask is None:
        return None
    ids, at, masks = branch.sampling_mask.ids.tolist(), 0, []
    for count in branch.sampling_mask.counts.tolist():
        masks.append(ids[at : at + count] or None)
        at += count
    return masks


async def main(port: int, engine_url: str, folder: str, model: str, client: str) -> None:
    sessions = Sessions(engine_url, folder, model, client)
    async with sessions.server:
        app = web.Application()
        app.router.add_post("/open/{id}", sessions.open)
        app.router.add_post("/finish/{id}", sessions.finish)
        app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:6]))
