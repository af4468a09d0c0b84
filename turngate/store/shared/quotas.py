"""Quotas in the shared store, which has the sessions of all projects."""

from __future__ import annotations

from turngate.store.projects import DEFAULT_PROJECT
from turngate.store.quotas import QuotaTable


class SharedQuotas(QuotaTable):
    def measure(self, project: str) -> int:
        table = "shipments" if project == DEFAULT_PROJECT else f'"project_{project}".shipments'
        with self._reading() as db:
            if db.execute("SELECT to_regclass(?)::text", (table,)).fetchone() == (None,):
                return 0  # nothing was shipped yet
            return int(db.execute(f"SELECT coalesce(sum(bytes), 0)::int8 FROM {table}").fetchone()[0])
