"""Test responses that later requests refer to by id: continue them, refer to their items, read and delete them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.engines.providers import KEY, ModelTurn, ResponsesProvider
from tests.engines.standins import serving
from tests.exact.invariants import check_invariants
from tests.kit import Json, Running, calls, gateway, say
from turngate.engines.scripted import Scripted
from turngate.errors import StoreError
from turngate.store.replies import StoredReply
from turngate.verify import Renderers, SessionReader, VerifyOptions, verify

READ = {
    "type": "function",
    "name": "read_file",
    "description": "Reads.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    "strict": False,
}
THOUGHT = "<think>\nI should look.\n</think>\n\n"
SCRIPT = [say(THOUGHT + calls(("read_file", {"path": "a"}))), say("It says x."), say("Bye.")]
INTERRUPTIONS = ["none", "eviction", "restart"]
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


class Conversation:
    """A session whose gateway can be restarted between two calls."""

    def __init__(self, data: Path, engine: Scripted, interruption: str) -> None:
        self._data, self._engine, self._interruption = data, engine, interruption
        self.key = self.session = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[Running]:
        async with gateway(engine=self._engine, data=self._data) as g:
            if not self.key:
                self.session, self.key = await g.open()
            yield g

    async def run(self, steps: list[Callable[[Running], Any]]) -> None:
        """Run the steps with the interruption between each two."""
        if self._interruption == "restart":
            for step in steps:
                async with self.serve() as g:
                    await step(g)
            return
        async with self.serve() as g:
            for step in steps:
                await step(g)
                if self._interruption == "eviction":
                    assert await g.app.evictor.sweep(time.time() + 3600) == 1


async def create(g: Running, key: str, *, stream: bool = False, **request: Any) -> Any:
    client = g.client(key)
    request = {"model": "m", "tools": [READ], "instructions": "Be brief.", **request}
    if not stream:
        return await client.responses.create(**request)
    events: list[Any] = [e async for e in await client.responses.create(stream=True, **request)]
    return events[-1].response


def result(response: Any, text: str = "x") -> Json:
    call_id = next(item.call_id for item in response.output if item.type == "function_call")
    return {"type": "function_call_output", "call_id": call_id, "output": text}


async def check_one_row(g: Running, session: str, engine: Scripted, turns: int) -> None:
    [row] = await g.samples(session)
    assert len(row["spans"]) == turns == len(engine.received)
    for request, span in zip(engine.received, row["spans"], strict=True):
        assert request.prompt.tolist() == row["ids"][: span["start"]]
    check_invariants(await g.app.sessions.find(session), [np.asarray(request.prompt) for request in engine.received])


# ── continue ────────────────────────────────────────────────────────────────────────────────────────────────────────


@STREAMED
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
async def test_previous_response_continues_in_one_row(tmp_path: Path, interruption: str, stream: bool) -> None:
    engine = Scripted(SCRIPT)
    talk = Conversation(tmp_path, engine, interruption)
    replies: list[Any] = []

    async def ask(g: Running) -> None:
        replies.append(await create(g, talk.key, input="Hi", stream=stream))

    async def answer(g: Running) -> None:
        previous = replies[-1].id
        replies.append(
            await create(g, talk.key, input=[result(replies[-1])], previous_response_id=previous, stream=stream)
        )
        assert replies[-1].previous_response_id == previous

    async def go_on(g: Running) -> None:
        replies.append(await create(g, talk.key, input="Done?", previous_response_id=replies[-1].id, stream=stream))

    await talk.run([ask, answer, go_on])
    assert [reply.output_text for reply in replies] == ["", "It says x.", "Bye."]
    async with talk.serve() as g:
        await check_one_row(g, talk.session, engine, 3)
    with SessionReader(tmp_path) as reader:
        verdict = verify(reader, talk.session, VerifyOptions(renderers=Renderers()))
        assert verdict.ok, verdict


@STREAMED
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
async def test_item_references_continue_in_one_row(tmp_path: Path, interruption: str, stream: bool) -> None:
    """Agents such as the AI SDK's send the items of earlier replies as references by default."""
    engine = Scripted(SCRIPT)
    talk = Conversation(tmp_path, engine, interruption)
    history: list[Json] = [{"role": "user", "content": "Hi"}]

    async def ask(g: Running) -> None:
        reply = await create(g, talk.key, input=history, stream=stream)
        history.extend({"type": "item_reference", "id": item.id} for item in reply.output)
        if any(item.type == "function_call" for item in reply.output):
            history.append(result(reply))
        else:
            history.append({"role": "user", "content": "Done?"})

    await talk.run([ask, ask, ask])
    assert [item.get("type") for item in history].count("item_reference") == 4
    async with talk.serve() as g:
        await check_one_row(g, talk.session, engine, 3)


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
async def test_two_answers_to_one_question_are_two_branches(tmp_path: Path, interruption: str) -> None:
    engine = Scripted([say("One."), say("Two."), say("After one."), say("After two.")])
    talk = Conversation(tmp_path, engine, interruption)
    first: list[Any] = []

    async def ask(g: Running) -> None:
        first.append(await create(g, talk.key, input="Hi"))

    async def go_on(g: Running) -> None:
        for reply in first:
            await create(g, talk.key, input="More", previous_response_id=reply.id)

    await talk.run([ask, ask, go_on])
    async with talk.serve() as g:
        rows = await g.samples(talk.session)
        turns = await g.turns(talk.session)
    assert [turn["message"]["content"] for turn in turns] == ["One.", "Two.", "After one.", "After two."]
    assert sorted(len(row["spans"]) for row in rows) == [2, 2]


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
async def test_tools_from_items_stay_offered(tmp_path: Path, interruption: str) -> None:
    engine = Scripted(SCRIPT[:2])
    talk = Conversation(tmp_path, engine, interruption)
    replies: list[Any] = []

    async def ask(g: Running) -> None:
        tools = {"type": "additional_tools", "role": "developer", "tools": [READ]}
        replies.append(await create(g, talk.key, tools=[], input=[tools, {"role": "user", "content": "Hi"}]))

    async def answer(g: Running) -> None:
        replies.append(
            await create(g, talk.key, tools=[], input=[result(replies[0])], previous_response_id=replies[0].id)
        )

    await talk.run([ask, answer])
    async with talk.serve() as g:
        await check_one_row(g, talk.session, engine, 2)


async def test_response_can_continue_conversation_of_another_dialect(tmp_path: Path) -> None:
    """The path of a response may contain messages that arrived as Chat Completions."""
    engine = Scripted([say("Hello."), say("Fine."), say("Bye.")])
    async with gateway(engine=engine, data=tmp_path) as g:
        session = await g.open()
        chat = await g.ask(session.key, [{"role": "user", "content": "Hi"}])
        history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": chat.content}]
        plain: Json = {"tools": [], "instructions": None}
        reply = await create(g, session.key, input=[*history, {"role": "user", "content": "How?"}], **plain)
        listed = await g.client(session.key).responses.input_items.list(reply.id, order="asc")
        assert [item.content[0].text for item in listed.data] == ["Hi", "Hello.", "How?"]  # type: ignore[union-attr]
        await g.app.evictor.sweep(time.time() + 3600)
        await create(g, session.key, input="More", previous_response_id=reply.id, **plain)
        await check_one_row(g, session.id, engine, 3)


async def test_observed_endpoint_receives_items_instead_of_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    provider = ResponsesProvider(ModelTurn("One."), ModelTurn("Two."), ModelTurn("Three."))
    async with (
        serving(provider),
        gateway(observe="responses", engine_url=[provider.url], engine_key_env="PROVIDER_KEY") as g,
    ):
        session = await g.open(mode="observe")
        first = await create(g, session.key, input=[{"role": "user", "content": "Hi"}])
        second = await create(g, session.key, input="More", previous_response_id=first.id)
        reference = {"type": "item_reference", "id": second.output[0].id}
        user: list[Json] = [{"role": "user", "content": "Hi"}, reference, {"role": "user", "content": "Bye"}]
        await create(g, session.key, input=user)
        sent = [json.loads(body) for body in provider.bodies]
    assert "previous_response_id" not in sent[1]
    assert [item["role"] for item in sent[1]["input"]] == ["user", "assistant", "user"]
    assert [item.get("type") for item in sent[2]["input"]] == [None, "message", None]
    assert not any("resp_tg" in json.dumps(body) or "msg_tg" in json.dumps(body) for body in sent)


# ── not found ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def expect_not_found(g: Running, key: str, response_id: str, item_id: str) -> list[str]:
    """Check that nothing is found under these ids, and return the messages."""
    client = g.client(key)
    messages = []
    lookups: list[tuple[Any, type[openai.APIStatusError], str, str]] = [
        (client.responses.retrieve(response_id), openai.NotFoundError, "not_found", "response_id"),
        (client.responses.delete(response_id), openai.NotFoundError, "not_found", "response_id"),
        (client.responses.input_items.list(response_id), openai.NotFoundError, "not_found", "response_id"),
        (
            create(g, key, input="More", previous_response_id=response_id),
            openai.BadRequestError,
            "previous_response_not_found",
            "previous_response_id",
        ),
        (
            create(g, key, input=[{"type": "item_reference", "id": item_id}]),
            openai.NotFoundError,
            "item_not_found",
            "input[0]",
        ),
    ]
    for lookup, kind, code, param in lookups:
        with pytest.raises(kind) as caught:
            await lookup
        assert (caught.value.code, caught.value.param) == (code, param)
        messages.append(caught.value.message.replace(response_id, "ID").replace(item_id, "ID"))
    return messages


async def test_other_sessions_and_unknown_responses_look_the_same() -> None:
    async with gateway([say("Hello.")]) as g:
        mine, other = await g.open(), await g.open()
        reply = await create(g, mine.key, input="Hi")
        await g.client(mine.key).responses.retrieve(reply.id)
        unknown = await expect_not_found(g, other.key, "resp_tg" + "0" * 24, "msg_tg" + "0" * 26)
        assert await expect_not_found(g, other.key, reply.id, reply.output[0].id) == unknown
        assert await g.turns(other.id) == []


@STREAMED
async def test_response_with_store_false_is_not_found(stream: bool) -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        reply = await create(g, session.key, input="Hi", store=False, stream=stream)
        assert reply.store is False
        for message in await expect_not_found(g, session.key, reply.id, reply.output[0].id):
            assert "store=false" in message
        assert g.rows("SELECT count(*) FROM replies") == [(0,)]


async def test_deleted_response_is_not_found_and_its_turn_stays() -> None:
    async with gateway([say("Hello."), say("More.")]) as g:
        session = await g.open()
        client = g.client(session.key)
        first = await create(g, session.key, input="Hi")
        second = await create(g, session.key, input="Go on", previous_response_id=first.id)
        await client.responses.delete(first.id)
        await expect_not_found(g, session.key, first.id, first.output[0].id)
        assert len(await g.turns(session.id)) == 2
        listed = await client.responses.input_items.list(second.id, order="asc")
        assert [item.content[0].text for item in listed.data] == ["Hi", "Hello.", "Go on"]  # type: ignore[union-attr]


async def test_ended_session_keeps_its_responses() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        client = g.client(session.key)
        reply = await create(g, session.key, input="Hi")
        await g.seal(session.id)
        with pytest.raises(openai.ConflictError):
            await client.responses.delete(reply.id)
        assert await client.responses.retrieve(reply.id) == reply


async def test_deleted_session_leaves_no_replies() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        await create(g, session.key, input="Hi")
        assert (await g.admin.delete(f"/admin/sessions/{session.id}")).is_success
        assert g.rows("SELECT count(*) FROM replies") == g.rows("SELECT count(*) FROM reply_echoes") == [(0,)]


# ── read ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@STREAMED
@pytest.mark.parametrize("base", ["/v1", "/s/{id}/v1"])
async def test_read_response_is_as_delivered(stream: bool, base: str) -> None:
    async with gateway(SCRIPT) as g:
        session = await g.open()
        client = g.client(session.key, base_url=g.root + base.replace("{id}", session.id))
        reply = await create(g, session.key, input="Hi", metadata={"a": "b"}, stream=stream)
        assert await client.responses.retrieve(reply.id) == reply
        await g.seal(session.id)
        assert await client.responses.retrieve(reply.id) == reply


async def test_read_needs_session_key() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        reply = await create(g, session.key, input="Hi")
        with pytest.raises(openai.AuthenticationError):
            await g.client("tg-wrong").responses.retrieve(reply.id)


async def test_stream_of_stored_response_is_refused() -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()
        reply = await create(g, session.key, input="Hi")
        with pytest.raises(openai.BadRequestError) as caught:
            await g.client(session.key).responses.retrieve(reply.id, stream=True)
        assert caught.value.param == "stream"


async def test_pages_of_input_items() -> None:
    async with gateway(SCRIPT) as g:
        session = await g.open()
        items = g.client(session.key).responses.input_items
        first = await create(g, session.key, input="Hi")
        second = await create(g, session.key, input=[result(first)], previous_response_id=first.id)
        kinds = ["message", "reasoning", "function_call", "function_call_output"]
        assert [item.type async for item in items.list(second.id, order="asc", limit=1)] == kinds
        assert [item.type async for item in items.list(second.id)] == kinds[::-1]
        ids = [item.id async for item in items.list(second.id, order="asc")]
        assert ids[1:3] == [item.id for item in first.output] and len(set(ids)) == 4
        with pytest.raises(openai.BadRequestError) as caught:
            await items.list(second.id, after="msg_unknown")
        assert caught.value.param == "after"
        # An item that came without an id can be referred to by the id under which it is listed.
        reference: Json = {"type": "item_reference", "id": ids[0]}
        await create(g, session.key, input=[reference, *(item.to_dict() for item in first.output), result(first)])
        prompts = [request.prompt.tolist() for request in g.engine.received]
        assert prompts[2] == prompts[1]


# ── cost ────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_references_to_one_response_read_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("One."), say("Two.")]) as g:
        session = await g.open()
        first = await create(g, session.key, input=[{"role": "user", "content": f"Note {n}"} for n in range(300)])
        listed = g.client(session.key).responses.input_items.list(first.id, order="asc", limit=100)
        references: list[Json] = [{"type": "item_reference", "id": item.id} async for item in listed]
        replies = g.app.store.replies
        reads: list[str] = []
        find = replies.find

        def count(session_key: int, reply_id: str) -> StoredReply | None:
            reads.append(reply_id)
            return find(session_key, reply_id)

        monkeypatch.setattr(replies, "find", count)
        await create(g, session.key, input=references)
        assert g.engine.received[1].prompt.tolist() == g.engine.received[0].prompt.tolist()
    assert len(references) == 300 and len(reads) <= 2  # the output, then the input


async def test_references_read_at_most_as_many_bytes_as_a_request_may_have() -> None:
    async with gateway([say("One."), say("Two.")], max_body_mb=0.02) as g:
        session = await g.open()
        ids = []
        for letter in "ab":
            reply = await create(g, session.key, input=letter * 12_000)
            ids += [item.id async for item in g.client(session.key).responses.input_items.list(reply.id)]
        with pytest.raises(openai.APIStatusError, match="max_body_mb") as caught:
            await create(g, session.key, input=[{"type": "item_reference", "id": item_id} for item_id in ids])
    assert (caught.value.status_code, caught.value.param) == (413, "input")


async def test_repeated_part_is_stored_once() -> None:
    async with gateway([say("One."), say("Two."), say("Three.")]) as g:
        session = await g.open()
        previous = None
        for _ in range(3):
            previous = (await create(g, session.key, input="Hi", previous_response_id=previous)).id
        assert g.rows("SELECT count(*) FROM replies") == [(3,)]
        assert g.rows("SELECT count(*) FROM reply_echoes") == [(1,)]


async def test_reply_that_cannot_be_stored_is_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway([say("Hello.")]) as g:
        session = await g.open()

        def refuse(*_: object) -> None:
            raise StoreError("the disk is full")

        monkeypatch.setattr(g.app.store.replies, "add", refuse)
        with pytest.raises(openai.InternalServerError, match="the disk is full"):
            await create(g, session.key, input="Hi")
        [turn] = await g.turns(session.id)
        assert turn["delivered"] is False
