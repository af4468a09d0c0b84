"""Check that stored replies, which agents may refer to by id, agree with their turns."""

from __future__ import annotations

import msgspec

from turngate.types import Message
from turngate.verify.findings import CheckResults
from turngate.verify.messages import NodeMessages
from turngate.verify.store_reader import DECODE_ERRORS, StoredReplyRow, StoredSession, StoredTurn

_CALLS = ("function_call", "custom_tool_call", "tool_search_call")


class _Part(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    type: str
    content: list[_Part] = []
    call_id: str = ""


class _Reply(msgspec.Struct):
    id: str
    output: list[_Item]


def check_replies(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    with results.check(
        "structure", "replies", "every stored reply belongs to a complete turn and has its text and calls"
    ) as check:
        turns = {turn.id: turn for turn in session.turns}
        for row in session.related.replies:
            turn = turns.get(row.node) if isinstance(row.node, int) else None
            problem = _find_problem(row, turn, messages)
            check.expect(not problem, f"the reply {row.id} {problem}", node=None if turn is None else turn.id)


def _find_problem(row: StoredReplyRow, turn: StoredTurn | None, messages: NodeMessages) -> str:
    """Return a description of what is wrong with a reply, or "" if nothing is."""
    if turn is None:
        return f"belongs to node {row.node}, which is not a turn of this session"
    if turn.info.finish == "abort":
        return "belongs to an aborted turn"
    if not isinstance(row.head, bytes) or not isinstance(row.tail, bytes):
        return "is damaged on disk: it is not stored as bytes"
    try:
        reply = msgspec.json.decode(row.head.rstrip(b",") + row.tail, type=_Reply)
    except DECODE_ERRORS as error:
        return f"cannot be read: {error}"
    if reply.id != row.id:
        return f"contains a different id, {reply.id}"
    return "" if turn.id in messages.errors else _find_difference(reply, messages.reply(turn))


def _find_difference(reply: _Reply, message: Message) -> str:
    calls = [item.call_id for item in reply.output if item.type in _CALLS]
    if calls != [call.id for call in message.tool_calls]:
        return f"has different calls from its turn: {', '.join(calls) or 'none'}"
    texts = ["".join(part.text for part in item.content) for item in reply.output if item.type == "message"]
    return "" if all(text.strip() in message.content for text in texts) else "has different text from its turn"
