"""Rollouts as MCP tools: a thin layer over `turngate.service`, started by `turngate mcp`.

server   lists and calls the tools, for any transport
stdio    one client, which starts the server
http     many clients, each with the key
"""
