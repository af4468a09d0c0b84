"""Record the outcomes of rollouts. A different second outcome is rejected, unless the caller asks to replace the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from turngate.errors import BadRequest, Conflict
from turngate.gateway.events import Events
from turngate.gateway.feeds import Feeds
from turngate.gateway.sessions import Sessions
from turngate.store.events import new_event
from turngate.store.outcomes import RecordedOutcome
from turngate.store.store import Store
from turngate.telemetry.metrics import Metrics
from turngate.trace.session import Session
from turngate.trace.turn_rewards import (
    ToolCallRecord,
    check_turn_rewards,
    list_turn_records,
    resolve_turn_rewards,
    reward_tool_calls,
)

_MAX_NAME_BYTES = 2000


class OutcomeRecorder:
    def __init__(
        self,
        store: Store,
        sessions: Sessions,
        events: Events,
        feeds: Feeds,
        metrics: Metrics,
        require_lease: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a recorder. `require_lease` raises an error if this gateway is a cell without a lease."""
        self._attempts = store.attempts
        self._outcomes = store.outcomes
        self._sessions = sessions
        self._events = events
        self._feeds = feeds
        self._metrics = metrics
        self._require_lease = require_lease

    def has_turn_rewards(self, session_id: str, outcome: RecordedOutcome) -> bool:
        """Return whether the outcome gives rewards to turns, or the host tools of its session may.

        If so, the caller must complete the outcome with `complete_turn_rewards` before it calls `record`.
        """
        row = self._sessions.find_row(session_id)
        gives_rewards = any(tool.reward is not None for tool in row.config.tools)
        return bool(outcome.turn_rewards) or (gives_rewards and outcome.reward is not None)

    def record(self, session_id: str, outcome: RecordedOutcome, *, replace: bool = False) -> str:
        """Store the outcome of an ended session. Return why the outcome does not count, or an empty string if it counts.

        Recording the same outcome again is allowed. Raise `Conflict` if the session is still open, or if it has a different outcome and
        `replace` is not set.
        """
        self._require_lease()
        row = self._sessions.find_row(session_id)
        if row.config.rollout:  # a session that names its rollout also has the attempt in its settings
            outcome = msgspec.structs.replace(outcome, attempt=row.config.attempt)
        written = outcome.encode()
        _check_name(outcome.group, "group")
        _check_name(outcome.task, "task")
        live = self._sessions.find_live(session_id)
        if (live.status if live else row.status) == "open":
            raise Conflict(f"session {session_id} is still open; seal it before recording its outcome")
        event = new_event(session_id, "outcome", outcome.event_data())
        before = self._outcomes.put(row.key, written, event, replace=replace)
        if before is not None and before != written and not replace:
            raise Conflict(f"session {session_id} already has a different outcome; use ?replace=1 to replace it")
        if before is None:
            self._metrics.count_outcome(outcome.kind, outcome.reward)
        self._events.wake(session_id)
        self._feeds.wake()
        return self._attempts.find_exclusion(row.key)


def complete_turn_rewards(
    outcome: RecordedOutcome, session: Session, replies: Mapping[int, bytes], calls: Sequence[ToolCallRecord]
) -> RecordedOutcome:
    """Add the rewards of host tools to an outcome, and find the turn of each reward. Return the new outcome.

    `replies` contains the JSON of each turn's message, by node id. Raise `BadRequest` if a reward is invalid, or if its turn cannot be
    determined.
    """
    turns = list_turn_records(session.trace, replies)
    of_tools = {} if outcome.reward is None else reward_tool_calls(session.config.tools, turns, calls)
    # If a stored outcome is recorded again, it already has the rewards of host tools.
    given = [one for one in outcome.turn_rewards or () if msgspec.structs.replace(one, turn=None) not in of_tools]
    check_turn_rewards(given, outcome.reward)
    resolved = resolve_turn_rewards(given, turns, calls)
    return msgspec.structs.replace(outcome, turn_rewards=(*resolved, *of_tools.values()))


def _check_name(name: str, field: str) -> None:
    """Raise `BadRequest` for a name that the shared store cannot index."""
    if "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
        raise BadRequest(
            f"{field} must be at most {_MAX_NAME_BYTES} bytes of UTF-8, without null characters", param=field
        )
