"""Rollouts as a service: start, watch, abort and finalize them. MCP, the OpenEnv environment and the Python API are thin layers over it."""
