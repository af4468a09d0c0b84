"""What `turngate show` prints: the conversation of a session with its roles and branches, its rows, and its tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.cli.terminal import console as new_console
from turngate.cli.terminal import sanitize, sanitize_line, say
from turngate.client.gateway import GatewayClient, Refused
from turngate.client.keys import read_admin_key
from turngate.dialects import decode_stored_messages
from turngate.errors import ConfigError, NotFound
from turngate.render import Tokenizer, find_tokenizer
from turngate.store.sqlite import Store
from turngate.types import Json, Message
from turngate.views.session import encode_array, read
from turngate.views.session_directory import describe_session

_STYLE = {"system": "magenta", "user": "blue", "tool": "yellow", "assistant": "green"}
_LONG = 1200  # characters of a message that are shown; --full shows all


class NodeView(msgspec.Struct):
    """One node of `GET /admin/sessions/{id}/trace`."""

    id: int
    parent: int | None
    kind: Literal["context", "sampled"]
    ids: list[int]
    cause: str | None = None
    dialect: str = "chat"
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    role: str = ""
    logprobs: list[float | None] | None = None
    message: Message | None = None
    finish: str = ""
    version_start: int = 0
    version_end: int = 0
    started: float = 0.0
    ended: float = 0.0
    biases: list[str] = []
    capture: str = ""
    fault: str = ""
    delivered: bool = True


class SpanView(msgspec.Struct):
    node: int
    role: str
    trained: bool
    reason: str
    start: int
    end: int


class RowView(msgspec.Struct):
    branch: int
    ids: list[int]
    mask: list[int | bool]
    spans: list[SpanView]


class View(msgspec.Struct):
    """Everything that is shown of a session."""

    summary: Json
    nodes: list[NodeView]
    rows: list[RowView]


def of_folder(data: Path, wanted: str) -> tuple[View, str | None]:
    """A session of a data folder, whether a gateway serves it at present or not, and the tokenizer it was recorded with."""
    store = Store.reading(data)
    try:
        known = store.find(wanted)
        session_id = wanted if known else _chosen(wanted, store.ids(10_000))
        shown = read(store, session_id)
        trace = shown.trace()
        view = _view(
            _plain(describe_session(store, shown.session)), _plain(trace), _plain(shown.samples(keep_empty=True))
        )
        return view, store.setting(f"tokenizer:{trace['vocabulary']}")
    finally:
        store.close()


async def of_gateway(gateway: GatewayClient, wanted: str) -> View:
    """A session of a running gateway."""
    async with gateway:
        session_id = wanted if await _is_there(gateway, wanted) else _chosen(wanted, await gateway.sessions())
        return _view(
            await gateway.show(session_id),
            await gateway.trace(session_id),
            await gateway.samples(session_id, everything=True),
        )


async def _is_there(gateway: GatewayClient, session: str) -> bool:
    try:
        await gateway.show(session)
    except Refused as refused:
        if refused.answered != 404:
            raise
        return False
    return True


def _chosen(wanted: str, known: list[str]) -> str:
    """A session by its id, by the beginning of it, or `last`."""
    if not known:
        raise NotFound("session: none has been recorded here")
    if wanted == "last":
        return known[0]
    fitting = [wanted] if wanted in known else [session for session in known if session.startswith(wanted)]
    if len(fitting) == 1:
        return fitting[0]
    raise NotFound(
        f"session: {wanted!r} is the beginning of {len(fitting)} ids; give more of it"
        if fitting
        else f"session: there is no {wanted!r} here; the newest is {known[0]}"
    )


def _plain(value: object) -> Json:
    """As it reads over HTTP."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=encode_array))


def _view(summary: Json, trace: Json, samples: Json) -> View:
    # Raw messages stay raw: they are read in their own dialect.
    return msgspec.json.decode(
        msgspec.json.encode({"summary": summary, "nodes": trace["nodes"], "rows": samples}), type=View
    )


def report(wanted: str, data: str, gateway: str, tokens: bool, tokenizer: str, full: bool, as_json: bool) -> None:
    known: str | None = None
    if gateway:
        view = asyncio.run(of_gateway(GatewayClient(gateway, read_admin_key()), wanted))
    else:
        view, known = of_folder(Path(data), wanted)
    if as_json:
        print(msgspec.json.encode(view).decode())
        return
    reader = read_with(tokenizer, known) if tokens else None
    show(view, tokenizer=reader, full=full, console=new_console())


def show(view: View, *, tokenizer: Tokenizer | None, full: bool, console: Console) -> None:
    """`tokenizer`: show tokens instead of text."""
    _head(view, console)
    _Printer(view, tokenizer, full, console).print()
    _rows(view, console)


def read_with(tokenizer: str, known: str | None) -> Tokenizer:
    """The tokenizer that ids are read with: the one named, or the one that the session was recorded with."""
    if tokenizer:
        return Tokenizer(find_tokenizer(tokenizer))
    if not known or not Path(known).is_dir():
        raise ConfigError(
            "tokenizer: the one it was recorded with is not here; give --tokenizer PATH", param="tokenizer"
        )
    return Tokenizer(Path(known))


def _head(view: View, console: Console) -> None:
    summary = view.summary
    config = summary["config"]
    metadata = config.get("metadata", {})
    status = summary["status"] + (f" ({summary['stop']})" if summary["stop"] else "")
    lasted = (summary["closed"] or time.time()) - summary["opened"]
    roles = ", ".join(f"{count} {role}" for role, count in summary["roles"].items())
    lines = [
        ("session", summary["id"]),
        (
            "status",
            f"{status}, opened {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(summary['opened']))}, {lasted:.0f} s",
        ),
        (
            "ran",
            " · ".join(
                f"{name} {metadata[name]}"
                for name in ("agent", "agent_version", "task", "sandbox")
                if metadata.get(name)
            ),
        ),
        ("model", config.get("model", "") or "any"),
        ("turns", f"{summary['turns']} ({roles})" if roles else "0"),
        ("tokens", f"{summary['tokens']} stored, {summary['sampled_tokens']} sampled"),
        ("outcome", summary.get("damaged") or _outcome(summary.get("outcome"))),
    ]
    for name, value in lines:
        if value:
            say(console, Text.assemble((f"{name:8}", "dim"), sanitize_line(str(value))))


def _outcome(outcome: Json) -> str:
    """How the rollout ended; nothing where nobody has recorded that. A reward that is not known is not 0."""
    if not outcome:
        return ""
    reward = "no reward" if outcome["reward"] is None else f"reward {outcome['reward']:g}"
    resolved = {True: "resolved", False: "not resolved", None: ""}[outcome["resolved"]]
    return " · ".join(fact for fact in (outcome["kind"], reward, resolved, outcome["message"]) if fact)


class _Printer:
    def __init__(self, view: View, tokenizer: Tokenizer | None, full: bool, console: Console) -> None:
        self._nodes = {node.id: node for node in view.nodes}
        self._children: dict[int | None, list[NodeView]] = {}
        for node in view.nodes:
            self._children.setdefault(node.parent, []).append(node)
        self._depth: dict[int, int] = {}  # nodes below each, itself included; a child's id is larger than its parent's
        for node in reversed(view.nodes):
            self._depth[node.id] = 1 + sum(self._depth[child.id] for child in self._children.get(node.id, []))
        self._numbers = {node.id: n for n, node in enumerate((n for n in view.nodes if n.kind == "sampled"), 1)}
        self._tokenizer = tokenizer
        self._full = full
        self._console = console

    def print(self) -> None:
        waiting = list(self._children.get(None, []))
        while waiting:
            waiting = self._branch(waiting[0]) + waiting[1:]

    def _branch(self, start: NodeView) -> list[NodeView]:
        """Print from `start` along its longest way; what branches off is given back, to be printed after it."""
        self._rule(start)
        apart: list[NodeView] = []
        node: NodeView | None = start
        while node is not None:
            self._node(node)
            children = sorted(self._children.get(node.id, []), key=self._weight, reverse=True)
            apart = children[1:] + apart
            node = children[0] if children else None
        return apart

    def _weight(self, node: NodeView) -> tuple[bool, int]:
        """Of several ways to go on, the heaviest is followed first: one that counts, and the longest of those."""
        return node.role not in ("superseded", "aborted"), self._depth[node.id]

    def _rule(self, start: NodeView) -> None:
        first = next((n for n in self._along(start) if n.kind == "sampled"), None)
        role = first.role if first is not None else "unanswered"
        cause = _told(start.cause, role)
        if start.parent is None:
            title = f"{role} · conversation{cause}"
        else:
            at = self._nodes[start.parent]
            turn = self._numbers.get(at.id) or self._numbers.get(-1 if at.parent is None else at.parent)
            where = f"after turn {turn}" if turn else "from the beginning"
            title = f"{role} · branch {where}{cause}"
        self._console.print()
        self._console.rule(Text(sanitize(title), style="bold"), align="left", style="dim")

    def _node(self, node: NodeView) -> None:
        if node.kind == "sampled":
            say(self._console, self._turn_head(node))
        if self._tokenizer is not None:
            say(self._console, self._tokens(node, self._tokenizer))
        elif node.message is not None:
            self._say(node.message)
        elif node.kind == "context":
            for message in decode_stored_messages(node.dialect, bytes(node.messages)):
                say(self._console, Text(message.role, style=f"bold {_STYLE[message.role]}"))
                self._say(message)

    def _say(self, message: Message) -> None:
        if message.reasoning:
            say(self._console, Text(self._short(message.reasoning), style="dim italic"))
        if message.content:
            say(self._console, Text(self._short(message.content)))
        for call in message.tool_calls:
            name, arguments = sanitize_line(call.name), self._short(call.arguments)
            say(self._console, Text.assemble(("→ ", "cyan"), (name, "bold cyan"), f" {arguments}"))

    def _turn_head(self, node: NodeView) -> Text:
        known = [p for p in node.logprobs or () if p is not None]
        facts = [f"{len(node.ids)} tokens", node.finish, node.role]
        if known:
            facts.insert(1, f"mean log-probability {sum(known) / len(known):.2f}")
        if node.version_end:
            facts.append(
                f"policy {node.version_start}"
                + (f"–{node.version_end}" if node.version_end != node.version_start else "")
            )
        marks = (node.fault, ", ".join(node.biases), "" if node.delivered else "not delivered")
        facts += [fact for fact in marks if fact]
        if node.capture != "tokens":
            facts.append(f"captured as {node.capture}")
        line = " · ".join(facts) + _told(node.cause, node.role)
        return Text.assemble(
            (f"assistant, turn {self._numbers[node.id]}", "bold green"), (f"  {sanitize_line(line)}", "dim")
        )

    def _tokens(self, node: NodeView, tokenizer: Tokenizer) -> Text:
        """Sampled tokens coloured from green (likely) to red; context in grey."""
        text = Text()
        logprobs = node.logprobs or [None] * len(node.ids)
        plain = not self._console.is_terminal
        for token, (piece, logprob) in zip(
            node.ids, zip(_pieces(tokenizer, node.ids), logprobs, strict=True), strict=True
        ):
            shown = sanitize(piece) if piece else f"⟨{token}⟩"
            if node.kind == "context":
                text.append(shown, style="bright_black")
            elif plain:
                text.append(shown + ("│" if logprob is None else f"│{logprob:.2f}│"))
            else:
                text.append(shown, style=_shade(logprob))
        return text

    def _short(self, text: str) -> str:
        text = sanitize(text)
        if self._full or len(text) <= _LONG:
            return text
        return (
            f"{text[: _LONG * 3 // 4]}\n… {len(text) - _LONG} characters (--full shows them) …\n{text[-_LONG // 4 :]}"
        )

    def _along(self, node: NodeView) -> Iterator[NodeView]:
        at: NodeView | None = node
        while at is not None:
            yield at
            at = max(self._children.get(at.id, []), key=self._weight, default=None)


def _told(cause: str | None, role: str) -> str:
    """Why a branch is one, where its role does not say so. (A first look may take the main conversation for a sub-agent's.)"""
    return f" · {cause}" if cause and cause not in (role, "subagent", "side") else ""


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds. A character that several tokens make up appears at the last of them."""
    decoder = tokenizer.decoder()
    return [decoder.feed([token]) for token in ids]


def _shade(logprob: float | None) -> str:
    if logprob is None:
        return "black on white"
    likely = math.exp(max(-20.0, min(0.0, logprob)))
    red, green = int(220 * (1 - likely) + 20), int(180 * likely + 20)
    return f"white on rgb({red},{green},30)"


def _rows(view: View, console: Console) -> None:
    console.print()
    if not view.rows:
        say(console, "No row: nothing of this trace is trained.", "yellow")
        return
    table = Table(title="Rows", title_justify="left")
    for heading in ("row", "tokens", "trained", "turns", "not trained"):
        table.add_column(heading, overflow="fold")
    for number, row in enumerate(view.rows, 1):
        reasons = [span.reason for span in row.spans if span.reason]
        counted = ", ".join(f"{reasons.count(reason)} × {reason}" for reason in dict.fromkeys(reasons))
        table.add_row(str(number), str(len(row.ids)), str(sum(map(bool, row.mask))), str(len(row.spans)), counted)
    console.print(table)
