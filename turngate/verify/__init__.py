"""Prove independently that a session's rows are exact. `verify` builds the verdict, and `turngate verify` prints it.

This package reads the store with its own reader and imports nothing from `trace`, `store`, `gateway` or `views`, so that a bug in those
packages cannot hide itself. The caller passes in functions that build the rows and compare the agent's transcript. The verdict has these
parts:

    structure    bytes, tree, turns, times, tools, messages, causes, outcome, events: could a gateway have recorded this?
    rows         chains, masks, roles, reasons: does a trainer receive what was sampled?
    render       does the chat template render what was sent, and do the sampled ids parse to what was delivered?
    replay       does the engine assign the recorded log-probabilities to the recorded tokens?
    transcript   does the agent's own log agree?
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from turngate.types import DeliveredTurn
from turngate.verify.attempts import check_attempts
from turngate.verify.events import check_events
from turngate.verify.findings import (
    CheckResults,
    Counts,
    ForkReport,
    Note,
    Part,
    Replay,
    SkippedCheck,
    TemplateDifference,
    Verdict,
    VerifyFinding,
    unreadable_verdict,
)
from turngate.verify.forks import check_drift
from turngate.verify.messages import NodeMessages
from turngate.verify.outcome import check_outcome
from turngate.verify.quotes import check_quotes
from turngate.verify.render import Renderers, check_rendering
from turngate.verify.replay import TOLERANCE, check_replay
from turngate.verify.replies import check_replies
from turngate.verify.roles import derive_roles
from turngate.verify.rows import RowSource, TrainerRow, check_rows
from turngate.verify.sampling_mask import check_sampling_masks
from turngate.verify.scorers import Scorer, ScriptedScorer, VLLMScorer
from turngate.verify.shared_reader import open_session_reader
from turngate.verify.side_data import check_side_data
from turngate.verify.store_reader import SessionReader, StoredSession, UnreadableSession
from turngate.verify.structure import check_structure
from turngate.verify.teacher_scores import check_teacher_scores
from turngate.verify.turn_rewards import check_turn_rewards

__all__ = [
    "TOLERANCE",
    "ForkReport",
    "Note",
    "Part",
    "Renderers",
    "Replay",
    "RowSource",
    "Scorer",
    "ScriptedScorer",
    "SessionReader",
    "SkippedCheck",
    "StoredSession",
    "TemplateDifference",
    "TrainerRow",
    "TranscriptComparison",
    "VLLMScorer",
    "Verdict",
    "VerifyFinding",
    "VerifyOptions",
    "open_session_reader",
    "unreadable_verdict",
    "verify",
]

# Compares the agent's own transcript with a trace. Returns the differences, or None and the reason why they cannot be compared.
TranscriptComparison = Callable[[StoredSession, list[DeliveredTurn]], tuple[list[str] | None, str]]
_MAX_TRIES = 4  # attempts to read an open session and its rows in the same state


class VerifyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs for verifying sessions. If `rows`, `scorer` or `transcript` is None, the part of the verdict that needs it is left out.

    Without `renderers`, the recorded tokenizers and renderer families are used.
    """

    rows: RowSource | None = None
    renderers: Renderers | None = None
    scorer: Scorer | None = None
    tolerance: float = TOLERANCE
    version: int | None = None  # the scorer's policy version; None: score turns of any version
    transcript: TranscriptComparison | None = None


def verify(reader: SessionReader, session_id: str, options: VerifyOptions) -> Verdict:
    """Verify one session. Raise `NotFound` if it does not exist. Errors of the scoring engine are not caught."""
    for _ in range(_MAX_TRIES):
        try:
            session = reader.read_session(session_id)
        except UnreadableSession as error:
            return unreadable_verdict(session_id, error.message)
        verdict = _build_verdict(session, options, reader.path)
        # An open session may have gained a turn between reading its nodes and reading its rows.
        if session.status != "open" or not reader.has_changed(session):
            break
    return verdict


def _build_verdict(session: StoredSession, options: VerifyOptions, folder: Path) -> Verdict:
    results = CheckResults()
    messages = NodeMessages(session)
    check_structure(session, messages, results)
    check_side_data(session, results)
    check_sampling_masks(session, results)
    check_quotes(session, messages, results)
    sound = all(finding.ok for finding in results.findings())
    check_replies(session, messages, results)
    check_outcome(session, results)  # after `sound`: rows can be built even if the outcome or the events are wrong
    check_turn_rewards(session, results)
    check_attempts(session, results)
    check_events(session, results)
    check_teacher_scores(session, folder, results)
    renderer = check_rendering(session, messages, options.renderers or Renderers(), results)
    trained = check_rows(session, messages, options.rows, results, sound=sound) if options.rows is not None else {}
    check_drift(session, messages, renderer, trained, results)
    if options.scorer is not None:
        check_replay(session, options.scorer, results, tolerance=options.tolerance, version=options.version)
    if options.transcript is not None:
        _check_transcript(session, messages, options.transcript, results)
    findings = results.findings()
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
        notes=results.notes,
        unchecked=results.list_skipped(),
        forks=tuple(results.forks),
        differences=tuple(results.differences),
        replay=results.replay,
    )


def _check_transcript(
    session: StoredSession, messages: NodeMessages, compare: TranscriptComparison, results: CheckResults
) -> None:
    with results.check("transcript", "transcript", "the agent's own log has the same turns") as check:
        differences, why = compare(session, list_delivered_turns(session, messages))
        if differences is None:
            check.skip(why)
        for difference in differences or ():
            check.expect(False, difference)


def list_delivered_turns(session: StoredSession, messages: NodeMessages) -> list[DeliveredTurn]:
    """Return the delivered turns, oldest first, for comparison with the agent's transcript."""
    role_of = derive_roles(session, messages)
    root_of: dict[int, int] = {}
    for node in session.nodes:  # parents come before their children
        root_of[node.id] = node.id if node.parent is None else root_of[node.parent.id]
    return [
        DeliveredTurn(role_of[turn.id], turn.parent.info.signals.thread or str(root_of[turn.id]), messages.reply(turn))
        for turn in session.turns
        if turn.delivered
    ]
