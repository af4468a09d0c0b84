# mypy: ignore-errors
"""Runs in LiteLLM's environment: a callback, its own way to keep what passed through, that writes one line for each call."""

import json
import os

from litellm.integrations.custom_logger import CustomLogger


class Log(CustomLogger):
    async def async_log_success_event(self, kwargs, response_obj, start_time, end_time):
        reply = response_obj.model_dump() if hasattr(response_obj, "model_dump") else dict(response_obj)
        choice = (reply.get("choices") or [{}])[0]
        extra = choice.get("provider_specific_fields") or {}
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        entry = {
            "asked": json.dumps(kwargs.get("messages") or kwargs.get("input"), ensure_ascii=False, default=str),
            "text": told(choice.get("message") or {}),
            "ids": extra.get("token_ids") or choice.get("token_ids") or [],
            "prompt": reply.get("prompt_token_ids") or [],
            "logprobs": [each["logprob"] for each in logprobs],
        }
        with open(os.environ["GAUNTLET_LOG"], "a", encoding="utf-8") as out:  # noqa: ASYNC230  # in order, and out of the agent's way
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")


def told(message: dict) -> str:
    parts = [message.get("reasoning_content") or "", message.get("content") or ""]
    for call in message.get("tool_calls") or []:
        parts.append(json.dumps(call["function"], ensure_ascii=False))
    return "\n".join(parts)


log = Log()
