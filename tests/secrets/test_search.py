"""The search finds planted secrets in every encoding and in every kind of place that the full runs search."""

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

from tests.secrets.kit import PROCESSES, PROVIDER_KEY, Evidence, Planted, Processes, Provider, open_workspace
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
def test_leak_is_found_in_every_encoding(spelling: str) -> None:
    planted, evidence = Planted(), Evidence()
    key, other = planted.new("a key", "sk-{}"), planted.new("another")
    evidence.add("a place", f"before {SPELLINGS[spelling](key)} after")
    evidence.add("a clean place", "nothing of interest here")
    found = planted.find(evidence)
    assert {(leak.where, leak.secret) for leak in found} == {("a place", "a key")}
    assert planted.find(evidence, allow=("a key",)) == [] and other not in repr(found) and key not in repr(found)


def test_leak_is_found_in_every_file_format(tmp_path: Path) -> None:
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
    assert [kind for kind in kinds if not any(kind in leak.where for leak in planted.find(evidence))] == []


def test_file_with_secret_must_be_private(tmp_path: Path) -> None:
    planted, evidence = Planted(), Evidence()
    (tmp_path / "admin-key").write_text(planted.new("a key"))
    (tmp_path / "admin-key").chmod(0o640)
    with pytest.raises(AssertionError, match="can be read by others"):
        evidence.add_folder(tmp_path, allow=("admin-key",))
    (tmp_path / "admin-key").chmod(0o600)
    evidence.add_folder(tmp_path, allow=("admin-key",))
    assert planted.find(evidence) == []


@pytest.mark.process
def test_leak_in_process_list_is_found() -> None:
    planted, evidence = Planted(), Evidence()
    with Processes().watch() as processes:
        sleeping = [sys.executable, "-c", "import time; time.sleep(3600)", "--key", planted.new("a key")]
        with subprocess.Popen(sleeping) as child:
            looks = processes.looks
            while processes.looks < looks + 2:
                time.sleep(0.01)
            child.kill()
    evidence.add(PROCESSES, b"\n".join(processes.lines()))
    assert {leak.secret for leak in planted.find(evidence)} == {"a key"}


@pytest.mark.process
def test_leak_in_response_and_program_output_is_found() -> None:
    """The provider's stand-in repeats its request, and a program that prints its environment is recorded."""
    with open_workspace() as workspace, Provider().serve() as provider:
        key = workspace.env[PROVIDER_KEY]
        with httpx.Client(trust_env=False, timeout=scaled(5)) as client:
            reply = client.post(f"{provider.url}/v1/x", headers={"authorization": f"Bearer {key}"}, content=b"FAIL-500")
        workspace.evidence.add_response(reply)
        workspace.run("-c", "import os; print(os.environ)", program=(sys.executable,))
        found = {(leak.where, leak.secret) for leak in workspace.planted.find(workspace.evidence)}
    assert ("the answer to POST /v1/x", "the provider's key") in found and provider.keys == {f"Bearer {key}"}
    printed = {secret for where, secret in found if where.startswith("stdout of")}
    assert printed == {"HF_TOKEN", "E2B_API_KEY", "a variable of the host", "the provider's key"}
