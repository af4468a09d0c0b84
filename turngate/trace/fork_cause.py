"""Fork causes: why a turn does not continue its branch, derived from the agent's signals and the structure of the trace.

retry       the same request again: its answer was lost, or the client marked the request as a retry
resample    the same request again, for a second answer
branch      a second continuation of a turn
edited      a changed history: a question differs, or the model never gave one of the answers
compaction  the same conversation, shortened: it repeats or quotes a part of the earlier conversation
handoff     another agent takes over: its request repeats answers of the conversation, with a different system prompt or different tools
subagent    a sub-agent's own conversation
side        a call that is not part of the conversation: a title, a summary or a probe
new         a separate conversation that does not continue an earlier one; its role says what it is for
tools       the same conversation with different tools
system      the same conversation with a different system prompt
template    the chat template does not extend the earlier ids (detected when a prompt is rendered)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from turngate.trace.message_equality import DIGEST_SIZE, RequestMessages
from turngate.trace.quotes import has_same_start, repeats_question
from turngate.trace.tree import Cause, Context, Location, Sampled, Trace
from turngate.types import CallSignals


def find_fork_cause(
    trace: Trace,
    location: Location,
    *,
    context: Context | None = None,
    has_tools: bool,
    retried: bool = False,
    idempotency_key: str = "",
    signals: CallSignals = CallSignals(),
    started: float = inf,
    quotes: tuple[int, ...] = (),
) -> Cause | None:
    """Return why a turn forks, or None if it extends the tip of a branch, begins the first conversation, or repeats an unanswered request.

    `context` is the known context with exactly the ids of the turn's prompt, or None. `location.context` is a known context with the same
    meaning, whose ids may differ. `started` is the time at which the turn began. `quotes` are the ids of the turns that the turn's new
    messages quote.
    """
    for known in (location.context, context):
        if known is not None:
            # Ignore answers that began later, even if they ended first.
            answers = [s for s in known.children if s.info.started <= started]
            same_key = bool(idempotency_key) and any(s.info.idempotency_key == idempotency_key for s in answers)
            if (cause := _repetition_cause(answers, started, is_retry=retried or same_key)) is not None:
                return cause
    if context is not None:
        return None
    if location.node is not None:
        return _continuation_cause(location.node, location, signals)
    return _new_root_cause(trace, location.request, has_tools, signals, quotes) if trace.roots else None


def _repetition_cause(answers: list[Sampled], started: float, *, is_retry: bool) -> Cause | None:
    """Return why a request that already has these answers was sent again, or None if there are no answers."""
    if not answers:
        return None  # an identical call may still be in flight
    # Equal requests alone do not prove a retry, since an agent that compacts repeats itself. The client must mark the retry, or an answer
    # must have been lost. An answer lost after this turn began proves a retry only if all answers were lost. Otherwise, the calls ran in
    # parallel.
    lost = [not s.delivered or s.info.finish == "abort" for s in answers]
    lost_before = any(is_lost and s.info.ended <= started for is_lost, s in zip(lost, answers, strict=True))
    return "retry" if is_retry or lost_before or all(lost) else "resample"


def _continuation_cause(node: Sampled, location: Location, signals: CallSignals) -> Cause | None:
    """Return why new messages after the known turn `node` start a fork, or None if they continue its branch."""
    if signals.is_aside:
        return "side"  # such as a summary of the conversation so far
    # A sub-agent or side call that branched off here does not make the conversation itself fork.
    continues = any(_is_same_thread(context.info.signals, signals) for context in node.children)
    if signals.is_subagent:
        # A sub-agent may start from its parent's history. It forks where it leaves the parent's thread, then continues its own.
        is_own = node.parent.info.signals.thread == signals.thread
        return None if is_own and not continues else "subagent"
    is_foreign = any(m.role == "assistant" for m in location.request.messages_from(location.start))
    return "edited" if is_foreign else ("branch" if continues else None)


def _is_same_thread(one: CallSignals, other: CallSignals) -> bool:
    return one.thread == other.thread and one.role == other.role


def _new_root_cause(
    trace: Trace, request: RequestMessages, has_tools: bool, signals: CallSignals, quotes: tuple[int, ...]
) -> Cause | None:
    """Return the cause of a conversation that shares no turn with the trace, or None if it is the first one.

    The agent's signals take precedence over the structure of the trace.
    """
    if signals.is_aside:
        return "side"
    if signals.is_subagent:
        return "subagent"
    roots = [root for root in trace.roots if not root.info.signals.is_aside]
    if not roots:
        return None  # only titles so far: this is the first real conversation
    cause = _structural_cause(trace, request, has_tools, quotes)
    if cause == "subagent" and has_tools and not any(root.info.has_tools for root in roots):
        return None  # only titles so far, though no signal marked them
    threads = [root.info.signals.thread for root in roots if root.info.signals.thread]
    if not signals.thread or not threads:
        return cause
    if signals.thread in threads:
        # The same thread with a different beginning: the agent itself changed it, not a sub-agent.
        return "compaction" if has_tools and cause in ("subagent", "new") else cause
    return "subagent" if has_tools else "side"


def _structural_cause(trace: Trace, request: RequestMessages, has_tools: bool, quotes: tuple[int, ...]) -> Cause:
    question = _first_question(request)
    repeated = _find_repeated_answers(trace, request)
    if (cause := _revision_cause(trace, request, has_tools, bool(repeated))) is not None:
        return cause
    same = [root for root in trace.roots if has_same_start(root, request)]
    if repeated and not same:
        return "handoff"
    if not has_tools and any(root.info.has_tools for root in trace.roots):
        return "side"
    quoted = [node for node in trace.nodes if isinstance(node, Sampled) and node.id in quotes]
    if not same:
        return _unlike_cause(trace, request, has_tools, quoted)
    alike = [root for root in same if _first_question_of(root) == question]
    if alike and not repeated and not quoted and any(_is_other_task(root, request) for root in alike):
        return "new"  # another task after the same fixed messages or examples
    if alike:
        # Some agents keep the user's first message and summarize the rest.
        longest = max((node.count for node in trace.nodes if node.root in same), default=0)
        return "compaction" if longest > len(request) + 1 and not _has_answers(request) else "edited"
    if any(_repeats_first_answer(root, request) for root in same):
        return "edited"  # only the question changed; a summary would not keep the first answer
    # Many agents ask independent questions with one system prompt, so a shorter conversation alone proves nothing.
    if not has_tools:
        return "compaction" if repeated or find_summary(trace, quoted, has_tools=False) is not None else "new"
    newest = max(quoted, key=lambda turn: turn.id, default=None)
    if newest is not None and newest.info.arguments and not newest.children:
        # The task comes from a tool call that has no result yet, so this is a new sub-agent, or an earlier one with a shortened history.
        others = [root for root in same if root is not newest.root]
        return "compaction" if repeats_question(others, request) else "subagent"
    return "compaction" if repeated or quoted or repeats_question(same, request) else "new"


def _unlike_cause(trace: Trace, request: RequestMessages, has_tools: bool, quoted: Sequence[Sampled]) -> Cause:
    """Return the cause of a conversation, given that no earlier one has both the same tools and the same first message."""
    if not has_tools:
        return "new"
    alike = [root for root in trace.roots if root.info.preamble == request.preamble and root.info.roles[:1] == "u"]
    if not alike or _has_system_prompt(request):
        return "subagent"
    if quoted:
        return "compaction" if find_summary(trace, quoted, has_tools=True) is not None else "subagent"
    return "subagent" if repeats_question(alike, request) else "new"


def _revision_cause(trace: Trace, request: RequestMessages, has_tools: bool, repeats_answers: bool) -> Cause | None:
    """Return the cause of a conversation that repeats an earlier one with different tools or a different system prompt, otherwise None."""
    head, question = request.meaning(0), _first_question(request)
    # A title or summary is never revised, nor is a request without tools that preceded the first conversation with tools.
    known = [root for root in trace.roots if root.info.cause != "side" and not root.info.signals.is_aside]
    for root in [root for root in known if root.info.has_tools] or known:
        same_preamble = root.info.preamble == request.preamble
        same_head = root.info.meanings[:DIGEST_SIZE] == head
        same_question = _first_question_of(root) == question
        if not same_preamble and same_head and (question is None or same_question):
            return "tools" if has_tools else "side"
        # Without tools, a title or another agent may have the same question. Only a revision of the conversation also repeats its answers.
        continues = has_tools or repeats_answers
        if same_preamble and not same_head and question is not None and same_question and continues:
            return "system"
    return None


def find_summary(trace: Trace, quoted: Sequence[Sampled], *, has_tools: bool) -> Sampled | None:
    """Return the turn that wrote the summary at the start of a shortened conversation, or None.

    `quoted` are the turns that the shortened conversation quotes. The newest of them wrote the summary, if all of these hold:

    - It makes no tool calls, and no turn follows it.
    - The turn before it, if any, either makes tool calls or is not quoted. If two successive answers are quoted, the quoting text is a
      transcript.
    - The agent's signals mark it as a side call or a summary. Otherwise, the conversation that it summarizes must have at least two turns
      or already be shortened, because the turn might be a plan or a review.

    If an unmarked summary is the first turn of a conversation, it summarizes an earlier conversation. Its own conversation must then quote
    the earlier one, or lack the tools that the shortened one has.
    """
    turn = max(quoted, key=lambda turn: turn.id, default=None)
    if turn is None or turn.info.arguments or any(context.children for context in turn.children):
        return None
    before, is_aside = turn.parent.parent, turn.parent.info.signals.is_aside
    if before is None:
        return turn if is_aside or _has_long_source(trace, turn, has_tools=has_tools) else None
    if before in quoted and not before.info.arguments:
        return None
    return turn if is_aside or _is_later(before) else None


def _has_long_source(trace: Trace, summary: Sampled, *, has_tools: bool) -> bool:
    """Return whether an earlier conversation that `summary` may summarize is long enough to be shortened.

    `summary` is the first turn of its own conversation.
    """
    earlier = [turn for turn in trace.turns() if turn.id < summary.id and turn.root is not summary.root]
    is_quiet = has_tools and not summary.parent.info.has_tools
    quotes = summary.root.info.quotes or ()
    sources = {turn.root.id for turn in earlier if turn.id in quotes or (is_quiet and turn.root.info.has_tools)}
    return any(turn.root.id in sources and _is_later(turn) for turn in earlier)


def _is_later(turn: Sampled) -> bool:
    """Return whether a turn has earlier turns in its conversation, or begins a shortened conversation."""
    return turn.parent.parent is not None or turn.root.info.cause == "compaction"


def _find_repeated_answers(trace: Trace, request: RequestMessages) -> list[Sampled]:
    """Return the recorded turns that a request repeats as assistant messages. Titles and summaries are ignored."""
    answers = {request.meaning(index) for index in range(len(request)) if request.assistant(index) is not None}
    return [
        turn
        for turn in (trace.turns() if answers else ())
        if turn.info.meaning in answers and not turn.parent.info.signals.is_aside
    ]


def _repeats_first_answer(root: Context, request: RequestMessages) -> bool:
    """Return whether the first answer in the request is a recorded answer to `root`, at the same position."""
    first = root.count
    if len(request) <= first or any(request.assistant(index) is not None for index in range(first)):
        return False
    return request.assistant(first) is not None and any(s.info.meaning == request.meaning(first) for s in root.children)


def _is_other_task(root: Context, request: RequestMessages) -> bool:
    """Return whether a request differs from the first request of a conversation only in user messages."""
    if len(request) != root.count:
        return False
    meanings = (root.info.meanings[at : at + DIGEST_SIZE] for at in range(0, len(root.info.meanings), DIGEST_SIZE))
    different = [index for index, meaning in enumerate(meanings) if meaning != request.meaning(index)]
    return all(
        root.info.roles[index] == "u" and all(m.role == "user" for m in request.messages(index)) for index in different
    )


def _has_system_prompt(request: RequestMessages) -> bool:
    return len(request) > 0 and any(message.role == "system" for message in request.messages(0))


def _has_answers(request: RequestMessages) -> bool:
    return any(m.role == "assistant" for m in request.messages_from())


def _first_question(request: RequestMessages) -> bytes | None:
    """Return the digest of the request's first user message, or None if it has none."""
    for index in range(len(request)):
        if any(m.role == "user" for m in request.messages(index)):
            return request.meaning(index)
    return None


def _first_question_of(root: Context) -> bytes | None:
    at = root.info.roles.find("u")
    return root.info.meanings[at * DIGEST_SIZE : (at + 1) * DIGEST_SIZE] if at >= 0 else None
