"""`turngate train --ray`: agents in the cells of a cluster, engine and trainer in the driver."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.api.kit import program
from tests.cli.kit import run_rejected
from tests.cli.test_train import model_folder  # skips without torch
from tests.cluster.batch_kit import check_leftovers, sweep_sandboxes
from tests.cluster.ray_kit import ROOT, LocalRay, ray_python, start_ray
from tests.engines import local_kit
from tests.postgres import PostgresServer
from tests.speed import scaled
from turngate.config import ServeConfig
from turngate.errors import ConfigError
from turngate.render import BUILTIN_TOKENIZER
from turngate.trainers.local.cluster import TrainingCluster, open_cluster_environment
from turngate.trainers.local.training import TimedEngine

URL = "postgresql://turngate@db/turngate"


def write_tasks(folder: Path) -> Path:
    """Write a task for the `shell` agent. Every second grade is 1, so that groups have a signal."""
    count = folder / "count"
    test = f"echo x >> {count}; exit $(($(wc -l < {count}) % 2))"
    grader = {"type": "script", "files": {"test.sh": test}, "decides": "exit code"}
    row = {"id": "guess", "instruction": program("ask('Hi')\nask('And now?')"), "grader": grader}
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


def train_arguments(folder: Path) -> list[str]:
    agent = ["--agent", "shell", "--set", f"command=exec {sys.executable} -", "--sandbox", "local"]
    model = ["--model-folder", str(model_folder(folder / "model")), "--tokenizer", str(BUILTIN_TOKENIZER)]
    size = ["--n", "4", "--groups", "1", "--learning-rate", "0.01", "--every", "1"]
    return ["train", *agent, *model, *size, "--tasks", str(write_tasks(folder)), "--out", str(folder / "out")]


def train(cluster: LocalRay, arguments: list[str], steps: int) -> None:
    """Run the command in a Python that has Ray, and finds torch in this one's packages."""
    packages = f"{ROOT}:{sysconfig.get_path('purelib')}"
    done = subprocess.run(
        [str(ray_python()), "-m", "turngate", *arguments, "--steps", str(steps)],
        env=cluster.environment(PYTHONPATH=packages),
        cwd=cluster.folder,
        capture_output=True,
        text=True,
        timeout=scaled(300),
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The demo's test trains a real agent, and test_ray_batch.py runs agents in the cells of a cluster.
@pytest.mark.repeat
@pytest.mark.needs("ray", "postgres")
@pytest.mark.timeout(scaled(900))
def test_training_on_a_cluster_is_exact_and_resumes(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    database = postgres_url.rpartition("/")[2]
    with start_ray("a", slots=2) as cluster:
        arguments = [*train_arguments(tmp_path), "--ray", cluster.address, "--data", postgres_url, "--concurrency", "4"]
        train(cluster, arguments, 2)
        check_leftovers(cluster)
        train(cluster, arguments, 3)
        check_leftovers(cluster)
    sweep_sandboxes()
    steps = json.loads((tmp_path / "out" / "steps.json").read_text())
    assert [one["step"] for one in steps] == [1, 2, 3]
    versions = [one["version"] for one in steps]
    assert versions == sorted(versions) and versions[-1] >= 2, "weights were updated"
    for one in steps:
        measured = one["measured"]
        # The trainer recomputes the log-probabilities of tokens that were recorded with the version that it has.
        assert measured["compared"] == measured["rows"] and measured["largest"] < 0.01 and not measured["refused"], one
    deliveries = [(one["first"], one["last"]) for one in steps]
    assert deliveries == [(1, 1), (2, 2), (3, 3)], "each group is trained once"
    cells = postgres_server.query("SELECT count(DISTINCT name) FROM cells", database)
    settled = postgres_server.query("SELECT count(*) FROM attempts WHERE state='settled'", database)
    assert (cells, settled) == ("2", "12")


@pytest.mark.full
@pytest.mark.needs("postgres")
async def test_other_engines_of_the_store_are_refused(
    tmp_path: Path, postgres_server: PostgresServer, postgres_url: str
) -> None:
    """A cell also samples from the engines of the shared store's list, whose weights are not trained."""
    config = ServeConfig(
        port=0, data=postgres_url, engine="local", model_folder="m", tokenizer=str(BUILTIN_TOKENIZER), model="m"
    )
    cluster = TrainingCluster(engine_host="127.0.0.1")
    async with open_cluster_environment(config, small_engine(), cluster) as environment:
        await environment.gateway.resume(1)
        await environment.gateway.pause("drain")
        assert (await environment.gateway.resume(2)).version == 2
    add = "INSERT INTO engines VALUES ('http://127.0.0.1:9', 'active', '')"
    postgres_server.query(add, postgres_url.rpartition("/")[2])
    with pytest.raises(ConfigError, match="which would sample with weights that this run does not train"):
        async with open_cluster_environment(config, small_engine(), cluster):
            pass


def small_engine() -> TimedEngine:
    return TimedEngine(local_kit.model(), slots=1, max_context=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--ray", "auto"], "data must be the URL of a PostgreSQL database"),
        (["--ray", "auto", "--data", "folder"], "data must be the URL of a PostgreSQL database"),
        (["--ray", "auto", "--data", "postgresql://u:secret@db/t"], "do not pass the database password"),
        (["--data", URL], "also pass --ray"),
        (["--ray-label", "pool=docker"], "also pass --ray"),
        (["--engine-host", "10.0.0.5"], "also pass --ray"),
    ],
)
def test_wrong_flags_are_refused(tmp_path: Path, given: list[str], message: str) -> None:
    assert message in run_rejected(*train_arguments(tmp_path), *given)
