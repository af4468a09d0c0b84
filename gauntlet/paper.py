"""Where results are written: a page with all tables, a JSON file beside it, and the table in a README between two marks."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from gauntlet import report
from gauntlet.run import Result

BEGIN, END = "<!-- gauntlet -->", "<!-- /gauntlet -->"


def about(command: str) -> dict[str, str]:
    """When, where and how."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {_cpu()}, {_memory_gb()} GB; {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "command": command,
    }


def marked(readme: Path) -> bool:
    """Whether there is a place for the table."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    return text.count(BEGIN) == 1 and END in text.partition(BEGIN)[2]


def write_readme(readme: Path, results: Sequence[Result], told: dict[str, str], ours: str) -> None:
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    compared = [line for line in report.compare(results, ours) if not line.startswith("  ")]
    parts = [
        BEGIN,
        report.table(results),
        *(f"- {line}" for line in compared),
        f"{told['date']}, {told['machine']}.",
        END,
    ]
    readme.write_text(f"{before}{_joined(parts)}{after}", encoding="utf-8")


def write_page(page: Path, results: Sequence[Result], told: dict[str, str], ours: str) -> None:
    """The page and its JSON."""
    lines = [
        "# The Gauntlet: results",
        f"Made by `{told['command']}` on {told['date']}; do not edit. What the columns mean: [gauntlet.md](gauntlet.md).",
        f"{told['machine']}; Python {told['python']}.",
        "\n".join(f"- `{result.gateway}`: {result.about}" for result in results),
        report.everything(results, ours),
    ]
    if wrong := report.trouble(results):
        lines += ["### What went wrong", "\n".join(f"- {line}" for line in wrong)]
    page.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    page.with_suffix(".json").write_text(report.as_json(results, told, rollouts=False), encoding="utf-8")


def _joined(parts: Sequence[str]) -> str:
    """Items of a list stand together, all else apart."""
    text = ""
    for last, part in zip(["", *parts], parts, strict=False):
        text += "" if not last else "\n" if last.startswith("- ") and part.startswith("- ") else "\n\n"
        text += part
    return text


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_gb() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
