"""LiteLLM's proxy, which records what its log callbacks receive.

If vLLM is asked for ids, the callback receives them for non-streamed replies of chat and messages. For everything else it receives text.
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from gauntlet.gateways.base import PACKAGE, Gateway, Record, Session, Turn, merge_calls
from gauntlet.gateways.delivery import Absence
from gauntlet.sampler import MODEL

_CUE = re.compile(r"\[cue ([0-9a-z]+)\.")
_CONFIG = """\
model_list:
  - model_name: {model}
    litellm_params:
      model: hosted_vllm/{model}
      api_base: {url}/v1
      api_key: none
      logprobs: true
      return_token_ids: true
      use_chat_completions_api: true
litellm_settings:
  use_chat_completions_url_for_anthropic_messages: true
  callbacks: litellm_log.log
  num_retries: 0
  drop_params: true
router_settings:
  disable_cooldowns: true
general_settings:
  master_key: sk-gauntlet
"""

_TYPES = "litellm/types/utils.py"
_NO_FIELD = "the replies that its callbacks receive have no field for it"
_NO_ROWS = "its callbacks receive single calls"


class LiteLLM(Gateway):
    name = "litellm"
    about = "litellm 1.106.2 proxy, in front of vLLM's chat endpoint"
    dialects = ("chat", "responses", "messages", "gemini")
    requirements = ("litellm[proxy]==1.106.2",)
    lacks = {
        "experts": Absence(_NO_FIELD, _TYPES, without="routed_experts"),
        "masks": Absence(_NO_FIELD, _TYPES, without="sampling_mask"),
        "tree": Absence(_NO_ROWS, _TYPES, without="loss_mask|training_row"),
        "turn rewards": Absence(_NO_FIELD, _TYPES, without="reward"),
        "teacher": Absence(_NO_FIELD, _TYPES, without="teacher|ref_log"),
        "versions": Absence(_NO_FIELD, _TYPES, without="(policy|weight)_version"),
        "loaders": Absence(_NO_ROWS, _TYPES, without="loss_mask|training_row"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, list[dict[str, Any]]] = {}
        self._seen = 0
        self._reading = asyncio.Lock()
        self._log = Path()

    def command(self, engine_url: str, folder: Path) -> tuple[list[str], dict[str, str]]:
        config = folder / "litellm.yaml"
        config.write_text(_CONFIG.format(model=MODEL, url=engine_url), encoding="utf-8")
        (folder / "litellm_log.py").write_text(
            (PACKAGE / "inside" / "litellm_log.py").read_text(encoding="utf-8"), encoding="utf-8"
        )
        self._log = folder / "litellm.jsonl"
        program = str(self.home / "bin" / "litellm")
        command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(self.port)]
        added = {"GAUNTLET_LOG": str(self._log), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        return [*command, "--num_workers", "1", "--telemetry", "False"], added

    @property
    def health(self) -> str:
        return "/health/liveliness"

    async def open(self, http: aiohttp.ClientSession, rollout: str) -> Session:
        return Session(rollout, self.url, "sk-gauntlet")

    async def record(self, http: aiohttp.ClientSession, session: Session) -> Record:
        await asyncio.sleep(0.3)  # its callbacks run after the reply is sent
        async with self._reading:
            await asyncio.to_thread(self._read)
        entries = self._entries.pop(session.id, [])
        turns = [Turn(tuple(entry["ids"]), entry["text"]) for entry in entries]
        calls = [
            (entry["prompt"], entry["ids"], entry["logprobs"]) for entry in entries if entry["ids"] and entry["prompt"]
        ]
        return Record(turns, merge_calls(calls))

    def _read(self) -> None:
        """Read new log entries. LiteLLM has no sessions, so entries are assigned to rollouts by their cues."""
        if not self._log.exists():
            return
        with self._log.open("rb") as log:
            log.seek(self._seen)
            for line in log:
                if not line.endswith(b"\n"):
                    return
                self._seen += len(line)
                entry = json.loads(line)
                cue = _CUE.search(entry["asked"])
                if cue is not None:
                    self._entries.setdefault(cue[1], []).append(entry)
