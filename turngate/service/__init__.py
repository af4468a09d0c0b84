"""Rollouts as a service: start, watch, abort and finalize them. MCP, OpenEnv and the Python API are thin layers over this package."""
