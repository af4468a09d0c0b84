"""Compatibility with other projects' APIs: prime-rl's rollout gateway and OpenEnv's capture API."""
