"""Quotas in the shared store. Its database contains the sessions of all projects, so each project can be measured there."""

from __future__ import annotations

from turngate.store.projects import DEFAULT_PROJECT
from turngate.store.quotas import QuotaTable


class SharedQuotas(QuotaTable):
    def measure(self, project: str) -> int:
        table = "shipments" if project == DEFAULT_PROJECT else f'"project_{project}".shipments'
        with self._reading() as db:
            if db.execute("SELECT to_regclass(?)::text", (table,)).fetchone() == (None,):
                return 0  # nothing has been shipped yet
            return int(db.execute(f"SELECT coalesce(sum(bytes), 0)::int8 FROM {table}").fetchone()[0])
