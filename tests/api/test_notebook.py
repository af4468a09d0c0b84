"""A real kernel: the example notebook from its first cell to its last, and interrupts, which leave nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.agents_real.kit import agent
from tests.api.kit import AGENT, NAP, program, scripted
from tests.api.test_html import TAGS, Page
from tests.cli.kit import ROOT
from tests.sandboxes.kit import need, processes, wait_until
from tests.speed import scaled

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.process, pytest.mark.full]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def shown(cell: Any) -> str:
    """The page that a cell's value shows itself as; empty if it has none."""
    pages = [one["data"]["text/html"] for one in cell["outputs"] if one["output_type"] == "execute_result"]
    return "".join(pages)


def printed(cell: Any) -> str:
    return "".join(one["text"] for one in cell["outputs"] if one["output_type"] == "stream")


def limits() -> dict[str, int]:
    """Of a client, in seconds: for each cell, and for the start of the kernel."""
    return {"timeout": int(scaled(120)), "startup_timeout": int(scaled(60))}


@pytest.mark.needs("bubblewrap", "agent:pi")
async def test_the_example_notebook() -> None:
    need("bubblewrap")
    agent("pi")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is kept without its outputs"
    await NotebookClient(notebook, resources={"metadata": {"path": str(NOTEBOOK.parent)}}, **limits()).async_execute()
    cells = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    pages = [page for cell in cells if (page := shown(cell))]
    result, results, broken = pages
    assert (
        "reward 1" in Page(result).text and "5 turns" in Page(result).text and "1 row for training" in Page(result).text
    )
    assert "2 results · mean reward 1 · pass@1 1" in Page(results).text
    assert "reward unknown" in Page(broken).text and "no such package" in Page(broken).text
    assert all({*Page(page).tags} <= TAGS for page in pages)
    told = "".join(printed(cell) for cell in cells)
    assert "return a + b" in told and "did you mean timeout_s?" in told and "[1.0, 1.0] 1.0 [0.0, 0.0]" in told
    [live] = [one for one in cells[1]["outputs"] if one["output_type"] == "display_data"]
    assert "finished" in Page(live["data"]["text/html"]).text  # the line that told how far it was


@pytest.mark.parametrize("how", ["await tg.run", "tg.run_sync"])
async def test_interrupting_the_kernel_ends_the_rollout(tmp_path: Path, how: str) -> None:
    sleeps = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{NAP}'])")
    model = scripted(tmp_path, ["Hello."])
    notebook = new_notebook(
        cells=[
            new_code_cell(f"import turngate as tg\n{how}({sleeps!r}, model={model!r}, **{AGENT!r})"),
            new_code_cell("print('still of use')"),
        ]
    )
    client = NotebookClient(notebook, allow_errors=True, kernel_name="python3", **limits())
    async with client.async_setup_kernel(cwd=str(ROOT)):
        running = asyncio.create_task(client.async_execute_cell(notebook.cells[0], 0))
        await wait_until(lambda: processes(f"sleep\0{NAP}") or running.done(), 40)
        assert client.km is not None
        await client.km.interrupt_kernel()
        first = await running
        assert first["outputs"][-1]["ename"] in ("KeyboardInterrupt", "CancelledError"), first["outputs"]
        assert processes(f"sleep\0{NAP}") == []
        await client.async_execute_cell(notebook.cells[1], 1)
        assert printed(notebook.cells[1]) == "still of use\n"
