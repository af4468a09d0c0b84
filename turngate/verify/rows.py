"""Compare the rows that a trainer receives with the stored nodes.

The caller passes in a function that builds the rows with the gateway's code. From the stored nodes, independent code derives what the rows
must contain: the chain of nodes in each row and the reasons not to train a turn (here), and the role of each turn (`roles.py`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from turngate.errors import TurngateError
from turngate.types import Ids
from turngate.verify.findings import CheckResults, VerifyCheck
from turngate.verify.messages import NodeMessages
from turngate.verify.replay import read_temperature
from turngate.verify.roles import derive_roles
from turngate.verify.sampling_mask import are_masks_complete
from turngate.verify.side_data import TrainerColumn, check_columns
from turngate.verify.store_reader import DECODE_ERRORS, StoredSession, StoredTurn, path, path_ids
from turngate.verify.turn_rewards import TrainerReward, check_row_rewards


class TrainerSpan(Protocol):
    @property
    def node(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def role(self) -> str: ...
    @property
    def trained(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def version_start(self) -> int: ...
    @property
    def version_end(self) -> int: ...
    @property
    def version_runs(self) -> Sequence[tuple[int, int]]: ...
    @property
    def temperature(self) -> float: ...


class TrainerRow(Protocol):
    """One row as a trainer receives it."""

    @property
    def branch(self) -> int: ...
    @property
    def ids(self) -> Ids: ...
    @property
    def mask(self) -> np.ndarray: ...
    @property
    def logprobs(self) -> np.ndarray: ...
    @property
    def spans(self) -> Sequence[TrainerSpan]: ...
    @property
    def side(self) -> Mapping[str, TrainerColumn]: ...
    @property
    def turn_rewards(self) -> Sequence[TrainerReward]: ...


# Takes a session id, and whether to include rows without trained tokens. Returns the rows.
RowSource = Callable[[str, bool], Sequence[TrainerRow]]


def check_rows(
    session: StoredSession, messages: NodeMessages, given: RowSource, results: CheckResults, *, sound: bool
) -> dict[int, int]:
    """Check a session's rows. Return the number of trained tokens of each row that a trainer receives, by branch.

    `given` builds the rows. If it fails, return an empty dictionary. `sound` is True if the checks of the trace found no errors.
    """
    names = ("rows", "masks", "once", "reasons", "roles")
    try:
        every = given(session.id, True)
        trained = given(session.id, False)
    except (TurngateError, sqlite3.Error, *DECODE_ERRORS) as error:
        problem = error.message if isinstance(error, TurngateError) else f"{type(error).__name__}: {error}"
        for name in names:
            with results.check("rows", name, "") as check:
                if sound:
                    check.expect(False, f"the gateway cannot build rows for this session: {problem}")
                else:
                    check.skip(f"the gateway cannot build rows because the trace has errors ({problem})")
        return {}
    _check_chains(session, every, trained, results)
    _check_masks(session, every, results)
    role_of = derive_roles(session, messages)
    _check_trained_once(session, role_of, every, results)
    _check_reasons(session, role_of, every, results)
    _check_roles(role_of, every, results)
    check_columns(session, every, results)
    check_row_rewards(session, every, results)
    return {row.branch: int(np.asarray(row.mask).astype(bool).sum()) for row in trained}


def _check_chains(
    session: StoredSession, every: Sequence[TrainerRow], trained: Sequence[TrainerRow], results: CheckResults
) -> None:
    turns = {turn.id: turn for turn in session.turns}
    with results.check(
        "rows", "rows", "each branch has one row, with the ids that were sent and sampled, from root to leaf"
    ) as check:
        branches = [row.branch for row in every]
        for leaf in session.leaves:
            check.expect(
                branches.count(leaf.id) == 1,
                f"the branch that ends with it has {branches.count(leaf.id)} rows",
                node=leaf.id,
            )
        for row in every:
            end = turns.get(row.branch)
            if end is None or end not in session.leaves:
                check.expect(False, "a row ends with this node, but no branch does", node=row.branch)
            else:
                _check_chain(row, end, check)
        kept = [row.branch for row in every if np.asarray(row.mask).any()]
        check.expect(
            [row.branch for row in trained] == kept,
            "the rows sent to a trainer are not exactly the rows with tokens to train",
        )
        whole = {row.branch: row for row in every}
        for row in trained:
            other = whole.get(row.branch)
            equal = other is not None and np.array_equal(row.ids, other.ids) and np.array_equal(row.mask, other.mask)
            check.expect(
                equal,
                "the row sent to a trainer differs from its branch's row in the list of all rows",
                node=row.branch,
            )


def _check_chain(row: TrainerRow, leaf: StoredTurn, check: VerifyCheck) -> None:
    ids = path_ids(leaf)
    check.expect(np.array_equal(row.ids, ids), _describe_difference(row.ids, ids), node=leaf.id)
    sizes = len(row.ids) == len(row.mask) == len(row.logprobs)
    check.expect(
        sizes,
        f"the lists of its row have different lengths (ids: {len(row.ids)}, mask: {len(row.mask)}, logprobs: {len(row.logprobs)})",
        node=leaf.id,
    )
    at, due = 0, []
    for node in path(leaf):
        if isinstance(node, StoredTurn):
            info = node.info
            runs = tuple(info.version_runs) if len(info.version_runs) > 1 else ()
            due.append((node.id, at, at + len(node.ids), info.version_start, info.version_end, runs))
        at += len(node.ids)
    found = [(s.node, s.start, s.end, s.version_start, s.version_end, tuple(s.version_runs)) for s in row.spans]
    check.expect(found == due, f"the spans of its row are {found}, but should be {due}", node=leaf.id)
    turns = {node.id: node for node in path(leaf) if isinstance(node, StoredTurn)}
    for span in row.spans:
        recorded = read_temperature(turns[span.node].info.sampling) if span.node in turns else None
        check.expect(
            recorded in (None, span.temperature),
            f"its row has temperature {span.temperature}, but the recorded temperature is {recorded}",
            node=span.node,
        )


def _describe_difference(given: Ids, stored: Ids) -> str:
    size = min(len(given), len(stored))
    apart = np.flatnonzero(np.asarray(given[:size]) != stored[:size])
    if len(apart):
        at = int(apart[0])
        return f"token {at} of its row is {int(given[at])}, but the stored token is {int(stored[at])}"
    return f"its row has length {len(given)}, but its branch has length {len(stored)}"


def _check_masks(session: StoredSession, every: Sequence[TrainerRow], results: CheckResults) -> None:
    turns = {turn.id: turn for turn in session.turns}
    with results.check(
        "rows", "masks", "only sampled tokens with their own log-probability are trained; nothing is filled in"
    ) as check:
        for row in every:
            mask, scores = np.asarray(row.mask).astype(bool), np.asarray(row.logprobs, np.float32)
            if len(mask) != len(row.ids) or len(scores) != len(row.ids):
                continue  # reported above
            due_mask, due_scores = np.zeros(len(mask), bool), np.full(len(mask), np.nan, np.float32)
            for span in row.spans:
                turn = turns.get(span.node)
                if turn is None or span.end - span.start != len(turn.ids) or span.end > len(mask):
                    continue
                due_mask[span.start : span.end] = span.trained
                if turn.logprobs is not None and len(turn.logprobs) == len(turn.ids):
                    due_scores[span.start : span.end] = turn.logprobs
            wrong = np.flatnonzero(mask != due_mask)
            check.expect(
                not len(wrong),
                f"token {wrong[0] if len(wrong) else 0} of its row is masked differently from its span",
                node=row.branch,
            )
            unfounded = np.flatnonzero(mask & ~np.isfinite(due_scores))
            check.expect(
                not len(unfounded),
                f"token {unfounded[0] if len(unfounded) else 0} of its row is trained but has no log-probability",
                node=row.branch,
            )
            other = np.flatnonzero(~((scores == due_scores) | (np.isnan(scores) & np.isnan(due_scores))))
            check.expect(
                not len(other),
                f"token {other[0] if len(other) else 0} of its row does not have the recorded log-probability",
                node=row.branch,
            )


def _check_trained_once(
    session: StoredSession, role_of: dict[int, str], every: Sequence[TrainerRow], results: CheckResults
) -> None:
    with results.check("rows", "once", "every turn that should be trained is trained in exactly one row") as check:
        for turn in session.turns:
            count = sum(span.trained for row in every for span in row.spans if span.node == turn.id)
            due = 0 if _reasons_against_training(turn, role_of[turn.id], session) else 1
            check.expect(count <= 1, f"it is trained in {count} rows", node=turn.id)
            check.expect(count >= due, "it should be trained, but no row trains it", node=turn.id)
            check.expect(count <= due or count > 1, "it should not be trained, but a row trains it", node=turn.id)


def _check_reasons(
    session: StoredSession, role_of: dict[int, str], every: Sequence[TrainerRow], results: CheckResults
) -> None:
    turns = {turn.id: turn for turn in session.turns}
    elsewhere = {span.node: row.branch for row in every for span in row.spans if span.trained}
    with results.check("rows", "reasons", "every untrained turn has a valid reason") as check:
        for row in every:
            for span in row.spans:
                turn = turns.get(span.node)
                if turn is None:
                    continue
                if span.trained:
                    check.expect(not span.reason, f"it is trained despite a reason not to: {span.reason}", node=turn.id)
                    continue
                true = _reasons_against_training(turn, role_of[turn.id], session)
                if elsewhere.get(turn.id, row.branch) != row.branch:
                    true = [*true, "trained in another row"]
                check.expect(
                    span.reason in true,
                    f"its reason is {span.reason or 'missing'}, but the valid reasons are: {'; '.join(true) or 'none'}",
                    node=turn.id,
                )


def _reasons_against_training(turn: StoredTurn, role: str, session: StoredSession) -> list[str]:
    """Return every reason not to train a turn, in exactly the gateway's words."""
    info, policy = turn.info, session.config.policy
    why = [info.fault] if info.fault else []
    if info.capture != "tokens":
        why.append(f"captured as {info.capture} only")
    if turn.logprobs is None:
        why.append("no log-probabilities")
    elif len(turn.logprobs) != len(turn.ids):
        why.append(f"different numbers of log-probabilities ({len(turn.logprobs)}) and tokens ({len(turn.ids)})")
    elif not np.isfinite(turn.logprobs).all():
        why.append("missing log-probabilities")
    if role not in policy.roles:
        why.append(f"role {role}")
    if info.biases and not policy.biased and not are_masks_complete(turn):
        why.append("biased sampling: " + ", ".join(info.biases))
    if not policy.refused and not all(refusal.repeated for refusal in session.related.refused):
        why.append("the agent was refused a model call")
    return why


def _check_roles(role_of: dict[int, str], every: Sequence[TrainerRow], results: CheckResults) -> None:
    with results.check(
        "rows", "roles", "the role of every turn follows from the tree and the agent's signals"
    ) as check:
        for row in every:
            for span in row.spans:
                due = role_of.get(span.node, "")
                check.expect(
                    span.role == due, f"its role is recorded as {span.role}, but should be {due}", node=span.node
                )
