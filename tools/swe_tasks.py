#!/usr/bin/env python3
"""Build real SWE tasks from successive releases of small PyPI packages: for each, a row in SWE-rebench's format and a Docker image.

    python tools/swe_tasks.py --out rows.jsonl               all tasks (a few minutes the first time, later a few seconds)
    python tools/swe_tasks.py --out rows.jsonl --only parse  the tasks of one package
    python tools/swe_tasks.py --list

Run by hand, by CI and by `tests/swe/`. The older release is the base. The changes of the newer release to the package are the reference
patch, and its changes to the tests are the test patch. To find the tests that must pass, the tests are run in the task's image before and
after the patch, twice each. Two releases are rejected if the patch fixes no test, if no test passes both before and after it, or if a test
is flaky.

As in real repositories, the repository in an image contains its own future: a later commit with the fix, a tag for that commit, and a
remote. This must be hidden from an agent that works there.

Releases come from the package index, and their SHA-256 is checked. Images are built from `turngate-base:bookworm` without pulling
anything. Releases and rows are kept in `$TURNGATE_CACHE/swe`, and images in Docker. The names of rows and images contain a digest of
their inputs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that this file can also be run by its path

from tools import base_image
from turngate.errors import TurngateError
from turngate.tasks.grading import logs
from turngate.tasks.grading.result import Undecided
from turngate.tasks.grading.types import CaseOutcome
from turngate.tasks.loaders import swe
from turngate.tasks.task import Swe

Row = dict[str, object]

RECIPE = 1  # increase it when rows or images are built differently
INDEX = "https://pypi.org/simple"
TIMES = 2  # how often each measurement is made
AT_ONCE = 2
TESTS_S = 300
TEST_FOLDERS = ("test", "tests")
SITE = "/usr/local/lib/python3.11/dist-packages"  # where the base image's Python looks for packages
PYTHON_IMAGE = "turngate-swe-python"
TASK_IMAGE = "turngate-swe"
TEST_CMD = "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider -W ignore::DeprecationWarning"
# The packages that the tests of all tasks need, including their dependencies. All are pure Python.
WHEELS = (
    "pytest==8.4.2",
    "iniconfig==2.1.0",
    "packaging==25.0",
    "pluggy==1.6.0",
    "pygments==2.19.2",
    "freezegun==1.5.5",
    "python-dateutil==2.9.0.post0",
    "six==1.17.0",
    "pip==25.2",
    "setuptools==80.9.0",
)
# Debian does not let pip change its Python. In an image for a single repository, it may, but offline.
PIP_CONF = "[global]\nbreak-system-packages = true\nno-index = true\ndisable-pip-version-check = true\n"


class SweError(Exception):
    """A task could not be built. The message says which one and why."""


@dataclass(frozen=True)
class Pair:
    """Two successive releases. The newer one fixes something."""

    repo: str
    old: str
    new: str
    sha256: tuple[str, str]  # of the two archives
    sources: tuple[str, ...]  # the package: files and folders
    problem: str  # the problem that the newer release fixes, as a user of the older one would report it
    package: str = ""  # its name on the index, if it differs from the repository's
    root: str = ""  # the folder that contains the package
    parser: str = "parse_log_pytest"
    install: str = ""
    as_text: bool = False  # whether the row's lists are JSON strings, as in some data sets

    @property
    def name(self) -> str:
        return self.package or self.repo.partition("/")[2]

    @property
    def instance(self) -> str:
        return f"{self.repo.replace('/', '__')}-{self.new}"


PAIRS = (
    Pair(
        repo="pytoolz/toolz",
        old="1.0.0",
        new="1.1.0",
        sha256=(
            "2c86e3d9a04798ac556793bced838816296a2f085017664e4995cb40a1047a02",
            "27a5c770d068c110d9ed9323f24f1543e83b2f300a687b7891c1a6d56b697b5b",
        ),
        sources=("toolz", "tlz"),
        problem="""\
`partition_all` trusts `__len__` of a broken sequence

`partition_all(n, seq)` uses `len(seq)` as a short cut to find out how long its last tuple is. If the object's `__len__` does not agree with
what iterating over it yields (it says too few, or too many), the last tuple silently loses items, or has items in it that were never in the
sequence: the internal padding object leaks out.

Such a sequence is wrong, and the caller should be told: `partition_all` should raise a `LookupError` once it comes to the last tuple and
sees that the length cannot be right. Sequences whose length is right must go on working as before.
""",
    ),
    Pair(
        repo="python-humanize/humanize",
        old="4.12.2",
        new="4.12.3",
        sha256=(
            "ce0715740e9caacc982bb89098182cf8ded3552693a433311c6a4ce6f4e12a2c",
            "8430be3a615106fdfceb0b2c1b41c4c98c6b0fc5cc59663a5539b111dd325fb0",
        ),
        sources=("src/humanize",),
        root="src",
        parser="pytest",  # swebench's parser cuts off parameters of its tests, which contain spaces
        as_text=True,
        problem="""\
naturalsize(1.0) says "1.0 Byte"

`humanize.naturalsize(1)` is "1 Byte", but for a float, or a string that holds a number, the value is printed as it came:

    >>> humanize.naturalsize(1.0)
    '1.0 Byte'

It should be "1 Byte" for `1`, `1.0` and `"1"` alike.

Beside that, after `humanize.i18n.activate("fr_FR")` the decimal separator is not the one that is expected for French:
`humanize.intcomma(1_234_567.89)` should keep the point before the decimals.
""",
    ),
    Pair(
        repo="r1chardj0n3s/parse",
        old="1.20.1",
        new="1.20.2",
        sha256=(
            "09002ca350ad42e76629995f71f7b518670bcf93548bdde3684fd55d2be51975",
            "b41d604d16503c79d81af5165155c0b20f6c8d6c559efa66b4b695c3e5a0a0ce",
        ),
        sources=("parse.py",),
        install="python -m pip install --quiet --no-deps --no-build-isolation --editable .",
        problem="""\
Field names with a hyphen are not recognised

A template such as `/local/sub/{user-id}/duration` is not understood: `{user-id}` is taken for literal text, so `search` finds nothing.

Field names should be allowed to contain `-`. The result has the name as it was written, `result["user-id"]`. The group names behind it
(`Parser.named_fields`) have an underscore in the place of the hyphen, as they have for a dot, and where two fields would get the same group
name they are told apart by further underscores, in the order in which they come: `{user-id}`, `{user_id}` and `{user.id}` in one template
become `user_id`, `user__id` and `user___id`.
""",
    ),
    Pair(
        repo="cpburnz/python-pathspec",
        package="pathspec",
        old="0.12.0",
        new="0.12.1",
        sha256=(
            "c57e16065a97b7beb175f13c84d27cb05f7b7315741c2fbd5de541042f4ea6e1",
            "a482d51503a1ab33b1c67a6c3813a26953dbdc71c31dacaef9a838c4e29f5712",
        ),
        sources=("pathspec",),
        as_text=True,
        problem="""\
PathSpec.match_file() returns None since 0.12.0

For a file that no pattern matches, `PathSpec.match_file()` returns `None`. It is documented to return a bool, and did so before
0.12.0. Code
that compares the answer with `False`, or stores it, breaks. It should be `False`.
""",
    ),
    Pair(
        repo="andialbrecht/sqlparse",
        old="0.5.1",
        new="0.5.2",
        sha256=(
            "bb6b4df465655ef332548e24f08e205afc81b9ab86cb1c45657a7ff173a3a00e",
            "9e37b35e16d1cc652a2545f0997c1deb23ea28fa1f3eefe609eee3063c3b105f",
        ),
        sources=("sqlparse",),
        parser="pytest",  # swebench's parser cuts names at spaces, or includes the reasons of expected failures in them
        problem="""\
strip_comments removes SQL hints

`sqlparse.format(sql, strip_comments=True)` also removes optimizer hints, which change how a statement is executed and are no comments:
`--+full(u)` and `#+ hint` at the end of a line, and `/*+ DIRECT */`. For instance

    SELECT /*+cluster(T)*/* FROM T_EEE T where A >:1

loses its hint. Hints of all three kinds should stay exactly as they are, on their own and next to ordinary comments; the ordinary comments
should still be removed (`select --+full(u)`, line end, `--comment simple` becomes the first line with its line end).

Beside that, EXTENSION is not recognised as a keyword.
""",
    ),
    Pair(
        repo="martinblech/xmltodict",
        old="0.14.2",
        new="0.15.0",
        sha256=(
            "201e7c28bb210e374999d1dde6382923ab0ed1a8a5faeece48ab525b7810a553",
            "c6d46b4e3413d1e4fc3e5016f0f1c7a5c10f8ce39efaa0cb099af986ecfc9a53",
        ),
        sources=("xmltodict.py",),
        parser="parse_log_pytest_v2",
        as_text=True,
        problem="""\
unparse() lets keys break out of their tag

`xmltodict.unparse` writes dictionary keys as element and attribute names without looking at them. A key that contains `<` or `>` therefore
injects markup of its own into the document: element names, attribute names (`@…`), and the names of namespace declarations in `@xmlns`.

None of these can ever be a valid name. `unparse` should raise a `ValueError` for each of them.
""",
    ),
    Pair(
        repo="lepture/mistune",
        old="3.1.3",
        new="3.1.4",
        sha256=(
            "a7035c21782b2becb6be62f8f25d3df81ccb4d6fa477a6525b15af06539f02a0",
            "b5a7f801d389f724ec702840c11d8fc48f2b33519102fc7ee739e8177b672164",
        ),
        sources=("src/mistune",),
        root="src",
        problem="""\
Unicode white space at the start of a heading is lost

`mistune.html("# \\u3000\\u3000abc")` gives `<h1>abc</h1>`: the two ideographic spaces are gone. CommonMark strips only ordinary spaces and
tabs from a heading; other white space is content, and should stay: `<h1>\\u3000\\u3000abc</h1>`.

Beside that, a fenced directive that follows a list item should end the list, as a fenced code block does.
""",
    ),
    Pair(
        repo="toumorokoshi/deepmerge",
        old="1.1.0",
        new="1.1.1",
        sha256=(
            "4c27a0db5de285e1a7ceac7dbc1531deaa556b627dea4900c8244581ecdfea2d",
            "53a489dc9449636e480a784359ae2aab3191748c920649551c8e378622f0eca4",
        ),
        sources=("deepmerge",),
        as_text=True,
        problem="""\
Two different subclasses of dict are not merged

Merging an `OrderedDict` with a `defaultdict` with `always_merger` does not merge the two: neither class is a subclass of the other, so this
is taken for a conflict of types, and the second replaces the first. Both are dictionaries, though, and there is a strategy for those.

Whether there is a strategy for a type that both values are instances of should be looked at first. Only where there is none are their types
in conflict.
""",
    ),
)


# ---- functions for callers ----


def rows(only: Sequence[str] = ()) -> list[Row]:
    """Return the rows. Build missing rows and images first."""
    base_image.ensure_docker()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        return list(threads.map(_row, chosen(only)))


def missing(only: Sequence[str] = ()) -> str | None:
    """Return which row or requirement is missing and what to run, or None if everything is ready. Do not build anything."""
    if reason := base_image.missing_docker():
        return reason
    if find_spec("swebench") is None:
        return "swebench is missing (run: pip install 'turngate[swe]')"
    for pair in chosen(only):
        if not _kept(pair).is_file() or not _is_image(_image(pair)):
            return f"the SWE task {pair.instance} has not been built (run: python tools/swe_tasks.py --out FILE)"
    return None


def chosen(only: Sequence[str]) -> tuple[Pair, ...]:
    if unknown := set(only) - {name for pair in PAIRS for name in (pair.name, pair.instance)}:
        names = ", ".join(pair.name for pair in PAIRS)
        raise SweError(f"unknown package or task: {', '.join(sorted(unknown))}; the packages are {names}")
    return tuple(pair for pair in PAIRS if not only or {pair.name, pair.instance} & set(only))


def cached() -> Path:
    return base_image.cache() / "swe"


# ---- one task ----


def _row(pair: Pair) -> Row:
    with _locked(pair.name):
        if not _is_image(_image(pair)) or not _kept(pair).is_file():
            with tempfile.TemporaryDirectory(prefix="turngate-swe-") as scratch:
                _make(pair, Path(scratch))
        row: Row = json.loads(_kept(pair).read_text(encoding="utf-8"))
        return row


def _make(pair: Pair, scratch: Path) -> None:
    began = time.monotonic()
    folder = scratch / "testbed"
    base, later = repository(pair, folder, scratch)
    row: Row = {
        "instance_id": pair.instance,
        "repo": pair.repo,
        "base_commit": base,
        "version": pair.old,
        "problem_statement": pair.problem,
        "patch": _difference(folder, base, later, lambda path: _in_package(pair, path)),
        "test_patch": _difference(folder, base, later, _is_test),
        "FAIL_TO_PASS": [],
        "PASS_TO_PASS": [],
        "image_name": _image(pair),
        "install_config": {"install": pair.install, "test_cmd": TEST_CMD, "log_parser": pair.parser},
    }
    if not row["patch"] or not row["test_patch"]:
        raise SweError(
            f"{pair.instance}: the newer release does not change the {'tests' if row['patch'] else 'package'}"
        )
    _build(pair, scratch)
    mended, kept = measured(row, scratch)
    row |= {
        name: json.dumps(tests) if pair.as_text else tests
        for name, tests in (("FAIL_TO_PASS", mended), ("PASS_TO_PASS", kept))
    }
    _kept(pair).parent.mkdir(parents=True, exist_ok=True)
    new = _kept(pair).with_suffix(".new")
    new.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8")
    new.rename(_kept(pair))
    print(
        f"{pair.instance}: {len(mended)} tests to fix, {len(kept)} to keep ({time.monotonic() - began:.0f} s)",
        flush=True,
    )


def _key(pair: Pair) -> str:
    """Return a digest of everything that determines the image and the row."""
    content = json.dumps([RECIPE, asdict(pair), TEST_CMD, SITE, TIMES, _python_key()], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _image(pair: Pair) -> str:
    return f"{TASK_IMAGE}:{pair.name}-{pair.old}-{_key(pair)}"


def _kept(pair: Pair) -> Path:
    return cached() / "rows" / f"{pair.instance}-{_key(pair)}.json"


# ---- releases ----


def _release(pair: Pair, version: str, sha256: str, scratch: Path) -> Path:
    """Unpack a release, remove the metadata that packaging added, and return its folder."""
    packed = archive(pair.name, version, sha256)
    place = scratch / f"release-{version}"
    with tarfile.open(packed) as tar:
        tar.extractall(place, filter="data")
    [folder] = place.iterdir()
    for path in sorted(folder.rglob("*")):
        if path.name.endswith(".egg-info"):
            shutil.rmtree(path)
    return folder


def archive(name: str, version: str, sha256: str) -> Path:
    file = f"{name.replace('-', '_')}-{version}.tar.gz"
    place = cached() / "releases" / file
    if place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == sha256:
        return place
    content = _fetch(_address(name, file))
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise SweError(f"{file} is not the expected release: its SHA-256 is {found}, not {sha256}")
    place.parent.mkdir(parents=True, exist_ok=True)
    new = place.with_suffix(f".{os.getpid()}.new")
    new.write_bytes(content)
    new.rename(place)
    return place


def _address(name: str, file: str) -> str:
    """Return the URL of a file on the package index, which is a page of links, as for pip."""
    page = f"{os.environ.get('PIP_INDEX_URL') or INDEX}".rstrip("/") + f"/{name}/"
    for link in re.findall(r'href="([^"]+)"', _fetch(page).decode("utf-8", "replace")):
        address = urllib.parse.urljoin(page, html.unescape(link))
        if urllib.parse.unquote(urllib.parse.urlsplit(address).path).endswith(f"/{file}"):
            return address
    raise SweError(f"{page} has no link to {file}")


def _fetch(address: str) -> bytes:
    try:
        with urllib.request.urlopen(address, timeout=120) as reply:
            content: bytes = reply.read()
            return content
    except (urllib.error.URLError, OSError) as error:
        raise SweError(f"{address}: {error}") from error


# ---- the repository ----


def repository(pair: Pair, folder: Path, scratch: Path) -> tuple[str, str]:
    """Create a repository that is at the older release and also contains the newer one. Return the commits of both."""
    folder.mkdir()
    _git(folder, "init", "--quiet", "--initial-branch", "main")
    old, new = (
        _release(pair, version, sha256, scratch)
        for version, sha256 in zip((pair.old, pair.new), pair.sha256, strict=True)
    )
    shutil.copyfile(old / "PKG-INFO", scratch / "METADATA")
    for release in (old, new):
        (release / "PKG-INFO").unlink()
    first = [path for path in old.iterdir() if path.is_file() and path.suffix not in (".py", ".toml", ".cfg", ".ini")]
    for path in first:
        shutil.copy(path, folder / path.name)
    _commit(folder, f"Begin {pair.name}", 0)
    base = _commit_release(folder, old, f"{pair.name} {pair.old}", 1)
    _git(folder, "tag", f"v{pair.old}")
    later = _commit_release(folder, new, f"{pair.name} {pair.new}", 2)
    _git(folder, "tag", "--annotate", "--message", f"{pair.name} {pair.new}", f"v{pair.new}", day=2)
    _git(folder, "remote", "add", "origin", f"https://github.com/{pair.repo}.git")
    _git(folder, "update-ref", "refs/remotes/origin/main", later)
    _git(folder, "reset", "--quiet", "--hard", base)
    return base, later


def _commit_release(folder: Path, release: Path, message: str, day: int) -> str:
    for path in folder.iterdir():
        if path.name != ".git":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(release, folder, dirs_exist_ok=True)
    return _commit(folder, message, day)


def _commit(folder: Path, message: str, day: int) -> str:
    _git(folder, "add", "--all", "--force", day=day)
    _git(folder, "commit", "--quiet", "--allow-empty", "--message", message, day=day)
    return _git(folder, "rev-parse", "HEAD").strip()


def _git(folder: Path, *command: str, day: int = 0) -> str:
    """Run git so that its results do not depend on this machine or the current time."""
    stamp = f"2025-01-{day + 1:02}T12:00:00+00:00"
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_DATE": stamp,
        "GIT_COMMITTER_DATE": stamp,
        **{f"GIT_{who}_NAME": "releases" for who in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{who}_EMAIL": "releases@localhost" for who in ("AUTHOR", "COMMITTER")},
    }
    options = ["-c", "core.autocrlf=false", "-c", "core.fileMode=true", "-c", "gc.auto=0"]
    return _run(["git", *options, *command], cwd=folder, env=env)


def _difference(folder: Path, base: str, later: str, wanted: Callable[[str], bool]) -> str:
    """Return the changes in the wanted files as a patch. Binary files are left out, as in such data sets."""
    paths = []
    for line in _git(folder, "diff", "--no-renames", "--numstat", "-z", base, later).split("\0"):
        if line:
            added, _, path = line.split("\t", 2)
            if added != "-" and wanted(path):
                paths.append(f":(literal){path}")
    if not paths:
        return ""
    return _git(folder, "diff", "--no-renames", "--no-color", "--no-ext-diff", base, later, "--", *paths)


def _is_test(path: str) -> bool:
    return any(part in TEST_FOLDERS for part in path.split("/")[:-1])


def _in_package(pair: Pair, path: str) -> bool:
    return not _is_test(path) and any(path == source or path.startswith(f"{source}/") for source in pair.sources)


# ---- images ----


def _build(pair: Pair, scratch: Path) -> None:
    """Build the image of a task: the repository, with the package on Python's path as after an editable install."""
    if not _is_image(_python_image()):
        with _locked("python"):
            if not _is_image(_python_image()):
                _build_python()
    site = scratch / "site"
    site.mkdir()
    (site / "testbed.pth").write_text(f"/testbed/{pair.root}".rstrip("/") + "\n")
    if not pair.install:  # the install command creates its own metadata
        about = site / f"{pair.name}-{pair.old}.dist-info"
        about.mkdir()
        shutil.copyfile(scratch / "METADATA", about / "METADATA")
    dockerfile = (
        f"FROM {_python_image()}\n"
        f"COPY site {SITE}/\n"
        "COPY --chown=1000:1000 testbed /testbed\n"
        "WORKDIR /testbed\n"
        f"LABEL turngate.swe={pair.instance}\n"
    )
    (scratch / ".dockerignore").write_text("release-*\n")
    _docker_build(dockerfile, scratch, _image(pair))


def _build_python() -> None:
    """Build the image that all tasks are based on: Python with pytest."""
    print(f"{_python_image()}: install {', '.join(WHEELS)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="turngate-swe-python-") as name:
        scratch = Path(name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        target = ["--python-version", "3.11", "--only-binary", ":all:", "--target", str(scratch / "site")]
        _run([*pip, *target, *([] if sys.version_info[:2] == (3, 11) else ["--no-compile"]), *WHEELS])
        shutil.rmtree(scratch / "site" / "bin", ignore_errors=True)
        programs = scratch / "bin"
        programs.mkdir()
        for program in ("pytest", "pip"):
            (programs / program).write_text(f'#!/bin/sh\nexec /usr/bin/python3 -m {program} "$@"\n')
            (programs / program).chmod(0o755)
        (programs / "python").symlink_to("/usr/bin/python3")
        (scratch / "pip.conf").write_text(PIP_CONF)
        dockerfile = (
            f"FROM {base_image.IMAGE}\nCOPY site {SITE}/\nCOPY bin /usr/local/bin/\nCOPY pip.conf /etc/pip.conf\n"
        )
        _docker_build(dockerfile, scratch, _python_image())


def _python_key() -> str:
    content = json.dumps([RECIPE, WHEELS, SITE, PIP_CONF, base_image.fingerprint()])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _python_image() -> str:
    return f"{PYTHON_IMAGE}:{_python_key()}"


def _docker_build(dockerfile: str, context: Path, tag: str) -> None:
    (context / "Dockerfile").write_text(dockerfile)
    _run(["docker", "build", "--quiet", "--force-rm", "--network", "none", "--tag", tag, str(context)])


def _is_image(tag: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", tag], capture_output=True, check=False).returncode == 0


# ---- measuring ----

WHEN = ("before", "after")
MEASURE = """
set -e
cd /testbed
git apply --whitespace=nowarn /swe/test.patch
if [ "$1" = after ]; then git apply --whitespace=nowarn /swe/fix.patch; fi
if [ -s /swe/install ]; then . /swe/install; fi >&2
set +e
. /swe/test
"""


def measured(row: Mapping[str, object], scratch: Path) -> tuple[list[str], list[str]]:
    """Return the tests that the patch fixes, and those that pass both with and without it."""
    name = str(row["instance_id"])
    task = swe.build_task({**row, "FAIL_TO_PASS": ["not known yet"]}, name)
    assert isinstance(task.grader, Swe)
    place = scratch / "swe"
    place.mkdir()
    for file, text in (
        ("test.patch", task.grader.test_patch),
        ("fix.patch", str(row["patch"])),
        ("install", task.grader.install),
        ("test", task.grader.test_cmd),
        ("measure", MEASURE),
    ):
        (place / file).write_text(text + "\n" if text else "")
    before, after = ([_outcomes(name, task.grader, place, task.image, when) for _ in range(TIMES)] for when in WHEN)
    for runs in (before, after):
        unsteady = [test for test in {**runs[0], **runs[1]} if len({run.get(test) for run in runs}) > 1]
        if unsteady:
            raise SweError(f"{name}: these tests are flaky: {', '.join(sorted(unsteady)[:5])}")
    good = sorted(test for test, case in after[0].items() if case == "passed")
    mended = [test for test in good if before[0].get(test) != "passed"]
    kept = [test for test in good if before[0].get(test) == "passed"]
    if not mended or not kept:
        raise SweError(
            f"{name}: the patch fixes {len(mended)} tests and keeps {len(kept)}; both numbers must be at least 1"
        )
    return mended, kept


def _outcomes(name: str, grader: Swe, place: Path, image: str, when: str) -> dict[str, CaseOutcome]:
    container = f"turngate-swe-{os.getpid()}-{place.parent.name}"
    command = ["docker", "run", "--rm", "--name", container, "--network", "none", "--env", "HOME=/tmp"]
    command += ["--volume", f"{place}:/swe:ro", image, "sh", "/swe/measure", when]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=TESTS_S)
    except subprocess.TimeoutExpired:
        subprocess.run(["docker", "rm", "--force", container], capture_output=True, check=False)
        raise SweError(f"{name}: the tests {when} the patch took longer than {TESTS_S} s") from None
    try:
        cases = logs.parse_log(grader.parser, done.stdout)
    except Undecided as error:
        raise SweError(f"{name}: {when} the patch: {error}") from error
    if done.returncode not in (0, 1) or not cases:  # pytest's exit codes for "all passed" and "some failed"
        raise SweError(
            f"{name}: {when} the patch: exit code {done.returncode}, {len(cases)} tests; the last lines of output:\n"
            + "\n".join((done.stderr + done.stdout).splitlines()[-15:])
        )
    return cases


# ---- commands, locks and the command line ----


def _run(command: list[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).decode("utf-8", "replace")
        raise SweError(
            f"{' '.join(command[:6])} …: exited with status {done.returncode}; the end of its output:\n{said[-2000:]}"
        )
    return done.stdout.decode("utf-8")


@contextmanager
def _locked(name: str) -> Iterator[None]:
    cached().mkdir(parents=True, exist_ok=True)
    with (cached() / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> int:
    parser = argparse.ArgumentParser(description="Build SWE tasks from releases of PyPI packages.")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file for the rows, one JSON object per line")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="a package or an instance id; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="list the tasks")
    arguments = parser.parse_args()
    try:
        if arguments.list:
            for pair in chosen(arguments.only):
                print(f"{pair.instance}  {pair.name} {pair.old} → {pair.new}  {pair.problem.partition(chr(10))[0]}")
            return 0
        if arguments.out is None:
            parser.error("--out FILE is required")
        lines = [json.dumps(row, ensure_ascii=False) for row in rows(arguments.only)]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{arguments.out}: {len(lines)} tasks", flush=True)
    except (SweError, base_image.ImageError, TurngateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
