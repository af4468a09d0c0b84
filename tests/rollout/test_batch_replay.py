"""The scripted engine in a batch: every second rollout of a group replays the reference solution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.kit import tokenizer
from turngate.agents.installation import Installation
from turngate.agents.spec import find_agent
from turngate.config import ServeConfig
from turngate.engines.base import Generate
from turngate.engines.scripted import Scripted
from turngate.errors import ConfigError, EngineError
from turngate.render import BUILTIN_TOKENIZER, load_renderer
from turngate.rollout.batch_replay import mark_replay, play_references
from turngate.rollout.plan import BatchPlan
from turngate.rollout.reference import REPLAYED
from turngate.sandboxes import get_backend
from turngate.tasks import BUNDLED_TASK, load_task
from turngate.tasks.archive import PackedTask
from turngate.types import Sampling

TASK = load_task(BUNDLED_TASK)
REFERENCE = ServeConfig(script="reference")


def make_plan(**fields: Any) -> BatchPlan:
    settings: dict[str, Any] = {
        "tasks": (TASK,),
        "agent": find_agent("mini-swe-agent").spec,
        "installed": Installation(),
        "backend": get_backend("local"),
        "model": "scripted",
        "folder": Path("out"),
        "n": 4,
    }
    return BatchPlan(**{**settings, **fields})


def reply(engine: Scripted, session: str, turns: int) -> str:
    """What the engine answers after this many turns."""
    text = f"<tools>{TASK.instruction}" + "<|im_start|>assistant\nx<|im_end|>\n" * turns + "<|im_start|>assistant\n"
    ids = np.array(tokenizer().encode(text), np.int32)
    request = Generate(prompt=ids, session=session, max_tokens=1000, sampling=Sampling())
    return tokenizer().decode(list(engine._begin(request).ids))


def test_every_second_rollout_of_each_group_solves_its_task() -> None:
    plan = make_plan()
    replay = play_references(plan, REFERENCE)
    engine = replay.build_engine(ServeConfig(), load_renderer(BUILTIN_TOKENIZER, model="", family="auto")[0])
    assert isinstance(engine, Scripted)
    for round in (0, 1):
        solved = []
        for index in range(plan.n):
            order = plan.rollout_order(PackedTask(task=TASK), index, "b", 1, round)
            replay.add_rollout(order, "/w")
            first, last = (reply(engine, order.session_id, turns) for turns in (0, 1))
            assert '{"name": "bash", "arguments": {"command": ' in first
            assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in last
            solved.append("s/return a - b/return a + b/" in first)
        assert solved == [True, False, True, False]
    with pytest.raises(EngineError, match="session other does not belong to this batch"):
        reply(engine, "other", 0)


def test_sessions_are_marked_and_have_the_folder_of_the_solution() -> None:
    plan = mark_replay(make_plan(backend=get_backend("bubblewrap"), session={"metadata": {"by": "me"}}))
    order = plan.rollout_order(PackedTask(task=TASK), 0, "b", 1)
    assert order.folders == ("/solution",)
    assert order.session["metadata"] == {
        "batch": "b",
        "by": "me",
        REPLAYED: "reference solution in every second rollout",
    }
    assert plan.fingerprint() != make_plan(backend=get_backend("bubblewrap")).fingerprint()


def test_task_without_solution_is_named() -> None:
    other = msgspec.structs.replace(TASK, id="other", solution=None)
    with pytest.raises(ConfigError, match=r"^task other: script 'reference' cannot be used: the task has no solution"):
        play_references(make_plan(tasks=(TASK, other)), REFERENCE)
