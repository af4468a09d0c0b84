"""What the web page's thread works with: the overview, and the rollouts that were looked at last. Only `page.py` calls it."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import msgspec

from turngate.errors import ConfigError, NotFound, StoreError
from turngate.render import Tokenizer
from turngate.render.certificate_cache import load_any_record
from turngate.store.outcomes import RecordedOutcome
from turngate.store.queries import RawEvent
from turngate.store.sqlite import Store
from turngate.trace.advantage import is_too_large
from turngate.trace.session import Session, SessionConfig
from turngate.types import Json
from turngate.views.overview import Overview
from turngate.views.rollout import RolloutView
from turngate.views.rollout_index import DONE, RolloutRow
from turngate.views.session import SessionView, encode_json, load_session_view

FORMATS = ("rows", "trace", "messages")
_MAX_ROLLOUTS = 4  # rollouts that are kept in memory as they were read
_MAX_FACTS = 4096  # ended rollouts whose facts are kept
_LOG_CHARS = 16_000  # characters
_MAX_TOOL_CALLS = 200  # of host tools
_ENTROPY = "mean of -log-probability over the sampled tokens whose log-probability is known: an estimate of the policy's entropy"


class ViewCache:
    """Of one data folder."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.overview = Overview()
        self._own = tokenizer
        self._other: tuple[str, Tokenizer | None, str] | None = None  # the last one of another vocabulary
        self._close: OrderedDict[str, tuple[object, RolloutView]] = OrderedDict()
        self._facts: OrderedDict[int, dict[str, Json]] = OrderedDict()
        self._trains: dict[int, bool] = {}  # ended rollouts, by session key

    def close(self, store: Store, session: str) -> tuple[RolloutView, int]:
        """A rollout as it is now, and the cursor of what is known. One whose session is not open yet, or never was, is empty."""
        row, key, cursor = self.overview.rollout(store, session)
        return self._looked_at(store, session, key) if key else _empty_view(row), cursor

    def _looked_at(self, store: Store, session: str, key: int) -> RolloutView:
        with store.snapshot():
            stored = store.find_key(key)
            state = (key, store.queries.state(key), None if stored is None else (stored.status, stored.stop))
            known = self._close.get(session)
            if known is not None and known[0] == state:
                self._close.move_to_end(session)
                return known[1]
            shown = load_session_view(store, session)
        close = RolloutView(shown, self._tokenizer(store, shown.session.vocabulary)[0])
        self._close[session] = (state, close)
        while len(self._close) > _MAX_ROLLOUTS:
            self._close.popitem(last=False)
        return close

    def _tokenizer(self, store: Store, vocabulary: str) -> tuple[Tokenizer | None, str]:
        """The one that ids are of, or why it is not here."""
        if self._own is not None and self._own.digest == vocabulary:
            return self._own, ""
        if not vocabulary:
            return None, "its ids are of no tokenizer that is known here"
        if self._other is None or self._other[0] != vocabulary:
            folder = store.setting(f"tokenizer:{vocabulary}")
            try:
                found = load_decoder(Path(folder)) if folder else None
                why = "" if found is not None else "the tokenizer that it was recorded with is not known here"
            except ConfigError as error:
                found, why = None, f"the tokenizer that it was recorded with cannot be read: {error.message}"
            if found is not None and found.digest != vocabulary:
                found, why = None, "the tokenizer that it was recorded with is another one by now"
            self._other = (vocabulary, found, why)
        return self._other[1], self._other[2]

    # ── the header ──────────────────────────────────────────────────────────────────────────────────────────────

    def header(self, store: Store, session: str) -> dict[str, Json]:
        row, key, cursor = self.overview.rollout(store, session)
        facts = store.queries.stages(session)
        damaged = ""
        try:
            stored = store.find_key(key) if key else None
        except StoreError as error:  # whatever else is known of it is told all the same
            stored, damaged = None, error.message
        outcome = _read_outcome(store, key) if key else None
        data = outcome.data if outcome is not None and isinstance(outcome.data, dict) else {}
        totals, unreadable = _empty_view(row).totals(), "nothing was recorded of it"
        if key:
            unreadable = self._tokenizer(store, stored.vocabulary if stored is not None else "")[1]
            try:
                totals = self._looked_at(store, session, key).totals()
            except StoreError as error:
                unreadable = damaged = error.message
        _, no_retry = self.overview.check_retry(store, session)
        return {
            "rollout": row,
            "cursor": cursor,
            "config": None if stored is None else _config_to_json(stored.config),
            "stages": _stages(facts, data),
            "outcome": outcome,
            "error": _error(row, outcome, data, facts) or _damage_error(damaged or self.overview.damage(session)),
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

    # ── what groups and exports need of each rollout ────────────────────────────────────────────────────────────

    def facts(self, store: Store, *, session: str, key: int) -> dict[str, Json]:
        known = self._facts.get(key)
        if known is not None:
            return known
        try:
            close = self._looked_at(store, session, key)
            found = close.facts()
        except (StoreError, NotFound) as error:
            return {**_NO_FACTS, "error": error.message}
        row = store.find_key(key)
        if row is not None and row.status != "open":  # nothing is added to it any more
            self._facts[key] = found
            while len(self._facts) > _MAX_FACTS:
                self._facts.popitem(last=False)
        return found

    def group_of(self, store: Store, *, session: str) -> list[tuple[str, int]]:
        """The rollouts that it is compared with, itself among them."""
        row, key, _ = self.overview.rollout(store, session)
        if not key:
            raise NotFound(f"rollout {row.id!r} has no session: nothing was recorded of it")
        return self.overview.members(store, row.group) if row.group else [(session, key)]

    def counted_reward(self, store: Store, *, session: str, key: int) -> float | None:
        """As a feed counts: one of which nothing can be trained has no say."""
        outcome = _read_outcome(store, key)
        return outcome.reward if outcome is not None and self.facts(store, session=session, key=key)["rows"] else None

    def trains(self, store: Store, *, session: str, key: int) -> bool:
        """Whether anything of it can be trained."""
        known = self._trains.get(key)
        if known is not None:
            return known
        found = bool(self.facts(store, session=session, key=key)["rows"])
        if key in self._facts:  # nothing is added to it any more
            self._trains[key] = found
        return found

    def unread(self, members: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those of which `trains` would read the trace."""
        return [one for one in members if one[1] not in self._trains]

    def damaged(self, store: Store, *, session: str, key: int) -> bool:
        return bool(self.facts(store, session=session, key=key)["error"])

    def lines(self, store: Store, *, session: str, key: int, format: str, advantage: float | None) -> list[bytes]:
        try:
            row, close = store.find_key(key), self._looked_at(store, session, key)
        except (StoreError, NotFound):  # left out, as the exporter does; `damaged` has said so before the first line
            return []
        if row is None:
            return []  # deleted meanwhile
        outcome = _read_outcome(store, key)
        if format == "rows" and outcome is not None and outcome.reward is not None and is_too_large(outcome.reward):
            return []  # as the exporter and feeds do
        told = row.config.metadata
        about: dict[str, Json] = {
            "session": session,
            "group": outcome.group if outcome is not None else _text(told.get("group")),
            "task": (outcome.task if outcome is not None else "") or _text(told.get("task")),
            "attempt": 1 if outcome is None else outcome.attempt,
            "kind": None if outcome is None else outcome.kind,
            "reward": None if outcome is None else outcome.reward,
            "resolved": None if outcome is None else outcome.resolved,
            "agent": _text(told.get("agent")),
            "opened": row.opened,
            "closed": row.closed,
        }
        records = close.training_rows(outcome, advantage, about) if format == "rows" else close.conversations(about)
        return [encode_json(record) + b"\n" for record in records]


_NO_FACTS: dict[str, Json] = {
    "turns": None,
    "sampled_tokens": None,
    "trained_tokens": None,
    "rows": None,
    "roles": {},
    "entropy": None,
    "entropy_tokens": 0,
    "forks": {},
    "anew": {},
    "versions": [],
}


def summarize_drift(name: str, found: list[dict[str, Json]]) -> dict[str, Json]:
    """Of a group, what its rollouts come to together."""
    tokens = sum(one["entropy_tokens"] for one in found)
    total = sum(one["entropy"] * one["entropy_tokens"] for one in found if one["entropy"] is not None)
    causes = sorted({cause for one in found for cause in one["forks"]})
    drift = [
        {
            "cause": cause,
            "forks": sum(one["forks"].get(cause, 0) for one in found),
            "rollouts": sum(cause in one["forks"] for one in found),
            "tokens": sum(one["anew"].get(cause, 0) for one in found),
        }
        for cause in causes
    ]
    return {
        "group": name,
        "rollouts": [{field: value for field, value in one.items() if field != "anew"} for one in found],
        "entropy": total / tokens if tokens else None,
        "entropy_tokens": tokens,
        "entropy_what": _ENTROPY,
        "drift": sorted(drift, key=lambda one: -one["forks"]),
    }


def _config_to_json(config: Json) -> Json:
    """Whole, whatever is left at its default."""
    return {
        name: _value_to_json(value)
        for name, value in msgspec.structs.asdict(config).items()
        if name not in ("tools", "signals")
    }


def _value_to_json(value: Json) -> Json:
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value


def _stages(facts: list[RawEvent], data: dict[str, Json]) -> list[dict[str, Json]]:
    """When each began, and how long it took: by the runner's own clock where it told, else until the next one began."""
    spent = data.get("seconds")
    known = spent if isinstance(spent, dict) else {}
    told: list[dict[str, Json]] = []
    for fact in facts:
        stage = _text(_decode_fact(fact).get("stage"))
        if told and told[-1]["seconds"] is None:
            own = known.get(told[-1]["stage"])
            told[-1]["seconds"] = (
                own if isinstance(own, int | float) else round(max(0.0, fact.time - told[-1]["at"]), 3)
            )
        if stage and stage != DONE:
            told.append({"stage": stage, "at": fact.time, "seconds": None})
    return told


def _error(
    row: RolloutRow, outcome: RecordedOutcome | None, data: dict[str, Json], facts: list[RawEvent]
) -> dict[str, Json] | None:
    """What went wrong, and on whose side; None: nothing, as far as is known."""
    if row.kind in ("", "graded"):
        return None
    fault = data.get("fault")
    if outcome is None and facts:  # it never came as far as being recorded: its runner's last word
        fault = _decode_fact(facts[-1]).get("fault")
    known = fault if isinstance(fault, dict) else {}
    return {
        "class": row.kind,
        "boundary": _text(known.get("boundary")),
        "stage": _text(known.get("stage")),
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
    """To read ids with, and not to encode: nothing is probed."""
    known = load_any_record(folder)
    if known is not None:
        return Tokenizer(folder, vocabulary=known.vocabulary, fast=known.fast)
    return Tokenizer(folder, fast=False)


def _read_outcome(store: Store, key: int) -> RecordedOutcome | None:
    """None if it is damaged, too: the lists say so."""
    outcome = store.outcomes.find(key)
    return outcome if isinstance(outcome, RecordedOutcome) else None


def _empty_view(row: RolloutRow) -> RolloutView:
    return RolloutView(SessionView(Session(row.id, 0, SessionConfig(), row.opened), {}, {}), None)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""
