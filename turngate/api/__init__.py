"""Rollouts from Python: `import turngate as tg; result = await tg.run(task, agent="pi", model=…)`. docs/python.md describes it.

    client          run, group, batch, Client: with await
    blocking        run_sync, group_sync, batch_sync, open: without await
    arguments       their arguments, for type checkers and checked at run time
    task            a task from a path, a row or an instruction
    models          a model from one line
    result          Result and Results; result_data: their fields, and Turn
    result_builder  a Result from the service's result and the gateway's trace
    display         results in notebooks and terminals
    progress        progress while rollouts run

`import turngate` loads it on first use.
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
