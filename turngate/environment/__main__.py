"""`python -m turngate.environment`: the environment's server."""

from turngate.environment.app import serve

serve()
