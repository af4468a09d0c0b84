"""Why does a call not simply go on where the last one ended? One word for each way, from the structure of the tree."""

from __future__ import annotations

from math import inf

from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages
from turngate.trace.tree import Cause, Context, Location, Sampled, Trace
from turngate.types import CallSignals


def find_fork_cause(
    trace: Trace,
    located: Location,
    *,
    has_tools: bool,
    retried: bool,
    idempotency_key: str = "",
    told: CallSignals = CallSignals(),
    started: float = inf,
) -> Cause | None:
    """None: this call extends the tip of a branch, or is the first one. `started`: when it began, of one that has ended by now."""
    if located.context is not None:
        # Answers that began after it are no reason for it, though they may have come first.
        answers = [s for s in located.context.children if s.info.started <= started]
        same_key = bool(idempotency_key) and any(s.info.idempotency_key == idempotency_key for s in answers)
        return _repetition_cause(answers, started, told_so=retried or same_key)
    if located.node is not None:
        if told.role == "side":
            return "side"  # a summary of the conversation so far, say
        # What left the line here, a helper or a side call, is no reason for the line itself to fork.
        goes_on = any(_same_line(context.info.signals, told) for context in located.node.children)
        if told.role == "subagent" or (told.parent and told.parent != told.thread):
            # A helper may begin where its parent stands. It is one where it leaves its parent's line, and goes on as itself.
            own = located.node.parent.info.signals.thread == told.thread
            return None if own and not goes_on else "subagent"
        foreign = any(m.role == "assistant" for m in located.reading.all(located.start))
        return "edited" if foreign else ("branch" if goes_on else None)
    return _new_root_cause(trace, located.reading, has_tools, told) if trace.roots else None


def _repetition_cause(answers: list[Sampled], started: float, *, told_so: bool) -> Cause | None:
    """Another answer to the same question, after these. None: there are none yet."""
    if not answers:
        return None  # the same call, made at the same moment, may be being answered
    # Equal bodies alone prove nothing (a compacting agent repeats itself): only the client's word or a lost reply does. One that was
    # lost meanwhile does if nothing else was there: else they were asked for side by side.
    lost = [not s.delivered or s.info.finish == "abort" for s in answers]
    before = any(gone and s.info.ended <= started for gone, s in zip(lost, answers, strict=True))
    return "retry" if told_so or before or all(lost) else "resample"


def _same_line(one: CallSignals, other: CallSignals) -> bool:
    return one.thread == other.thread and one.role == other.role


def _new_root_cause(
    trace: Trace, reading: RequestMessages, has_tools: bool, told: CallSignals = CallSignals()
) -> Cause | None:
    """A conversation that shares no sampled turn with what is known: what the agent's program says of it, or what it looks like."""
    if told.role == "side":
        return "side"
    if told.role == "subagent" or (told.parent and told.parent != told.thread):
        return "subagent"
    roots = [root for root in trace.roots if root.info.signals.role != "side"]
    if not roots:
        return None  # titles came first: this is where the work begins
    cause = _structural_cause(trace, reading, has_tools)
    if cause == "subagent" and has_tools and not any(root.info.has_tools for root in roots):
        return None  # so they did, though nothing said it of them
    known = [root.info.signals.thread for root in roots if root.info.signals.thread]
    if not told.thread or not known:
        return cause
    if told.thread in known:
        # The same conversation went on with another beginning: that is its own doing, not a helper's.
        return "compaction" if cause == "subagent" else cause
    return "subagent" if has_tools else "side"


def _structural_cause(trace: Trace, reading: RequestMessages, has_tools: bool) -> Cause:
    head = reading.meaning(0)
    asks = _first_question(reading)
    # A title or a summary is no conversation that another one could be a later form of; nor is what came without tools before the work.
    known = [root for root in trace.roots if root.info.cause != "side" and root.info.signals.role != "side"]
    for root in [root for root in known if root.info.has_tools] or known:
        meanings = root.info.meanings
        known_ask = _first_user(root)
        if (
            root.info.preamble != reading.preamble
            and meanings[:DIGEST_SIZE] == head
            and (asks is None or known_ask == asks)
        ):
            return "tools" if has_tools else "side"
        if (
            root.info.preamble == reading.preamble
            and known_ask == asks
            and asks is not None
            and meanings[:DIGEST_SIZE] != head
        ):
            return "system"
    if not has_tools and any(root.info.has_tools for root in trace.roots):
        return "side"
    same_head = [
        root
        for root in trace.roots
        if root.info.preamble == reading.preamble and root.info.meanings[:DIGEST_SIZE] == head
    ]
    if not same_head:
        return "subagent"
    longest = max((node.count for node in trace.nodes if node.root in same_head), default=0)
    if any(_first_user(root) == asks for root in same_head):
        # Some agents keep what the user said when they sum up the rest.
        return "compaction" if longest > len(reading) + 1 and not _has_answers(reading) else "edited"
    if any(_repeats_first_answer(root, reading) for root in same_head):
        return "edited"  # all of it goes on as before, after another question: no summary keeps the very first answer
    return "compaction" if longest > len(reading) or _has_answers(reading) else "subagent"


def _repeats_first_answer(root: Context, reading: RequestMessages) -> bool:
    """Whether the first answer in it is one that was given to `root`, at its place."""
    first = root.count
    if len(reading) <= first or any(reading.assistant(index) is not None for index in range(first)):
        return False
    return reading.assistant(first) is not None and any(s.info.meaning == reading.meaning(first) for s in root.children)


def _has_answers(reading: RequestMessages) -> bool:
    return any(m.role == "assistant" for m in reading.all())


def _first_question(reading: RequestMessages) -> bytes | None:
    for index in range(len(reading)):
        if any(m.role == "user" for m in reading.messages(index)):
            return reading.meaning(index)
    return None


def _first_user(root: Context) -> bytes | None:
    at = root.info.roles.find("u")
    return root.info.meanings[at * DIGEST_SIZE : (at + 1) * DIGEST_SIZE] if at >= 0 else None
