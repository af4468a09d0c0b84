"""A real kernel: the example notebook runs, and interrupts leave nothing behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from tests.agents_real.kit import agent
from tests.api.kit import AGENT, SLEEP_S, program, write_script
from tests.api.test_html import TAGS, Page
from tests.cli.kit import ROOT
from tests.sandboxes.kit import need, processes, wait_until
from tests.speed import scaled

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.process, pytest.mark.full]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def html_output(cell: Any) -> str:
    """The HTML of a cell's value, or an empty string."""
    pages = [one["data"]["text/html"] for one in cell["outputs"] if one["output_type"] == "execute_result"]
    return "".join(pages)


def printed_output(cell: Any) -> str:
    return "".join(one["text"] for one in cell["outputs"] if one["output_type"] == "stream")


def timeouts() -> dict[str, int]:
    """Timeouts of a notebook client."""
    return {"timeout": int(scaled(120)), "startup_timeout": int(scaled(60))}


@pytest.mark.repeat  # tests/api/test_docs.py runs the same code
@pytest.mark.needs("bubblewrap", "agent:pi")
async def test_example_notebook() -> None:
    need("bubblewrap")
    agent("pi")
    notebook = nbformat.read(NOTEBOOK, 4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "the notebook has stored outputs"
    await NotebookClient(notebook, resources={"metadata": {"path": str(NOTEBOOK.parent)}}, **timeouts()).async_execute()
    cells = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    pages = [page for cell in cells if (page := html_output(cell))]
    result, results, broken = pages
    assert (
        "reward 1" in Page(result).text and "5 turns" in Page(result).text and "1 row for training" in Page(result).text
    )
    assert "2 results · mean reward 1 · pass@1 1" in Page(results).text
    assert "reward unknown" in Page(broken).text and "no such package" in Page(broken).text
    assert all({*Page(page).tags} <= TAGS for page in pages)
    output = "".join(printed_output(cell) for cell in cells)
    assert "return a + b" in output and "did you mean timeout_s?" in output and "[1.0, 1.0] 1.0 [0.0, 0.0]" in output
    [live] = [one for one in cells[1]["outputs"] if one["output_type"] == "display_data"]
    assert "finished" in Page(live["data"]["text/html"]).text  # the progress line


@pytest.mark.parametrize("call", [pytest.param("await tg.run", marks=pytest.mark.repeat), "tg.run_sync"])
async def test_kernel_interrupt_ends_rollout(tmp_path: Path, call: str) -> None:
    sleeps = program(f"import subprocess; ask('Hi'); subprocess.run(['sleep', '{SLEEP_S}'])")
    model = write_script(tmp_path, ["Hello."])
    notebook = new_notebook(
        cells=[
            new_code_cell(f"import turngate as tg\n{call}({sleeps!r}, model={model!r}, **{AGENT!r})"),
            new_code_cell("print('still of use')"),
        ]
    )
    client = NotebookClient(notebook, allow_errors=True, kernel_name="python3", **timeouts())
    async with client.async_setup_kernel(cwd=str(ROOT)):
        running = asyncio.create_task(client.async_execute_cell(notebook.cells[0], 0))
        await wait_until(lambda: processes(f"sleep\0{SLEEP_S}") or running.done(), 40)
        assert client.km is not None
        await client.km.interrupt_kernel()
        first = await running
        assert first["outputs"][-1]["ename"] in ("KeyboardInterrupt", "CancelledError"), first["outputs"]
        assert processes(f"sleep\0{SLEEP_S}") == []
        await client.async_execute_cell(notebook.cells[1], 1)
        assert printed_output(notebook.cells[1]) == "still of use\n"
