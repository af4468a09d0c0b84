"""Rows of SWE data sets as tasks: SWE-Gym, SWE-bench, SWE-rebench and SWE-rebench V2. `read.py` calls `task`.

A row says what was reported, at which commit, and which tests have to change. What it does not say differs per data set: where the image
is, where the repository lies in it, how the tests are run and their output read. All of that is decided here, and nothing of it later.
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

# How the repositories of SWE-Gym are tested; its rows do not say.
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
_SELECTED_BY_NAME = (
    "python/mypy",
)  # its cases lie in data files, which pytest takes for no tests: they are chosen by name

# Only where the image has it.
ACTIVATE_CONDA = (
    "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate; conda activate testbed; fi"
)

INSTRUCTION = """\
Your working folder is a checkout of the repository {repo}. This was reported about it:

<issue>
{issue}
</issue>

Change the code in your working folder so that the issue is resolved and everything else goes on working. What the project needs to run
is installed. Tests that you are not shown decide whether the issue is resolved; changes to the project's existing tests do not count.
When you are done, stop: your working folder is looked at as you leave it.
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
)  # as swebench has it
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"

# What a checkout knows of times after `base_commit` is taken out of it. Runs with `sh`, as whoever owns the sandbox; git only where there
# is a repository. That nothing is left is looked at in the end, not taken for granted.
HIDE_HISTORY = r"""
set -eu
[ -e .git ] || exit 0
[ -d .git ] || { echo "setup: .git is no folder, so its history cannot be hidden" >&2; exit 1; }
git rev-parse --git-dir >/dev/null 2>&1 || git config --global --add safe.directory "$PWD"
g() {
  git -c core.hooksPath=/dev/null -c gc.auto=0 -c maintenance.auto=false -c core.logAllRefUpdates=false \
    -c commit.gpgSign=false -c core.commitGraph=false -c advice.detachedHead=false -c user.name=task -c user.email=task@localhost "$@"
}
base=$(g rev-parse --verify --quiet "@BASE@^{commit}") || { echo "setup: the repository has no commit @BASE@" >&2; exit 1; }
branch=$(g symbolic-ref --quiet --short HEAD) || branch=main
head=$(g rev-parse HEAD)
# Images of SWE-bench have one commit on top of the base: what their making changed, and the tests need.
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
# Tags of before stay, since version numbers are made from them.
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
  if [ -s .git/turngate-left ]; then echo "setup: later commits could not be taken out of the repository" >&2; exit 1; fi
fi
rm -f .git/turngate-*
"""


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the tests of a row are run and read."""

    test_cmd: str
    parser: str
    install: str = ""
    before: str = ""


class SweRow:
    """A row's fields, each with its type. What is wrong is told with the file, the row, the instance and the field."""

    def __init__(self, fields: Mapping[str, Json], where: str) -> None:
        self._fields = fields
        self.where = where
        self.id = "?"
        self.id = self.text("instance_id")

    def wrong(self, field: str, what: str) -> TaskError:
        return TaskError(f"task: {self.where} ({self.id}): {field}: {what}", param=field)

    def has(self, field: str) -> bool:
        return self._fields.get(field) not in (None, "")

    def text(self, field: str, default: str | None = None, *, pattern: re.Pattern[str] | None = None) -> str:
        value = self._fields.get(field)
        if value is None:
            if default is None:
                raise self.wrong(field, "is missing")
            return default
        if not isinstance(value, str):
            raise self.wrong(field, f"has to be a string, and is {_type_name(value)}")
        if not value.strip() and default is None:
            raise self.wrong(field, "is empty")
        if pattern is not None and not pattern.fullmatch(value):
            raise self.wrong(field, f"{value[:80]!r} does not look like one")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        """A list of strings, or a JSON string of one. A plain string is neither, and never taken apart."""
        value = self._fields.get(field)
        if value is None:
            raise self.wrong(field, "is missing; give a list of test names, [] for none")
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                raise self.wrong(field, f"{value[:80]!r} is no JSON; give a list of test names") from None
        if not isinstance(value, list | tuple):
            raise self.wrong(field, f"has to be a list of test names, and is {_type_name(value)}")
        if odd := [item for item in value if not isinstance(item, str) or not item]:
            raise self.wrong(field, f"holds {_type_name(odd[0])}, and not only test names")
        return tuple(value)

    def table(self, field: str) -> SweRow | None:
        """An object, or a JSON string of one. Its fields are named with the field before them."""
        value = self._fields.get(field)
        if isinstance(value, str) and value.strip():
            try:
                value = json.loads(value)
            except ValueError:
                raise self.wrong(field, f"{value[:80]!r} is no JSON; give an object") from None
        if value in (None, "", {}):
            return None
        if not isinstance(value, Mapping):
            raise self.wrong(field, f"has to be an object, and is {_type_name(value)}")
        inner = {f"{field}.{name}": item for name, item in value.items()}
        return SweRow({**inner, "instance_id": self.id}, self.where)

    def commands(self, field: str) -> tuple[str, ...]:
        """A shell command, or a list of them. () where there is none."""
        value = self._fields.get(field)
        if value is None:
            return ()
        found = (value,) if isinstance(value, str) else value
        if not isinstance(found, list | tuple) or not all(isinstance(item, str) for item in found):
            raise self.wrong(field, f"has to be a command or a list of commands, and is {_type_name(value)}")
        return tuple(line for line in found if line.strip())

    def is_list(self, field: str) -> bool:
        return isinstance(self._fields.get(field), list | tuple)


def _type_name(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        int: "a number",
        float: "a number",
        bool: "true or false",
        str: "a text",
    }
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def is_swe_row(fields: Mapping[str, Json]) -> bool:
    """Whether a row is one of such a data set, going by its fields."""
    return "instance_id" in fields and "problem_statement" in fields


def build_task(fields: Mapping[str, Json], where: str) -> Task:
    """The task of a row; `where` names the file and the row in messages."""
    row = SweRow(fields, where)
    row.text("instance_id", pattern=_ID)
    repo = row.text("repo", pattern=_REPO)
    base = row.text("base_commit", pattern=_COMMIT)
    test_patch = row.text("test_patch")
    fail_to_pass = row.names("FAIL_TO_PASS")
    if not fail_to_pass:
        raise row.wrong("FAIL_TO_PASS", "is empty: without a test that has to change, doing nothing would solve it")
    pass_to_pass = row.names("PASS_TO_PASS")
    kind = detect_data_set(row, repo)
    way = _eval_config(row, kind, repo, (*fail_to_pass, *pass_to_pass))
    patch = row.text("patch", "")
    issue = row.text("problem_statement").strip()
    return Task(
        id=to_task_id(row.id),
        instruction=check_instruction(INSTRUCTION.format(repo=repo, issue=issue), f"{where}: problem_statement"),
        setup=HIDE_HISTORY.replace("@BASE@", base),
        image=_image(row, kind),
        workdir=f"/{repo.split('/')[1]}" if kind == "swe-rebench-v2" else "/testbed",
        grader=Swe(
            repo=repo,
            base_commit=base,
            test_patch=test_patch,
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            test_cmd=way.test_cmd,
            parser=way.parser,
            install=way.install,
            before=way.before,
        ),
        solution=Solution(patch=patch) if patch.strip() else None,
        metadata={
            "data_set": kind,
            "repo": repo,
            "base_commit": base,
            **{name: row.text(name) for name in ("version", "language") if row.has(name)},
        },
        source=where,
    )


def detect_data_set(row: SweRow, repo: str) -> DataSet:
    """Which data set a row is of, going by the fields that only one of them has."""
    if row.has("install_config"):
        return "swe-rebench-v2" if row.has("language") else "swe-rebench"
    return "swe-gym" if repo.lower() in GYM_COMMANDS else "swe-bench"


def _image(row: SweRow, kind: DataSet) -> str:
    """The column wins; otherwise the data set's rule. No registry takes two underscores in a name, so each has its own sign for them."""
    for column in ("image_name", "docker_image", "image"):
        if row.has(column):
            return row.text(column)
    name = row.id.lower()
    match kind:
        case "swe-gym":
            return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest"
        case "swe-bench":
            return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
        case "swe-rebench":
            return f"swerebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
        case "swe-rebench-v2":
            raise row.wrong("image_name", "is missing; the images of SWE-rebench V2 have no rule to their names")


# ── how the tests are run ───────────────────────────────────────────────────────────────────────────────────────────


def _eval_config(row: SweRow, kind: DataSet, repo: str, cases: Sequence[str]) -> EvalConfig:
    if (config := row.table("install_config")) is not None:
        return _config_from_row(row, config, kind)
    if row.has("eval_script"):
        return _config_from_script(row, repo)
    if kind == "swe-gym":
        return _config_for_gym(row, repo, cases)
    return _config_from_swebench(row, repo)


def _config_from_row(row: SweRow, config: SweRow, kind: DataSet) -> EvalConfig:
    """SWE-rebench says it in the row. In V2 the image is built and the command whole; in the first, files to test are added to it."""
    commands = config.commands("install_config.test_cmd")
    if not commands:
        raise row.wrong("install_config.test_cmd", "is missing; give the command that runs the tests")
    parser = config.text("install_config.log_parser")
    whole = kind == "swe-rebench-v2" or config.is_list("install_config.test_cmd")
    return EvalConfig(
        test_cmd="\n".join(commands) if whole else append_files(commands[0], find_test_files(row.text("test_patch"))),
        parser=f"rebench:{parser}" if parser.startswith("parse_log_") else parser,
        install=""
        if kind == "swe-rebench-v2"
        else _reinstall_command("\n".join(config.commands("install_config.install"))),
        before="" if kind == "swe-rebench-v2" else ACTIVATE_CONDA,
    )


def _config_from_script(row: SweRow, repo: str) -> EvalConfig:
    """SWE-bench since its version 5 has a whole script in the row. What lies between its marks runs the tests, what comes before the first
    patch prepares that; resetting and patching the tests is the grader's own business."""
    if row.text("eval_type", "pass_and_fail") != "pass_and_fail":
        raise row.wrong("eval_type", "a test that is not reported would count as passed, which is not supported")
    lines = row.text("eval_script").splitlines()
    start = next((n for n, line in enumerate(lines) if _START in line), None)
    end = next((n for n, line in enumerate(lines) if _END in line), None)
    if start is None or end is None or end <= start + 1:
        raise row.wrong("eval_script", f"there is nothing between {_START!r} and {_END!r}")
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
    path = "\nexport PYTHONPATH=${PYTHONPATH:-}:$(pwd)" if repo == "conan-io/conan" else ""
    return EvalConfig(test_cmd=command, parser="pytest", before=ACTIVATE_CONDA + path)


def _config_from_swebench(row: SweRow, repo: str) -> EvalConfig:
    """Older rows of SWE-bench say nothing about it: up to its version 4 the `swebench` package knows."""
    missing = (
        f"there is no install_config and no eval_script, so nothing says how {repo} is tested; use a data set that has one of them "
        "(SWE-bench publishes eval_script since swebench 5), or add install_config: {test_cmd, log_parser}"
    )
    try:
        known = vars(import_module("swebench.harness.constants"))["MAP_REPO_VERSION_TO_SPECS"]
    except (ImportError, KeyError):
        raise row.wrong("install_config", f"{missing}, or install swebench<5, which knows the old ones") from None
    version = row.text("version")
    if repo not in known or version not in known[repo]:
        raise row.wrong("install_config", f"{missing}; the swebench package does not know {repo} {version} either")
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
    """Installed once more, after the work. As in the data sets' own harnesses that may fail: the image has it all installed, and what pip
    fetches to build is out of reach here."""
    if not install.strip():
        return ""
    settings = "export PIP_RETRIES=0 PIP_DISABLE_PIP_VERSION_CHECK=1"
    return f"{settings}\n(\n{install}\n) || echo 'Installing it again failed: what the image has is tested.'"


def find_test_files(patch: str) -> tuple[str, ...]:
    """The files that a test patch leaves behind, without those that no test runner takes."""
    parts = _DIFF_HEADER.split(patch)
    files = {}
    for new, rest in zip(parts[2::3], parts[3::3], strict=True):
        if "\n+++ /dev/null" not in rest and "\ndeleted file mode" not in rest and not new.endswith(_NON_TEST_SUFFIXES):
            files[new] = True
    return tuple(files)


def append_files(command: str, files: Sequence[str]) -> str:
    """A command that is told which files to run, unless it names one of them already."""
    if any(file in command for file in files):
        return command
    return " ".join([command, *map(shlex.quote, files)])
