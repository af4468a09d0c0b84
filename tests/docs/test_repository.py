"""The files that GitHub and contributors use: workflows, issue forms, hooks, the changelog and the list of decisions."""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from turngate import __version__

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
OUTSIDE_DOCS = sorted(
    [*ROOT.glob("*.md"), *(ROOT / folder / "README.md" for folder in ("bench", "tests/golden", "tools"))]
)
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "github-issue-forms": [GITHUB / "ISSUE_TEMPLATE" / "bug.yml", GITHUB / "ISSUE_TEMPLATE" / "feature.yml"],
    "github-issue-config": [GITHUB / "ISSUE_TEMPLATE" / "config.yml"],
}
STATUS = re.compile(r"^Status: (accepted|superseded by \[\d{4}\]\(\S+\))\. Date: (\d{4}-\d\d-\d\d)\.$", re.M)


def load(path: Path) -> Any:
    return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # YAML 1.1 reads the key `on` as true


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    (line,) = re.findall(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    return set(line.split())


@pytest.mark.parametrize(
    ("schema", "path"),
    [(schema, path) for schema, paths in SCHEMAS.items() for path in paths],
    ids=lambda value: getattr(value, "name", value),
)
def test_github_accepts_the_file(schema: str, path: Path) -> None:
    text = files("check_jsonschema").joinpath("builtin_schemas", "vendor", f"{schema}.json").read_bytes()
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if True in content:
        content["on"] = content.pop(True)
    jsonschema.Draft7Validator(msgspec.json.decode(text)).validate(content)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_is_read_only_and_has_timeouts(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert int(job["timeout-minutes"]) > 0
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
        tiers = job.get("strategy", {}).get("matrix", {}).get("tier", [])
        called = {
            target for step in job["steps"] for target in re.findall(r"\bmake (?!-)(\$|[\w-]+)", step.get("run", ""))
        }
        if "$" in called:  # make ${{ matrix.tier }}
            called = called - {"$"} | set(tiers)
        assert called and called <= targets()


def test_tested_python_versions_are_the_declared_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    assert load(GITHUB / "workflows" / "test.yml")["jobs"]["test"]["strategy"]["matrix"]["python"] == declared
    assert project["requires-python"] == f">={declared[0]}"


def test_hooks_use_tools_of_this_repository() -> None:
    hooks = [hook for repo in load(ROOT / ".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    checks = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in hooks:
        program, *arguments = hook["entry"].split()
        assert program.startswith(".venv/bin/")
        assert f"$(BIN)/{program.rpartition('/')[2]} {arguments[0]}" in checks, f"make check does not run {hook['id']}"


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = set(re.findall(r"^# make ([\w-]+)", text, re.M))
    assert listed <= targets()
    assert targets() - listed == {"help", "setup", "format", "clean"}


def test_changelog_has_current_version_below_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", headings[1])
    groups = set(re.findall(r"^### (.+)$", text, re.M))
    assert groups <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.stem)
def test_decision_has_status_and_date_and_is_listed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    number, title = re.match(r"# (\d{4}): (.+)\n", text).groups()  # type: ignore[union-attr]
    assert path.name.startswith(f"{number}-")
    ((status, date),) = STATUS.findall(text)
    index = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f"| [{number}]({path.name}) | {title} | {status} | {date} |" in index
    assert f"decisions/{path.name}" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", OUTSIDE_DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path: Path) -> None:
    """`make check` finds broken links between the pages of docs/."""
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", path.read_text(encoding="utf-8"))
    for file, anchor in links:
        target = path.parent / file if file else path
        assert target.exists(), f"{path.name} links to {file}"
        assert not anchor or anchor in list_anchors(target), f"{file} has no heading for #{anchor}"


def list_anchors(page: Path) -> list[str]:
    """List the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TO_BE_ADDED = re.compile(r"NAME|my-agent|kto")  # in the paths of files that a contributor creates


def test_the_files_that_contributors_are_sent_to_exist() -> None:
    assert CONTRIBUTING.count("\n") <= 150
    paths = set(re.findall(r"(?<![\w./-])(?:turngate|tests|tools|docs|examples)/[\w./-]*\w", CONTRIBUTING))
    assert len(paths) > 30
    assert not [path for path in paths if not TO_BE_ADDED.search(path) and not (ROOT / path).exists()]
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", CONTRIBUTING, re.M)) <= targets()


def test_the_names_that_contributors_have_to_change_exist() -> None:
    named = re.findall(r"`(\w+)`\s+in\s+`([\w/.]+\.py)`", CONTRIBUTING)
    assert len(named) > 10
    assert not [f"{name} in {path}" for name, path in named if name not in (ROOT / path).read_text(encoding="utf-8")]
