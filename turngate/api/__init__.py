"""Python API for rollouts: `import turngate as tg; result = await tg.run(task, agent="pi", model=…)`. See docs/python.md.

    client          the async API: run, group, batch and Client
    blocking        the blocking API: run_sync, group_sync, batch_sync and open
    cluster         runs a client's rollouts on a Ray cluster
    arguments       the arguments of both APIs, typed and validated
    task            loads a task from a path, a row or an instruction
    models          parses a model such as vllm://MODEL@URL
    result          Result and Results
    result_data     the fields of a Result, and Turn
    result_builder  builds a Result from the service's result and the gateway's trace
    display         displays results in notebooks and terminals
    progress        displays progress while rollouts run

The package `turngate` exports the names in `__all__`, and imports this package when one of them is first used.
"""

from turngate.api.blocking import BlockingClient, batch_sync, group_sync, open, run_sync
from turngate.api.client import Client, batch, group, run
from turngate.api.result import Result, Results, Turn
from turngate.errors import TurngateError
from turngate.service.catalog import Endpoint
from turngate.service.config import ServiceConfig
from turngate.tasks.task import Task

__all__ = [
    "BlockingClient",
    "Client",
    "Endpoint",
    "Result",
    "Results",
    "ServiceConfig",
    "Task",
    "Turn",
    "TurngateError",
    "batch",
    "batch_sync",
    "group",
    "group_sync",
    "open",
    "run",
    "run_sync",
]
