"""Google's SDK: a chat with automatic function calling, whole and streamed."""

from __future__ import annotations

from functools import partial

from conversation import MODEL, QUESTIONS, ROOT, SYSTEM, TOOLS, main
from google import genai
from google.genai import types


def gemini(key: str, *, stream: bool) -> list[str]:
    client = genai.Client(api_key=key, http_options=types.HttpOptions(base_url=ROOT))
    config = types.GenerateContentConfig(system_instruction=SYSTEM, tools=list(TOOLS.values()))
    chat = client.chats.create(model=MODEL, config=config)
    answers = []
    for question in QUESTIONS:
        if stream:
            text = ""
            for chunk in chat.send_message_stream(question):
                text = "" if chunk.function_calls else text + (chunk.text or "")  # what follows the last call
            answers.append(text)
        else:
            answers.append(chat.send_message(question).text or "")
    return answers


main({"gemini": partial(gemini, stream=False), "gemini streamed": partial(gemini, stream=True)})
