"""`turngate certify`: probe a chat template and print the verdicts."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.common.safe_text import sanitize_line
from turngate.render import Certificate, Renderer, TemplateRenderer, find_tokenizer, load_renderer
from turngate.render.certify import ProbeResult

_LABELS = {
    "same": ("same", "green"),
    "thinking": ("same except thinking", "cyan"),
    "turn": ("same except the model's turns", "cyan"),
    "differs": ("differs", "red"),
    "refused": ("rejected by template", "yellow"),
}


def certify_tokenizer(tokenizer: str, model: str, family: str, as_json: bool) -> bool:
    """Print the verdict on each probe, and return whether sampled ids can be extended exactly at every transition between turns."""
    folder = find_tokenizer(tokenizer)
    renderer, certificate = load_renderer(
        folder,
        model=model or (tokenizer if "/" in tokenizer and not Path(tokenizer).exists() else ""),
        family=family,
        recertify=True,
    )
    if as_json:
        print(_encode(folder, renderer, certificate))
    else:
        _print(Console(), folder, renderer, certificate)
    return certificate.passed


def _encode(folder: Path, renderer: Renderer, certificate: Certificate) -> str:
    cases = [
        {**msgspec.to_builtins(finding), "transition": finding.transition.describe() if finding.transition else ""}
        for finding in certificate.findings
    ]
    return msgspec.json.encode(
        {
            "tokenizer": str(folder),
            "renderer": renderer.name,
            "passed": certificate.passed,
            "uncertified": {transition.describe(): why for transition, why in certificate.uncertified.items()},
            "unread": certificate.unread,
            "unused_template": renderer.unused_template if isinstance(renderer, TemplateRenderer) else "",
            "cases": cases,
        }
    ).decode()


def _print(console: Console, folder: Path, renderer: Renderer, certificate: Certificate) -> None:
    table = Table(
        title=Text(f"{folder} · renderer {renderer.name} · fast encoder {'yes' if renderer.tokenizer.fast else 'no'}"),
        title_justify="left",
    )
    for heading in ("case", "transition", "verdict", "detail"):
        table.add_column(heading, overflow="fold")
    for finding in certificate.findings:
        label, color = _LABELS[finding.verdict]
        transition = finding.transition.describe() if finding.transition else ""
        # Text instead of a string, because rich would read square brackets in a template's text as markup.
        table.add_row(finding.case, transition, Text(label, style=color), Text(sanitize_line(finding.detail)))
    console.print(table)
    shown = set()
    for finding in certificate.findings:
        if finding.tokens is not None and finding.transition not in shown:
            shown.add(finding.transition)
            console.print(_build_token_table(finding))
    if isinstance(renderer, TemplateRenderer) and renderer.unused_template:
        console.print(Text.assemble(("Note: ", "yellow"), renderer.unused_template))
    if certificate.unread:
        console.print(Text.assemble(("Not read: ", "yellow"), certificate.explain_unread()))
    console.print(_summarize(certificate))


def _build_token_table(finding: ProbeResult) -> Table:
    """Build a table that shows the tokens of the bridge and of the template around their first difference, side by side."""
    difference = finding.tokens
    assert difference is not None
    table = Table(
        title=Text(f"{finding.case}: {difference.where}, after {difference.at} identical tokens"),
        title_justify="left",
    )
    for heading in ("bridge", "id", "template", "id"):
        table.add_column(heading, overflow="fold")
    size = max(len(difference.bridge), len(difference.template))
    for n in range(size):
        cells: list[Text] = []
        pair = [side[n] if n < len(side) else None for side in (difference.bridge, difference.template)]
        style = "" if pair[0] == pair[1] else "red"
        for token in pair:
            cells += [Text(repr(token[1]), style), Text(str(token[0]), style)] if token else [Text(""), Text("")]
        table.add_row(*cells)
    return table


def _summarize(certificate: Certificate) -> Text:
    if certificate.passed:
        return Text.assemble(
            ("Certified:", "green"), " turns extend the sampled ids; an unchanged history never forks."
        )
    return Text.assemble(
        ("Certified in part:", "yellow") if certificate.certified else ("Not certified:", "red"),
        f" {certificate.explain_uncertified()}.",
        " All other turns extend the sampled ids." if certificate.certified else "",
    )
