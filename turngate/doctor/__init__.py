"""What `turngate doctor` examines: the machine, the engine, its tokenizer, agents, sandboxes, or a gateway that runs.

`examine.py` has the table of all checks and runs them side by side, each within its time. A check looks, changes nothing, and says what
it saw and how to mend it; nothing that it says holds a secret. Called by `cli/doctor.py` only.
"""

from __future__ import annotations

from turngate.doctor.context import Subject
from turngate.doctor.examine import CHECKS, examine
from turngate.doctor.finding import Finding, State

__all__ = ["CHECKS", "Finding", "State", "Subject", "examine"]
