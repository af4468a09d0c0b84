"""Agents: unmodified programs, each described by one TOML file. No code per agent.

`spec` reads a description, `install` puts the program into the cache, `launch` plans one run of it, `transcript` reads what the
agent itself wrote down. What its requests tell about the conversation they belong to is read by `trace/signals.py`.
"""
