"""The bundled agents, by the tier that runs them. Uses only the standard library."""

from __future__ import annotations

from pathlib import Path

CATALOG = Path(__file__).resolve().parents[1] / "turngate" / "agents" / "catalog"
AGENTS = ("pi", "opencode", "codex", "claude-code", "gemini-cli", "qwen-code", "mini-swe-agent")  # in `make test-real`
# All others run only in `make test-all`. `shell` runs any command, so it is not a program to install.
MORE_AGENTS = tuple(sorted({file.stem for file in CATALOG.glob("*.toml")} - {*AGENTS, "shell"}))
