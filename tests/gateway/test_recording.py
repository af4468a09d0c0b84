"""Test the fork cause of recorded turns: a re-rendered prompt forks with cause "template" unless the request explains the fork."""

from __future__ import annotations

import numpy as np
import pytest

from tests.trace.kit import Call, Recorder, assistant, read, system, user
from turngate.gateway.draft import TurnDraft
from turngate.gateway.prompt import Preamble, Prompt, build_observed_prompt
from turngate.gateway.recording import _find_cause
from turngate.telemetry.metrics import CallTiming
from turngate.trace.session import Session, SessionConfig
from turngate.trace.tree import Cause, path_ids
from turngate.types import ID_DTYPE, NEUTRAL, Ids
from turngate.types import Call as WireCall

FIRST = [system("You code."), user("Fix it.")]
SECOND = [*FIRST, assistant("On it."), user("And?")]
OTHER = [*FIRST, assistant("On it."), user("Why?")]
EDITED = [*FIRST, assistant("On it."), user("And?"), assistant("Me."), user("So?")]
WORK = [Call(FIRST, assistant("On it.")), Call(SECOND, assistant("Done."))]
PREAMBLE = Preamble(b"tools", (), b"[]", b"{}", {})
RERENDERED = np.array([7, 8, 9], ID_DTYPE)


async def ignore(events: object) -> None:
    pass


def draft(recorder: Recorder, prompt: Prompt) -> TurnDraft:
    session = Session("s", 1, SessionConfig(), 0.0)
    session._trace = recorder.trace
    call = WireCall(model="m", history=prompt.location.request.history)
    return TurnDraft(session, call, prompt, NEUTRAL, 0, ignore, CallTiming(0.0))


@pytest.mark.parametrize(
    ("before", "messages", "cause"),
    [
        (WORK[:1], SECOND, "template"),
        (WORK, OTHER, "template"),  # a branch as well
        (WORK[:1], EDITED, "edited"),
        ([], FIRST, None),
    ],
    ids=["next turn", "other continuation", "edited history", "first call"],
)
def test_cause_of_rerendered_prompt(before: list[Call], messages: list[dict[str, object]], cause: Cause) -> None:
    recorder = Recorder(before)
    location = recorder.trace.locate(read(messages))
    prompt = Prompt(location, None, None, RERENDERED, RERENDERED, PREAMBLE)
    assert _find_cause(draft(recorder, prompt), None, ()) == cause


@pytest.mark.parametrize(
    ("messages", "ids", "cause"),
    [
        (OTHER, None, "branch"),
        (OTHER, "extended", "branch"),
        (OTHER, "rerendered", "template"),
        (EDITED, "rerendered", "template"),
        (FIRST, None, "resample"),
        (FIRST, "rerendered", "resample"),
    ],
)
def test_cause_of_prompt_reported_by_endpoint(messages: list[dict[str, object]], ids: str | None, cause: Cause) -> None:
    recorder = Recorder(WORK)
    location = recorder.trace.locate(read(messages))
    seen: Ids | None = None if ids is None else RERENDERED
    if ids == "extended":
        seen = np.concatenate([path_ids(location.node), RERENDERED])
    prompt = build_observed_prompt(location, seen, PREAMBLE)
    assert _find_cause(draft(recorder, prompt), prompt.context, ()) == cause


def test_draft_counts_live_tokens_until_settled() -> None:
    recorder = Recorder()
    location = recorder.trace.locate(read(FIRST))
    sampling = draft(recorder, Prompt(location, None, None, RERENDERED, RERENDERED, PREAMBLE))
    sampling.add([1, 2, 3], [-0.1, -0.2, -0.3], 4)
    sampling.add([5], None, 5)
    assert (sampling.session.live_tokens, sampling.version_start, sampling.version_end) == (4, 4, 5)
    assert sampling.build_logprobs() is None, "one chunk had none"
    sampling.settle()
    sampling.settle()
    assert sampling.session.live_tokens == 0 and sampling.ids == [1, 2, 3, 5]
