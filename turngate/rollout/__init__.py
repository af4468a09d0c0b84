"""One rollout: a task, an agent, a sandbox and a session, from start to end."""
