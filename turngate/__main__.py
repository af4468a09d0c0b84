"""Run the `turngate` command with `python -m turngate`."""

from turngate.cli import app

app()
