"""Projects in the shared store. The store of each project except `default` is a separate schema in the same database."""

from __future__ import annotations

from turngate.store.connection import StoreConnection
from turngate.store.projects import ProjectTable


class SharedProjects(ProjectTable):
    def _drop_store(self, db: StoreConnection, name: str) -> None:
        db.execute(f'DROP SCHEMA IF EXISTS "project_{name}" CASCADE')
