"""`python -m turngate.openenv`: the environment's server."""

from turngate.openenv.app import serve

serve()
