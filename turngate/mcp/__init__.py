"""Rollouts as tools for agents and programs that speak MCP: a thin skin over `turngate.service`. `turngate mcp` starts it.

server   the SDK's server, which lists and calls them
stdio    one client, which started us
http     many clients, each with the key
"""
