"""Grading of an agent's work by the host. The function `grade` in `grade.py` decides the reward of all work that is graded."""
