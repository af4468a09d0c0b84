"""`turngate certify`: probe a chat template and print the verdicts."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from turngate.render import find_tokenizer, load_renderer

_LABELS = {
    "same": "[green]same[/]",
    "thinking": "[cyan]same except thinking[/]",
    "differs": "[red]differs[/]",
    "refused": "[yellow]rejected by template[/]",
}


def certify_tokenizer(tokenizer: str, model: str, family: str, as_json: bool) -> bool:
    """Print the verdicts, and return whether sampled ids may be extended."""
    folder = find_tokenizer(tokenizer)
    renderer, certificate = load_renderer(
        folder,
        model=model or (tokenizer if "/" in tokenizer and not Path(tokenizer).exists() else ""),
        family=family,
        recertify=True,
    )
    if as_json:
        print(
            msgspec.json.encode(
                {
                    "tokenizer": str(folder),
                    "renderer": renderer.name,
                    "passed": certificate.passed,
                    "cases": certificate.findings,
                }
            ).decode()
        )
        return certificate.passed
    table = Table(
        title=f"{folder} · renderer {renderer.name} · fast encoder {'yes' if renderer.tokenizer.fast else 'no'}",
        title_justify="left",
    )
    for heading in ("case", "verdict", "detail"):
        table.add_column(heading, overflow="fold")
    for finding in certificate.findings:
        table.add_row(finding.case, _LABELS[finding.verdict], finding.detail)
    console = Console()
    console.print(table)
    if certificate.passed:
        console.print("[green]Certified:[/] turns extend the sampled ids; an unchanged history never forks.")
    else:
        console.print(
            "[red]Not certified:[/] every turn renders the whole conversation, and the trace forks wherever the template rewrites history."
        )
    return certificate.passed
