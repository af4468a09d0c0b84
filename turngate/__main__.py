"""`python -m turngate`."""

from turngate.cli import app

app()
