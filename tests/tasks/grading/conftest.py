"""The same places as the red team has."""

from __future__ import annotations

from tests.redteam.conftest import root, walled

__all__ = ["root", "walled"]
