"""`turngate show`: print a session's conversation as text, tokens or JSON, with its roles, branches and training rows."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turngate.client.gateway import GatewayClient, RequestRejected
from turngate.client.keys import read_admin_key
from turngate.client.protocol import DecodedTrace, SampleRow, SessionInfo
from turngate.common.database_url import refuse_password_flag
from turngate.common.session_id import resolve_session_id
from turngate.common.terminal import console as new_console
from turngate.common.terminal import sanitize, sanitize_line, say
from turngate.dialects import decode_stored_messages
from turngate.errors import ConfigError
from turngate.gateway.events import PAGE
from turngate.gateway.lost_runners import find_runner
from turngate.render import Tokenizer, find_tokenizer
from turngate.store.location import open_store_for_reading
from turngate.store.outcomes import RecordedOutcome
from turngate.trace.sample import NEEDS_MASK, Sample
from turngate.trace.session import CacheUse
from turngate.trace.training_report import list_warnings
from turngate.trace.turn_rewards import TurnReward
from turngate.types import RUNNER_LOST, Message
from turngate.views.session import encode_json, load_session_view
from turngate.views.session_directory import describe_session
from turngate.views.trace import decode_trace

_STYLE = {"system": "magenta", "user": "blue", "tool": "yellow", "assistant": "green"}
_OBVIOUS = "the main conversation"  # evidence that is not printed, because the title of the branch already says it
_LONG = 1200  # characters; longer messages are shortened unless --full is passed


class NodeView(msgspec.Struct):
    """The fields of a trace node that `show` uses, in the form in which `GET /admin/sessions/{id}/trace` returns them."""

    id: int
    parent: int | None
    kind: Literal["context", "sampled"]
    ids: list[int]
    cause: str | None = None
    detail: str = ""
    dialect: str = "chat"
    messages: msgspec.Raw = msgspec.Raw(b"[]")
    role: str = ""
    evidence: str = ""
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


class ShownSession(msgspec.Struct):
    """The parts of a session that `show` prints."""

    summary: SessionInfo
    nodes: list[NodeView]
    rows: list[RowView]  # as a trainer that receives sampling masks gets them
    masked: list[int]  # nodes of turns that are trained only in rows with sampling masks


def load_from_store(data: str | Path, wanted: str) -> tuple[ShownSession, str | None]:
    """Load a session and the path of its tokenizer (None if unknown) from a data folder or a shared store, which a gateway may be using."""
    store = open_store_for_reading(data)
    try:
        known = store.find(wanted)
        session_id = wanted if known else resolve_session_id(wanted, store.ids())
        shown = load_session_view(store, session_id)
        summary = describe_session(store, shown.session)
        if summary.status == "open" and not summary.stop:
            runner = find_runner(store.events.page(session_id, 0, PAGE))
            if runner is not None and runner.gone:
                summary = msgspec.structs.replace(summary, stop=RUNNER_LOST)
        view = _build_view(
            summary,
            decode_trace(shown.encode_trace()),
            shown.samples(keep_empty=True, masks=True),
            _find_masked(shown.samples(keep_empty=True)),
        )
        return view, store.setting(f"tokenizer:{shown.session.vocabulary}")
    finally:
        store.close()


async def load_from_gateway(gateway: GatewayClient, wanted: str) -> ShownSession:
    """Load a session from a running gateway."""
    async with gateway:
        session_id = wanted if await _exists(gateway, wanted) else resolve_session_id(wanted, await gateway.sessions())
        return _build_view(
            await gateway.show(session_id),
            await gateway.trace(session_id),
            await gateway.samples(session_id, everything=True, masks=True),
            _find_masked(await gateway.samples(session_id, everything=True)),
        )


async def _exists(gateway: GatewayClient, session: str) -> bool:
    try:
        await gateway.show(session)
    except RequestRejected as rejection:
        if rejection.answered != 404:
            raise
        return False
    return True


def _find_masked(rows: Sequence[Sample | SampleRow]) -> list[int]:
    """Return the nodes of the turns that would be trained if these rows had sampling masks."""
    return sorted({span.node for row in rows for span in row.spans if span.reason.startswith(NEEDS_MASK)})


def _build_view(summary: object, trace: DecodedTrace, samples: object, masked: Sequence[int]) -> ShownSession:
    # Messages stay raw JSON here. They are decoded later, each in the dialect in which it arrived.
    return msgspec.json.decode(
        encode_json({"summary": summary, "nodes": trace.nodes, "rows": samples, "masked": masked}), type=ShownSession
    )


def show_session(wanted: str, data: str, gateway: str, tokens: bool, tokenizer: str, full: bool, as_json: bool) -> None:
    recorded_with: str | None = None
    refuse_password_flag(data)
    if gateway:
        view = asyncio.run(load_from_gateway(GatewayClient(gateway, read_admin_key()), wanted))
    else:
        view, recorded_with = load_from_store(data, wanted)
    if as_json:
        print(msgspec.json.encode(view).decode())
        return
    decoder = load_tokenizer(tokenizer, recorded_with) if tokens else None
    print_session(view, tokenizer=decoder, full=full, console=new_console())


def print_session(view: ShownSession, *, tokenizer: Tokenizer | None, full: bool, console: Console) -> None:
    """Print a session. If a tokenizer is passed, print tokens instead of text."""
    _print_head(view, console)
    _TreePrinter(view, tokenizer, full, console).print()
    if tokenizer is not None:
        _print_legend(console)
    _print_rows(view, console)


def load_tokenizer(tokenizer: str, recorded_with: str | None) -> Tokenizer:
    """Load `tokenizer` or, if it is empty, the tokenizer with which the session was recorded (the folder `recorded_with`)."""
    if tokenizer:
        return Tokenizer(find_tokenizer(tokenizer))
    if not recorded_with or not Path(recorded_with).is_dir():
        problem = f"({recorded_with}) is not on this machine" if recorded_with else "is unknown"
        raise ConfigError(f"the session's tokenizer {problem}; pass --tokenizer PATH", param="tokenizer")
    return Tokenizer(Path(recorded_with))


def _print_head(view: ShownSession, console: Console) -> None:
    summary = view.summary
    metadata = summary.config.metadata
    status = summary.status + (f" ({summary.stop})" if summary.stop else "")
    lasted = (summary.closed or time.time()) - summary.opened
    roles = ", ".join(f"{count} {role}" for role, count in (summary.roles or {}).items())
    lines = [
        ("session", summary.id),
        (
            "status",
            f"{status}, opened {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(summary.opened))}, {lasted:.0f} s",
        ),
        (
            "ran",
            " · ".join(
                f"{name} {metadata[name]}"
                for name in ("agent", "agent_version", "task", "sandbox", "replayed")
                if metadata.get(name)
            ),
        ),
        ("attempt", f"{summary.config.attempt} of {summary.config.rollout}" if summary.config.rollout else ""),
        ("model", summary.config.model or "any"),
        ("turns", f"{summary.turns} ({roles})" if roles else "0"),
        ("tokens", f"{summary.tokens} stored, {summary.sampled_tokens} sampled"),
        ("cache", _describe_cache(summary.cache)),
        ("outcome", summary.damaged or _describe_outcome(summary.outcome, summary.excluded)),
        *(("warning", warning) for warning in list_warnings(summary.training, summary.refused)),
    ]
    for name, value in lines:
        if value:
            say(console, Text.assemble((f"{name:8}", "dim"), sanitize_line(str(value))))


def _describe_cache(cache: CacheUse | None) -> str:
    """Describe how many of the prompt tokens were cached by the engine. Return an empty string if the engine did not report this."""
    if cache is None or cache.rate is None:
        return ""
    return f"{cache.rate:.0%} of prompt tokens were cached ({cache.cached_tokens} of {cache.prompt_tokens})"


def _describe_outcome(outcome: RecordedOutcome | None, excluded: str) -> str:
    """Describe how the rollout ended, or return an empty string if no outcome is recorded. An unknown reward is not shown as 0."""
    if outcome is None:
        return ""
    reward = "no reward" if outcome.reward is None else f"reward {outcome.reward:g}"
    not_counted = f"does not count: {excluded}" if excluded else ""
    resolved = {True: "resolved", False: "not resolved", None: ""}[outcome.resolved]
    return " · ".join(fact for fact in (outcome.kind, reward, resolved, outcome.message, not_counted) if fact)


class _TreePrinter:
    """Prints a trace branch by branch. Where the tree forks, printing continues with the child that has the highest `_weight`."""

    def __init__(self, view: ShownSession, tokenizer: Tokenizer | None, full: bool, console: Console) -> None:
        self._nodes = {node.id: node for node in view.nodes}
        self._children: dict[int | None, list[NodeView]] = {}
        for node in view.nodes:
            self._children.setdefault(node.parent, []).append(node)
        self._size: dict[int, int] = {}  # number of nodes per subtree; children have larger ids than their parents
        for node in reversed(view.nodes):
            self._size[node.id] = 1 + sum(self._size[child.id] for child in self._children.get(node.id, []))
        self._numbers = {node.id: n for n, node in enumerate((n for n in view.nodes if n.kind == "sampled"), 1)}
        self._tokenizer = tokenizer
        self._full = full
        self._console = console
        self._evidence = ""  # the evidence for the role of the branch that is being printed
        outcome = view.summary.outcome
        self._rewards = () if outcome is None else outcome.turn_rewards or ()

    def print(self) -> None:
        waiting = list(self._children.get(None, []))
        while waiting:
            waiting = self._print_branch(waiting[0]) + waiting[1:]

    def _print_branch(self, start: NodeView) -> list[NodeView]:
        """Print a path from `start` to a leaf, following the child with the highest `_weight`. Return the other children, to print next."""
        self._print_title(start)
        branches: list[NodeView] = []
        node: NodeView | None = start
        while node is not None:
            self._print_node(node)
            children = sorted(self._children.get(node.id, []), key=self._weight, reverse=True)
            branches = children[1:] + branches
            node = children[0] if children else None
        return branches

    def _weight(self, node: NodeView) -> tuple[bool, int]:
        """Return the sort key of a child. Superseded and aborted turns rank lowest. Otherwise, a larger subtree ranks higher."""
        return node.role not in ("superseded", "aborted"), self._size[node.id]

    def _print_title(self, start: NodeView) -> None:
        first = next((n for n in self._walk(start) if n.kind == "sampled"), None)
        role = first.role if first is not None else "unanswered"
        cause = _describe_cause(start.cause, role)
        if start.parent is None:
            title = f"{role} · conversation{cause}"
        else:
            at = self._nodes[start.parent]
            turn = self._numbers.get(at.id) or self._numbers.get(-1 if at.parent is None else at.parent)
            where = f"after turn {turn}" if turn else "from the beginning"
            title = f"{role} · branch {where}{cause}"
        self._console.print()
        self._console.rule(Text(sanitize(title), style="bold"), align="left", style="dim")
        self._evidence = first.evidence if first is not None else ""
        why = _explain_role(self._evidence)
        if why and why != _OBVIOUS:
            say(self._console, Text(sanitize_line(f"why {role}: {why}"), style="dim"))
        if start.detail:
            say(self._console, Text(sanitize_line(f"reason for the fork: {start.detail}"), style="dim"))

    def _print_node(self, node: NodeView) -> None:
        if node.kind == "sampled":
            say(self._console, self._turn_title(node))
        if self._tokenizer is not None:
            say(self._console, self._color_tokens(node, self._tokenizer))
        elif node.message is not None:
            self._print_message(node.message)
        elif node.kind == "context":
            for message in decode_stored_messages(node.dialect, bytes(node.messages)):
                say(self._console, Text(message.role, style=f"bold {_STYLE[message.role]}"))
                self._print_message(message)

    def _print_message(self, message: Message) -> None:
        if message.reasoning:
            say(self._console, Text(self._shorten(message.reasoning), style="dim italic"))
        if message.content:
            say(self._console, Text(self._shorten(message.content)))
        for call in message.tool_calls:
            name, arguments = sanitize_line(call.name), self._shorten(call.arguments)
            say(self._console, Text.assemble(("→ ", "cyan"), (name, "bold cyan"), f" {arguments}"))

    def _turn_title(self, node: NodeView) -> Text:
        known = [p for p in node.logprobs or () if p is not None]
        role = node.role if node.evidence == self._evidence else f"{node.role} ({_explain_role(node.evidence)})"
        facts = ["1 token" if len(node.ids) == 1 else f"{len(node.ids)} tokens", node.finish, role]
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
        facts += [_describe_reward(reward) for reward in self._rewards if reward.turn == node.id]
        line = " · ".join(facts) + _describe_cause(node.cause, node.role)
        return Text.assemble(
            (f"assistant, turn {self._numbers[node.id]}", "bold green"), (f"  {sanitize_line(line)}", "dim")
        )

    def _color_tokens(self, node: NodeView, tokenizer: Tokenizer) -> Text:
        """Return a node's tokens as text.

        On a terminal, sampled tokens are colored from green (likely) to red (unlikely), and context tokens are gray. Elsewhere, each
        sampled token is followed by its log-probability, or by '?' if it is unknown.
        """
        text = Text()
        logprobs = node.logprobs or [None] * len(node.ids)
        plain = not self._console.is_terminal
        for token, (fragment, logprob) in zip(
            node.ids, zip(_decode_each(tokenizer, node.ids), logprobs, strict=True), strict=True
        ):
            shown = sanitize(fragment) if fragment else f"⟨{token}⟩"
            if node.kind == "context":
                text.append(shown, style="bright_black")
            elif plain:
                text.append(shown + ("│?│" if logprob is None else f"│{logprob:.2f}│"))
            else:
                text.append(shown, style=_shade(logprob))
        return text

    def _shorten(self, text: str) -> str:
        text = sanitize(text)
        if self._full or len(text) <= _LONG:
            return text
        return f"{text[: _LONG * 3 // 4]}\n… characters left out: {len(text) - _LONG:,}; --full shows them …\n{text[-_LONG // 4 :]}"

    def _walk(self, node: NodeView) -> Iterator[NodeView]:
        current: NodeView | None = node
        while current is not None:
            yield current
            current = max(self._children.get(current.id, []), key=self._weight, default=None)


def _describe_reward(reward: TurnReward) -> str:
    """Describe the reward of a turn, such as `reward -0.5 (extra, style, tokens 0–3)`."""
    span = "" if reward.start is None or reward.end is None else f"tokens {reward.start}–{reward.end}"
    call = "" if reward.call is None else f"tool call {reward.call}"
    facts = (reward.kind, reward.name, call, span)
    return f"reward {reward.value:g} ({', '.join(fact for fact in facts if fact)})"


def _explain_role(evidence: str) -> str:
    """Remove the kind from the evidence for a role: `delivery: it was cut short` becomes `it was cut short`."""
    return evidence.partition(": ")[2] or evidence


def _describe_cause(cause: str | None, role: str) -> str:
    """Return the text that a title shows for the cause of a branch, or an empty string if the role already says it.

    The causes `subagent`, `side` and `new` are never shown, because they were guessed when the branch began. The role is more reliable.
    """
    return f" · {cause}" if cause and cause not in (role, "subagent", "side", "new") else ""


def _decode_each(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Decode each token separately. A character that spans several tokens is returned with the last of them."""
    decoder = tokenizer.decoder()
    return [decoder.feed([token]) for token in ids]


def _shade(logprob: float | None) -> str:
    if logprob is None:
        return "black on white"
    likely = math.exp(max(-20.0, min(0.0, logprob)))
    red, green = int(220 * (1 - likely) + 20), int(180 * likely + 20)
    return f"white on rgb({red},{green},30)"


def _print_legend(console: Console) -> None:
    """Print what the colors of the tokens mean or, if the output is not a terminal, what the numbers after the tokens mean."""
    console.print()
    if not console.is_terminal:
        say(
            console,
            "Each sampled token is followed by its log-probability between two bars, or by '?' if it is unknown. Context tokens have none.",
        )
        return
    samples = [(f" {share:.0%} ", _shade(math.log(share))) for share in (0.01, 0.25, 0.5, 0.75, 1.0)]
    say(
        console,
        Text.assemble(
            ("context", "bright_black"),
            "  sampled with a probability of ",
            *samples,
            "  ",
            (" unknown ", _shade(None)),
        ),
    )


def _print_rows(view: ShownSession, console: Console) -> None:
    console.print()
    if not view.rows:
        say(console, "No rows: this trace contains nothing to train on.", "yellow")
        return
    table = Table(title="Rows", title_justify="left")
    for heading in ("row", "tokens", "trained", "turns", "not trained"):
        table.add_column(heading, overflow="fold")
    for number, row in enumerate(view.rows, 1):
        reasons = [span.reason for span in row.spans if span.reason]
        # A reason can contain text from the endpoint.
        counted = sanitize_line(", ".join(f"{reasons.count(each)} × {each}" for each in dict.fromkeys(reasons)))
        table.add_row(str(number), str(len(row.ids)), str(sum(map(bool, row.mask))), str(len(row.spans)), counted)
    console.print(table)
    if view.masked:
        turns = "1 turn is" if len(view.masked) == 1 else f"{len(view.masked)} turns are"
        say(console, f"{turns} trained only in rows with sampling masks (turngate export rows --side sampling_mask).")
