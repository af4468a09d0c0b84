"""Rollouts and batches: run an agent on a task in a sandbox, record its session, and grade its work."""
