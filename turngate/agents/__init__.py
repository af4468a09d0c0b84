"""Agents: unmodified programs, each described by one TOML file. No agent has code of its own.

`spec` loads a description, `install` puts the program into the cache, `launch` plans one run of it, `host_tools` adds commands for host
tools, `transcript` reads the agent's own record of a run. `trace/signals.py` reads what requests reveal about their conversation.
"""
