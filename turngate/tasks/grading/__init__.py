"""Grading: what the host decides about an agent's work. `grade` is the only way to a reward."""
