"""Agents: unmodified programs, each described by one TOML file. No code is specific to an agent.

`spec` loads a description, `install` installs the program into the cache, `launch` plans one run, `host_tools` adds shell commands that
call host tools, and `transcript` reads the agent's own record of a run. `trace/signals.py` reads the signals in an agent's requests.
"""
