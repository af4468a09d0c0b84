"""The agent of a batch: calls the model a few times, guesses, and prints what it received. Runs inside sandboxes: standard library only.

    python3 -I -S agent.py PAUSE_S TRIES     repeats a failed call up to TRIES times, and pauses for PAUSE_S seconds after each answer

Its output is its log: each answer as a line of JSON when it has arrived in full, and at the end its guess.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

TURNS = 3
TOOL = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}


def ask(messages: list[dict[str, Any]], attempt: int) -> Any:
    """Send a call, and return the message of the reply. Uses a bare socket, because an HTTP client takes long to import."""
    body = json.dumps({"model": os.environ["TURNGATE_MODEL"], "messages": messages, "tools": [TOOL]})
    host, _, port = os.environ["TURNGATE_BASE_URL"].rpartition("/")[2].partition(":")
    head = ["POST /v1/chat/completions HTTP/1.1", "host: x", "connection: close", "content-type: application/json"]
    head += [f"authorization: Bearer {os.environ['TURNGATE_API_KEY']}", f"x-stainless-retry-count: {attempt}"]
    with socket.create_connection((host, int(port))) as line:
        line.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", body]).encode())
        reply = b"".join(iter(lambda: line.recv(65536), b""))
    top, _, content = reply.partition(b"\r\n\r\n")
    if b" 200 " not in top.partition(b"\r\n")[0]:
        raise ConnectionError(reply[:300].decode(errors="replace"))
    return json.loads(content)["choices"][0]["message"]


def ask_until_answered(messages: list[dict[str, Any]], tries: int) -> Any:
    for attempt in range(tries):
        try:
            return ask(messages, attempt)
        except (OSError, ValueError) as error:
            print(f"call failed: {error}", file=sys.stderr, flush=True)
            time.sleep(0.3)
    sys.exit(1)


def main(pause_s: float, tries: int) -> None:
    messages = [{"role": "user", "content": sys.stdin.read()}]
    for turn in range(TURNS):
        message = ask_until_answered(messages, tries)
        print(json.dumps(message), flush=True)
        calls = message.get("tool_calls") or []
        answers = [{"role": "tool", "tool_call_id": call["id"], "content": f"output {turn}"} for call in calls]
        messages += [message, *(answers or [{"role": "user", "content": f"go on {turn}"}])]
        time.sleep(pause_s)
    guess = "right" if os.urandom(1)[0] % 2 else "wrong"
    with open("guess", "w") as file:
        file.write(guess)
    print(json.dumps({"guess": guess}), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
