"""The role of each turn in its rollout, derived from the trace.

main        the agent's own conversation
subagent    a sub-agent's conversation
side        titles, summaries and probes
superseded  sampled, but then retried or abandoned
aborted     cut short, for example because the agent hung up
"""

from __future__ import annotations

from typing import Literal

from turngate.trace.tree import Context, Sampled, Trace

TurnRole = Literal["main", "subagent", "side", "superseded", "aborted"]
ROLES: tuple[TurnRole, ...] = ("main", "subagent", "side", "superseded", "aborted")


def assign_roles(trace: Trace) -> dict[int, TurnRole]:
    """Return the role of each sampled node, by node id."""
    root_roles = _assign_root_roles(trace)
    superseded = _find_superseded(trace)
    assigned: dict[int, TurnRole] = {}
    for turn in trace.turns():
        if turn.info.finish == "abort":
            assigned[turn.id] = "aborted"
        elif turn.id in superseded or (not turn.delivered and not turn.children):
            assigned[turn.id] = "superseded"
        else:
            assigned[turn.id] = _role_from_signals(turn) or root_roles[turn.root.id]
    return assigned


def _role_from_signals(turn: Sampled) -> TurnRole | None:
    """Return the role given by the agent's signals, if any. A sub-agent may continue its parent's history, in the same tree."""
    signals = turn.parent.info.signals
    if signals.role:
        return signals.role
    if signals.parent and signals.parent != signals.thread:
        return "subagent"
    root_thread = turn.root.info.signals.thread
    is_other_thread = bool(signals.thread and root_thread and signals.thread != root_thread)
    return "subagent" if is_other_thread and turn.parent.info.has_tools else None


def _assign_root_roles(trace: Trace) -> dict[int, TurnRole]:
    """Return the role of each root's conversation, by node id."""
    # An agent may request a title first, so the main conversation is the first one with tools, or else the longest.
    sizes: dict[int, int] = {}
    for turn in trace.turns():
        sizes[turn.root.id] = sizes.get(turn.root.id, 0) + 1
    longest = max(trace.roots, key=lambda root: sizes.get(root.id, 0), default=None)
    own = [root for root in trace.roots if not _is_not_main(root)]
    main = next((root for root in own if root.info.has_tools), longest)
    assigned: dict[int, TurnRole] = {}
    for root in trace.roots:
        continues = root.info.cause in ("compaction", "system", "tools", "template", "edited")
        # A second title with a different system prompt may look like a revision of the first, until a conversation with tools begins.
        is_title = root.info.cause == "system" and not root.info.has_tools and main is not None and main.info.has_tools
        if root is main or (continues and not is_title):
            assigned[root.id] = "main"
        elif root.info.cause == "subagent":
            assigned[root.id] = "subagent"
        else:
            assigned[root.id] = "side"
    return assigned


def _is_not_main(root: Context) -> bool:
    """Return whether the agent's signals mark this as a side or sub-agent conversation."""
    signals = root.info.signals
    return signals.role in ("side", "subagent") or bool(signals.parent and signals.parent != signals.thread)


def _find_superseded(trace: Trace) -> set[int]:
    """Return the turns that the agent abandoned because it continued or retried a different answer to the same request."""
    superseded: set[int] = set()
    for context in (node for node in trace.nodes if isinstance(node, Context)):
        answers = context.children
        if len(answers) < 2:
            continue
        has_continued = any(s.children for s in answers)
        is_retried = False
        for answer in reversed(answers):
            if not answer.children and (has_continued or is_retried):
                superseded.add(answer.id)
            is_retried = is_retried or answer.info.cause == "retry"
    return superseded
