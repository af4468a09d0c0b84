"""The examples import only names that docs/reference/python.md documents."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import turngate

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted([*(ROOT / "examples").rglob("*.py"), *(ROOT / "examples").rglob("*.ipynb")])
_ENTRY = re.compile(r"^::: (\S+)\n(?:    options:\n      members: \[(.*)\]\n)?", re.M)


def read_public_names() -> tuple[set[str], set[str]]:
    """Read the public names and the modules of which every name is public."""
    names, modules = {f"turngate.{name}" for name in turngate.__all__}, set()
    for entry, members in _ENTRY.findall((ROOT / "docs" / "reference" / "python.md").read_text()):
        names.add(entry)
        if members:
            names |= {f"{entry}.{member}" for member in members.split(", ")}
        elif (ROOT / entry.replace(".", "/")).with_suffix(".py").exists():
            modules.add(entry)
    return names, modules


def find_imports(path: Path) -> Iterator[str]:
    """Yield the names that an example imports from turngate."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for node in ast.walk(compile(text, str(path), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "turngate":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("turngate."))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_imports_only_documented_names(example: Path) -> None:
    names, modules = read_public_names()
    internal = [name for name in find_imports(example) if name not in names and name.rpartition(".")[0] not in modules]
    assert not internal, f"not in docs/reference/python.md: {', '.join(internal)}"


def test_internal_import_is_found(tmp_path: Path) -> None:
    example = tmp_path / "example.py"
    example.write_text(
        "import turngate as tg\nfrom turngate.cli.train import train_model\nimport turngate.store.store\n"
    )
    assert list(find_imports(example)) == ["turngate.cli.train.train_model", "turngate.store.store"]
    names, modules = read_public_names()
    assert "turngate.run" in names and "turngate.rollout.plan.BatchPlan" in names and "turngate.errors" in modules
