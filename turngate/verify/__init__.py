"""Independent proof that a session's rows are exact, from the store alone. `verify` gives a verdict; `turngate verify` prints it.

Reads the store with its own reader and imports nothing of `trace`, `store`, `prompt`, `turn` or `control`, so that a fault there cannot
hide itself; the rows and the agent's transcript are handed in by whoever calls.

    structure    bytes, tree, turns, times, tools, messages, causes, outcome, events: can a gateway have recorded this?
    rows         chains, masks, roles, reasons: is what a trainer is given what was sampled?
    render       does the chat template, asked again, say what was sent; do the sampled ids say what was delivered?
    replay       does the engine give the recorded tokens the recorded log-probabilities?
    transcript   does the agent's own log agree?
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from turngate.types import Json
from turngate.verify.drift import check_drift
from turngate.verify.events import check_events
from turngate.verify.findings import (
    CheckResults,
    Counts,
    Fork,
    Note,
    Part,
    Replay,
    SkippedCheck,
    TemplateDifference,
    Verdict,
    VerifyFinding,
    unreadable_verdict,
)
from turngate.verify.messages import NodeMessages
from turngate.verify.outcome import check_outcome
from turngate.verify.render import Renderers, check_rendering
from turngate.verify.replay import TOLERANCE, Scorer, ScriptedScorer, VLLMScorer, check_replay
from turngate.verify.rows import RowSource, TrainerRow, check_rows, derive_roles
from turngate.verify.spot_checks import SpotChecker, summarize_verdict
from turngate.verify.store_reader import StoredContext, StoredSession, StoreReader, UnreadableSession
from turngate.verify.structure import check_structure

__all__ = [
    "TOLERANCE",
    "Fork",
    "Note",
    "Part",
    "Renderers",
    "Replay",
    "RowSource",
    "Scorer",
    "ScriptedScorer",
    "SkippedCheck",
    "SpotChecker",
    "StoreReader",
    "StoredSession",
    "TemplateDifference",
    "TrainerRow",
    "TranscriptComparison",
    "VLLMScorer",
    "Verdict",
    "VerifyFinding",
    "VerifyOptions",
    "summarize_verdict",
    "unreadable_verdict",
    "verify",
]

# The agent's own transcript against a trace: where they disagree, or None and why it cannot be told.
TranscriptComparison = Callable[[StoredSession, Json], tuple[list[str] | None, str]]
_MAX_TRIES = 4  # to read a session that is being recorded, together with its rows


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is verified with. What is left out is not looked at."""

    rows: RowSource | None = None
    renderers: Renderers | None = None
    scorer: Scorer | None = None
    tolerance: float = TOLERANCE
    version: int | None = None  # of the scorer's policy; None: whatever was sampled
    transcript: TranscriptComparison | None = None


def verify(folder: StoreReader, session_id: str, means: VerifyOptions) -> Verdict:
    """The verdict on one session. Raises only where there is none of that id, or an engine cannot be asked."""
    for _ in range(_MAX_TRIES):
        try:
            session = folder.read(session_id)
        except UnreadableSession as error:
            return unreadable_verdict(session_id, error.message)
        verdict = _build_verdict(session, means)
        # A session that goes on may have got a turn between the reading of its nodes and of its rows.
        if session.status != "open" or not folder.has_changed(session):
            break
    return verdict


def _build_verdict(session: StoredSession, means: VerifyOptions) -> Verdict:
    book = CheckResults()
    words = NodeMessages(session)
    check_structure(session, words, book)
    sound = all(finding.ok for finding in book.findings())
    check_outcome(session, book)  # what is wrong with that, and with events, keeps no gateway from making rows
    check_events(session, book)
    renderer = check_rendering(session, words, means.renderers or Renderers(), book)
    trained = check_rows(session, words, means.rows, book, sound=sound) if means.rows is not None else {}
    check_drift(session, words, renderer, trained, book)
    if means.scorer is not None:
        check_replay(session, means.scorer, book, tolerance=means.tolerance, version=means.version)
    if means.transcript is not None:
        _check_transcript(session, words, means.transcript, book)
    findings = book.findings()
    return Verdict(
        session=session.id,
        ok=all(finding.ok for finding in findings),
        status=session.status,
        counts=Counts(
            nodes=len(session.rows),
            turns=len(session.turns),
            tokens=sum(len(node.ids) for node in session.nodes),
            sampled_tokens=sum(len(turn.ids) for turn in session.turns),
            rows=len(trained),
            trained_tokens=sum(trained.values()),
        ),
        findings=findings,
        notes=tuple(book.notes),
        unchecked=book.unchecked(),
        forks=tuple(book.forks),
        differences=tuple(book.differences),
        replay=book.replay,
    )


def _check_transcript(
    session: StoredSession, words: NodeMessages, compare: TranscriptComparison, book: CheckResults
) -> None:
    with book.check("transcript", "transcript", "the agent's own log tells of the same turns") as check:
        told, why = compare(session, build_trace(session, words))
        if told is None:
            check.skip(why)
        for difference in told or ():
            check.expect(False, difference)


def build_trace(session: StoredSession, words: NodeMessages) -> Json:
    """The trace in the form of `GET /admin/sessions/{id}/trace`, as far as a transcript is compared with it."""
    role_of = derive_roles(session, words)
    nodes: list[Json] = []
    for node in session.nodes:
        common = {"id": node.id, "parent": node.row.parent, "kind": node.row.kind}
        if isinstance(node, StoredContext):
            nodes.append({**common, "told": {k: v for k, v in _signals_to_json(node).items() if v}})
        else:
            message = msgspec.to_builtins(words.turn(node))
            nodes.append({**common, "role": role_of[node.id], "delivered": node.delivered, "message": message})
    return {"session": session.id, "stop": session.stop, "nodes": nodes}


def _signals_to_json(context: StoredContext) -> dict[str, str]:
    told = context.info.signals
    return {"thread": told.thread, "parent": told.parent, "role": told.role, "why": told.why}
