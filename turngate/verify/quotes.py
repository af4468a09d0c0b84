"""Check that each turn contains its recorded excerpts, and that each context quotes the turns that it is recorded as quoting."""

from __future__ import annotations

from turngate.types import Message
from turngate.verify.findings import CheckResults
from turngate.verify.messages import NodeMessages, same_meaning
from turngate.verify.store_reader import StoredContext, StoredSession, StoredTurn


def check_quotes(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    turns = {turn.id: turn for turn in session.turns}
    with results.check(
        "structure", "quotes", "recorded excerpts and quotations agree with the stored messages"
    ) as check:
        for turn in session.turns:
            if turn.id in messages.errors:
                continue  # reported elsewhere
            reply, size = messages.reply(turn), turn.info.text_size
            check.expect(
                size in (-1, len(reply.content)),
                f"its text is recorded with length {size}, but has length {len(reply.content)}",
                node=turn.id,
            )
            wrong = [excerpt for excerpt in turn.info.excerpts if excerpt not in _text_of(reply)]
            check.expect(
                not wrong, f"it does not contain the recorded excerpt {wrong[0] if wrong else ''!r}", node=turn.id
            )
        for context in session.contexts:
            for quoted in context.info.quotes or () if messages.is_readable(context) else ():
                source = turns.get(quoted)
                check.expect(
                    source is not None and source.id < context.id and _is_quoted(source, context, messages),
                    f"it is recorded as quoting turn {quoted}, but does not quote it",
                    node=context.id,
                )


def _text_of(reply: Message) -> str:
    return "\n".join([reply.content, *(call.arguments for call in reply.tool_calls)])


def _is_quoted(turn: StoredTurn, context: StoredContext, messages: NodeMessages) -> bool:
    own, reply = messages.of(context), messages.reply(turn)
    if any(message.role == "assistant" and same_meaning(reply, message) for message in own):
        return True
    heard = "\n".join(message.content for message in own if message.role != "assistant")
    return any(excerpt in heard for excerpt in turn.info.excerpts)
