"""The type of the connection factory that each table class receives."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager

Connect = Callable[[], AbstractContextManager[sqlite3.Connection]]
