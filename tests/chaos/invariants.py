"""Compare what the gateway recorded with what the agents received, what the engine sampled and what the runners sent. No I/O."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from tests.chaos.agents import RolloutLog
from tests.chaos.engine import Generation, read_serials
from tests.crash.storm import walk_paths
from turngate.engines.scripted import derive_logprobs
from turngate.rollout.ledger import FinishedRollout
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
    """What the gateway recorded of a rollout."""

    trace: Json
    samples: Sequence[Json]  # training rows, including those without trained tokens
    outcome: Json | None


def check_rollouts(
    logs: Sequence[RolloutLog], recorded: Mapping[str, RecordedRollout], generations: Mapping[int, Generation]
) -> Breaches:
    """Check every rollout, and that no generation was recorded twice."""
    found = Breaches()
    for log in logs:
        rollout = recorded.get(log.session)
        if rollout is None:
            found.lost += max(1, len(log.received))
            found.notes.append(f"{log.session}: the session is gone")
            continue
        found.add(check_turns(log, rollout, generations))
        found.add(check_training(log.session, rollout))
        found.add(check_reward(log, rollout))
    found.add(check_repeats([recorded[log.session] for log in logs if log.session in recorded]))
    return found


def check_repeats(rollouts: Iterable[RecordedRollout]) -> Breaches:
    """Check that no generation was recorded twice."""
    found = Breaches()
    nodes = (node for rollout in rollouts for node in sampled_nodes(rollout.trace))
    for serial, times in Counter(serial for node in nodes for serial in read_node(node)).items():
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
    """Return what is wrong with the ids of a node, or an empty string. A turn that is marked as faulty may have other ids."""
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


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class AgentLog:
    """What the agent of a rollout printed (`batch_agent.py`)."""

    received: list[int] = field(default_factory=list)  # serial numbers of its answers
    guess: str = ""  # empty if the agent did not finish


def parse_agent_log(text: str) -> AgentLog:
    lines = text.splitlines()
    guesses = [json.loads(line)["guess"] for line in lines if line.startswith('{"guess"')]
    return AgentLog([serial for line in lines for serial in read_serials(line)], *guesses)


@dataclass(frozen=True)
class BatchEvidence:
    """Everything that is known of a batch after its end."""

    expected: Set[str]  # rollouts
    finished: Mapping[str, FinishedRollout]  # by rollout: the runner's ledger
    logs: Mapping[str, AgentLog]  # by session
    recorded: Mapping[str, RecordedRollout]  # by session
    generations: Mapping[int, Generation]
    may_fail: bool = False  # agents may fail, because the fault hits them

    def select(self, rollout: str) -> BatchEvidence:
        """Return the evidence of one rollout."""
        return replace(self, expected={rollout}, finished={rollout: self.finished[rollout]})


def check_batch(batch: BatchEvidence) -> Breaches:
    """Check that each rollout finished once, with what its agent received and the reward that its agent's work deserves."""
    found = Breaches()
    missing, unknown = batch.expected - batch.finished.keys(), batch.finished.keys() - batch.expected
    found.lost, found.duplicated = len(missing), len(unknown)
    found.notes += [f"{rollout}: did not finish" for rollout in missing]
    sessions = Counter(done.session for done in batch.finished.values() if done.session)
    found.duplicated += sum(count - 1 for count in sessions.values())
    for done in batch.finished.values():
        log, rollout = batch.logs.get(done.session, AgentLog()), batch.recorded.get(done.session)
        if why := _explain_wrong_reward(done, log, rollout, may_fail=batch.may_fail):
            found.wrong_rewards += 1
            found.notes.append(f"{done.rollout}: {why}")
        if rollout is not None:
            found.add(check_turns(RolloutLog(done.session, 0.0, log.received), rollout, batch.generations))
            found.add(check_training(done.session, rollout))
    found.add(check_repeats([batch.recorded[session] for session in sessions if session in batch.recorded]))
    return found


def _explain_wrong_reward(
    done: FinishedRollout, log: AgentLog, rollout: RecordedRollout | None, *, may_fail: bool
) -> str:
    """Return what is wrong with the reward of a rollout, or an empty string."""
    outcome = None if rollout is None else rollout.outcome
    if outcome is None or outcome["reward"] != done.reward:
        return f"{done.kind} with reward {done.reward}, but the gateway has {outcome}"
    if (done.kind == "graded") != (done.reward is not None):
        return f"{done.kind} with reward {done.reward}"
    if not may_fail and not (done.kind == "graded" and log.guess):
        return f"{done.kind} ({done.message}), but the fault was not the agent's, which printed {log}"
    if log.guess and done.reward is not None and done.reward != float(log.guess == "right"):
        return f"reward {done.reward}, but the agent's guess was {log.guess}"
    return ""
