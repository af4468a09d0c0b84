"""The checks of `turngate doctor`. They examine the machine, the engine, its tokenizer, agents and sandboxes, or a running gateway.

`checks.py` lists all checks and runs them. A check removes everything that it creates. It reports what it found and how to fix any
problem, and never reveals a secret.
"""

from __future__ import annotations

from turngate.doctor.checks import CHECKS, diagnose
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckState, Finding

__all__ = ["CHECKS", "CheckState", "DoctorContext", "Finding", "diagnose"]
