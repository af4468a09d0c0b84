"""agentcore-rl-toolkit's rollout gateway.

It renders prompts itself, calls vLLM's `/inference/v1/generate`, and builds rows from a message tree. It is a library without a program.
`inside/agentcore_serve.py` runs it as its own backends do, and adds two routes for sessions.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp

from gauntlet.gateways.base import PACKAGE, Gateway, Record, Row, Session, trained_spans
from gauntlet.tokens import model_folder


class AgentCore(Gateway):
    name = "agentcore"
    about = "agentcore-rl-toolkit 0.2.0, history mode tree (its default)"
    dialects = ("chat", "messages")
    requirements = ("agentcore-rl-toolkit[gateway]==0.2.0", "transformers==5.12.1")
    mode = "tree"

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        program = str(PACKAGE / "inside" / "agentcore_serve.py")
        return [str(self.python), program, str(self.port), engine_url, str(model_folder()), self.mode], {}

    @property
    def health(self) -> str:
        return "/healthz"

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/gauntlet/open/{rollout}") as response:
            response.raise_for_status()
        return Session(rollout, self.url, rollout)

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        async with http.post(f"{self.url}/gauntlet/finish/{session.id}") as response:
            response.raise_for_status()
            rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in await response.json()]
        return Record(list({turn for row in rows for turn in trained_spans(row)}), rows)


class AgentCoreLinear(AgentCore):
    name = "agentcore-linear"
    about = "agentcore-rl-toolkit 0.2.0, history mode linear"
    mode = "linear"
