"""The tables of projects, keys and the audit log, on both stores."""

from __future__ import annotations

import time

import pytest

from tests.store.kit import finish_rollout
from turngate.common.database_url import parse_database_url
from turngate.errors import Conflict, NotFound, StoreError
from turngate.gateway.api_keys import KeyRing, KnownProjects, read_projects
from turngate.gateway.projects import Projects
from turngate.store.audit import NewAuditEntry
from turngate.store.projects import OPERATOR_CALLER, ApiKey, ProjectRow, Quotas, locate_project
from turngate.store.shared.store import SharedStore
from turngate.store.store import Store

ENTRY = NewAuditEntry("operator", "acme", "project created", "acme", {"weight": 1.0})


def test_projects_keys_and_entries_are_kept(store: Store) -> None:
    table = store.projects
    assert table.list_projects() == [ProjectRow("default")]
    project = ProjectRow("acme", 1.0, 2.0, Quotas(live_sessions=3))
    table.create(project, ENTRY)
    with pytest.raises(Conflict, match="already exists"):
        table.create(project, ENTRY)
    with pytest.raises(NotFound, match="unknown project 'ghost'"):
        table.change("ghost", 1.0, None, ENTRY)
    table.change("default", None, Quotas(tokens_per_day=5), ENTRY)
    assert [(row.name, row.weight, row.quotas) for row in table.list_projects()] == [
        ("acme", 2.0, Quotas(live_sessions=3)),
        ("default", 1.0, Quotas(tokens_per_day=5)),
    ]
    first = ApiKey("tgp-1", b"\x00" * 32, "acme", frozenset({"traces", "feed"}), "note", 1.0)
    second = ApiKey("tgp-2", b"\x01" * 32, "acme", first.scopes, "note", 2.0)
    table.add_key(first, ENTRY)
    table.replace_key("tgp-1", second, 10.0, ENTRY)
    table.replace_key(
        "tgp-1", ApiKey("tgp-3", b"x", "other", first.scopes, "", 3.0), 20.0, ENTRY
    )  # does not prolong it
    [old, new] = table.list_keys("acme")
    assert (old.expires, new) == (10.0, second)
    table.revoke_key("tgp-2", ENTRY)
    table.revoke_key("tgp-2", ENTRY)  # changes nothing
    assert [key.is_valid(time.time()) for key in table.list_keys()] == [False, False, True]
    entries = store.audit.page()
    assert len(entries) == 6 and entries[0].details == {"weight": 1.0}
    assert store.audit.page(project="acme", after=entries[4].number) == entries[5:]
    assert store.audit.page(project="ghost") == []
    for change in ("UPDATE audit SET actor='x'", "DELETE FROM audit"):
        with pytest.raises(StoreError, match="append-only"), store.database.writing() as db:
            db.execute(change)
    assert store.audit.page() == entries


def test_entries_of_a_project_have_numbers_of_their_own(store: Store) -> None:
    """Gaps in the numbers would tell members of a project how much happens in others."""
    for n in range(7):
        store.audit.add(NewAuditEntry("operator", ("acme", "other", "other")[n % 3], "key created", str(n)))
    assert [(entry.number, entry.subject) for entry in store.audit.page(project="acme")] == [
        (1, "0"),
        (2, "3"),
        (3, "6"),
    ]
    assert [(entry.number, entry.subject) for entry in store.audit.page(project="acme", after=1, limit=1)] == [(2, "3")]
    assert [entry.subject for entry in store.audit.page(after=store.audit.page()[4].number)] == ["5", "6"]


def test_newest_entries_are_numbered_like_the_others(store: Store) -> None:
    for n in range(7):
        store.audit.add(NewAuditEntry("operator", ("acme", "other", "other")[n % 3], "key created", str(n)))
    for project in (None, "acme", "ghost"):
        entries = store.audit.page(project=project)
        for limit in (1, 2, 100):
            assert store.audit.page(project=project, limit=limit, newest=True) == entries[-limit:]
        for after in (entry.number for entry in entries):
            later = [entry for entry in entries if entry.number > after]
            assert store.audit.page(project=project, after=after, limit=1, newest=True) == later[-1:]


@pytest.mark.needs("postgres")
@pytest.mark.full
def test_project_schemas_share_only_the_cells(postgres_url: str) -> None:
    whole = SharedStore(parse_database_url(postgres_url))
    projects = [SharedStore(parse_database_url(locate_project(postgres_url, name))) for name in ("a", "b-1")]
    try:
        for one in (whole, *projects):
            finish_rollout(one, "same", "g")
            assert [row.id for row in one.sessions()] == ["same"] and one.events.newest() == 4
            reader = one.open_reader()
            with reader.snapshot():
                assert reader.find("same") is not None
            reader.close()
        whole.cells.register("c1", "cell", "http://c", 30.0)
        assert [cell.id for cell in projects[0].cells.list_cells()] == ["c1"]
        assert projects[1].cells.renew("c1") and not projects[1].cells.take_over("c1")
        again = SharedStore(parse_database_url(locate_project(postgres_url, "a")))  # opens without migration
        assert again.queries.sum_events()[0].turns == 1
        again.close()
    finally:
        for one in (whole, *projects):
            one.close()


def test_project_that_is_deleted_while_it_is_changed_is_unknown(store: Store) -> None:
    def delete_and_read() -> KnownProjects:
        store.projects.delete("acme", ENTRY)
        return read_projects(store.projects)

    store.projects.create(ProjectRow("acme"), ENTRY)
    projects = Projects(store.projects, store.audit, KeyRing(delete_and_read), lambda name: 0)
    with pytest.raises(NotFound, match="acme"):
        projects.change(OPERATOR_CALLER, "acme", 2.0, None)
