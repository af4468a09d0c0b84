"""Report how much of a rollout is trained. If too little is trained, also report why and what to change. No I/O.

The turns of a rollout's main conversation are expected to be trained. The amount is "few" if fewer than half of their tokens are trained,
and "none" if no token of the rollout is trained. In both cases, the report gives the main reason and a fix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from turngate.trace.roles import TurnRole
from turngate.trace.sample import NEEDS_MASK, TrainingPolicy, find_exclusion, find_untrained
from turngate.trace.tree import RefusedCalls, Sampled, Trace

NO_TOKENS = "no tokens are trained"  # start of the warning about a rollout without trained tokens
FEW = 0.5  # a smaller share of the main turns' sampled tokens is reported as few
_BIASED = "biased sampling: "
_FORCED = "constrained: "
_REPLACED: tuple[TurnRole, ...] = ("superseded", "aborted")
_NO_CALLS = (
    "no model call by the agent was answered",
    "check that the agent uses the base URL and the key that it was given, and that the engine is up; read the agent's output",
)
_READ_OTHER = "another attempt at the rollout is trained instead, if there is one"
_SERVE_CALL = (
    "make the agent request only what the gateway serves, or pass --on-refused train (policy.refused in a session's settings) to train "
    "such rollouts anyway"
)


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How much of a rollout is trained. `reason` and `fix` are empty if `amount` is "most"."""

    amount: Literal["most", "few", "none"] = "most"
    trained_tokens: int = 0  # of a session, including tokens that are trained only in rows with sampling masks
    main_tokens: int = 0  # tokens that the main turns sampled
    trained_main_tokens: int = 0
    reason: str = ""
    fix: str = ""

    @property
    def warning(self) -> str:
        """One line with the reason and the fix, or "" if most tokens are trained.

        The token counts are left out, so that identical warnings about several rollouts can be counted.
        """
        amount = NO_TOKENS if self.amount == "none" else f"{self.amount} tokens are trained"
        return "" if self.amount == "most" else f"{amount}: {self.reason}; {self.fix}"


def report_training(
    trace: Trace,
    role_of: Mapping[int, TurnRole],
    policy: TrainingPolicy,
    excluded: str = "",
    failure: str = "",
    masked: Collection[int] | None = None,
) -> TrainingReport:
    """Report how much of a trace is trained. `role_of` maps the node id of each turn to its role.

    `excluded` says why the whole rollout is not trained, whatever its trace contains. `failure` is the fault that ended the rollout, such
    as an engine that is down. `masked` contains the nodes whose sampling masks the trainer receives. If it is None, the trainer receives
    all recorded masks.
    """
    reasons = find_untrained(trace, role_of, policy, masked)
    turns = list(trace.turns())
    main = _find_main_turns(turns, role_of, policy)
    if excluded:
        main_tokens = sum(turn.size for turn in main)
        return TrainingReport(amount="none", main_tokens=main_tokens, reason=excluded, fix=_READ_OTHER)
    report = TrainingReport(
        trained_tokens=sum(turn.size for turn in turns if not reasons[turn.id]),
        main_tokens=sum(turn.size for turn in main),
        trained_main_tokens=sum(turn.size for turn in main if not reasons[turn.id]),
    )
    if report.trained_tokens and report.trained_main_tokens >= FEW * report.main_tokens:
        return report
    if failure and not turns:
        reason, fix = (
            f"the rollout failed before its first turn ({failure})",
            "remove the cause, and run the rollout again",
        )
    else:
        reason, fix = _explain(trace, main, reasons, policy)
    return msgspec.structs.replace(report, amount="few" if report.trained_tokens else "none", reason=reason, fix=fix)


def list_warnings(report: TrainingReport | None, refused: RefusedCalls | None) -> list[str]:
    """Return warnings about the training data of a rollout, one line each."""
    warnings = [report.warning] if report is not None and report.warning else []
    if refused is not None and not any(_describe_refused(refused) in warning for warning in warnings):
        warnings.append(_describe_refused(refused))
    return warnings


def _describe_refused(refused: RefusedCalls) -> str:
    calls = "a model call by the agent was" if refused.count == 1 else "model calls by the agent were"
    return f"{calls} refused ({refused.status}: {refused.message})"


def _find_main_turns(
    turns: Sequence[Sampled], role_of: Mapping[int, TurnRole], policy: TrainingPolicy
) -> list[Sampled]:
    """Return the turns that are expected to be trained.

    These are the turns with the role `main` or, if the policy does not train `main`, with any role that the policy does train. If there
    are none, return all turns that were neither superseded nor aborted. If there are none of these either, return all turns.
    """
    expected = ("main",) if "main" in policy.roles else policy.roles
    main = [turn for turn in turns if role_of[turn.id] in expected]
    return main or [turn for turn in turns if role_of[turn.id] not in _REPLACED] or list(turns)


def _explain(
    trace: Trace, main: Sequence[Sampled], reasons: Mapping[int, str], policy: TrainingPolicy
) -> tuple[str, str]:
    """Return the main reason why tokens are not trained, and a fix."""
    if trace.refused is not None and (find_exclusion(trace.refused, policy) or not main):
        return _describe_refused(trace.refused), _SERVE_CALL
    weights: Counter[str] = Counter()
    for turn in main:
        if reasons[turn.id]:
            weights[reasons[turn.id]] += max(turn.size, 1)
    if not weights:
        return ("the model sampled no tokens", "read the conversation with `turngate show`") if main else _NO_CALLS
    [(reason, _)] = weights.most_common(1)
    count = sum(reasons[turn.id] == reason for turn in main)
    what, fix = _explain_reason(reason)
    share = "all" if count == len(main) else "most" if 2 * count > len(main) else "some"
    return f"{share} main turns {what}", fix


def _explain_reason(reason: str) -> tuple[str, str]:
    """Describe a reason in a phrase that completes "all main turns …", and return the phrase with a fix."""
    if reason.startswith(_BIASED):
        return _explain_bias(reason.removeprefix(_BIASED))
    if reason.startswith(NEEDS_MASK):
        return (
            f"are trained only with their sampling masks ({reason.removeprefix(NEEDS_MASK)})",
            "request the side data sampling_mask, with FeedConfig(side=…) or `turngate export rows --side sampling_mask`",
        )
    if reason.startswith("captured as "):
        return (
            f"were {reason}",
            "run the agent in exact mode, with an engine that returns token ids (--engine vllm, sglang or local)",
        )
    if "log-probabilities" in reason:
        return (
            f"are untrainable ({reason})",
            "make the engine return one log-probability for each token; `turngate doctor` checks whether it does",
        )
    if reason.startswith("role "):
        return (
            f"have the {reason}, which is not trained",
            "add this role to policy.roles, or describe in [signals] of the agent's file which calls are the agent's main work",
        )
    if reason == "aborted":
        return "were cut short", "read the agent's output and the gateway's log to find out what ended the calls"
    return f"failed ({reason})", "read the gateway's log"


def _explain_bias(biases: str) -> tuple[str, str]:
    if "greedy" in biases.split(", "):
        return (
            "were sampled greedily (temperature 0)",
            "pin a temperature: pass --temperature 1, or set sampling.temperature in the session's settings or in the agent's file",
        )
    if biases.startswith(_FORCED):
        return (
            f"were constrained to a format ({biases.removeprefix(_FORCED)})",
            "switch forced tools and formats off in the agent, or set policy.biased to train such turns anyway",
        )
    if "endpoint" in biases:
        return (
            f"were sampled with {biases}",
            "pin the sampling in the session's settings, such as sampling.temperature",
        )
    return (
        f"were sampled with a bias ({biases})",
        "leave these sampling settings out, record sampling masks (--sampling-masks, for top-p, top-k and min-p), "
        "or set policy.biased to train such turns anyway",
    )
