"""What part did each turn play in the rollout? Read off the tree, whenever it is asked for.

`main` is the agent's own line of work; `subagent` a helper with its own conversation; `side` titles, summaries and probes;
`superseded` what was sampled but then retried or abandoned; `aborted` what the agent hung up on.
"""

from __future__ import annotations

from typing import Literal

from turngate.trace.tree import Context, Sampled, Trace

TurnRole = Literal["main", "subagent", "side", "superseded", "aborted"]
ROLES: tuple[TurnRole, ...] = ("main", "subagent", "side", "superseded", "aborted")


def assign_roles(trace: Trace) -> dict[int, TurnRole]:
    """Role of each sampled node, by node id."""
    lines = _assign_root_roles(trace)
    superseded = _find_superseded(trace)
    found: dict[int, TurnRole] = {}
    for turn in trace.turns():
        if turn.info.finish == "abort":
            found[turn.id] = "aborted"
        elif turn.id in superseded or (not turn.delivered and not turn.children):
            found[turn.id] = "superseded"
        else:
            found[turn.id] = _signalled_role(turn, trace) or lines[turn.root.id]
    return found


def _signalled_role(turn: Sampled, trace: Trace) -> TurnRole | None:
    """What the agent's program said about this very call. A helper may go on from its parent's history, in the same tree."""
    told = turn.parent.info.signals
    if told.role:
        return told.role
    if told.parent and told.parent != told.thread:
        return "subagent"
    begun = turn.root.info.signals.thread
    return "subagent" if told.thread and begun and told.thread != begun and turn.parent.info.has_tools else None


def _assign_root_roles(trace: Trace) -> dict[int, TurnRole]:
    """The role of each root's whole conversation."""
    # An agent may ask for a title before it begins: the main line is the first one that has tools, or else the longest.
    sizes: dict[int, int] = {}
    for turn in trace.turns():
        sizes[turn.root.id] = sizes.get(turn.root.id, 0) + 1
    longest = max(trace.roots, key=lambda root: sizes.get(root.id, 0), default=None)
    own = [root for root in trace.roots if not _is_not_main(root)]
    main = next((root for root in own if root.info.has_tools), longest)
    found: dict[int, TurnRole] = {}
    for root in trace.roots:
        goes_on = root.info.cause in ("compaction", "system", "tools", "template", "edited")
        # A second title, with another system prompt, may look like a later form of the first one, until it is known what the work is.
        title = root.info.cause == "system" and not root.info.has_tools and main is not None and main.info.has_tools
        if root is main or (goes_on and not title):
            found[root.id] = "main"
        elif root.info.cause == "subagent":
            found[root.id] = "subagent"
        else:
            found[root.id] = "side"
    return found


def _is_not_main(root: Context) -> bool:
    """The program says that this is not its main conversation."""
    told = root.info.signals
    return told.role in ("side", "subagent") or bool(told.parent and told.parent != told.thread)


def _find_superseded(trace: Trace) -> set[int]:
    """Turns that the agent did not go on from, though it did from another answer to the same question."""
    out: set[int] = set()
    for context in (node for node in trace.nodes if isinstance(node, Context)):
        answers = context.children
        if len(answers) < 2:
            continue
        kept = [s for s in answers if s.children]
        retried = False
        for answer in reversed(answers):
            if not answer.children and (kept or retried):
                out.add(answer.id)
            retried = retried or _repeats(answer)
    return out


def _repeats(turn: Sampled) -> bool:
    return turn.info.cause == "retry"
