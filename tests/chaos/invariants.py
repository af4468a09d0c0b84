"""Compare what the gateway recorded with what the agents received, what the engine sampled and what the runners sent. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.agents import RolloutLog
from tests.chaos.engine import Generation, read_serials
from tests.crash.storm import walk_paths
from turngate.engines.scripted import derive_logprobs
from turngate.types import Ids

Json = dict[str, Any]


@dataclass
class Breaches:
    """Broken invariants: how many of each kind, and a line about each."""

    lost: int = 0
    duplicated: int = 0
    inexact: int = 0
    wrong_rewards: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.lost + self.duplicated + self.inexact + self.wrong_rewards

    def add(self, other: Breaches) -> None:
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.inexact += other.inexact
        self.wrong_rewards += other.wrong_rewards
        self.notes += other.notes


@dataclass(frozen=True)
class RecordedRollout:
    """What the gateway has of a rollout."""

    trace: Json
    samples: Sequence[Json]  # training rows, also those without trained tokens
    outcome: Json | None


def check_rollouts(
    logs: Sequence[RolloutLog], recorded: Mapping[str, RecordedRollout], generations: Mapping[int, Generation]
) -> Breaches:
    """Check every rollout, and that no generation was recorded twice."""
    found = Breaches()
    seen: Counter[int] = Counter()
    for log in logs:
        rollout = recorded.get(log.session)
        if rollout is None:
            found.lost += max(1, len(log.received))
            found.notes.append(f"{log.session}: the session is gone")
            continue
        found.add(check_turns(log, rollout, generations))
        found.add(check_training(log.session, rollout))
        found.add(check_reward(log, rollout))
        seen.update(serial for node in sampled_nodes(rollout.trace) for serial in read_node(node))
    for serial, times in seen.items():
        if times > 1:
            found.duplicated += times - 1
            found.notes.append(f"generation {serial} is recorded {times} times")
    return found


def sampled_nodes(trace: Json) -> list[Json]:
    return [node for node in trace["nodes"] if node["kind"] == "sampled"]


def read_node(node: Json) -> list[int]:
    """Return the serial number of the answer in a sampled node; none if it was cut off."""
    message = node["message"]
    arguments = [str(call["arguments"]) for call in message.get("tool_calls") or []]
    return read_serials(" ".join([message.get("content") or "", *arguments]))


def check_turns(log: RolloutLog, rollout: RecordedRollout, generations: Mapping[int, Generation]) -> Breaches:
    """Check that all received answers are on one path, one after the other, and that every node has the ids of its generation."""
    found = Breaches()
    paths: dict[int | None, list[int]] = {None: []}
    trained = {span["node"] for row in rollout.samples for span in row["spans"] if span["trained"]}
    for node, before in walk_paths(rollout.trace):
        paths[node["id"]] = [*paths[node["parent"]]]
        if node["kind"] == "sampled":
            serials = read_node(node)
            paths[node["id"]] += serials
            sampled = [generations.get(serial) for serial in serials]
            if why := _explain_inexact(log.session, node, before, sampled, is_trained=node["id"] in trained):
                found.inexact += 1
                found.notes.append(f"{log.session}: node {node['id']} {why}")
    on_path = max(_count_common(path, log.received) for path in paths.values())
    if on_path < len(log.received):
        found.lost += len(log.received) - on_path
        found.notes.append(f"{log.session}: received {log.received}, but only the first {on_path} are on one path")
    return found


def _explain_inexact(
    session: str, node: Json, before: Ids, sampled: Sequence[Generation | None], *, is_trained: bool
) -> str:
    """Return what is wrong with the ids of a node, or "". Other ids than the engine's are fine in a turn that is marked as faulty."""
    for generation in sampled:
        if generation is None or generation.session != session:
            return "was not sampled for this session"
        if generation.prompt != before.tolist():
            return "was sampled after other ids"
        expected = generation.ids[: len(node["ids"])] if node["finish"] == "abort" else generation.ids
        if expected != node["ids"] and (is_trained or not node["fault"]):
            return f"has other ids than generation {generation.serial}"
    is_proven = min(node["ids"], default=0) >= 0 and node["logprobs"] == derive_logprobs(before, node["ids"])
    return "is trained, but its log-probabilities belong to other ids" if is_trained and not is_proven else ""


def check_recorded(session: str, rollout: RecordedRollout, generations: Mapping[int, Generation]) -> Breaches:
    """Check the turns of a rollout whose agent keeps no log."""
    found = check_turns(RolloutLog(session, 0.0), rollout, generations)
    found.add(check_training(session, rollout))
    return found


def check_training(session: str, rollout: RecordedRollout) -> Breaches:
    """Check that each sampled node is trained in at most one row."""
    found = Breaches()
    times = Counter(span["node"] for row in rollout.samples for span in row["spans"] if span["trained"])
    for node, count in times.items():
        if count > 1:
            found.duplicated += count - 1
            found.notes.append(f"{session}: node {node} is trained in {count} rows")
    return found


def check_reward(log: RolloutLog, rollout: RecordedRollout) -> Breaches:
    """Check that the recorded reward is the one sent; it may be missing only if it was not confirmed."""
    reward = None if rollout.outcome is None else rollout.outcome["reward"]
    if reward == log.reward or (reward is None and not log.is_recorded):
        return Breaches()
    return Breaches(wrong_rewards=1, notes=[f"{log.session}: recorded reward {reward}, but {log.reward} was sent"])


def _count_common(path: Sequence[int], received: Sequence[int]) -> int:
    """Return how many of the received answers a path begins with."""
    count = 0
    for recorded, seen in zip(path, received, strict=False):
        if recorded != seen:
            break
        count += 1
    return count
