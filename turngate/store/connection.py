"""The type of a connection to the database that a table is given."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager

Connect = Callable[[], AbstractContextManager[sqlite3.Connection]]
