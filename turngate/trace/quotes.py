"""Find the recorded turns that the messages of a request quote.

An agent quotes an answer when it passes the answer from one conversation to another: a plan in another agent's prompt, a review in a
tool result, or a summary at the start of a shortened conversation. Each turn keeps a few excerpts of its answer, and the messages of
each new context are searched for these excerpts. This works even if the token ids are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from math import isqrt

import msgspec

from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages, meaning_digest
from turngate.trace.tree import Context, Sampled, SampledInfo, Trace
from turngate.types import Message

_MIN_SIZE = 12  # characters of an excerpt; shorter ones may be repeated by chance
_MIN_ARGUMENT = (
    24  # characters of an excerpt of arguments; most arguments are shorter, but a task for a sub-agent is longer
)
_MAX_SIZE = 48
_MAX_EXCERPTS = 3
_MAX_TEXT = 4000  # characters at the end of a turn from which excerpts are taken
_MAX_ARGUMENTS = 1000  # characters at the start of a tool call's arguments
_MAX_TURNS = 100  # how many turns are searched for, newest first
_SPLIT_ARGUMENTS = re.compile(
    r'"|\\(?:u....|.)'
)  # the ends of JSON strings, and escapes, which a quotation does not keep
_MARKUP = " \t-*#>`"
_MAX_LINES = 40  # places in a message where the question of an earlier conversation may begin or end
_MAX_COMPARED = 16_000_000  # twice the maximum total size, in characters, of the parts that a message is split into


def take_excerpts(message: Message) -> tuple[str, ...]:
    """Return excerpts that identify a turn: from its first tool calls or, if it has none, from the longest lines near its end."""
    if message.tool_calls:
        calls = message.tool_calls[:_MAX_EXCERPTS]
        split = (_SPLIT_ARGUMENTS.split(call.arguments[:_MAX_ARGUMENTS]) for call in calls)
        return tuple(piece for pieces in split for piece in _longest(pieces, 1, _MIN_ARGUMENT))
    return _longest(message.content[-_MAX_TEXT:].splitlines(), _MAX_EXCERPTS, _MIN_SIZE)


def find_quotes(trace: Trace, parent: Sampled | None, request: RequestMessages, start: int) -> tuple[int, ...]:
    """Return the ids of the turns, oldest first, that are quoted by the messages from index `start` on.

    If `parent` is None, the conversation is new, and it may quote any of the newest turns. Its tool results are not searched, because a
    tool result may repeat the tool call before it. Otherwise, `parent` is the last turn of the conversation, and only turns that other
    conversations added after it are considered. An assistant message that repeats a turn also counts as a quotation, except in a new
    conversation that starts in the same way as the turn's own conversation.
    """
    candidates = _list_candidates(trace, parent)
    if not candidates:
        return ()
    speakers = ("system", "user") if parent is None else ("system", "user", "tool")
    text = "\n".join(message.content for message in request.messages_from(start) if message.role in speakers)
    answers = {request.meaning(index) for index in range(start, len(request)) if request.assistant(index) is not None}
    return tuple(
        turn.id
        for turn in reversed(candidates)
        if is_quoted(turn.info, text)
        or (turn.info.meaning in answers and (parent is not None or not has_same_start(turn.root, request)))
    )


def has_same_start(root: Context, request: RequestMessages) -> bool:
    """Return whether a conversation and a request have the same tools, template arguments and first message."""
    return root.info.preamble == request.preamble and root.info.meanings[:DIGEST_SIZE] == request.meaning(0)


def repeats_question(roots: Iterable[Context], request: RequestMessages) -> bool:
    """Return whether a request contains the first user message of an earlier conversation.

    Only the request's user messages before its first assistant message are searched.
    """
    questions = {_find_question(root) for root in roots} - {b""}
    for message in request.messages_from() if questions else ():
        if message.role == "assistant":
            break
        if message.role == "user":
            parts = (msgspec.structs.replace(message, content=part) for part in _split_into_parts(message.content))
            if any(part.content.strip() and meaning_digest((part,), {}) in questions for part in parts):
                return True
    return False


def _find_question(root: Context) -> bytes:
    before, user, _ = root.info.roles.partition("u")
    return root.info.meanings[len(before) * DIGEST_SIZE :][:DIGEST_SIZE] if user else b""


def _split_into_parts(text: str) -> Iterator[str]:
    """Yield every span of whole lines in a text.

    If there are too many lines, yield spans of whole paragraphs instead. If there are too many paragraphs, use only the first
    and last few breaks between them.
    """
    limit = max(2, min(_MAX_LINES, isqrt(_MAX_COMPARED // (len(text) + 1))))
    starts = [0, *(match.end() for match in re.finditer("\n", text)), len(text) + 1]
    if len(starts) > limit:
        starts = [0, *(match.end() for match in re.finditer("\n\n", text)), len(text) + 1]
    if len(starts) > limit:
        starts = [*starts[: limit // 2], *starts[-(limit // 2) :]]
    for first, start in enumerate(starts):
        for end in starts[first + 1 :]:
            yield text[start : end - 1]


def is_quoted(info: SampledInfo, text: str) -> bool:
    """Return whether a text contains an excerpt of a turn's tool calls or, if the turn has no calls, at least half of its excerpts."""
    found = sum(excerpt in text for excerpt in info.excerpts)
    return found > 0 and (bool(info.arguments) or 2 * found >= len(info.excerpts))


def _list_candidates(trace: Trace, parent: Sampled | None) -> list[Sampled]:
    if parent is not None and len(trace.roots) == 1:
        return []  # the usual case: one conversation
    since, candidates = 0 if parent is None else parent.id, list[Sampled]()
    for node in reversed(trace.nodes):
        if node.id <= since or len(candidates) == _MAX_TURNS:
            break
        is_other = parent is None or node.root is not parent.root
        if is_other and isinstance(node, Sampled) and node.info.excerpts:
            candidates.append(node)
    return candidates


def _longest(pieces: Sequence[str], count: int, least: int) -> tuple[str, ...]:
    """Return up to `_MAX_SIZE` characters from the middle of each of the `count` longest pieces. Ignore pieces with fewer than `least`
    characters.

    Markup at the ends of a piece is removed first, because a quotation might not keep it.
    """
    trimmed: Iterable[str] = (piece.strip(_MARKUP) for piece in pieces if len(piece) >= least)
    found = sorted((piece for piece in trimmed if len(piece) >= least), key=len, reverse=True)[:count]
    return tuple(piece[(start := max(0, len(piece) - _MAX_SIZE) // 2) : start + _MAX_SIZE] for piece in found)
