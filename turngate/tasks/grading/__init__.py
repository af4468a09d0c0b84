"""Grading of an agent's work by the host. `grade` is the only source of rewards."""
