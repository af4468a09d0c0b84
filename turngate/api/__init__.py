"""Rollouts from Python: `import turngate as tg; result = await tg.run(task, agent="pi", model=…)`. docs/python.md has the whole of it.

    client      run, group, batch, Client: with await
    blocking    run_sync, group_sync, batch_sync, open: without
    arguments   what they take, listed and checked
    task        a task from a path, a row, or words
    models      a model from one line
    made        what the service and the gateway tell, as a result
    result      Result, Results, Turn
    watching    what is shown meanwhile
    thread      a loop in a thread of its own

`import turngate` loads none of it before it is used.
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
