"""Commands on a shared store do not create one by accident."""

from __future__ import annotations

import pytest

from tests.store.kit import open_shared
from turngate.errors import ConfigError
from turngate.store.audit import NewAuditEntry
from turngate.store.location import open_all_projects
from turngate.store.projects import ProjectRow

pytestmark = [pytest.mark.needs("postgres"), pytest.mark.full]


def test_an_empty_database_is_refused_and_projects_are_found(postgres_url: str) -> None:
    with pytest.raises(ConfigError, match="has no tables; start `turngate serve --data"):
        list(open_all_projects(postgres_url))
    store = open_shared(postgres_url)
    store.projects.create(ProjectRow("acme"), NewAuditEntry("operator", "acme", "project created", "acme", {}))
    store.close()
    assert [name for name, _ in open_all_projects(postgres_url, read_only=True)] == [
        "default"
    ]  # acme has no tables yet
    assert [name for name, _ in open_all_projects(postgres_url)] == ["default", "acme"]
    assert [name for name, _ in open_all_projects(postgres_url, read_only=True)] == ["default", "acme"]
