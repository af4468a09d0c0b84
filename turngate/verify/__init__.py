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
from turngate.verify.drift import drift
from turngate.verify.events import events
from turngate.verify.findings import (
    Book,
    Counts,
    Difference,
    Finding,
    Fork,
    Note,
    Part,
    Replay,
    Unchecked,
    Verdict,
    unreadable,
)
from turngate.verify.messages import Words
from turngate.verify.outcome import ending
from turngate.verify.render import Renderers, render
from turngate.verify.replay import TOLERANCE, VLLM, Derived, Scorer, replay
from turngate.verify.rows import Rows, Sample, roles, rows
from turngate.verify.spot_checks import Sampler, summed_up
from turngate.verify.store_reader import Context, Folder, Session, Unreadable
from turngate.verify.structure import structure

__all__ = [
    "TOLERANCE",
    "VLLM",
    "Derived",
    "Difference",
    "Finding",
    "Folder",
    "Fork",
    "Means",
    "Note",
    "Part",
    "Renderers",
    "Replay",
    "Rows",
    "Sample",
    "Sampler",
    "Scorer",
    "Session",
    "Transcript",
    "Unchecked",
    "Verdict",
    "summed_up",
    "unreadable",
    "verify",
]

# The agent's own transcript against a trace: where they disagree, or None and why it cannot be told.
Transcript = Callable[[Session, Json], tuple[list[str] | None, str]]
_TRIES = 4  # to read a session that is being recorded, together with its rows


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is verified with. What is left out is not looked at."""

    rows: Rows | None = None
    renderers: Renderers | None = None
    scorer: Scorer | None = None
    tolerance: float = TOLERANCE
    version: int | None = None  # of the scorer's policy; None: whatever was sampled
    transcript: Transcript | None = None


def verify(folder: Folder, session_id: str, means: Means) -> Verdict:
    """The verdict on one session. Raises only where there is none of that id, or an engine cannot be asked."""
    for _ in range(_TRIES):
        try:
            session = folder.read(session_id)
        except Unreadable as error:
            return unreadable(session_id, error.message)
        verdict = _verdict(session, means)
        # A session that goes on may have got a turn between the reading of its nodes and of its rows.
        if session.status != "open" or not folder.changed(session):
            break
    return verdict


def _verdict(session: Session, means: Means) -> Verdict:
    book = Book()
    words = Words(session)
    structure(session, words, book)
    sound = all(finding.ok for finding in book.findings())
    ending(session, book)  # what is wrong with that, and with events, keeps no gateway from making rows
    events(session, book)
    renderer = render(session, words, means.renderers or Renderers(), book)
    trained = rows(session, words, means.rows, book, sound=sound) if means.rows is not None else {}
    drift(session, words, renderer, trained, book)
    if means.scorer is not None:
        replay(session, means.scorer, book, tolerance=means.tolerance, version=means.version)
    if means.transcript is not None:
        _transcript(session, words, means.transcript, book)
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


def _transcript(session: Session, words: Words, compare: Transcript, book: Book) -> None:
    with book.check("transcript", "transcript", "the agent's own log tells of the same turns") as check:
        told, why = compare(session, traced(session, words))
        if told is None:
            check.skip(why)
        for difference in told or ():
            check.hold(False, difference)


def traced(session: Session, words: Words) -> Json:
    """The trace in the form of `GET /admin/sessions/{id}/trace`, as far as a transcript is compared with it."""
    role_of = roles(session, words)
    nodes: list[Json] = []
    for node in session.nodes:
        common = {"id": node.id, "parent": node.row.parent, "kind": node.row.kind}
        if isinstance(node, Context):
            nodes.append({**common, "told": {k: v for k, v in _named(node).items() if v}})
        else:
            message = msgspec.to_builtins(words.turn(node))
            nodes.append({**common, "role": role_of[node.id], "delivered": node.delivered, "message": message})
    return {"session": session.id, "stop": session.stop, "nodes": nodes}


def _named(context: Context) -> dict[str, str]:
    told = context.info.told
    return {"thread": told.thread, "parent": told.parent, "role": told.role, "why": told.why}
