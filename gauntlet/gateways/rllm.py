"""rLLM's model gateway (`rllm-model-gateway`): relays chat to vLLM, and records the ids and log-probabilities of each call."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp

from gauntlet.gateways.base import Gateway, Record, Session, Turn, merge_calls
from gauntlet.gateways.delivery import Absence

_MODELS = "rllm_model_gateway/models.py"
_SINGLE = "A single captured LLM call"
_NO_FIELD = "the record of a call has no field for it"


class Rllm(Gateway):
    name = "rllm"
    about = "rllm-model-gateway 0.1.0, in front of vLLM's chat endpoint"
    dialects = ("chat",)
    requirements = ("rllm-model-gateway==0.1.0",)
    lacks = {
        "experts": Absence(_NO_FIELD, _MODELS, without="expert"),
        "masks": Absence(_NO_FIELD, _MODELS, without="sampling_mask|kept_ids"),
        "tree": Absence("it returns single calls", _MODELS, says=_SINGLE),
        "turn rewards": Absence(_NO_FIELD, _MODELS, without="reward"),
        "teacher": Absence(_NO_FIELD, _MODELS, without="teacher|reference|ref_log"),
        "versions": Absence(_NO_FIELD, _MODELS, without="(policy|weight|model)_version"),
        "loaders": Absence(
            "it returns single calls; rLLM, which makes rows of them, is not on PyPI", _MODELS, says=_SINGLE
        ),
    }

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        program = str(self.home / "bin" / "rllm-model-gateway")
        command = [program, "--host", "127.0.0.1", "--port", str(self.port), "--worker", f"{engine_url}/v1"]
        return [*command, "--db-path", str(folder / "traces.db"), "--log-level", "WARNING"], {}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/sessions", json={"session_id": rollout}) as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(opened["session_id"], f"{self.url}/sessions/{opened['session_id']}", "EMPTY")

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        await asyncio.sleep(0.2)  # it stores calls after the reply is sent, and has no route that waits for that
        async with http.post(f"{self.url}/admin/flush") as response:
            response.raise_for_status()
        async with http.get(f"{self.url}/sessions/{session.id}/traces") as response:
            traces = await response.json()
        recorded = [trace for trace in traces if trace["completion_token_ids"]]
        calls = [(trace["prompt_token_ids"], trace["completion_token_ids"], trace["logprobs"]) for trace in recorded]
        return Record([Turn(tuple(trace["completion_token_ids"])) for trace in recorded], merge_calls(calls))
