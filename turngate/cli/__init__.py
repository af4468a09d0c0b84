"""The `turngate` command. Each subcommand parses its flags, calls the package and prints the result."""

from turngate.cli.main import app

__all__ = ["app"]
