"""verifiers' interception server.

With its training client, it renders chat itself and calls vLLM's `/inference/v1/generate`. With its evaluation client, it relays three
dialects to an endpoint that supports them, and records text without ids. It is a library without a program. `inside/verifiers_serve.py`
runs it as a rollout does, and adds a port for sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import aiohttp

from gauntlet.gateways.base import PACKAGE, Gateway, Record, Row, Session, Turn, trained_spans
from gauntlet.gateways.delivery import Absence, Delivery, Feature, Segment
from gauntlet.sampler import MODEL
from gauntlet.tokens import model_folder

_TRACE, _GRAPH = "verifiers/v1/trace.py", "verifiers/v1/graph.py"


class Verifiers(Gateway):
    name = "verifiers"
    about = "verifiers 0.4.0, training client with the qwen3 renderer"
    dialects: tuple[str, ...] = ("chat",)
    requirements = ("verifiers==0.4.0",)
    client = "train"
    expert_format = "raw"
    lacks = {
        "turn rewards": Absence(
            "rewards belong to a whole trace, and credit per token is left to the trainer",
            _TRACE,
            says="rewards: dict[str, Reward | None]",
        ),
        "teacher": Absence(
            "a message has a field for them, which its trainer fills in; the package scores nothing",
            _GRAPH,
            says="reference_logprobs: list[float] | None = None",
        ),
        "versions": Absence("a message has no field for it", _GRAPH, without="(policy|weight|model)_version"),
    }
    untested = {"loaders": "its trainer, prime-rl, is not on PyPI"}

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        program = str(PACKAGE / "inside" / "verifiers_serve.py")
        return [str(self.python), program, str(self.port), engine_url, str(model_folder()), MODEL, self.client], {}

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        async with http.post(f"{self.url}/open/{rollout}") as response:
            response.raise_for_status()
            opened = await response.json()
        return Session(rollout, opened["base_url"].rstrip("/").removesuffix("/v1"), opened["key"])

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        async with http.post(f"{self.url}/finish/{session.id}") as response:
            response.raise_for_status()
            data = await response.json()
        if not self.trains:
            return Record([Turn(text="recorded as text")] * data["answered"])
        rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in data["rows"]]
        return Record(list({turn for row in rows for turn in trained_spans(row)}), rows)

    async def deliver(
        self, http: aiohttp.ClientSession, session: Session, turns: Sequence[Sequence[int]], rewards: Sequence[float]
    ) -> Delivery:
        async with http.post(f"{self.url}/finish/{session.id}") as response:
            response.raise_for_status()
            data = await response.json()
        rows = [Row(row["ids"], row["mask"], row["logprobs"]) for row in data["rows"]]
        if self.feature == "tree":
            segments = [Segment(node["parent"], node["ids"]) for node in data["nodes"]]
            return Delivery(rows, segments=segments, leaves=[row["leaf"] for row in data["rows"]])
        return Delivery(rows, [row[str(self.feature)] for row in data["rows"] if row[str(self.feature)] is not None])


class VerifiersRelay(Verifiers):
    name = "verifiers-relay"
    about = "verifiers 0.4.0, evaluation client: relays to vLLM's chat, responses and messages endpoints"
    dialects = ("chat", "responses", "messages")
    trains = False
    client = "eval"
    lacks = {
        feature: Absence("it relays, and keeps no ids", "verifiers/v1/clients/eval.py", without="token_ids|TurnTokens")
        for feature in get_args(Feature)
    }
    untested = {}
