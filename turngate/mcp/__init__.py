"""Rollouts as MCP tools: a thin layer over `turngate.service`, started by `turngate mcp`.

server   lists and calls the tools, for any transport
stdio    serves the one client that started the process
http     serves many clients, authenticated by a key
"""
