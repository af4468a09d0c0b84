"""Tests for the recorder: redaction, packing, listening and recording again."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.agents_real import kit as agents
from tests.golden import recording
from tests.golden.recording import Json
from tests.speed import scaled
from tools.record_golden import Elided, Heard, Steady, listening
from turngate.common.sharding import new_secret

ROOT = Path(__file__).parents[2]
KEY = new_secret("some-session")


def make_exchange(body: Json, headers: Mapping[str, str] = {}, reply: Json = None) -> Heard:
    content = [("content-type", "application/json")]
    sent, received = json.dumps(body).encode(), json.dumps(reply).encode()
    return Heard("POST", "/v1/messages", list(headers.items()), sent, 200, content, received)


# ── redaction ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_id_has_same_placeholder_everywhere() -> None:
    steady = Steady([])
    first, second = "3c3fb64393798b2ee57c7daa", "f97e9e8eea517878e52775b3"
    assert steady.text(f"call_{first}") == "call_000000000000000000000001"
    assert (
        steady.text(f"toolu_{second} toolu_{first}") == "toolu_000000000000000000000002 toolu_000000000000000000000001"
    )
    assert steady.text("01a1ddc2-ff2b-7f81-9f11-d7a68ffcfa6f") == "00000000-0000-4000-8000-000000000001"


def test_responses_item_ids_keep_suffix() -> None:
    mark = "885485af73becc70164bee97"
    assert Steady([]).text(f"resp_tg{mark} rs_tg{mark}00 fc_tg{mark}02") == (
        "resp_tg000000000000000000000001 rs_tg00000000000000000000000100 fc_tg00000000000000000000000102"
    )


def test_keys_are_redacted() -> None:
    kept = Steady([]).exchange(make_exchange({"echo": KEY}, {"authorization": f"Bearer {KEY}", "x-api-key": KEY}))
    assert kept["request"]["headers"] == {"authorization": "Bearer REDACTED", "x-api-key": "REDACTED"}
    assert KEY not in json.dumps(kept)


def test_machine_details_are_replaced() -> None:
    steady = Steady([(re.compile("6.18.44-fc"), "<kernel>")])
    call = make_exchange({"text": "Linux 6.18.44-fc on x64"}, {"user-agent": "pi (linux 6.18.44-fc; x64)"})
    kept = steady.exchange(call)["request"]
    assert kept["headers"]["user-agent"] == "pi (linux <kernel>; <arch>)"
    assert kept["body"]["text"] == "Linux <kernel> on x64", "only headers replace the architecture"


def test_relay_headers_are_dropped() -> None:
    added = {"host": "127.0.0.1:1", "x-turngate-attempt": "1", "idempotency-key": "0" * 32, "connection": "close"}
    own = {"idempotency-key": "stainless-retry-1", "accept": "*/*"}
    assert Steady([]).exchange(make_exchange({}, added))["request"]["headers"] == {}
    assert Steady([]).exchange(make_exchange({}, own))["request"]["headers"] == own


def test_reply_times_and_token_counts_are_zeroed() -> None:
    reply = {"created": 1794721906, "usage": {"prompt_tokens": 18216, "details": {"cached": 3}}, "index": 7}
    kept = Steady([]).exchange(make_exchange({}, reply=reply))["reply"]["body"]
    assert kept == {"created": 0, "usage": {"prompt_tokens": 0, "details": {"cached": 0}}, "index": 7}


def test_tool_results_are_sorted_by_call() -> None:
    def result(call: str, **more: Json) -> Json:
        return {"type": "tool_result", "tool_use_id": call, "content": call, **more}

    calls = [{"type": "tool_use", "id": call} for call in ("a", "b")]
    mark = {"cache_control": {"type": "ephemeral"}}
    assistant = {"role": "assistant", "content": calls}
    one = {"messages": [assistant, {"role": "user", "content": [result("a"), result("b", **mark)]}]}
    other = {"messages": [assistant, {"role": "user", "content": [result("b"), result("a", **mark)]}]}
    assert Steady([]).exchange(make_exchange(one)) == Steady([]).exchange(make_exchange(other))


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LONG = "word " * 30
TEXT = "a first line\n" * 20


def exchange(*messages: Json, events: Json = ()) -> Json:
    body = {"model": "m", "messages": list(messages), "tools": [{"name": "read", "description": TEXT}]}
    request = {"method": "POST", "path": "/v1/x?y=1", "headers": {"accept": LONG}, "body": body}
    return {"request": request, "reply": {"status": 200, "headers": {"x": LONG}, "events": list(events)}}


def test_packing_round_trips() -> None:
    tools = [{"name": "read", "description": TEXT}]
    made = [
        exchange({"role": "user", "content": TEXT}, events=[{"event": "created", "data": {"tools": tools}}]),
        exchange({"role": "user", "content": TEXT}, {"role": "assistant", "content": LONG}),
        exchange({"role": "user", "content": "another beginning"}, events=[{"data": "[DONE]"}, {"data": LONG}]),
        exchange({"role": "user", "content": TEXT}, {"role": "assistant", "content": LONG}, {"role": "user"}),
    ]
    packed = recording.pack(made)
    assert recording.unpack(json.loads(json.dumps(packed))) == made
    assert packed[0]["reply"]["events"][0]["data"]["tools"] == {"@sent": "tools"}
    assert packed[1]["request"]["headers"] == {"@same": 0}
    assert packed[3]["request"]["body"]["messages"] == {"@first": 2, "@of": 1, "@then": [{"role": "user"}]}


def test_file_is_json_with_short_values_on_one_line() -> None:
    made = {"name": "x", "exchanges": [exchange({"role": "user", "content": "Hi"})]}
    text = recording.text(made)
    assert recording.unpack(json.loads(text)["exchanges"]) == made["exchanges"]
    assert '"messages": [{"role": "user", "content": "Hi"}],\n' in text


# ── listening ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_listener_records_calls_but_not_admin_requests() -> None:
    calls: list[Heard] = []

    async def app(scope: Json, receive: Json, send: Json) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 201, "headers": [(b"X-Y", b"z")]})
        await send({"type": "http.response.body", "body": b"yes", "more_body": False})

    async def ask(path: str) -> None:
        parts: Iterator[Json] = iter([{"body": b"do ", "more_body": True}, {"body": b"it"}])
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"a=1", "headers": [(b"K", b"v")]}

        async def receive() -> Json:
            return {"type": "http.request", **next(parts)}

        async def send(message: Json) -> None:
            pass

        await listening(calls)(app)(scope, receive, send)

    asyncio.run(ask("/v1/messages"))
    asyncio.run(ask("/admin/sessions"))
    assert calls == [Heard("POST", "/v1/messages?a=1", [("k", "v")], b"do it", 201, [("x-y", "z")], b"yes")]


@pytest.mark.needs("agent:pi")
@pytest.mark.full
def test_recording_pi_again_gives_same_requests(tmp_path: Path) -> None:
    agents.agent("pi")
    command = [sys.executable, str(ROOT / "tools" / "record_golden.py"), "--to", str(tmp_path), "pi"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / "pi.json").read_text())
    now = [e["request"]["body"] for e in recording.unpack(made["exchanges"])]
    assert now == [e["request"]["body"] for e in recording.read("pi")["exchanges"]]


def test_foreign_prose_is_elided() -> None:
    elided = Elided(["Fix the file notes.txt, please.", '{"path": "a b c"}'])
    prose = "You are a very helpful agent that never sleeps."
    left = elided.text(f'# Rules\n{prose}\nFix the file notes.txt, please.\n{{"x": "a b c", "n": 1}}')
    assert left.splitlines()[0] == "# Rules" and left.splitlines()[2:] == [
        "Fix the file notes.txt, please.",
        '{"x": "a b c", "n": 1}',
    ]
    assert prose not in left and f"⟨{len(prose)} characters, " in left
    assert elided.text(prose) == elided.text(prose) != elided.text(prose.replace("never", "NEVER"))
