"""The parts of `tools/swe_tasks.py` that need no Docker: its command line and the check of pinned releases."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tools import swe_tasks

pytestmark = pytest.mark.process

FILE = "parse-1.20.1.tar.gz"


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, swe_tasks.__file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)


def test_list_prints_every_task() -> None:
    done = run_tool("--list")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [pair.instance for pair in swe_tasks.PAIRS]


def test_unknown_name_error_lists_known_names() -> None:
    done = run_tool("--list", "--only", "nothing")
    assert done.returncode == 1
    assert "nothing" in done.stderr and "deepmerge" in done.stderr and "Traceback" not in done.stderr


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local package index, with an empty cache."""
    folder = tmp_path / "index" / "parse"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text(f'<a href="../parse/{FILE}#sha256=0">{FILE}</a>')
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder.parent)))
    thread = Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("TURNGATE_CACHE", str(tmp_path / "cache"))
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def test_release_is_fetched_once_and_must_match_pin(index: Path) -> None:
    (index / FILE).write_bytes(b"a release")
    pinned = hashlib.sha256(b"a release").hexdigest()
    with pytest.raises(swe_tasks.SweError, match="is not the expected release"):
        swe_tasks.archive("parse", "1.20.1", "0" * 64)
    assert swe_tasks.archive("parse", "1.20.1", pinned).read_bytes() == b"a release"
    (index / FILE).unlink()
    assert swe_tasks.archive("parse", "1.20.1", pinned).read_bytes() == b"a release"
    with pytest.raises(swe_tasks.SweError, match="404"):
        swe_tasks.archive("parse", "1.20.1", "0" * 64)
    with pytest.raises(swe_tasks.SweError, match=r"has no link to parse-9\.tar\.gz"):
        swe_tasks.archive("parse", "9", pinned)
