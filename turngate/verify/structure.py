"""Check, from the store's rows alone, that a gateway could have recorded the trace.

This covers the bytes, the tree, turns, times, tools, messages and signals.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import pairwise

import msgspec
import numpy as np

from turngate.types import LOGPROB_TOLERANCE, Json
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.messages import NodeMessages
from turngate.verify.store_reader import DECODE_ERRORS, StoredContext, StoredSession, StoredTurn, path

_FINISHES = ("stop", "length", "tool_calls", "abort")
_CAPTURES = ("tokens", "logprobs", "text")
_NEUTRAL: dict[str, Json] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "min_tokens": 0,
}
_FREE = ("temperature", "seed")  # parameters that an agent may set in a neutral session
_FORCED = "constrained: "
_AFTER_REASONING = " after reasoning"
_SHAPES = ("json_object", "json_schema", "tools", "tool")
_OBSERVED = "the endpoint's own sampling"
_CLOCK_SLACK_S = 0.05  # the clock may have been set back by up to this much


def check_structure(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    _check_checksums(session, results)
    _check_tree(session, results)
    _check_duplicates(session, results)
    _check_lengths(session, results)
    _check_turns(session, messages, results)
    _check_sampling(session, results)
    _check_times(session, results)
    _check_preambles(session, messages, results)
    _check_messages(session, messages, results)
    _check_signals(session, messages, results)


def _check_checksums(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "checksum", "every node's bytes are unchanged") as check:
        for row in session.rows:
            fits = row.checksum == row.compute_checksum(session.key)
            check.expect(fits, "its bytes do not match its checksum", node=row.id)


def _check_tree(session: StoredSession, results: CheckResults) -> None:
    with results.check(
        "structure",
        "tree",
        "every node's parent is an earlier node of the other kind, and every context is answered",
    ) as check:
        check.expect(not session.config_error, f"the session's settings cannot be read: {session.config_error}")
        for row in session.rows:
            check.expect(row.id not in session.orphans, session.orphans.get(row.id, ""), node=row.id)
            check.expect(row.id > 0, "its id is not positive", node=row.id)
        for context in session.contexts:
            # A context is stored with its first answer, in one transaction.
            check.expect(bool(context.children), "nothing was sampled after it", node=context.id)
            unchanged = context.info.preamble == context.root.info.preamble
            check.expect(
                unchanged,
                "its tools or template arguments differ from those of its conversation's root",
                node=context.id,
            )
    ids = [row.id for row in session.rows]
    gaps = [
        f"{a + 1}" if b == a + 2 else f"{a + 1} to {b - 1}" for a, b in zip([0, *ids], ids, strict=False) if b > a + 1
    ]
    if gaps:
        results.note("tree", f"missing node ids: {', '.join(gaps)}; nodes were removed, or writing them failed")


def _check_duplicates(session: StoredSession, results: CheckResults) -> None:
    with results.check("structure", "duplicates", "nothing is recorded twice") as check:
        seen: dict[tuple[float, float, bytes], int] = {}
        for turn in session.turns:
            key = turn.info.started, turn.info.ended, turn.row.ids
            first = seen.setdefault(key, turn.id)
            check.expect(first == turn.id, f"it repeats turn {first}, with the same times and ids", node=turn.id)
        names: dict[str, int] = {}
        for turn in session.turns if session.config.mode != "observe" else ():
            for call in _call_ids(turn):
                first = names.setdefault(call, turn.id)
                check.expect(first == turn.id, f"it repeats call {call} of turn {first}", node=turn.id)
        same: dict[tuple[int | None, bytes, bytes, bytes], int] = {}
        for context in session.contexts if session.config.mode != "observe" else ():
            place = context.row.parent, context.row.ids, context.info.preamble, context.info.meanings
            first = same.setdefault(place, context.id)
            check.expect(first == context.id, f"it repeats context {first} at the same position", node=context.id)


def _call_ids(turn: StoredTurn) -> list[str]:
    try:
        message = msgspec.json.decode(turn.row.messages)
        return [call["id"] for call in message.get("tool_calls", ()) if isinstance(call["id"], str)]
    except (*DECODE_ERRORS, AttributeError, KeyError):
        return []  # reported by the messages check


def _check_lengths(session: StoredSession, results: CheckResults) -> None:
    with results.check(
        "structure", "lengths", "every sampled id has its own log-probability, or the turn has none at all"
    ) as check:
        for row in session.rows:
            whole = row.logprobs is None or len(row.logprobs) % 4 == 0
            check.expect(
                whole,
                f"its log-probabilities have {len(row.logprobs or b'')} bytes, which is not a multiple of 4",
                node=row.id,
            )
            check.expect(
                row.kind != "context" or row.logprobs is None, "it is a context, but has log-probabilities", node=row.id
            )
        for turn in session.turns:
            scores = turn.logprobs
            if scores is None:
                continue
            paired = len(scores) == len(turn.ids) or session.config.mode == "observe" or turn.row.logprobs == b""
            check.expect(
                paired,
                f"it has different numbers of log-probabilities ({len(scores)}) and tokens ({len(turn.ids)})",
                node=turn.id,
            )
            known = scores[~np.isnan(scores)]
            fine = not len(known) or (bool(np.isfinite(known).all()) and float(known.max()) <= LOGPROB_TOLERANCE)
            check.expect(fine, "one of its log-probabilities is above 0 or infinite", node=turn.id)
        for node in session.nodes:
            check.expect(not len(node.ids) or int(node.ids.min()) >= 0, "one of its ids is negative", node=node.id)
        for context in session.contexts if session.config.mode != "observe" else ():
            check.expect(len(context.ids) > 0, "it is a context without ids", node=context.id)


def _has_consistent_runs(turn: StoredTurn) -> bool:
    """Return whether the policy versions of a turn's tokens are consistent, or True if the engine did not report them.

    Consistent versions cover all tokens, increase, and match the turn's first and last version.
    """
    runs = turn.info.version_runs
    if not runs:
        return True
    versions = [version for version, _ in runs]
    return (
        sum(count for _, count in runs) == len(turn.ids)
        and all(count > 0 for _, count in runs)
        and all(first < second for first, second in pairwise(versions))
        and (versions[0], versions[-1]) == (turn.info.version_start, turn.info.version_end)
    )


def _check_turns(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    exact, newest = session.config.mode != "observe", session.related.version
    with results.check("structure", "turn", "finish, fault and capture of each turn are consistent") as check:
        for turn in session.turns:
            info, message = turn.info, messages.reply(turn)

            def hold(holds: bool, what: str, at: int = turn.id) -> None:
                check.expect(holds, what, node=at)

            hold(info.finish in _FINISHES, f"its finish is {info.finish!r}, which is not one of {', '.join(_FINISHES)}")
            hold(
                info.capture in _CAPTURES,
                f"its capture is {info.capture!r}, which is not one of {', '.join(_CAPTURES)}",
            )
            hold(info.version_start <= info.version_end, "its policy version decreased while it was sampled")
            hold(info.version_start >= 0, f"its policy version is {info.version_start}, but versions start at 0")
            hold(
                newest is None or info.version_end <= newest,
                f"its policy version is {info.version_end}, but the highest ever active here is {newest}",
            )
            hold(
                _has_consistent_runs(turn),
                "the policy versions that the engine reported per token do not increase, do not cover all its tokens, or do not "
                "match its first and last version",
            )
            hold(
                -1 <= info.cached <= turn.parent.length,
                f"its number of cached prompt tokens is {info.cached}, but its prompt has length {turn.parent.length}",
            )
            hold(info.finish != "abort" or bool(info.fault), "it was aborted, but no fault is recorded")
            hold(info.capture != "text" or not len(turn.ids), "it was captured as text only, but has ids")
            if not exact:
                continue
            hold(
                not info.fault or info.finish == "abort",
                f"it ended with {info.finish}, but has a fault: {info.fault}",
            )
            hold(
                info.capture == "tokens" and not info.engine,
                f"it is an exact turn, but was captured as {info.capture} from {info.engine!r}",
            )
            hold(info.finish != "stop" or not message.tool_calls, "it has tool calls, but its finish is stop")
            hold(
                info.finish != "tool_calls" or bool(message.tool_calls), "its finish is tool_calls, but it has no calls"
            )
            hold(
                info.finish in ("abort", "stop") or len(turn.ids) > 0, f"its finish is {info.finish}, but it has no ids"
            )
            if not turn.delivered and any(context.children for context in turn.children):
                results.note("delivered", "it is marked as not delivered, but the agent continued from it", turn.id)


def _check_sampling(session: StoredSession, results: CheckResults) -> None:
    with results.check(
        "structure", "sampling", "the recorded biases match the sampling parameters, and pinned values were applied"
    ) as check:
        pinned = session.config.sampling
        for turn in session.turns:
            try:
                used = {**_NEUTRAL, **(msgspec.json.decode(turn.info.sampling) if turn.info.sampling else {})}
            except DECODE_ERRORS:
                check.expect(False, "its sampling parameters cannot be read", node=turn.id)
                continue
            due = {name for name, value in used.items() if name not in _FREE and value != _NEUTRAL.get(name)}
            due |= {"greedy"} if used["temperature"] == 0 else set()
            marked = {b for b in turn.info.biases if not b.startswith((_FORCED, "field ")) and b != _OBSERVED}
            forced = {b.removeprefix(_FORCED) for b in turn.info.biases if b.startswith(_FORCED)}
            forced = {shape.removesuffix(_AFTER_REASONING) for shape in forced} - set(_SHAPES)
            check.expect(
                not forced, f"it is marked as constrained to an unknown shape: {_join_names(forced)}", node=turn.id
            )
            check.expect(
                marked == due,
                f"it is marked as biased by {_join_names(marked)}, but was sampled with {_join_names(due)}",
                node=turn.id,
            )
            if session.config.mode != "observe":
                kept = all(used.get(name) == value for name, value in pinned.items())
                check.expect(kept, "it was not sampled with the values pinned by the session", node=turn.id)
                free = session.config.bias != "neutral" or due <= {*pinned, "greedy"}
                check.expect(
                    free,
                    f"it was sampled with {_join_names(due)}, but the session allows only neutral values and those that it pins",
                    node=turn.id,
                )


def _check_times(session: StoredSession, results: CheckResults) -> None:
    with results.check(
        "structure", "times", "every turn was sampled while the session was open, and after the turn that it follows"
    ) as check:
        for turn in session.turns:
            started, ended = turn.info.started, turn.info.ended
            check.expect(started <= ended + _CLOCK_SLACK_S, "it ended before it started", node=turn.id)
            check.expect(
                started >= session.opened - _CLOCK_SLACK_S, "it was sampled before the session was opened", node=turn.id
            )
            closed = session.closed is None or ended <= session.closed + _CLOCK_SLACK_S
            check.expect(closed, "it was sampled after the session was closed", node=turn.id)
            before = turn.parent.parent
            late = before is None or before.info.ended <= started + _CLOCK_SLACK_S
            check.expect(
                late, f"it started before turn {before.id if before else 0}, which it follows, had ended", node=turn.id
            )
    ends = [(turn.info.ended, turn.id) for turn in session.turns]
    for (was, _), (now, node) in pairwise(ends):
        if now < was:
            results.note(
                "times",
                "it ended earlier than the previous turn; the clock may have been set back, or the order of the turns changed",
                node,
            )


def _check_preambles(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    with results.check(
        "structure",
        "preamble",
        "the tools and template arguments of every context are stored and match their digest",
    ) as check:
        for context in session.contexts:
            found = messages.tools_or_error(context)
            fits = not isinstance(found, str)
            check.expect(fits, found if isinstance(found, str) else "", node=context.id)
            if not isinstance(found, str):
                marked = context.info.has_tools
                check.expect(
                    marked == bool(found),
                    f"it is marked as having {'tools, but none' if marked else 'no tools, but some'} are stored",
                    node=context.id,
                )
        used = {context.info.preamble for context in session.contexts}
        for digest in session.preambles:
            check.expect(digest in used, "no context uses these stored tools", where=f"preamble {digest.hex()}")
        for context in session.roots:
            stored = messages.preamble(context)
            if stored is not None and session.config.template_kwargs:
                kept = _decode_kwargs(stored.kwargs)
                pinned = session.config.template_kwargs.items()
                check.expect(
                    all(kept.get(k) == v for k, v in pinned),
                    "its stored template arguments do not contain those that the session sets",
                    node=context.id,
                )


def _decode_kwargs(raw: bytes) -> dict[str, Json]:
    try:
        found = msgspec.json.decode(raw)
    except DECODE_ERRORS:
        return {}
    return found if isinstance(found, dict) else {}


def _check_messages(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    with results.check(
        "structure",
        "messages",
        "the messages of every node can be read, and tool results answer calls on their own branch",
    ) as check:
        makers = {call: turn for turn in session.turns for call in _call_ids(turn)}
        for node in session.nodes:
            check.expect(
                node.id not in messages.errors,
                f"its messages cannot be read: {messages.errors.get(node.id, '')}",
                node=node.id,
            )
            if isinstance(node, StoredTurn) and node.id not in messages.errors:
                check.expect(
                    messages.reply(node).role == "assistant",
                    "it is a turn, but its message is not an assistant message",
                    node=node.id,
                )
        for context in session.contexts:
            count = messages.item_counts.get(context.id)
            if count is not None:
                fits = len(context.info.meanings) == 16 * count == 16 * len(context.info.roles)
                check.expect(
                    fits,
                    f"its digests ({len(context.info.meanings) / 16:g}) and roles ({len(context.info.roles)}) do not match the number of "
                    f"its stored messages ({count})",
                    node=context.id,
                )
            if session.config.mode != "observe":
                _check_answers(context, messages, makers, check)


def _check_answers(
    context: StoredContext, messages: NodeMessages, makers: dict[str, StoredTurn], check: VerifyCheck
) -> None:
    """Check that tool results are on the same branch as their calls.

    Call ids are unique, so an id identifies the turn that made the call.
    """
    own_messages = messages.of(context)
    own = {call.id for message in own_messages for call in message.tool_calls}
    branch = {node.id for node in path(context)}
    for message in own_messages:
        maker = makers.get(message.tool_call_id) if message.role == "tool" and message.tool_call_id not in own else None
        if maker is not None:
            # If two turns have the same meaning, an agent that renames call ids may have answered either.
            near = maker.id in branch or maker.parent.id in branch
            check.expect(near, f"it answers a call of turn {maker.id}, which is not on its branch", node=context.id)


def _check_signals(session: StoredSession, messages: NodeMessages, results: CheckResults) -> None:
    """Check that the session's signal rules can produce the recorded signals of each context."""
    config = session.config.signals
    with results.check(
        "structure", "signals", "the recorded signals of every context follow from the session's signal rules"
    ) as check:
        for context in session.contexts:
            signals = context.info.signals
            check.expect(
                not signals.thread or bool(config.thread),
                f"it has the thread {signals.thread!r}, but no rule reads a thread",
                node=context.id,
            )
            check.expect(
                not signals.parent or bool(config.parent),
                f"it has the parent thread {signals.parent!r}, but no rule reads a parent thread",
                node=context.id,
            )
            by_model = (
                signals.role in config.models.values()
                and signals.why.startswith("model ")
                and signals.source in ("", "model")
            )
            fitting = [
                n
                for n, rule in enumerate(config.rules)
                if (rule.role, rule.why) == (signals.role, signals.why)
                and signals.source in ("", rule.source)  # older gateways did not record the source
            ]
            known = not signals.role or by_model or bool(fitting)
            if not check.expect(
                known, f"its role is {signals.role} ({signals.why}), but no rule assigns that role", node=context.id
            ):
                continue
            seen = [_rule_matches(rule.source, rule.match, context, messages) for rule in config.rules]
            if fitting and not by_model:
                shown = any(seen[n] is not False for n in fitting)
                check.expect(
                    shown,
                    f"its role is {signals.role} ({signals.why}), but its messages and tools do not match that rule",
                    node=context.id,
                )
            first = next((n for n, fits in enumerate(seen) if fits), None)
            if first is not None:
                earlier = bool(fitting) and fitting[0] <= first
                check.expect(
                    earlier,
                    f"its messages and tools match the rule for role {config.rules[first].role}, but its recorded signals do not follow "
                    "from that rule",
                    node=context.id,
                )


def _rule_matches(source: str, match: str, context: StoredContext, messages: NodeMessages) -> bool | None:
    """Return whether a signal rule matches a context, or None if that is unknown.

    Headers, request bodies and model names are not stored, so rules about them cannot be checked.
    """
    kind, _, name = source.partition(":")
    if not messages.is_readable(context):
        return None
    match kind:
        case "tool":
            tools = messages.tools(context)
            return None if tools is None else any(tool.name == name for tool in tools) and fnmatchcase(name, match)
        case "system":
            beginning = messages.of(context.root)[:1]
            text = "\n".join(m.content for m in beginning if m.role == "system")
            return bool(text) and fnmatchcase(text, match)
        case "last":
            last = messages.last_items.get(context.id, ())
            text = "\n".join(m.content for m in last)
            return None if not last else bool(text) and fnmatchcase(text, match)
        case _:
            return None


def _join_names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
