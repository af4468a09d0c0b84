"""Example commands for testing an external gateway: `open URL ROLLOUT` and `record URL ROLLOUT`, here for Turngate."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

ADMIN = {"authorization": "Bearer outside-the-gauntlet", "content-type": "application/json"}
CAUSES = {  # Turngate's fork causes, mapped to the Gauntlet's
    "compaction": "compaction",
    "subagent": "sub-agent",
    "handoff": "hand-off",
    "new": "new conversation",
    "side": "side call",
    "retry": "retry",
    "resample": "retry",
    "branch": "branch",
    "edited": "edited",
    "system": "system prompt changed",
    "tools": "tools changed",
    "template": "template",
}


def call(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, ADMIN)) as response:
        return json.load(response)


def open_rollout(url: str, rollout: str) -> dict[str, Any]:
    return {"key": call(f"{url}/admin/sessions", {"id": rollout})["api_key"], "base_url": url}


def read_record(url: str, rollout: str) -> dict[str, Any]:
    session = f"{url}/admin/sessions/{rollout}"
    call(f"{session}/seal", {})
    turns = [node for node in call(f"{session}/trace")["nodes"] if node["kind"] == "sampled"]
    return {
        "turns": [turn["ids"] for turn in turns],
        "rows": call(f"{session}/samples")["samples"],
        "forks": [{"ids": turn["ids"], "cause": CAUSES[turn["cause"]]} for turn in turns if turn["cause"]],
    }


if __name__ == "__main__":
    verb, url, rollout = sys.argv[1:]
    print(json.dumps(open_rollout(url, rollout) if verb == "open" else read_record(url, rollout)))
