"""Build tasks from rows of SWE data sets: SWE-Gym, SWE-bench, SWE-rebench and SWE-rebench V2.

A row contains the issue, the commit and the tests. Data sets differ in how they specify the image, the location of the repository in the
image, the test command, and the parser for its output. This module determines all of these.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Literal

import msgspec

from turngate.errors import TaskError
from turngate.tasks.task import Solution, Swe, Task, check_instruction, to_task_id
from turngate.types import Json

DataSet = Literal["swe-gym", "swe-bench", "swe-rebench", "swe-rebench-v2"]

# The test commands of SWE-Gym's repositories, which its rows do not contain.
GYM_COMMANDS: Mapping[str, str] = {
    "python/mypy": "pytest -n0 -rA",
    "getmoto/moto": "pytest -n0 -rA",
    "conan-io/conan": "pytest -n0 -rA",
    "dask/dask": "pytest -n0 -rA --color=no",
    "project-monai/monai": "pytest -rA",
    "iterative/dvc": "pytest -rA",
    "bokeh/bokeh": "pytest -rA -n0",
    "modin-project/modin": "pytest -n0 -rA",
    "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header",
    "pandas-dev/pandas": "pytest -rA --tb=long",
    "facebookresearch/hydra": "pytest -rA --tb=long",
}
# Repositories whose cases are in data files that pytest does not collect, so the cases are selected by name.
_SELECTED_BY_NAME = ("python/mypy",)

# Does nothing if the image has no conda.
ACTIVATE_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
)

INSTRUCTION = """\
Your working folder is a checkout of the repository {repo}. The following issue was reported:

<issue>
{issue}
</issue>

Change the code in your working folder so that it resolves the issue and breaks nothing else. The project's dependencies are installed.
Hidden tests decide whether the issue is resolved. Changes to the project's existing tests are ignored. Stop when you are done: the files
in your working folder are your answer.
"""

_COMMIT = re.compile(r"[0-9a-fA-F]{7,64}")
_REPO = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")
_ID = re.compile(r"[A-Za-z0-9_.-]+")
_DIFF_HEADER = re.compile(r"^diff --git a/(.+) b/(.+)$", re.MULTILINE)
_NON_TEST_SUFFIXES = (
    ".json",
    ".png",
    "csv",
    ".txt",
    ".md",
    ".jpg",
    ".jpeg",
    ".pkl",
    ".yml",
    ".yaml",
    ".toml",
)  # the same list as in swebench
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"

# Removes everything later than `base_commit` from a checkout. Runs with `sh`, as the sandbox's user, and does nothing without a
# repository. Finally, it verifies that no later object remains.
HIDE_HISTORY = r"""
set -eu
[ -e .git ] || exit 0
[ -d .git ] || { echo "setup: .git is not a folder, so later history cannot be removed" >&2; exit 1; }
git rev-parse --git-dir >/dev/null 2>&1 || git config --global --add safe.directory "$PWD"
g() {
  git -c core.hooksPath=/dev/null -c gc.auto=0 -c maintenance.auto=false -c core.logAllRefUpdates=false \
    -c commit.gpgSign=false -c core.commitGraph=false -c advice.detachedHead=false -c user.name=task -c user.email=task@localhost "$@"
}
base=$(g rev-parse --verify --quiet "@BASE@^{commit}") || { echo "setup: the repository has no commit @BASE@" >&2; exit 1; }
branch=$(g symbolic-ref --quiet --short HEAD) || branch=main
head=$(g rev-parse HEAD)
# SWE-bench images have one commit on top of the base, with changes from building the image that the tests need.
if [ "$head" != "$base" ] && [ "$(g log -1 --format=%s%P HEAD)" != "SWE-bench$base" ]; then
  g checkout --quiet --force --detach "$base"
else
  g checkout --quiet --detach
  g reset --quiet --soft "$base"
fi
g add --update
if ! g diff --cached --quiet; then
  date=$(g log -1 --format=%cI "$base")
  GIT_AUTHOR_DATE=$date GIT_COMMITTER_DATE=$date g commit --quiet --no-verify -m "The environment of the task"
fi
head=$(g rev-parse HEAD)
g remote | while read -r name; do g remote remove "$name"; done
# Earlier tags stay, because version numbers are derived from them.
g for-each-ref --merged "$head" --format='%(refname)' refs/tags >.git/turngate-kept
g for-each-ref --format='%(refname)' >.git/turngate-refs
awk 'FILENAME == ARGV[1] { kept[$0] = 1; next } !($0 in kept) { print "delete " $0 }' \
  .git/turngate-kept .git/turngate-refs >.git/turngate-gone
g update-ref --no-deref --stdin <.git/turngate-gone
g checkout --quiet -B "$branch"
g reflog expire --expire=now --expire-unreachable=now --all
cd .git
rm -rf logs worktrees rebase-apply rebase-merge sequencer
rm -f FETCH_HEAD ORIG_HEAD MERGE_HEAD MERGE_MSG CHERRY_PICK_HEAD REVERT_HEAD AUTO_MERGE BISECT_* objects/pack/*.keep
rm -rf objects/info/commit-graph objects/info/commit-graphs objects/pack/multi-pack-index*
cd ..
left() {
  g cat-file --batch-all-objects --batch-check='%(objectname)' >.git/turngate-all
  g rev-list --objects --all --indexed-objects >.git/turngate-reached
  awk 'FILENAME == ARGV[1] { reached[$1] = 1; next } !($1 in reached) { print $1 }' \
    .git/turngate-reached .git/turngate-all >.git/turngate-left
}
left
if [ -s .git/turngate-left ]; then
  g repack -a -d -q
  rm -f .git/objects/info/alternates
  g prune --expire=now
  g prune-packed -q
  left
  if [ -s .git/turngate-left ]; then echo "setup: could not remove later commits from the repository" >&2; exit 1; fi
fi
rm -f .git/turngate-*
"""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that run a row's tests, and the parser for their output."""

    test_cmd: str
    parser: str
    install: str = ""
    before: str = ""


class SweRow:
    """Reads the fields of a row and checks their types. Errors name the file, the row, the instance and the field."""

    def __init__(self, fields: Mapping[str, Json], where: str) -> None:
        self._fields = fields
        self.where = where
        self.id = "?"
        self.id = self.text("instance_id")

    def error(self, field: str, problem: str) -> TaskError:
        return TaskError(f"task: {self.where} ({self.id}): {field} {problem}", param=field)

    def has(self, field: str) -> bool:
        return self._fields.get(field) not in (None, "")

    def text(self, field: str, default: str | None = None, *, pattern: re.Pattern[str] | None = None) -> str:
        value = self._fields.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if not isinstance(value, str):
            raise self.error(field, f"must be a string, not {_type_name(value)}")
        if not value.strip() and default is None:
            raise self.error(field, "is empty")
        if pattern is not None and not pattern.fullmatch(value):
            raise self.error(field, f"must match {pattern.pattern}, but is {value[:80]!r}")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        """Return a field's list of names. The list may be encoded as a JSON string. Any other string is rejected, never split."""
        value = self._fields.get(field)
        if value is None:
            raise self.error(field, "is missing; set it to a list of test names")
        if isinstance(value, str):
            value = self._parse(field, value, "a list of test names")
        if not isinstance(value, list | tuple):
            raise self.error(field, f"must be a list of test names, not {_type_name(value)}")
        if invalid := [item for item in value if not isinstance(item, str) or not item]:
            found = "an empty string" if invalid[0] == "" else _type_name(invalid[0])
            raise self.error(
                field, f"must contain only test names, but contains {found}; each name must be a non-empty string"
            )
        return tuple(value)

    def table(self, field: str) -> SweRow | None:
        """Return the object in a field, or None if the field is empty. The object may be encoded as a JSON string.

        In the returned row, the names of the object's fields start with `field` and a dot.
        """
        value = self._fields.get(field)
        if isinstance(value, str) and value.strip():
            value = self._parse(field, value, "an object")
        if value in (None, "", {}):
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, f"must be an object, not {_type_name(value)}")
        inner = {f"{field}.{name}": item for name, item in value.items()}
        return SweRow({**inner, "instance_id": self.id}, self.where)

    def commands(self, field: str) -> tuple[str, ...]:
        """Return the shell commands in a field that contains one command or a list of them. Return an empty tuple if there are none."""
        value = self._fields.get(field)
        if value is None:
            return ()
        commands = (value,) if isinstance(value, str) else value
        if not isinstance(commands, list | tuple) or not all(isinstance(item, str) for item in commands):
            found = "a list with other values" if isinstance(commands, list | tuple) else _type_name(value)
            raise self.error(field, f"must be a string or a list of strings, not {found}")
        return tuple(command for command in commands if command.strip())

    def is_list(self, field: str) -> bool:
        return isinstance(self._fields.get(field), list | tuple)

    def _parse(self, field: str, text: str, expected: str) -> Json:
        try:
            return json.loads(text)
        except RecursionError:
            raise self.error(field, f"must be {expected}, but its JSON is nested too deeply") from None
        except ValueError:
            raise self.error(field, f"must be {expected}, but {text[:80]!r} is not valid JSON") from None


def _type_name(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        int: "a number",
        float: "a number",
        bool: "true or false",
        str: "a string",
    }
    return names.get(type(value), "null" if value is None else type(value).__name__)


def is_swe_row(fields: Mapping[str, Json]) -> bool:
    """Return whether a row belongs to one of the SWE data sets, judging by its fields."""
    return "instance_id" in fields and "problem_statement" in fields


def build_task(fields: Mapping[str, Json], where: str) -> Task:
    """Build a task from a row. `where` names the file and row in messages."""
    row = SweRow(fields, where)
    row.text("instance_id", pattern=_ID)
    repo = row.text("repo", pattern=_REPO)
    base = row.text("base_commit", pattern=_COMMIT)
    test_patch = row.text("test_patch")
    fail_to_pass = row.names("FAIL_TO_PASS")
    if not fail_to_pass:
        raise row.error(
            "FAIL_TO_PASS", "is empty, so doing nothing would solve the task; name the tests that must pass"
        )
    pass_to_pass = row.names("PASS_TO_PASS")
    data_set = detect_data_set(row, repo)
    config = _eval_config(row, data_set, repo, (*fail_to_pass, *pass_to_pass))
    patch = row.text("patch", "")
    issue = row.text("problem_statement").strip()
    return Task(
        id=to_task_id(row.id),
        instruction=check_instruction(INSTRUCTION.format(repo=repo, issue=issue), f"{where}: problem_statement"),
        setup=HIDE_HISTORY.replace("@BASE@", base),
        image=_image(row, data_set),
        workdir=f"/{repo.split('/')[1]}" if data_set == "swe-rebench-v2" else "/testbed",
        grader=Swe(
            repo=repo,
            base_commit=base,
            test_patch=test_patch,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            test_cmd=config.test_cmd,
            parser=config.parser,
            install=config.install,
            before=config.before,
        ),
        solution=Solution(patch=patch) if patch.strip() else None,
        metadata={
            "data_set": data_set,
            "repo": repo,
            "base_commit": base,
            **{name: row.text(name) for name in ("version", "language") if row.has(name)},
        },
        source=where,
    )


def detect_data_set(row: SweRow, repo: str) -> DataSet:
    """Return the data set that a row belongs to, judging by its fields and repository."""
    if row.has("install_config"):
        return "swe-rebench-v2" if row.has("language") else "swe-rebench"
    return "swe-gym" if repo.lower() in GYM_COMMANDS else "swe-bench"


def _image(row: SweRow, data_set: DataSet) -> str:
    """Return the image that the row names, or derive its name from the instance id.

    In a derived name, `__` is replaced by the data set's separator. Names for SWE-rebench V2 cannot be derived.
    """
    for column in ("image_name", "docker_image", "image"):
        if row.has(column):
            return row.text(column)
    name = row.id.lower()
    match data_set:
        case "swe-gym":
            return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest"
        case "swe-bench":
            return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
        case "swe-rebench":
            return f"swerebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
        case "swe-rebench-v2":
            raise row.error(
                "image_name", "is missing; set it, because the image names of SWE-rebench V2 cannot be derived"
            )


# ── how the tests are run ───────────────────────────────────────────────────────────────────────────────────────────


def _eval_config(row: SweRow, data_set: DataSet, repo: str, cases: Sequence[str]) -> EvalConfig:
    if (config := row.table("install_config")) is not None:
        return _config_from_row(row, config, data_set)
    if row.has("eval_script"):
        return _config_from_script(row, repo)
    if data_set == "swe-gym":
        return _config_for_gym(row, repo, cases)
    return _config_from_swebench(row, repo)


def _config_from_row(row: SweRow, config: SweRow, data_set: DataSet) -> EvalConfig:
    """Read the configuration of a SWE-rebench row from the row itself.

    The test files are appended to the test command, unless the row is from SWE-rebench V2 or the command is a list.
    """
    commands = config.commands("install_config.test_cmd")
    if not commands:
        raise row.error("install_config.test_cmd", "is missing or empty; set it to the command that runs the tests")
    parser = config.text("install_config.log_parser")
    whole = data_set == "swe-rebench-v2" or config.is_list("install_config.test_cmd")
    return EvalConfig(
        test_cmd="\n".join(commands) if whole else append_files(commands[0], find_test_files(row.text("test_patch"))),
        parser=f"rebench:{parser}" if parser.startswith("parse_log_") else parser,
        install=""
        if data_set == "swe-rebench-v2"
        else _reinstall_command("\n".join(config.commands("install_config.install"))),
        before="" if data_set == "swe-rebench-v2" else ACTIVATE_CONDA,
    )


def _config_from_script(row: SweRow, repo: str) -> EvalConfig:
    """Read the configuration of a SWE-bench row from its `eval_script`, a field added with version 5 of the `swebench` package.

    The lines between the script's markers run the tests. The lines before its first `git checkout` or `git apply` set up the environment.
    The grader itself resets and patches the tests.
    """
    if row.text("eval_type", "pass_and_fail") != "pass_and_fail":
        raise row.error(
            "eval_type",
            "must be pass_and_fail; otherwise, tests that are not reported would count as passed",
        )
    lines = row.text("eval_script").splitlines()
    start = next((n for n, line in enumerate(lines) if _START in line), None)
    end = next((n for n, line in enumerate(lines) if _END in line), None)
    if start is None or end is None or end <= start + 1:
        raise row.error("eval_script", f"has no lines between {_START!r} and {_END!r}")
    before = []
    for line in lines[:start]:
        if line.startswith(("git checkout", "git apply")):
            break
        if not line.startswith(("#!", "set -", "git ", "cd ")) and line.strip():
            before.append(line)
    parser = row.text("log_parser", repo)
    return EvalConfig(test_cmd="\n".join(lines[start + 1 : end]), parser=f"swebench:{parser}", before="\n".join(before))


def _config_for_gym(row: SweRow, repo: str, cases: Sequence[str]) -> EvalConfig:
    command = GYM_COMMANDS[repo.lower()]
    if repo.lower() in _SELECTED_BY_NAME:
        names = dict.fromkeys(case.rpartition("::")[2].partition("[")[0] for case in cases)
        command = f"{command} -k {shlex.quote(' or '.join(names))}"
    else:
        command = append_files(command, find_test_files(row.text("test_patch")))
    path = "\nexport PYTHONPATH=${PYTHONPATH:-}:$(pwd)" if repo.lower() == "conan-io/conan" else ""
    return EvalConfig(test_cmd=command, parser="pytest", before=ACTIVATE_CONDA + path)


def _config_from_swebench(row: SweRow, repo: str) -> EvalConfig:
    """Read the configuration of an older SWE-bench row from the `swebench` package. Only versions before 5 contain it."""
    missing = (
        f"and eval_script are both missing, so it is unknown how to test {repo}; use a newer copy of the data set (SWE-bench rows have had "
        "eval_script since version 5 of the swebench package), or add install_config: {test_cmd, log_parser}"
    )
    try:
        known = vars(import_module("swebench.harness.constants"))["MAP_REPO_VERSION_TO_SPECS"]
    except (ImportError, KeyError):
        raise row.error(
            "install_config",
            f"{missing}, or install the package swebench<5, which has the test commands for older rows",
        ) from None
    version = row.text("version")
    if repo not in known or version not in known[repo]:
        raise row.error(
            "install_config",
            f"{missing}; the installed swebench package has no test commands for {repo} {version} either",
        )
    spec = known[repo][version]
    command = spec["test_cmd"]
    if isinstance(command, str):
        choose = vars(import_module("swebench.harness.test_spec.python"))["get_test_directives"]
        command = append_files(command, choose({"repo": repo, "test_patch": row.text("test_patch")}))
    install = spec.get("install", "")
    return EvalConfig(
        test_cmd=command if isinstance(command, str) else "\n".join(command),
        parser=f"swebench:{repo}",
        install=_reinstall_command(
            install if isinstance(install, str) else "\n".join([*install, *spec.get("build", [])])
        ),
        before="\n".join([ACTIVATE_CONDA, *spec.get("eval_commands", [])]),
    )


def _reinstall_command(install: str) -> str:
    """Return a command that reinstalls the project after the work has been copied in, or an empty string if `install` is blank.

    The command succeeds even if reinstalling fails. Without a network, pip cannot download build dependencies, but the image already has
    everything installed. The data sets' own harnesses also ignore such a failure.
    """
    if not install.strip():
        return ""
    settings = "export PIP_RETRIES=0 PIP_DISABLE_PIP_VERSION_CHECK=1"
    return f"{settings}\n(\n{install}\n) || echo 'Reinstalling failed; testing the version in the image.'"


def find_test_files(patch: str) -> tuple[str, ...]:
    """Return the files that a test patch adds or changes, except files such as .json or .md, which cannot be passed to a test runner."""
    parts = _DIFF_HEADER.split(patch)
    files = {}
    for new, rest in zip(parts[2::3], parts[3::3], strict=True):
        if "\n+++ /dev/null" not in rest and "\ndeleted file mode" not in rest and not new.endswith(_NON_TEST_SUFFIXES):
            files[new] = True
    return tuple(files)


def append_files(command: str, files: Sequence[str]) -> str:
    """Append test files to a command, unless the command already names one of them."""
    if any(file in command for file in files):
        return command
    return " ".join([command, *map(shlex.quote, files)])
