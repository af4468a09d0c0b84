"""Grading of an agent's work by the host. Only the function `grade` in `grade.py` decides rewards."""
