"""The read models behind the web page, with caches of recently viewed rollouts and of facts about ended ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

import msgspec

from turngate.errors import ConfigError, NotFound, StoreError
from turngate.render import Tokenizer
from turngate.render.certificate_cache import load_any_record
from turngate.store.outcomes import RecordedOutcome
from turngate.store.queries import RawEvent
from turngate.store.store import Store
from turngate.trace.advantage import is_too_large
from turngate.trace.session import Session, SessionConfig
from turngate.types import Json
from turngate.views.improvement import ENTROPY_ROLLOUTS
from turngate.views.overview import Overview
from turngate.views.rollout import RolloutView
from turngate.views.rollout_entry import DONE, RolloutRow
from turngate.views.rollout_facts import collect_facts
from turngate.views.session import SessionView, encode_json, load_session_view
from turngate.views.shared_overview import SharedOverview

FORMATS = ("rows", "trace", "messages")
_MAX_ROLLOUTS = 4  # maximum number of cached rollout views
_MAX_FACTS = 4096  # maximum number of ended rollouts whose facts are cached
_LOG_CHARS = 16_000
_MAX_TOOL_CALLS = 200
_ENTROPY = "mean negative log-probability of the sampled tokens, where known: an estimate of the policy's entropy"


class ViewCache:
    """The views of one store, with their caches. This class is not thread-safe, and is used only in the page's reader thread."""

    def __init__(self, tokenizer: Tokenizer | None, overview: Overview | SharedOverview) -> None:
        self.overview = overview
        self._own = tokenizer
        # The last tokenizer that was loaded for a different vocabulary, or the reason why it is unavailable.
        self._other: tuple[str, Tokenizer | None, str] | None = None
        self._rollouts: OrderedDict[str, tuple[object, RolloutView]] = OrderedDict()
        self._facts: OrderedDict[int, dict[str, Json]] = OrderedDict()
        self._trains: dict[int, bool] = {}  # whether ended rollouts have trainable tokens, by session key

    def rollout(self, store: Store, session: str) -> tuple[RolloutView, int]:
        """Return a rollout's current view and its event cursor. A rollout without a session has an empty view."""
        row, key, cursor = self.overview.rollout(store, session)
        return self._load_rollout(store, session, key) if key else _empty_view(row), cursor

    def _load_rollout(self, store: Store, session: str, key: int) -> RolloutView:
        with store.snapshot():
            stored = store.find_key(key)
            state = (
                key,
                store.queries.state(key),
                None if stored is None else (stored.status, stored.stop, store.refusals.find(key)),
                None if (outcome := _read_outcome(store, key)) is None else outcome.turn_rewards or (),
            )
            cached = self._rollouts.get(session)
            if cached is not None and cached[0] == state:
                self._rollouts.move_to_end(session)
                return cached[1]
            session_view = load_session_view(store, session)
        view = RolloutView(session_view, self._find_tokenizer(store, session_view.session.vocabulary)[0])
        self._rollouts[session] = (state, view)
        while len(self._rollouts) > _MAX_ROLLOUTS:
            self._rollouts.popitem(last=False)
        return view

    def _find_tokenizer(self, store: Store, vocabulary: str) -> tuple[Tokenizer | None, str]:
        """Return the tokenizer of a vocabulary, or None and the reason why it is unavailable."""
        if self._own is not None and self._own.digest == vocabulary:
            return self._own, ""
        if not vocabulary:
            return None, "no tokenizer is recorded for the session"
        if self._other is None or self._other[0] != vocabulary:
            folder = store.setting(f"tokenizer:{vocabulary}")
            try:
                tokenizer = load_decoder(Path(folder)) if folder else None
                why = "" if tokenizer is not None else "this store does not record where the session's tokenizer is"
            except ConfigError as error:
                tokenizer, why = None, f"the session's tokenizer cannot be read: {error.message}"
            if tokenizer is not None and tokenizer.digest != vocabulary:
                tokenizer = None
                why = f"the tokenizer in {folder} has changed since the session was recorded; restore its files to see the texts"
            self._other = (vocabulary, tokenizer, why)
        return self._other[1], self._other[2]

    # ── the header ──────────────────────────────────────────────────────────────────────────────────────────────

    def header(self, store: Store, session: str) -> dict[str, Json]:
        row, key, cursor = self.overview.rollout(store, session)
        facts = store.queries.stages(session)
        damaged = ""
        try:
            stored = store.find_key(key) if key else None
        except StoreError as error:  # show the rest of the header anyway
            stored, damaged = None, error.message
        outcome = _read_outcome(store, key) if key else None
        data = outcome.data if outcome is not None and isinstance(outcome.data, dict) else {}
        totals, unreadable = _empty_view(row).totals(), "nothing was recorded"
        if key:
            unreadable = self._find_tokenizer(store, stored.vocabulary if stored is not None else "")[1]
            try:
                totals = self._load_rollout(store, session, key).totals(
                    row.excluded, "" if outcome is None else outcome.failure
                )
            except StoreError as error:
                unreadable = damaged = error.message
        _, no_retry = self.overview.check_retry(store, session)
        return {
            "rollout": row,
            "cursor": cursor,
            "config": None if stored is None else _config_to_json(stored.config),
            "stages": _stages(facts, data),
            "outcome": outcome,
            "error": _error(row, outcome, data, facts)
            or _damage_error(damaged or self.overview.damage(store, session)),
            "logs": _logs(data),
            "host_tools": []
            if not key
            else [_tool_call(call) for call in store.tool_calls.page(key, 0, _MAX_TOOL_CALLS)],
            "totals": totals,
            "readable": not unreadable,
            "unreadable": unreadable,
            "can": {
                "cancel": row.status == "running",
                "seal": row.status == "running",
                "retry": {"ok": not no_retry, "why": no_retry},
                "export": list(FORMATS) if key else [],
            },
        }

    # ── facts of each rollout for groups and exports ────────────────────────────────────────────────────────────

    def facts(self, store: Store, *, session: str, key: int) -> dict[str, Json]:
        cached = self._facts.get(key)
        if cached is not None:
            return cached
        try:
            facts = collect_facts(self._load_rollout(store, session, key))
        except (StoreError, NotFound) as error:
            return {**_NO_FACTS, "error": error.message}
        row = store.find_key(key)
        if row is not None and row.status != "open":  # the rollout no longer changes
            self._facts[key] = facts
            while len(self._facts) > _MAX_FACTS:
                self._facts.popitem(last=False)
        return facts

    def group_of(self, store: Store, *, session: str) -> list[tuple[str, int]]:
        """Return the session ids and session keys of the rollouts in this rollout's group, or only its own if it has no group."""
        row, key, _ = self.overview.rollout(store, session)
        if not key:
            raise NotFound(f"rollout {row.id!r} has no session, so nothing was recorded")
        members = self.overview.members(store, row.group) if row.group else [(session, key)]
        if (session, key) not in members:
            raise NotFound(f"rollout {row.id!r} was deleted or changed its group in the meantime; load the page again")
        return members

    def training_reward(self, store: Store, *, session: str, key: int) -> float | None:
        """Return the reward from which an export computes advantages, or None if the rollout has no reward or no exported rows."""
        outcome = _read_outcome(store, key)
        exported = self.facts(store, session=session, key=key)["exported_rows"]
        return outcome.reward if outcome is not None and exported else None

    def trains(self, store: Store, *, session: str, key: int) -> bool:
        """Return whether a rollout has trainable tokens."""
        cached = self._trains.get(key)
        if cached is not None:
            return cached
        trains = bool(self.facts(store, session=session, key=key)["rows"])
        if key in self._facts:  # the rollout no longer changes
            self._trains[key] = trains
        return trains

    def unread(self, members: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Return the rollouts for which `trains` has no cached answer."""
        return [member for member in members if member[1] not in self._trains]

    def damaged(self, store: Store, *, session: str, key: int) -> bool:
        return bool(self.facts(store, session=session, key=key)["error"])

    def lines(self, store: Store, *, session: str, key: int, format: str, advantage: float | None) -> list[bytes]:
        try:
            row, view = store.find_key(key), self._load_rollout(store, session, key)
        except (StoreError, NotFound):  # omitted, as in the exporter; `damaged` reports it
            return []
        if row is None:
            return []  # the session was deleted in the meantime
        outcome = _read_outcome(store, key)
        if format == "rows" and outcome is not None and outcome.reward is not None and is_too_large(outcome.reward):
            return []  # omitted, as in the exporter and in feeds
        metadata = row.config.metadata
        about: dict[str, Json] = {
            "session": session,
            "group": outcome.group if outcome is not None else _text(metadata.get("group")),
            "task": (outcome.task if outcome is not None else "") or _text(metadata.get("task")),
            "attempt": 1 if outcome is None else outcome.attempt,
            "kind": None if outcome is None else outcome.kind,
            "reward": None if outcome is None else outcome.reward,
            "resolved": None if outcome is None else outcome.resolved,
            "agent": _text(metadata.get("agent")),
            "opened": row.opened,
            "closed": row.closed,
        }
        records = view.training_rows(outcome, advantage, about) if format == "rows" else view.conversations(about)
        return [encode_json(record) + b"\n" for record in records]


_NO_FACTS: dict[str, Json] = {
    "turns": None,
    "sampled_tokens": None,
    "trained_tokens": None,
    "rows": None,
    "exported_rows": None,
    "roles": {},
    "entropy": None,
    "entropy_tokens": 0,
    "forks": {},
    "anew": {},
    "versions": [],
}
_INTERNAL_FACTS = ("anew", "exported_rows")  # left out of the page's API


def summarize_drift(name: str, rollouts: list[dict[str, Json]]) -> dict[str, Json]:
    """Summarize entropy and forks over the rollouts of a group."""
    causes = sorted({cause for facts in rollouts for cause in facts["forks"]})
    drift = [
        {
            "cause": cause,
            "forks": sum(facts["forks"].get(cause, 0) for facts in rollouts),
            "rollouts": sum(cause in facts["forks"] for facts in rollouts),
            "tokens": sum(facts["anew"].get(cause, 0) for facts in rollouts),
        }
        for cause in causes
    ]
    return {
        "group": name,
        "rollouts": [{field: facts[field] for field in facts if field not in _INTERNAL_FACTS} for facts in rollouts],
        "entropy": _mean_entropy(rollouts),
        "entropy_tokens": sum(facts["entropy_tokens"] for facts in rollouts),
        "entropy_what": _ENTROPY,
        "drift": sorted(drift, key=lambda entry: -entry["forks"]),
    }


def summarize_entropy(rollouts: Sequence[tuple[int, dict[str, Json]]]) -> dict[str, Json]:
    """Summarize entropy by policy version. `rollouts` contains each rollout's version and facts, and is sorted by version."""
    versions: list[Json] = []
    for version, members in groupby(rollouts, lambda rollout: rollout[0]):
        read = [facts for _, facts in members if facts["entropy_tokens"]]
        if read:
            tokens = sum(facts["entropy_tokens"] for facts in read)
            versions.append(
                {"version": version, "entropy": _mean_entropy(read), "tokens": tokens, "rollouts": len(read)}
            )
    return {"versions": versions, "most_rollouts": ENTROPY_ROLLOUTS, "what": _ENTROPY}


def _mean_entropy(rollouts: Iterable[dict[str, Json]]) -> float | None:
    """Return the mean entropy, weighted by the number of sampled tokens with a log-probability, or None if there are no such tokens."""
    known = [facts for facts in rollouts if facts["entropy_tokens"]]
    tokens = sum(facts["entropy_tokens"] for facts in known)
    return sum(facts["entropy"] * facts["entropy_tokens"] for facts in known) / tokens if tokens else None


def _config_to_json(config: Json) -> Json:
    """Return the settings of a session, including defaults, but without its tools and signals."""
    return {
        name: _value_to_json(value)
        for name, value in msgspec.structs.asdict(config).items()
        if name not in ("tools", "signals")
    }


def _value_to_json(value: Json) -> Json:
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value


def _stages(facts: list[RawEvent], data: dict[str, Json]) -> list[dict[str, Json]]:
    """Return each stage's start and duration. A stage that the runner did not measure is assumed to last until the next stage starts."""
    seconds = data.get("seconds")
    measured = seconds if isinstance(seconds, dict) else {}
    stages: list[dict[str, Json]] = []
    for fact in facts:
        stage = _text(_decode_fact(fact).get("stage"))
        if stages and stages[-1]["seconds"] is None:
            last = stages[-1]
            duration = measured.get(last["stage"])
            last["seconds"] = (
                duration if isinstance(duration, int | float) else round(max(0.0, fact.time - last["at"]), 3)
            )
        if stage and stage != DONE:
            stages.append({"stage": stage, "at": fact.time, "seconds": None})
    return stages


def _error(
    row: RolloutRow, outcome: RecordedOutcome | None, data: dict[str, Json], facts: list[RawEvent]
) -> dict[str, Json] | None:
    """Return the rollout's error with its boundary, or None if the rollout did not fail."""
    if row.kind in ("", "graded"):
        return None
    fault = data.get("fault")
    if outcome is None and facts:  # no outcome was recorded, so use the runner's last event
        fault = _decode_fact(facts[-1]).get("fault")
    details = fault if isinstance(fault, dict) else {}
    return {
        "class": row.kind,
        "boundary": _text(details.get("boundary")),
        "stage": _text(details.get("stage")),
        "message": outcome.message if outcome is not None else row.message,
    }


def _decode_fact(fact: RawEvent) -> dict[str, Json]:
    try:
        return msgspec.json.decode(fact.data, type=dict[str, Json])
    except (msgspec.DecodeError, UnicodeDecodeError):  # damaged on disk
        return {}


def _damage_error(message: str) -> dict[str, Json] | None:
    return {"class": "", "boundary": "store", "stage": "", "message": message} if message else None


def _logs(data: dict[str, Json]) -> dict[str, str]:
    logs = data.get("logs")
    if not isinstance(logs, dict):
        return {}
    return {name: text[-_LOG_CHARS:] for name, text in logs.items() if isinstance(text, str) and text}


def _tool_call(call: Json) -> dict[str, Json]:
    return {
        "call": call.call,
        "tool": call.tool,
        "at": call.called,
        "arguments": call.arguments,
        "reply": call.reply,
        "answered": call.answered,
    }


def load_decoder(folder: Path) -> Tokenizer:
    """Load a tokenizer for decoding only, without probing the fast encoder."""
    record = load_any_record(folder)
    if record is not None:
        return Tokenizer(folder, vocabulary=record.vocabulary, fast=record.fast)
    return Tokenizer(folder, fast=False)


def _read_outcome(store: Store, key: int) -> RecordedOutcome | None:
    """Return a session's outcome, or None if it is missing or damaged. The lists report the damage."""
    outcome = store.outcomes.find(key)
    return outcome if isinstance(outcome, RecordedOutcome) else None


def _empty_view(row: RolloutRow) -> RolloutView:
    return RolloutView(SessionView(Session(row.id, 0, SessionConfig(), row.opened), {}, {}), None)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
