"""Rollouts as a service: start one, watch it, abort it, have its result. MCP, the OpenEnv environment and the Python API are skins
over it."""
