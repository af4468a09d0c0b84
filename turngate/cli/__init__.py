"""The `turngate` command. Thin: each command calls one thing and prints what came of it."""

from turngate.cli.main import app

__all__ = ["app"]
