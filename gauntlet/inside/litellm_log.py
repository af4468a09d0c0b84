# mypy: ignore-errors
"""A log callback for LiteLLM, run in its environment, that writes one line per call."""

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
            "text": message_text(choice.get("message") or {}),
            "ids": extra.get("token_ids") or choice.get("token_ids") or [],
            "prompt": reply.get("prompt_token_ids") or [],
            "logprobs": [each["logprob"] for each in logprobs],
        }
        with open(os.environ["GAUNTLET_LOG"], "a", encoding="utf-8") as out:  # noqa: ASYNC230  # keeps the order, and does not delay the agent
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")


def message_text(message: dict) -> str:
    parts = [message.get("reasoning_content") or "", message.get("content") or ""]
    for call in message.get("tool_calls") or []:
        parts.append(json.dumps(call["function"], ensure_ascii=False))
    return "\n".join(parts)


log = Log()
