"""Test tiers reject missing marks, missing parts, failing tests, hanging tests and leftovers."""

from __future__ import annotations

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.nested import environment
from tests.speed import SLOWNESS, scaled
from tools import tier

pytestmark = pytest.mark.process
ROOT = Path(__file__).parents[1]
HEAD = "import asyncio, os, subprocess, sys, tempfile, time\nimport pytest\n"
UNMARKED = {
    "a process": "def test_planted(): subprocess.run(['true'])",
    "a process behind a helper": "def start(): subprocess.run(['true'])\ndef test_planted(): start()",
    "a process behind a fixture": "@pytest.fixture\ndef job(): subprocess.run(['true'])\ndef test_planted(job): pass",
    "a heavy part without a tier": "@pytest.mark.needs('docker')\ndef test_planted(): pass",
    "an unknown part": "@pytest.mark.needs('dokcer')\n@pytest.mark.full\ndef test_planted(): pass",
    "an imported function": "from subprocess import run\ndef test_planted(): run(['true'])",
    "a part behind a helper": (
        "from tests.needs import uses\n@uses('tokenizers')\ndef load(): pass\n@pytest.mark.process\ndef test_planted(): load()"
    ),
}
FAILING = """
def test_hidden():
    __import__('importlib').import_module('subprocess').Popen(['true']).wait()

def test_swallowed():
    try: __import__('importlib').import_module('subprocess').Popen(['true']).wait()
    except RuntimeError: pass

@pytest.mark.process
def test_program_of_part(): subprocess.run(['docker', 'ps'])

@pytest.mark.timeout(1)
@pytest.mark.process
def test_hanging(): time.sleep(600)
"""
FAILURES = {
    "test_hidden": "mark it with @pytest.mark.process",
    "test_swallowed": "mark it with @pytest.mark.process",
    "test_program_of_part": '@pytest.mark.needs("docker")',
    "test_hanging": "Timeout",
}
MODE = 0o755  # of the folder for temporary files, which is not the tier's own
SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); time.sleep(600)"
LEFTOVERS = f"""
def test_process(): subprocess.run(['sh', '-c', 'exec "$0" -c "$1" &', sys.executable, {SERVER!r}])
def test_folder(): os.chmod(tempfile.mkdtemp(prefix='planted-'), 0o500)
"""


def run_pytest(folder: Path, source: str | list[str], *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest with the checks of `tests/tiers.py` on planted test files: `test_planted.py`, or a numbered one for each source."""
    for number, text in enumerate([source] if isinstance(source, str) else source):
        name = "test_planted.py" if isinstance(source, str) else f"test_planted_{number}.py"
        (folder / name).write_text(HEAD + text + "\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rfEs", "-p", "tests.tiers", "-c", str(ROOT / "pyproject.toml")]
    inherited = {name: value for name, value in os.environ.items() if name not in ("CI", "TURNGATE_TIER_REPORT")}
    return subprocess.run(
        [*command, *options, "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        env={**inherited, "COLUMNS": "1000", **env},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )


def start_tier(folder: Path, source: str) -> subprocess.Popen[str]:
    """Start the `test` tier on one planted test file, without installing parts."""
    (folder / "test_planted.py").write_text(f"{HEAD}pytestmark = pytest.mark.process\n{source}\n")
    temporary = folder / "tmp"
    temporary.mkdir()
    temporary.chmod(MODE)
    planted = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder / "test_planted.py")]
    command = [sys.executable, str(ROOT / "tools" / "tier.py"), "test", "--no-parts", *planted]
    return subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run of all tests with wrong marks."""
    return run_pytest(tmp_path_factory.mktemp("refused"), [*UNMARKED.values()])


@pytest.mark.parametrize("case", UNMARKED)
def test_wrong_mark_fails_collection(refused: subprocess.CompletedProcess[str], case: str) -> None:
    output = refused.stdout + refused.stderr
    assert refused.returncode not in (0, 1, 5) and "passed" not in output, output
    [line] = [line for line in output.splitlines() if f"test_planted_{[*UNMARKED].index(case)}.py::" in line]
    assert "mark" in line or "unknown parts: dokcer" in line


def test_unknown_mark_fails_collection(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "@pytest.mark.heavy\ndef test_planted(): pass")
    assert done.returncode not in (0, 1, 5) and "passed" not in done.stdout, done.stdout
    assert "test_planted" in done.stdout and "'heavy' not found in `markers`" in done.stdout, done.stdout


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """A run of all tests that fail while they run."""
    return run_pytest(tmp_path_factory.mktemp("failed"), FAILING)


@pytest.mark.parametrize("name", FAILURES)
def test_process_without_mark_or_hanging_test_fails(failed: subprocess.CompletedProcess[str], name: str) -> None:
    assert failed.returncode == 1, failed.stdout
    lines = [line for line in failed.stdout.splitlines() if re.match(rf"(FAILED|ERROR) .*::{name} - ", line)]
    assert lines and all(FAILURES[name] in line for line in lines), failed.stdout


def test_tier_installs_the_parts_of_its_tests(tmp_path: Path) -> None:
    done = run_pytest(
        tmp_path, "@pytest.mark.needs('coder')\n@pytest.mark.real\ndef test_planted(): pass", "--complete"
    )
    assert done.returncode
    assert (
        "make test-real does not install the parts that these tests need: test_planted.py::test_planted" in done.stderr
    )


def test_missing_part_skips_locally_and_fails_in_ci(tmp_path: Path) -> None:
    source = "@pytest.mark.needs('tokenizers')\ndef test_planted(): pass"
    skipped = run_pytest(tmp_path, source, TURNGATE_CACHE=str(tmp_path / "empty"))
    assert skipped.returncode == 0 and "1 skipped" in skipped.stdout
    assert "run: python tools/parts.py tokenizers" in skipped.stdout
    failed = run_pytest(tmp_path, source, TURNGATE_CACHE=str(tmp_path / "empty"), CI="true")
    assert failed.returncode == 1 and "run: python tools/parts.py tokenizers" in failed.stdout


@pytest.mark.real
def test_failed_assertion_fails_tier(tmp_path: Path) -> None:
    done = start_tier(tmp_path, "def test_planted(): assert 1 == 2\ndef test_fine(): pass")
    output, _ = done.communicate(timeout=scaled(60))
    assert done.returncode == 1
    assert output.endswith("test: 1 passed, 1 failed, 0 skipped\n"), output


@pytest.mark.real
def test_run_without_results_fails_tier(tmp_path: Path) -> None:
    source = "@pytest.mark.alone\ndef test_planted(): os._exit(0)"
    done = start_tier(tmp_path, source)
    output, _ = done.communicate(timeout=scaled(60))
    assert done.returncode == 1 and "test: 0 passed" in output, output


@pytest.mark.real
def test_leftovers_fail_tier_and_are_removed(tmp_path: Path) -> None:
    done = start_tier(tmp_path, LEFTOVERS)
    output, _ = done.communicate(timeout=scaled(120))
    assert done.returncode == 1 and "test: 2 passed, 0 failed, 0 skipped" in output, output
    assert re.search("left behind: folder .*planted-", output), output
    [pid] = re.findall(r"left behind: process (\d+) \(listens on \d+\)", output)
    assert not Path(f"/proc/{pid}").exists()
    temporary = tmp_path / "tmp"
    assert not list(temporary.iterdir()) and temporary.stat().st_mode & 0o777 == MODE, (
        "the tier changed a folder that it did not create"
    )


@pytest.mark.real
def test_ctrl_c_stops_all_processes(tmp_path: Path) -> None:
    source = "def test_planted():\n    subprocess.run(['sh', '-c', 'sleep 612 & sleep 612'], start_new_session=True)"
    started = start_tier(tmp_path, source)
    deadline = time.monotonic() + scaled(60)
    while not (jobs := [pid for pid, command in tier.descendants(started.pid).items() if "sleep 612" in command]):
        assert time.monotonic() < deadline, "the planted test did not start"
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    output, _ = started.communicate(timeout=scaled(120))
    assert started.returncode == 130 and "interrupted" in output, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in jobs)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.full
def test_process_tests_of_a_file_share_a_worker(tmp_path: Path) -> None:
    source = """pytestmark = pytest.mark.process
@pytest.mark.parametrize("number", range(8))
def test_planted(number):
    with open(os.environ["WORKERS"], "a") as file:
        file.write(os.environ["PYTEST_XDIST_WORKER"] + " ")
    time.sleep(0.05)"""
    workers = tmp_path / "workers"
    done = run_pytest(tmp_path, source, "-n", "2", "--dist", "loadgroup", WORKERS=str(workers))
    assert done.returncode == 0, done.stdout
    assert len(workers.read_text().split()) == 8 and len(set(workers.read_text().split())) == 1


@pytest.mark.full
def test_sample_covers_every_value_and_leaves_other_cases_to_the_full_tier(tmp_path: Path) -> None:
    source = """
@pytest.mark.sample(3)
@pytest.mark.parametrize("dialect", ["chat", "messages", "gemini"])
@pytest.mark.parametrize("stream", [True, False])
def test_planted(dialect, stream): pass

@pytest.mark.repeat
def test_repetition(): pass
"""
    sample = run_pytest(tmp_path, source, "-m", "not full", "--collect-only").stdout
    assert re.findall(r"test_planted\[(\S+)\]", sample) == ["True-chat", "True-gemini", "False-messages"]
    assert "test_repetition" not in sample
    assert "3 passed" in run_pytest(tmp_path, source, "-m", tier.TIERS["test-all"].marks).stdout
    assert "4 passed" in run_pytest(tmp_path, source, "-m", tier.TIERS["soak"].marks).stdout


def test_tiers_with_heavy_parts_look_for_containers() -> None:
    assert {name for name, one in tier.TIERS.items() if one.uses_docker} == {"test-real", "test-all", "soak"}


def test_programs_load_one_root_certificate(tmp_path: Path) -> None:
    if not (env := tier._trust_one_certificate(tmp_path / "one.pem")):
        pytest.skip("this machine has no root certificates")
    assert ssl.create_default_context(cafile=env["SSL_CERT_FILE"]).cert_store_stats()["x509_ca"] == 1


def test_timeouts_scale_with_slowness() -> None:
    command = [sys.executable, "-c", "from tests.speed import scaled; print(scaled(1))"]

    def limit(slowness: str) -> float:
        env = {**os.environ, SLOWNESS: slowness}
        return float(subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout)

    assert limit("4") == 4 * limit("1") and limit("0.5") == limit("1")


def test_crashed_process_prints_its_stack() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV and 'File "<string>", line 1' in done.stderr
