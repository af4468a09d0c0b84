"""agentcore-rl-toolkit's rollout gateway.

It renders prompts itself, calls vLLM's `/inference/v1/generate`, and builds rows from a message tree. It is a library without a program.
`inside/agentcore_serve.py` runs it as its own backends do, and adds two routes for sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import aiohttp

from gauntlet.gateways.base import PACKAGE, Gateway, Record, Row, Session, trained_spans
from gauntlet.gateways.delivery import Absence, Delivery
from gauntlet.tokens import model_folder

_TRACE = "agentcore_rl_toolkit/rollout_gateway/trace.py"
_OMITTED = "Off-policy / MoE fields (weight_version, routed_experts) are intentionally"


class AgentCore(Gateway):
    name = "agentcore"
    about = "agentcore-rl-toolkit 0.2.0, history mode tree (its default)"
    dialects = ("chat", "messages")
    requirements = ("agentcore-rl-toolkit[gateway]==0.2.0", "transformers==5.12.1", "tinker==0.36.0")
    mode = "tree"
    lacks = {
        "experts": Absence("its rows leave them out on purpose", _TRACE, says=_OMITTED),
        "masks": Absence("its rows have no field for them", _TRACE, without="sampling_mask|kept_ids"),
        "tree": Absence("each row is a whole sequence", _TRACE, says="is the full sequence for this row"),
        "turn rewards": Absence("a row has one reward, that of the rollout", _TRACE, says="    reward: float = 0.0"),
        "teacher": Absence("its rows have no field for them", _TRACE, without="teacher|reference|ref_log"),
        "versions": Absence("its rows leave them out on purpose", _TRACE, says=_OMITTED),
    }

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

    async def deliver(
        self, http: aiohttp.ClientSession, session: Session, turns: Sequence[Sequence[int]], rewards: Sequence[float]
    ) -> Delivery:
        async with http.post(f"{self.url}/gauntlet/load/{session.id}") as response:
            response.raise_for_status()
            data = await response.json()
        return Delivery([Row(**row) for row in data["rows"]], loaded={"tinker": [Row(**row) for row in data["loaded"]]})


class AgentCoreLinear(AgentCore):
    name = "agentcore-linear"
    about = "agentcore-rl-toolkit 0.2.0, history mode linear"
    mode = "linear"
