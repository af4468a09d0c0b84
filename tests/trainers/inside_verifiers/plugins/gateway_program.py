"""A verifiers harness with the gateway mixin; its agent is a small Python program in verifiers' runtime."""

from __future__ import annotations

import verifiers.v1 as vf

from turngate.trainers.verifiers import GatewayConfig, RolloutGatewayMixin

PRELUDE = """
import json, os, sys, time, urllib.request
def ask(*texts):
    messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    body = json.dumps({"model": os.environ["MODEL"], "messages": messages}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["SECRET"]}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", body, headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=3600) as reply:
        return json.loads(reply.read())["choices"][0]["message"]["content"]
"""


class ProgramConfig(GatewayConfig):
    program: str = ""
    breaks: bool = False  # the harness fails after the program has ended
    hook_breaks: bool = False


class Program(vf.Harness[ProgramConfig]):
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        trace.info["url"] = endpoint
        env = {"URL": endpoint, "SECRET": secret, "MODEL": ctx.model, "PYTHONUNBUFFERED": "1"}
        result = await runtime.run(["python3", "-c", PRELUDE + self.config.program], env)
        trace.info["printed"] = result.stdout
        if self.config.breaks:
            raise vf.SandboxError("the box is gone")
        return result


class GatewayProgram(RolloutGatewayMixin[ProgramConfig], Program):
    async def after_rollout(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        trace.info["after"] = [*trace.info.get("after", []), len(trace.nodes)]
        if self.config.hook_breaks:
            raise RuntimeError("the hook is broken")


__all__ = ["GatewayProgram"]
