"""The checks of `turngate doctor`: of the machine, the engine, its tokenizer, agents and sandboxes, or of a running gateway.

`checks.py` has the table of all checks and runs them. A check changes nothing. It reports what it found and how to fix it, and never a
secret.
"""

from __future__ import annotations

from turngate.doctor.checks import CHECKS, diagnose
from turngate.doctor.context import DoctorContext
from turngate.doctor.finding import CheckState, Finding

__all__ = ["CHECKS", "CheckState", "DoctorContext", "Finding", "diagnose"]
