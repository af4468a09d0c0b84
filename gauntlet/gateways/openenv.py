"""OpenEnv's capture proxy (`openenv`).

It translates four dialects to vLLM's chat endpoint, and links calls whose ids are a prefix of another call's ids.
"""

from __future__ import annotations

from pathlib import Path

import aiohttp

from gauntlet.gateways.base import Gateway, Record, Row, Session, trained_spans
from gauntlet.gateways.delivery import Absence
from gauntlet.sampler import MODEL

_TRAINING = "openenv/core/harness/training.py"
_STRICT = 'extra="forbid"'
_NO_FIELD = "no field of a turn for training is for it, and unknown fields are forbidden"


class OpenEnv(Gateway):
    name = "openenv"
    about = "openenv 0.10.0 capture, in front of vLLM's chat endpoint"
    dialects = ("chat", "responses", "messages", "gemini")
    requirements = ("openenv==0.10.0",)
    lacks = {
        "experts": Absence(_NO_FIELD, _TRAINING, says=_STRICT, without="expert"),
        "masks": Absence(_NO_FIELD, _TRAINING, says=_STRICT, without="sampling_mask|kept_ids"),
        "tree": Absence(
            "each sequence is a whole path of its graph",
            "openenv/core/harness/capture/export.py",
            says="one per root-to-leaf path",
        ),
        "turn rewards": Absence(
            "rewards belong to a whole session", _TRAINING, says="come from the session's `verify()` method"
        ),
        "teacher": Absence(_NO_FIELD, _TRAINING, says=_STRICT, without="teacher|reference|ref_log"),
        "versions": Absence(_NO_FIELD, _TRAINING, says=_STRICT, without="(policy|weight|model)_version"),
    }
    untested = {"loaders": "TRL reads its turns only inside a training run"}

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        command = [str(self.python), "-m", "openenv.core.harness.capture.server", "--llm-url", engine_url]
        return [*command, "--model", MODEL, "--port", str(self.port), "--engine", "vllm"], {}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        body = {"session_id": rollout, "purpose": "train", "sampling": {"temperature": 1.0}}
        async with http.post(f"{self.url}/sessions", json=body) as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(opened["session_id"], self.url, opened["session_id"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        async with http.get(f"{self.url}/sessions/{session.id}/rollout?include_discarded=true") as response:
            response.raise_for_status()
            rollout = await response.json()
        sequences = [(s["role"], Row(s["input_ids"], s["loss_mask"], s["logprobs"])) for s in rollout["sequences"]]
        turns = {turn for _, row in sequences for turn in trained_spans(row)}
        # A trainer uses only sequences that are labeled as the agent's own.
        return Record(list(turns), [row for role, row in sequences if role == "agent"])
