"""Tasks from rows of SWE data sets, errors for invalid rows, and real repositories with later commits hidden."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.needs import require
from tests.speed import scaled
from turngate.errors import TaskError
from turngate.tasks.loaders import swe
from turngate.tasks.task import Solution, Swe

pytestmark = pytest.mark.process

TEST_PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-x
+y
diff --git a/tests/data.json b/tests/data.json
--- a/tests/data.json
+++ b/tests/data.json
@@ -1 +1 @@
-1
+2
diff --git a/tests/test_old.py b/tests/test_old.py
deleted file mode 100644
--- a/tests/test_old.py
+++ /dev/null
@@ -1 +0,0 @@
-x
"""
CONFIG = {"install": "pip install -e .", "test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}


def row(**changes: Any) -> dict[str, Any]:
    fields = {
        "instance_id": "Org__repo-1",
        "repo": "Org/repo",
        "base_commit": "a" * 40,
        "problem_statement": "It breaks.\n",
        "hints_text": "The secret is in line 7.",
        "patch": "diff --git a/x b/x\n",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["tests/test_a.py::test_1"],
        "PASS_TO_PASS": '["tests/test_a.py::test_2", "tests/test_a.py::test_3[é]"]',
        "version": "1.0",
        "install_config": CONFIG,
        **changes,
    }
    return {name: value for name, value in fields.items() if value is not ...}


def grader(fields: dict[str, Any]) -> Swe:
    result = swe.build_task(fields, "rows.jsonl, row 1").grader
    assert isinstance(result, Swe)
    return result


def test_swe_rebench() -> None:
    task = swe.build_task(row(), "rows.jsonl, row 1")
    assert (task.id, task.workdir, task.source) == ("Org__repo-1", "/testbed", "rows.jsonl, row 1")
    assert task.image == "swerebench/sweb.eval.x86_64.org_1776_repo-1:latest"
    assert task.solution == Solution(patch="diff --git a/x b/x\n")
    assert "It breaks." in task.instruction and "Org/repo" in task.instruction and "secret" not in task.instruction
    found = grader(row())
    assert found.pass_to_pass == ("tests/test_a.py::test_2", "tests/test_a.py::test_3[é]")
    assert found.test_cmd == "pytest -rA tests/test_a.py", "data and deleted files are not tests"
    assert found.parser == "rebench:parse_log_pytest"
    assert "\npip install -e .\n" in found.install
    assert "conda activate testbed" in found.before
    assert "secret" not in repr(task)


def test_swe_rebench_v2() -> None:
    config = json.dumps({**CONFIG, "test_cmd": ["make build", "go test ./..."], "log_parser": "parse_log_gotest"})
    task = swe.build_task(
        row(install_config=config, language="go", image_name="docker.io/swerebenchv2/org-repo:1"), "r"
    )
    assert (task.image, task.workdir) == ("docker.io/swerebenchv2/org-repo:1", "/repo")
    found = task.grader
    assert isinstance(found, Swe)
    assert found.test_cmd == "make build\ngo test ./...", "the command is unchanged"
    assert (found.parser, found.install, found.before) == ("rebench:parse_log_gotest", "", "")
    assert task.metadata["language"] == "go"


def test_native_parser_and_command_with_test_files() -> None:
    found = grader(row(install_config={"test_cmd": "pytest tests/test_a.py -rA", "log_parser": "pytest"}))
    assert (found.test_cmd, found.parser, found.install) == ("pytest tests/test_a.py -rA", "pytest", "")


def test_swe_gym() -> None:
    fields = row(instance_id="getmoto__moto-7365", repo="getmoto/moto", install_config=...)
    assert swe.build_task(fields, "r").image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365:latest"
    assert grader(fields).test_cmd == "pytest -n0 -rA tests/test_a.py"
    fields |= {"repo": "python/mypy", "FAIL_TO_PASS": ["mypy/test/testcheck.py::TypeCheckSuite::check-a.test::testOne"]}
    fields |= {"PASS_TO_PASS": ["mypy/test/testcheck.py::TypeCheckSuite::check-a.test::testTwo"]}
    assert grader(fields).test_cmd == "pytest -n0 -rA -k 'testOne or testTwo'"


@pytest.mark.parametrize("repo", ["conan-io/conan", "Conan-IO/conan"])
def test_conan_is_tested_with_its_checkout_on_the_path(repo: str) -> None:
    assert "PYTHONPATH" in grader(row(repo=repo, install_config=...)).before


@pytest.mark.parametrize("install", ["exit 3", "false; true", "cd nowhere; nothing-like-this", "cat <<E\nx\nE"])
def test_failing_install_is_reported_and_does_not_stop(install: str) -> None:
    command = grader(row(install_config={**CONFIG, "install": install})).install
    for shell in ("sh", "bash"):
        arguments, limit = [shell, "-c", f"{command}\necho after"], scaled(20)
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=limit)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "after"
        assert ("failed" in done.stdout) == (install in ("exit 3", "cd nowhere; nothing-like-this"))


SCRIPT = """\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
conda activate testbed
cd /testbed
export LANG=en_US.UTF-8
git config --global --add safe.directory /testbed
git status
python -m pip install -e .
git checkout aaaa tests/test_a.py
git apply -v - <<'EOF_1'
diff --git a/x b/x
EOF_1
: '>>>>> Start Test Output'
pytest -rA astropy/tests/test_a.py
: '>>>>> End Test Output'
git checkout aaaa tests/test_a.py
"""


def test_swe_bench_eval_script() -> None:
    fields = row(
        repo="astropy/astropy",
        instance_id="astropy__astropy-1",
        install_config=...,
        eval_script=SCRIPT,
        eval_type="pass_and_fail",
        log_parser="parse_log_astropy",
    )
    assert swe.build_task(fields, "r").image == "swebench/sweb.eval.x86_64.astropy_1776_astropy-1:latest"
    found = grader(fields)
    assert (found.test_cmd, found.parser) == ("pytest -rA astropy/tests/test_a.py", "swebench:parse_log_astropy")
    assert found.before.splitlines() == [
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "export LANG=en_US.UTF-8",
        "python -m pip install -e .",
    ]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"FAIL_TO_PASS": "tests/test_a.py::test_1"},
            r"rows.jsonl, row 7 \(Org__repo-1\): FAIL_TO_PASS must be a list of test names, but .*not valid JSON",
        ),
        ({"FAIL_TO_PASS": '"tests/test_a.py::test_1"'}, "FAIL_TO_PASS must be a list of test names, not a string"),
        ({"FAIL_TO_PASS": 17}, "FAIL_TO_PASS must be a list of test names, not a number"),
        ({"FAIL_TO_PASS": {"a": 1}}, "FAIL_TO_PASS must be a list of test names, not an object"),
        ({"PASS_TO_PASS": ["a", 3]}, "PASS_TO_PASS must contain only test names, but contains a number"),
        ({"PASS_TO_PASS": ["a", None]}, "PASS_TO_PASS must contain only test names, but contains null"),
        ({"PASS_TO_PASS": ["a", ""]}, "PASS_TO_PASS must contain only test names, but contains an empty string"),
        ({"PASS_TO_PASS": ...}, "PASS_TO_PASS is missing"),
        ({"FAIL_TO_PASS": []}, "FAIL_TO_PASS is empty"),
        ({"base_commit": "main; rm -rf /"}, "base_commit must match .*, but is 'main; rm -rf /'"),
        ({"repo": "../../etc"}, "repo must match"),
        ({"repo": ...}, "repo is missing"),
        ({"problem_statement": 3}, "problem_statement must be a string, not a number"),
        ({"problem_statement": " "}, "problem_statement is empty"),
        ({"test_patch": ""}, "test_patch is empty"),
        ({"install_config": "pytest"}, "install_config must be an object, but 'pytest' is not valid JSON"),
        ({"install_config": [1]}, "install_config must be an object, not a list"),
        (
            {"PASS_TO_PASS": "[" * 5000},
            "PASS_TO_PASS must be a list of test names, but its JSON is nested too deeply",
        ),
        ({"install_config": '{"a":' * 5000}, "install_config must be an object, but its JSON is nested too deeply"),
        ({"install_config": {"log_parser": "pytest"}}, "install_config.test_cmd is missing"),
        ({"install_config": {"test_cmd": "pytest"}}, "install_config.log_parser is missing"),
        (
            {"install_config": {**CONFIG, "test_cmd": {"a": 1}}},
            "install_config.test_cmd must be a string or a list",
        ),
        ({"language": "go"}, "image_name is missing"),
        ({"install_config": ..., "eval_script": "pytest"}, "eval_script has no lines between"),
        ({"install_config": ..., "eval_script": SCRIPT, "eval_type": "fail_only"}, "eval_type"),
        ({"install_config": ...}, "install_config and eval_script are both missing.*unknown how to test Org/repo.*"),
    ],
)
def test_invalid_row_error_names_field(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TaskError, match=complaint):
        swe.build_task(row(**changes), "rows.jsonl, row 7")


# ── hiding later commits ────────────────────────────────────────────────────────────────────────────────────────────


class Repo:
    """A repository with commits before, at and after the base. Commits differ in the content of the file `a`."""

    def __init__(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.env = {"PATH": os.environ["PATH"], "HOME": str(path.parent), "GIT_CONFIG_NOSYSTEM": "1"}

    def git(self, *words: str, ok: bool = True) -> str:
        options = {"cwd": self.path, "env": self.env, "encoding": "utf-8", "errors": "replace", "timeout": scaled(60)}
        done = subprocess.run(["git", *words], capture_output=True, **options)
        assert not ok or done.returncode == 0, done.stderr
        return done.stdout.strip() if ok else done.stdout + done.stderr

    def commit(self, text: str) -> str:
        (self.path / "a").write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", text)
        return self.git("rev-parse", "HEAD")

    def hide(self, base: str) -> subprocess.CompletedProcess[str]:
        """Hide later commits as the setup of a task does in a sandbox."""
        command = ["sh", "-e", "-c", swe.HIDE_HISTORY.replace("@BASE@", base)]
        return subprocess.run(command, cwd=self.path, env=self.env, capture_output=True, text=True, timeout=scaled(120))


def make_repo(path: Path) -> tuple[Repo, str, str]:
    repo = Repo(path)
    repo.git("init", "--quiet", "--initial-branch", "devel")
    repo.git("config", "user.name", "a")
    repo.git("config", "user.email", "a@b")
    repo.commit("past")
    repo.git("tag", "v1")
    repo.git("tag", "--annotate", "v1.1", "--message", "old")
    base = repo.commit("base")
    future = repo.commit("the fix")
    return repo, base, future


def assert_future_is_hidden(repo: Repo, base: str, *futures: str) -> None:
    assert set(repo.git("log", "--all", "--format=%s").splitlines()) <= {"past", "base", "The environment of the task"}
    assert repo.git("fsck", "--unreachable", "--no-reflogs", "--full") == ""
    for future in futures:
        assert "bad object" in repo.git("show", future, ok=False)
    assert repo.git("remote") == "" and repo.git("stash", "list") == "" and repo.git("notes", "list", ok=False) == ""
    assert set(repo.git("reflog", "--all", "--format=%H").splitlines()) <= {base, repo.git("rev-parse", "HEAD")}
    assert "the fix" not in repo.git("cat-file", "--batch-all-objects", "--batch")
    assert not [name for name in os.listdir(repo.path / ".git") if name.startswith("turngate")]


def test_every_trace_of_later_commits_is_removed(tmp_path: Path) -> None:
    repo, base, future = make_repo(tmp_path / "r")
    repo.git("tag", "--annotate", "v2", "--message", "new")
    repo.git("branch", "next")
    repo.git("notes", "add", "--message", "the future")
    repo.git("update-ref", "refs/pull/7/head", future)
    (repo.path / "a").write_text("the fix, stashed")
    repo.git("stash", "--quiet")
    lost = repo.commit("the fix, lost")
    repo.git("reset", "--quiet", "--hard", base)
    assert repo.hide(base).returncode == 0
    assert_future_is_hidden(repo, base, future, lost)
    assert repo.git("rev-parse", "HEAD") == base and repo.git("symbolic-ref", "--short", "HEAD") == "devel"
    assert repo.git("status", "--porcelain") == ""
    assert repo.git("tag").split() == ["v1", "v1.1"], "version numbers may depend on older tags"
    assert repo.hide(base).returncode == 0, "hiding twice is fine"


def test_clone_with_packed_refs_and_objects(tmp_path: Path) -> None:
    origin, base, future = make_repo(tmp_path / "origin")
    origin.git("tag", "v2")
    repo = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", str(origin.path), ".")
    repo.git("remote", "add", "upstream", str(origin.path))
    repo.git("fetch", "--quiet", "upstream", "refs/heads/*:refs/all/*")
    repo.git("pack-refs", "--all")
    repo.git("gc", "--quiet")
    (pack,) = (repo.path / ".git/objects/pack").glob("*.pack")
    pack.with_suffix(".keep").touch()
    repo.git("commit-graph", "write", "--reachable")
    assert repo.hide(base).returncode == 0, "the checked-out tree was from a later commit"
    assert_future_is_hidden(repo, base, future)
    assert (repo.path / "a").read_text() == "base" and repo.git("status", "--porcelain") == ""


def test_objects_shared_with_another_repository(tmp_path: Path) -> None:
    origin, base, future = make_repo(tmp_path / "origin")
    repo = Repo(tmp_path / "clone")
    repo.git("clone", "--quiet", "--shared", str(origin.path), ".")
    assert repo.hide(base).returncode == 0
    assert_future_is_hidden(repo, base, future)


def test_changes_from_image_build_are_kept(tmp_path: Path) -> None:
    for how in ("as a commit", "as it is"):
        repo, base, future = make_repo(tmp_path / how)
        repo.git("reset", "--quiet", "--hard", base)
        (repo.path / "a").write_text("pinned")
        (repo.path / "built.so").write_text("not in git")
        if how == "as a commit":
            repo.git("commit", "--quiet", "--all", "--message", "SWE-bench")
        copy = Repo(Path(shutil.copytree(repo.path, tmp_path / f"{how}, once more")))
        assert repo.hide(base).returncode == copy.hide(base).returncode == 0
        assert (repo.path / "a").read_text() == "pinned" and (repo.path / "built.so").exists()
        assert repo.git("status", "--porcelain", "--untracked-files=no") == ""
        assert repo.git("rev-parse", "HEAD^") == base
        assert repo.git("rev-parse", "HEAD") == copy.git("rev-parse", "HEAD"), "the commit differs between sandboxes"
        assert_future_is_hidden(repo, base, future)


def test_repository_hooks_do_not_run(tmp_path: Path) -> None:
    repo, base, _ = make_repo(tmp_path / "r")
    for name in ("post-checkout", "pre-commit", "reference-transaction"):
        hook = repo.path / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\necho ran > {tmp_path}/ran\n")
        hook.chmod(0o755)
    assert repo.hide(base).returncode == 0
    assert not (tmp_path / "ran").exists()


def test_missing_repository_and_missing_commit(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    assert Repo(tmp_path / "plain").hide("a" * 40).returncode == 0
    repo, *_ = make_repo(tmp_path / "r")
    done = repo.hide("a" * 40)
    assert done.returncode == 1 and f"has no commit {'a' * 40}" in done.stderr


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users can read, unlike those of pytest."""
    require("root")
    with tempfile.TemporaryDirectory(prefix="turngate-test-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.needs("root")
def test_unprivileged_user_in_repository_owned_by_root(open_folder: Path) -> None:
    repo, base, future = make_repo(open_folder / "r")
    subprocess.run(["chmod", "-R", "a+rwX", str(repo.path)], check=True)
    home = open_folder / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)
    repo.env["HOME"] = str(home)
    command = ["sh", "-e", "-c", swe.HIDE_HISTORY.replace("@BASE@", base)]
    done = subprocess.run(
        command, cwd=repo.path, env=repo.env, user=12345, group=12345, extra_groups=[], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    log = subprocess.run(
        ["git", "log", "--all", "--format=%s"], cwd=repo.path, env=repo.env, user=12345, capture_output=True
    )
    assert log.stdout.split() == [b"base", b"past"], "git must work for the agent"
    repo.env["HOME"] = str(open_folder)
    repo.git("config", "--global", "--add", "safe.directory", "*")
    assert_future_is_hidden(repo, base, future)
