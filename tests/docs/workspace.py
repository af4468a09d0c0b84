"""A folder in which the commands of the documentation run: a clone of the repository, and stand-ins for what they would install."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from tests.docs import warm_programs
from tests.docs.blocks import ROOT
from turngate.agents.install import cache_folder

ADMIN_KEY = "admin-key-of-the-documentation-tests"
MODEL = "Qwen/Qwen3-8B"
_LINKED = ("bench", "deploy", "envs", "gauntlet", "pyproject.toml", "README.md", "tests", "tools", "turngate")

# An agent that costs next to nothing: one model call, then every second rollout of a task solves it.
AGENT = """
curl --silent --fail "$TURNGATE_BASE_URL/v1/chat/completions" -H "Authorization: Bearer $TURNGATE_API_KEY" \\
    -d '{"model": "'"$TURNGATE_MODEL"'", "messages": [{"role": "user", "content": "Fix add."}]}' > /dev/null
if mkdir "$0.solved" 2> /dev/null; then
    sed -i 's/a - b/a + b/' main.py
else
    rmdir "$0.solved"
fi
"""

# A program of the reader's own, which calls the model once.
PROGRAM = """
import argparse, os, sys, openai

parser = argparse.ArgumentParser()
parser.add_argument("prompt", nargs="?")
parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL", "policy"))
parser.add_argument("--print", action="store_true")
parser.add_argument("--yes", action="store_true")
options = parser.parse_args()
client = openai.OpenAI(base_url=os.environ.get("MINE_URL"), api_key=os.environ.get("MINE_KEY"))
messages = [{"role": "user", "content": options.prompt or sys.stdin.read()}]
print(client.chat.completions.create(model=options.model, messages=messages).choices[0].message.content)
"""

# Checks what `pip install` is asked for, and installs nothing.
PIP = """
import sys, tomllib
from pathlib import Path

extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
for word in sys.argv[2:]:
    path, _, names = word.partition("[")
    if path.startswith((".", "examples", "deploy")) and not Path(path).exists():
        sys.exit(f"{path} does not exist")
    if path == "." and (unknown := {name for name in names.rstrip("]").split(",") if name} - extras.keys()):
        sys.exit(f"pyproject.toml has no extra {', '.join(sorted(unknown))}")
"""


def write_program(path: Path, command: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


def _only_first_task(folder: str, names: list[str]) -> list[str]:
    """Leave out all tasks but one, so that batches are short."""
    return [name for name in names if name != "fix-add"] if Path(folder).name == "tasks" else []


def prepare(folder: Path, server: Path) -> None:
    """Write the files of the workspace. `server` is the socket of `warm_programs.py`."""
    (folder / "tmp").mkdir()
    (folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n", encoding="utf-8")
    (folder / "pip.py").write_text(PIP, encoding="utf-8")
    (folder / "agent.sh").write_text(AGENT, encoding="utf-8")
    (folder / "mine.py").write_text(PROGRAM, encoding="utf-8")
    programs = folder / "bin"
    programs.mkdir()
    for name in ("python", "python3"):
        write_program(programs / name, sys.executable)
    warm = f"{sys.executable} -I -S {Path(warm_programs.__file__)} {server}"
    for name, module in (
        ("turngate", "turngate"),
        ("vllm", "tests.docs.engine"),
        ("run_block", "tests.docs.run_block"),
    ):
        write_program(programs / name, f"{warm} {module}")
    write_program(programs / "mine", f"{sys.executable} {folder / 'mine.py'}")
    write_program(programs / "pip", f"{sys.executable} {folder / 'pip.py'}")
    for path in cache_folder().glob("agents/claude-code-*/node_modules/.bin/claude"):
        (programs / "claude").symlink_to(path)
    clone = folder / "clone"
    clone.mkdir()
    for name in _LINKED:
        (clone / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=_only_first_task)
    (clone / ".venv").mkdir()
    (clone / ".venv" / "bin").symlink_to(programs)
    snapshot = folder / "huggingface" / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(cache_folder() / "tokenizers" / "qwen3")


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables of the reader's shell."""
    return {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TMPDIR": str(folder / "tmp"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "TURNGATE_CACHE": str(cache_folder()),
        "TURNGATE_ADMIN_KEY": ADMIN_KEY,
        "AGENT": str(folder / "agent.sh"),
    }
