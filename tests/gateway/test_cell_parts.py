"""Test how projects and cells divide the engines: the parts of a cell, and in a simulation what becomes of them over time."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from tests.gateway.simulated_cells import Call, Network, Simulation
from turngate.gateway.cell_parts import OtherCells, ProjectCalls, divide_fairly

TOLERANCE = 0.06  # of the running calls, between a project's share and what it gets
LATE_AND_LOST = Network(delay_s=1.0, loss=0.3)


@pytest.mark.parametrize(
    ("total", "demands", "weights", "expected"),
    [
        (10, {}, {}, {}),
        (10, {"a": 99}, {}, {"a": 10}),
        (10, {"a": 99, "b": 99}, {}, {"a": 5, "b": 5}),
        (12, {"a": 99, "b": 99}, {"a": 3.0}, {"a": 9, "b": 3}),
        (12, {"a": 99, "b": 2}, {}, {"a": 10, "b": 2}),  # the others divide what one does not use
        (12, {"a": 99, "b": 2, "c": 99}, {"c": 4.0}, {"a": 2, "b": 2, "c": 8}),
        (12, {"a": 4, "b": 2}, {}, {"a": 4, "b": 2}),
        (0, {"a": 4, "b": 2}, {}, {"a": 0, "b": 0}),
    ],
)
def test_divide_fairly(
    total: int, demands: Mapping[str, int], weights: Mapping[str, float], expected: Mapping[str, float]
) -> None:
    assert divide_fairly(total, demands, lambda project: weights.get(project, 1.0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("own", "others", "expected"),
    [
        # Without other cells, a cell's part is the project's share.
        (ProjectCalls({"a": 10}, {"a": 9, "b": 9}), [], {"a": 5, "b": 5}),
        # A project's cells divide its share by their calls.
        (ProjectCalls({"a": 20}, {"a": 10}), [ProjectCalls({"b": 20}, {"b": 99})], {"a": 20}),
        (ProjectCalls({"a": 10}, {"a": 20}), [ProjectCalls({"a": 10, "b": 20}, {"a": 50, "b": 50})], {"a": 20 / 3}),
        (ProjectCalls({}, {"a": 1}), [ProjectCalls({"a": 40}, {"a": 59})], {"a": 0.4}),
        # A project that has few calls runs all of them.
        (ProjectCalls({"a": 10}, {"a": 20, "b": 2}), [ProjectCalls({"a": 10}, {"a": 20})], {"a": 9, "b": 2}),
    ],
)
def test_part_of_a_cell(own: ProjectCalls, others: Sequence[ProjectCalls], expected: Mapping[str, float]) -> None:
    assert OtherCells(others).divide(own, lambda project: 1.0) == pytest.approx(expected)


def test_every_part_is_above_zero() -> None:
    weights = {"a": 1.0, "b": 1e-17}
    own, others = ProjectCalls({}, {"a": 20, "b": 9}), OtherCells([ProjectCalls({"a": 20})])
    assert all(part > 0 for part in others.divide(own, weights.__getitem__).values())
    assert others.limit(own, weights.__getitem__) == {}


@pytest.mark.parametrize(
    ("own", "others", "weights", "expected"),
    [
        # A project with all the calls gives up half of them to one that waits in another cell, in each of its cells.
        (ProjectCalls({"a": 20}, {"a": 9}), [ProjectCalls({}, {"b": 50})], {}, {"a": 10}),
        (
            ProjectCalls({"a": 20}, {"a": 9}),
            [ProjectCalls({"a": 60}, {"a": 27}), ProjectCalls({}, {"b": 50})],
            {},
            {"a": 10},
        ),
        (ProjectCalls({"a": 20}, {"a": 9}), [ProjectCalls({"b": 20}, {"b": 50})], {"b": 3.0}, {"a": 10}),
        # The waiting project gets no more than it asks for.
        (ProjectCalls({"a": 40}, {"a": 9}), [ProjectCalls({}, {"b": 4})], {}, {"a": 36}),
        # A cell also gives up calls to another cell of the same project.
        (ProjectCalls({"a": 20}, {"a": 20}), [ProjectCalls({}, {"a": 40})], {}, {"a": 10}),
        # No cell lacks a whole call: nothing to give up, although calls wait.
        (ProjectCalls({"a": 21}, {"a": 9}), [ProjectCalls({"b": 20}, {"b": 50})], {}, {}),
        (ProjectCalls({"a": 20}, {"a": 9, "b": 50}), [ProjectCalls({"a": 30}, {"a": 14})], {}, {}),
        (ProjectCalls({"a": 20}, {"b": 50}), [], {}, {}),
        # At least one call of each project stays.
        (ProjectCalls({"a": 1}, {}), [ProjectCalls({"a": 9}, {"b": 50})], {"b": 99.0}, {"a": 1}),
    ],
)
def test_cell_gives_up_calls_only_if_another_cell_lacks_some(
    own: ProjectCalls, others: Sequence[ProjectCalls], weights: Mapping[str, float], expected: Mapping[str, int]
) -> None:
    assert OtherCells(others).limit(own, lambda project: weights.get(project, 1.0)) == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("network", [Network(), LATE_AND_LOST, Network(delay_s=3.0)], ids=["fast", "lossy", "slow"])
@pytest.mark.parametrize(
    ("agents", "weights", "expected"),
    [
        # A project gets no more because it runs on three cells.
        ([{"a": 30}, {"a": 30}, {"a": 30}, {"b": 60}], {}, {"a": 0.5, "b": 0.5}),
        ([{"a": 30}, {"a": 30}, {"a": 30}, {"b": 60}], {"b": 3.0}, {"a": 0.25, "b": 0.75}),
        ([{"a": 60}, {"a": 60, "b": 10}, {"b": 60, "c": 5}, {"c": 60}], {}, {"a": 0.33, "b": 0.33, "c": 0.33}),
        # What a project does not use goes to the others.
        ([{"a": 60}, {"a": 10}, {"b": 4}], {}, {"a": 0.9, "b": 0.1}),
        # Cells with the same projects, and cells of very different sizes.
        ([{"a": 60, "b": 60}, {"a": 60, "b": 60}], {}, {"a": 0.5, "b": 0.5}),
        ([{"a": 60, "b": 2}, {"a": 2, "b": 60}], {}, {"a": 0.5, "b": 0.5}),
        ([{"a": 60}, {"a": 10}], {}, {"a": 1.0}),
    ],
)
def test_shares_hold_for_all_cells(
    agents: Sequence[Mapping[str, int]], weights: Mapping[str, float], expected: Mapping[str, float], network: Network
) -> None:
    simulation = simulate(agents, weights, network=network)
    for _ in range(2):
        simulation.measure()
        simulation.run(simulation.now + 45)
        assert simulation.divide() == pytest.approx(expected, abs=TOLERANCE)
        assert simulation.idle < 0.001 and simulation.longest_hunger_s == 0
        assert set(simulation.ended) == {Call(cell, name) for cell, names in enumerate(agents) for name in names}


def simulate(
    agents: Sequence[Mapping[str, int]],
    weights: Mapping[str, float] | None = None,
    *,
    network: Network = Network(),
    seed: int = 1,
) -> Simulation:
    """Start agents, whose number `agents` has by cell and project, and run until the shares should be fair."""
    simulation = Simulation(len(agents), weights=weights, network=network, seed=seed)
    for cell, projects in enumerate(agents):
        for project, number in projects.items():
            simulation.add_agents(cell, project, number)
    simulation.run(90)
    return simulation


@pytest.mark.parametrize("network", [Network(), LATE_AND_LOST], ids=["fast", "lossy"])
def test_late_project_gets_its_share_soon(network: Network) -> None:
    simulation = simulate([{"a": 30}, {"a": 30}, {"a": 30}, {}], network=network)
    simulation.measure()
    simulation.add_agents(3, "late", 60, over_s=1)
    simulation.run(simulation.now + 30)
    assert simulation.idle < 0.02 and simulation.longest_hunger_s == 0
    simulation.measure()
    simulation.run(simulation.now + 30)
    assert simulation.divide() == pytest.approx({"a": 0.5, "late": 0.5}, abs=TOLERANCE)


def test_cell_that_cannot_use_room_costs_the_others_little() -> None:
    simulation = simulate([{"a": 30}, {"a": 30}, {}])
    simulation.cells[2].is_blind = True
    simulation.add_agents(2, "b", 60)
    simulation.measure()
    simulation.run(simulation.now + 120)
    assert simulation.idle < 0.02
    assert simulation.ended[Call(2, "b")] > 5  # one at a time


def test_one_call_of_a_project_runs_in_each_cell_without_reports() -> None:
    """Weights of 100 to 1 would leave project `b` nothing. The reports of the other cell stop, and its calls go on."""
    simulation = simulate([{"a": 60, "b": 60}, {"a": 60}], {"a": 100.0})
    simulation.kill(1)
    simulation.measure()
    simulation.run(simulation.now + 9)
    assert simulation.longest_hunger_s == 0 and simulation.ended[Call(0, "b")]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_random_changes(seed: int) -> None:
    """Cells with different clocks come and are lost, projects come and go, and weights change, while reports are late or lost."""
    rng = random.Random(seed)
    network = rng.choice([Network(), LATE_AND_LOST, Network(delay_s=3.0)])
    simulation = Simulation(0, slots=rng.choice([16, 48]), network=network, seed=seed)
    for _ in range(rng.randint(2, 5)):
        add_random_cell(simulation, rng)
    for _ in range(6):
        simulation.run(simulation.now + rng.uniform(5, 30))
        change_something(simulation, rng)
    assert simulation.idle < 0.05  # also while the agents start and cells are lost
    assert simulation.longest_hunger_s < 5  # until a new cell has read the others' reports for the first time
    simulation.run(simulation.now + 90)
    simulation.measure()
    simulation.run(simulation.now + 60)
    assert simulation.idle < 0.001 and simulation.longest_hunger_s == 0
    require_fair(simulation)


def add_random_cell(simulation: Simulation, rng: random.Random) -> None:
    cell = simulation.add_cell(clock_s=rng.uniform(-5, 5))
    for project in rng.sample("abcd", rng.randint(1, 3)):
        simulation.add_agents(cell, project, rng.choice([2, 10, 40]))


def change_something(simulation: Simulation, rng: random.Random) -> None:
    up = [number for number, cell in enumerate(simulation.cells) if cell.is_up]
    match rng.choice(["lose a cell", "add a cell", "add a project", "remove a project", "change a weight"]):
        case "lose a cell" if len(up) > 2:
            simulation.kill(rng.choice(up))
        case "add a cell":
            add_random_cell(simulation, rng)
        case "add a project":
            simulation.add_agents(rng.choice(up), rng.choice("anz"), 30)
        case "remove a project":
            project = rng.choice("ab")
            for cell in up:
                simulation.remove_agents(cell, project)
        case _:
            simulation.weights[rng.choice("abc")] = rng.choice([0.5, 1.0, 4.0])


def require_fair(simulation: Simulation) -> None:
    """Require that each project runs its share, except for one call in each cell of each project: parts are rounded, and at least 1."""
    running = simulation.count_running()
    calls = [cell.queue.count() for cell in simulation.cells if cell.is_up]
    demands = {call.project: sum(cell.demand(call.project) for cell in calls) for call in running}
    shares = divide_fairly(sum(running.values()), demands, lambda project: simulation.weights.get(project, 1.0))
    for project, share in shares.items():
        has = sum(number for call, number in running.items() if call.project == project)
        assert has >= share - len(running), (project, has, share)
