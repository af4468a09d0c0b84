"""The server, in the package in which OpenEnv expects it."""
