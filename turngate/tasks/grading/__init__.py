"""Grading of an agent's work by the host. The entry point is the function `grade` in `grade.py`."""
