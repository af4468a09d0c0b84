"""The fixtures of the red team."""

from __future__ import annotations

from tests.redteam.conftest import isolated, root

__all__ = ["isolated", "root"]
