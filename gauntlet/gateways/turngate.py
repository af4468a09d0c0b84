"""Turngate, through its public HTTP API."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet.gateways.base import CannotStart, Gateway, Record, Row, Session, Turn
from gauntlet.gateways.delivery import Delivery, Feature
from gauntlet.gateways.turngate_export import deliver
from gauntlet.sampler import MODEL
from gauntlet.tokens import model_folder

_KEY = "gauntlet-admin-key"
_ADMIN = {"authorization": f"Bearer {_KEY}"}
_ROOT = str(Path(__file__).resolve().parents[2])
_CAUSES = {  # Turngate's names of causes → the Gauntlet's; `turngate verify` uses nearly the same ones
    "compaction": "compaction",
    "subagent": "sub-agent",
    "handoff": "hand-off",
    "new": "new conversation",
    "side": "side call",
    "retry": "retry",
    "resample": "retry",  # on the wire, resampling looks like a retry
    "asked again": "retry",
    "branch": "branch",
    "edited": "edited",
    "system": "system prompt changed",
    "tools": "tools changed",
    "template": "template",
    "JSON spelling": "json spelling",
    "asked at the same time": "",
    "begun at the same time": "",
}
_FEATURE_OPTIONS: dict[Feature | None, tuple[str, ...]] = {
    "experts": ("--engine-api", "generate", "--routed-experts", "auto"),
    "masks": ("--engine-api", "generate", "--sampling-masks"),
    "versions": ("--engine-api", "generate"),  # which reports the version of each token
}


class Turngate(Gateway):
    name = "turngate"
    about = "exact mode, vLLM's /v1/completions"
    dialects = ("chat", "responses", "messages", "gemini")
    names_causes = True
    reports_refusals = True
    settings: dict[str, Any] = {"sampling": {"temperature": 1.0}}  # as in training, whatever the agent asks for

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        self.data = folder / "data"
        command = [sys.executable, "-m", "turngate", "serve", "--port", str(self.port), "--data", str(self.data)]
        command += ["--engine", "vllm", "--engine-url", engine_url, "--model", MODEL]
        command += ["--tokenizer", str(model_folder()), *_FEATURE_OPTIONS.get(self.feature, ())]
        self._engine_url = engine_url
        return command, {"TURNGATE_ADMIN_KEY": _KEY, "PYTHONPATH": _ROOT}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        # Sampling masks say which ids a truncated distribution has.
        settings = {"sampling": {"temperature": 1.0, "top_k": 20}} if self.feature == "masks" else self.settings
        body = {"id": rollout, **settings}
        async with http.post(f"{self.url}/admin/sessions", json=body, headers=_ADMIN) as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(opened["id"], self.url, opened["api_key"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        path = f"{self.url}/admin/sessions/{session.id}"
        async with http.post(f"{path}/seal", json={}, headers=_ADMIN) as response:
            response.raise_for_status()
        async with http.get(f"{path}/trace", headers=_ADMIN) as response:
            trace = await response.json()
        async with http.get(f"{path}/samples", headers=_ADMIN) as response:
            samples = (await response.json())["samples"]
        nodes = trace["nodes"]
        turns = [Turn(tuple(node["ids"])) for node in nodes if node["kind"] == "sampled"]
        rows = [Row(sample["ids"], sample["mask"], sample["logprobs"]) for sample in samples]
        refused = trace["refused"]["count"] if "refused" in trace else 0
        return Record(turns, rows, await self.causes(session, nodes), refused)

    async def update_weights(self, http: aiohttp.ClientSession, version: int) -> None:
        body = {"version": version, "path": f"/weights/{version}", "mode": "keep"}
        async with http.post(f"{self.url}/admin/weights", json=body, headers=_ADMIN) as response:
            if response.status != 200:
                raise ValueError(f"POST /admin/weights: {await response.text()}")

    async def deliver(
        self, http: aiohttp.ClientSession, session: Session, turns: Sequence[Sequence[int]], rewards: Sequence[float]
    ) -> Delivery:
        assert self.feature is not None
        path = f"{self.url}/admin/sessions/{session.id}"
        async with http.post(f"{path}/seal", json={}, headers=_ADMIN) as response:
            response.raise_for_status()
        async with http.get(f"{path}/trace", headers=_ADMIN) as response:
            nodes = (await response.json())["nodes"]
        ids = {tuple(node["ids"]): node["id"] for node in nodes if node["kind"] == "sampled"}
        given = zip(turns, rewards, strict=True)
        parts = [{"turn": ids[tuple(turn)], "value": reward, "kind": "part"} for turn, reward in given]
        outcome = {"kind": "graded", "reward": sum(rewards), "turn_rewards": parts}
        async with http.put(f"{path}/outcome", json=outcome, headers=_ADMIN) as response:
            if response.status != 200:
                raise ValueError(f"PUT …/outcome: {await response.text()}")
        return await deliver(self.feature, self.data, self._engine_url)

    async def causes(self, session: Session, nodes: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], str]:
        """Return the recorded cause of every turn at which the tree forks."""
        forks: dict[tuple[int, ...], str] = {}
        later: set[int] = set()  # nodes that are not the first child of their parent
        parents: set[int | None] = set()
        for node in nodes:
            if node["parent"] in parents:
                later.add(node["id"])
            parents.add(node["parent"])
            if node["kind"] == "sampled" and (node["cause"] or later & {node["id"], node["parent"]}):
                forks[tuple(node["ids"])] = _CAUSES[node["cause"]] if node["cause"] else ""
                later.discard(node["parent"])
        return forks


class TurngateDrop(Turngate):
    """Turngate configured to follow the template, so that it renders again and forks. `turngate verify` reports the cause of each fork."""

    name = "turngate-drop"
    about = "the same, with thinking dropped as in the template; causes from `turngate verify`"
    by_default = False
    settings = {**Turngate.settings, "thinking": "drop"}

    async def causes(self, session: Session, nodes: Sequence[dict[str, Any]]) -> dict[tuple[int, ...], str]:
        causes = {fork["node"]: fork["cause"] for fork in (await self.verify(session))["forks"]}
        return {
            tuple(node["ids"]): _CAUSES.get(causes[place], causes[place])
            for node in nodes
            if node["kind"] == "sampled"
            for place in (node["id"], node["parent"])
            if place in causes
        }

    async def verify(self, session: Session) -> dict[str, Any]:
        """Return what `turngate verify` prints for a session."""
        command = [sys.executable, "-m", "turngate", "verify", session.id, "--data", str(self.data), "--json"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd=_ROOT)
        out, _ = await process.communicate()
        if not out:
            raise CannotStart(f"turngate verify failed with exit code {process.returncode}")
        return _first_session(json.loads(out))


def _first_session(data: Any) -> dict[str, Any]:
    first: dict[str, Any] = data[0] if isinstance(data, list) else data.get("sessions", [data])[0]
    return first
