"""The search itself: whatever is planted in the open is found, in every spelling and at every kind of place that the full runs look at."""

from __future__ import annotations

import base64
import gzip
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import httpx
import pyarrow  # type: ignore[import-untyped]
import pytest
from pyarrow import parquet

from tests.secrets.kit import PROCESSES, PROVIDER_KEY, Evidence, Planted, Processes, Provider, house
from tests.speed import scaled

SPELLINGS: dict[str, Callable[[str], str]] = {
    "itself": lambda value: value,
    "in a header": lambda value: f"authorization: Bearer {value}, and more",
    "base64": lambda value: base64.b64encode(value.encode()).decode(),
    "base64 with something before it": lambda value: base64.b64encode(f"me:{value}".encode()).decode(),
    "URL-safe base64 with more before it": lambda value: base64.urlsafe_b64encode(f"user:{value}!".encode()).decode(),
    "URL-quoted": lambda value: f"https://example.org/?key={quote(value, safe='')}",
    "hex": lambda value: value.encode().hex(),
    "HEX": lambda value: value.encode().hex().upper(),
    "JSON with escaped slashes": lambda value: json.dumps(value).replace("/", "\\/"),
    "cut off": lambda value: value[:-6] + "…",
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_leak_is_found_in_every_spelling(spelling: str) -> None:
    planted, evidence = Planted(), Evidence()
    key, other = planted.new("a key", "sk-{}"), planted.new("another")
    evidence.add("a place", f"before {SPELLINGS[spelling](key)} after")
    evidence.add("a clean place", "nothing of interest here")
    found = planted.found(evidence)
    assert {(one.where, one.secret) for one in found} == {("a place", "a key")}
    assert planted.found(evidence, but=("a key",)) == [] and other not in repr(found) and key not in repr(found)


def test_a_leak_is_found_in_every_kind_of_file(tmp_path: Path) -> None:
    planted, evidence = Planted(), Evidence()
    key = planted.new("a key")
    (tmp_path / "log").write_text(f"x\n{key}\n")
    (tmp_path / "packed.gz").write_bytes(gzip.compress(key.encode()))
    parquet.write_table(pyarrow.table({"a": [f"it is {key}"]}), tmp_path / "rows.parquet", compression="zstd")
    (tmp_path / f"named-{quote(key, safe='')}").touch()
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t (a TEXT)")
        db.execute("INSERT INTO t VALUES (?)", (key,))
        db.commit()
        evidence.add_folder(tmp_path)
    db.close()
    kinds = ("log", "packed.gz", "rows.parquet", "named-", "a.db")
    assert [kind for kind in kinds if not any(kind in one.where for one in planted.found(evidence))] == []


def test_a_file_that_may_hold_a_secret_may_be_read_by_its_owner_only(tmp_path: Path) -> None:
    planted, evidence = Planted(), Evidence()
    (tmp_path / "admin-key").write_text(planted.new("a key"))
    (tmp_path / "admin-key").chmod(0o640)
    with pytest.raises(AssertionError, match="can be read by others"):
        evidence.add_folder(tmp_path, but=("admin-key",))
    (tmp_path / "admin-key").chmod(0o600)
    evidence.add_folder(tmp_path, but=("admin-key",))
    assert planted.found(evidence) == []


@pytest.mark.process
def test_a_leak_into_the_process_list_is_found() -> None:
    planted, evidence = Planted(), Evidence()
    with Processes().watching() as processes:
        sleeping = [sys.executable, "-c", "import time; time.sleep(3600)", "--key", planted.new("a key")]
        with subprocess.Popen(sleeping) as child:
            looks = processes.looks
            while processes.looks < looks + 2:
                time.sleep(0.01)
            child.kill()
    evidence.add(PROCESSES, b"\n".join(processes.lines()))
    assert {one.secret for one in planted.found(evidence)} == {"a key"}


@pytest.mark.process
def test_a_leak_in_an_answer_and_in_what_a_program_prints_is_found() -> None:
    """The stand-in of a provider does repeat what it was sent, and a program that prints its environment is heard."""
    with house() as home, Provider().running() as provider:
        key = home.env[PROVIDER_KEY]
        with httpx.Client(trust_env=False, timeout=scaled(5)) as client:
            reply = client.post(f"{provider.url}/v1/x", headers={"authorization": f"Bearer {key}"}, content=b"FAIL-500")
        home.evidence.add_answer(reply)
        home.ran("-c", "import os; print(os.environ)", program=(sys.executable,))
        found = {(one.where, one.secret) for one in home.planted.found(home.evidence)}
    assert ("the answer to POST /v1/x", "the provider's key") in found and provider.keys == {f"Bearer {key}"}
    printed = {secret for where, secret in found if where.startswith("stdout of")}
    assert printed == {"HF_TOKEN", "E2B_API_KEY", "a variable of the host", "the provider's key"}
