"""Placement on a Ray cluster: how many rollouts fit on a node, and which cell runs the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.rollout.cluster.open_cluster import _read_script, collect_settings, strip_password
from turngate.rollout.cluster.placement import (
    CellLoad,
    Demand,
    RayNodeView,
    choose_cell,
    count_slots,
    explain_no_room,
    measure_demand,
    parse_labels,
)
from turngate.rollout.cluster.ray_nodes import parse_node
from turngate.sandboxes.base import Resources
from turngate.tasks.task import Task

GB = 1e9


def node(**values: object) -> RayNodeView:
    return RayNodeView(**{"id": "1", "name": "a", "cpus": 8.0, "memory_bytes": 16 * GB, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("machine", "demand", "slots"),
    [
        (node(), Demand(), 8),  # one CPU each
        (node(), Demand(cpus=0.5), 16),
        (node(), Demand(cpus=3), 2),
        (node(), Demand(cpus=0.1), 80),  # 8 / 0.1 is not 79.99
        (node(), Demand(memory_mb=4000), 4),
        (node(), Demand(cpus=0.5, memory_mb=4000), 4),
        (node(slots=64), Demand(), 64),  # declared slots replace the default of one CPU each
        (node(slots=64), Demand(cpus=1), 8),
        (node(slots=3), Demand(cpus=0.5), 3),
        (node(slots=0), Demand(), 0),
        (node(cpus=0.5), Demand(), 0),
        (node(labels={"pool": "docker"}), Demand(labels={"pool": "docker"}), 8),
        (node(labels={"pool": "gpu"}), Demand(labels={"pool": "docker"}), 0),
        (node(), Demand(labels={"pool": "docker"}), 0),
        (node(is_draining=True), Demand(), 0),
    ],
)
def test_slots_of_node(machine: RayNodeView, demand: Demand, slots: int) -> None:
    assert count_slots(machine, demand) == slots


def test_explanation_names_what_is_missing() -> None:
    nodes = [
        node(labels={"pool": "gpu"}),
        node(name="b", cpus=1.0, labels={"pool": "docker"}),
        node(name="c", is_draining=True),
    ]
    text = explain_no_room(nodes, Demand(cpus=2, memory_mb=500, labels={"pool": "docker"}))
    assert "a has no label pool=docker" in text
    free, needed = "CPUs: 1, memory: 16,000 MB", "CPUs: 2, memory: 500 MB"
    assert f"b has too few free resources ({free}) for a rollout ({needed})" in text
    assert "c is draining" in text and "start more nodes" in text
    assert "the cluster has no live node" in explain_no_room([], Demand())
    full = explain_no_room([node(name="d", slots=0)], Demand())
    assert (
        "d has too few free resources (CPUs: 8, memory: 16,000 MB, turngate_slots: 0) for a rollout (turngate_slots: 1)"
        in full
    )


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"a": CellLoad(slots=4, running=2), "b": CellLoad(slots=8, running=2)}, "b"),
        ({"a": CellLoad(slots=4, running=4), "b": CellLoad(slots=8, running=7)}, "b"),
        ({"a": CellLoad(slots=4, is_closed=True), "b": CellLoad(slots=8, running=7)}, "b"),
        ({"a": CellLoad(slots=4, is_resting=True), "b": CellLoad(slots=8, running=7)}, "b"),
        ({"a": CellLoad(slots=4, is_resting=True)}, None),
        ({"a": CellLoad(slots=4, faults=3), "b": CellLoad(slots=8, running=7)}, "b"),
        ({"a": CellLoad(slots=4, faults=2), "b": CellLoad(slots=8, running=7)}, "a"),
        ({"a": CellLoad(slots=4, faults=9), "b": CellLoad(slots=8, running=8)}, "a"),  # better than to wait
        ({"a": CellLoad(slots=1, running=1)}, None),
        ({}, None),
    ],
)
def test_least_loaded_working_cell_is_chosen(loads: dict[str, CellLoad], chosen: str | None) -> None:
    assert choose_cell(loads) == chosen


def test_successful_rollout_ends_row_of_faults() -> None:
    load = CellLoad(slots=4)
    for is_fault, faults in ((True, 1), (True, 2), (False, 0), (True, 1)):
        load.count_result(is_fault=is_fault)
        assert load.faults == faults


@pytest.mark.parametrize(
    ("tasks", "batch", "expected"),
    [
        ([(None, None), (None, None)], Resources(), Demand()),
        ([(1.0, None), (2.0, 500)], Resources(), Demand(cpus=2.0, memory_mb=500)),
        ([(1.0, None), (2.0, 500)], Resources(cpus=0.5), Demand(cpus=0.5, memory_mb=500)),
    ],
)
def test_demand_is_that_of_the_largest_task(
    tasks: list[tuple[float | None, int | None]], batch: Resources, expected: Demand
) -> None:
    made = [Task(id=f"t{n}", instruction="x", cpus=cpus, memory_mb=mb) for n, (cpus, mb) in enumerate(tasks)]
    assert measure_demand(made, batch, {}) == expected


def test_node_as_ray_describes_it() -> None:
    described = {
        "NodeID": "f00",
        "NodeName": "worker-7",
        "NodeManagerAddress": "10.0.0.7",
        "Alive": True,
        "Resources": {"CPU": 16.0, "memory": 64 * GB, "turngate_slots": 40.0},
        "Labels": {"pool": "docker"},
    }
    free = {"CPU": 12.0, "memory": 32 * GB, "turngate_slots": 30.0}
    assert parse_node(described, free, is_draining=False) == RayNodeView(
        id="f00", name="worker-7", cpus=12.0, memory_bytes=32 * GB, slots=30, labels={"pool": "docker"}
    )
    # Ray leaves a resource out when all of it is in use.
    assert parse_node(described, {}, is_draining=True).slots == 0
    undeclared = {**described, "Resources": {"CPU": 16.0}, "NodeName": ""}
    assert parse_node(undeclared, free, is_draining=False).slots is None
    assert parse_node(undeclared, free, is_draining=False).name == "10.0.0.7"


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("postgresql://u:secret@db/t", "postgresql://u@db/t"),
        ("postgresql://u:s%40cret@db:5433/t?sslmode=require", "postgresql://u@db:5433/t?sslmode=require"),
        ("postgresql:///t?host=db&password=secret", "postgresql:///t?host=db"),
        ("postgresql://a,b/t", "postgresql://a,b/t"),
    ],
)
def test_password_of_the_database_stays_with_the_driver(url: str, sent: str) -> None:
    assert strip_password(url) == sent


def test_cells_get_only_the_settings_that_they_share() -> None:
    config = ServeConfig(
        data="postgresql://db/t", port=0, engine="vllm", engine_url=["http://e:8000"], model="m", workers=2
    )
    assert collect_settings(config) == {"engine": "vllm", "engine_url": ["http://e:8000"], "model": "m", "workers": 2}


def test_labels() -> None:
    assert parse_labels(["pool=docker", "zone="]) == {"pool": "docker", "zone": ""}
    for wrong in ("pool", "=x", ""):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            parse_labels([wrong])


def test_script_that_is_not_text_is_a_config_error(tmp_path: Path) -> None:
    script = tmp_path / "replies.json"
    script.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"^script .*replies\.json is not UTF-8 text"):
        _read_script(str(script))
