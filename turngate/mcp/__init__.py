"""Rollouts as tools for agents and programs that speak MCP: a thin skin over `turngate.service`. `turngate mcp` starts it.

tools    what there is to call: arguments, results, what each does
server   the SDK's server, which lists and calls them
stdio    one client, which started us
http     many clients, each with the key
"""
