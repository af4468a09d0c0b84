"""The server, where OpenEnv looks for it."""
