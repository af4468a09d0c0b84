"""The `turngate` command. Each subcommand calls one function of the package and prints the result."""

from turngate.cli.main import app

__all__ = ["app"]
