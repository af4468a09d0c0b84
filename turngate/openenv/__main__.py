"""Run the environment's server: `python -m turngate.openenv`."""

from turngate.openenv.app import serve

serve()
