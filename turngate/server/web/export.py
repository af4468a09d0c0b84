"""The web page's downloads: the training rows or messages of a rollout or a group, and the trace of a rollout."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from functools import partial
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from turngate.common.aio import give_way
from turngate.errors import StoreError
from turngate.gateway.projects import AuditNote
from turngate.server.operations import CHUNK_BYTES, CHUNK_S
from turngate.server.web.login import PageLogin
from turngate.server.web.reader import PageReader
from turngate.store.store import Store
from turngate.trace.advantage import compute_advantages
from turngate.views.session import load_session_view

_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._-]+")
Members = list[tuple[str, int]]  # the session id and session key of each rollout


class RolloutExportQuery(msgspec.Struct, frozen=True):
    format: Literal["rows", "messages", "trace"] = "rows"


class GroupExportQuery(msgspec.Struct, frozen=True):
    """Query parameters. `group` is the name of a group."""

    group: str = ""
    format: Literal["rows", "messages"] = "rows"


class ExportRoutes:
    def __init__(self, reader: PageReader, login: PageLogin, note: AuditNote) -> None:
        self._reader = reader
        self._login = login
        self._note = note
        self._views = reader.views

    async def export_rollout(self, request: Request, query: RolloutExportQuery) -> Response:
        """Download the training rows, messages or trace of a rollout."""
        session, format = request.path_params["id"], query.format
        if format == "trace":
            trace = await self._reader.run(partial(_encode_trace, session=session))
            self._note(self._login.find_caller(request), "export made", session, format=format)
            return _attachment(_chunks(trace), f"{session}.trace.json", "application/json")
        group = await self._reader.run(partial(self._views.group_of, session=session))
        self._note(self._login.find_caller(request), "export made", session, format=format)
        return await self._export(f"{session}.{format}.jsonl", format, [(session, dict(group)[session])], group)

    async def export_group(self, request: Request, query: GroupExportQuery) -> Response:
        """Download the training rows or messages of a group."""
        name, format = query.group, query.format
        group = await self._reader.run(partial(self._views.overview.members, name=name))
        self._note(self._login.find_caller(request), "export made", name, format=format)
        return await self._export(f"{name}.{format}.jsonl", format, group, group)

    async def _export(self, name: str, format: str, selected: Members, group: Members) -> Response:
        """Export the selected rollouts. Damaged rollouts are skipped, and a response header says how many."""
        damaged = 0
        for session, key in selected:
            damaged += await self._reader.run(partial(self._views.damaged, session=session, key=key))
        if damaged == len(selected):
            names = ", ".join(session for session, _ in selected[:3]) + (", …" if len(selected) > 3 else "")
            raise StoreError(f"nothing can be exported, because no selected rollout ({names}) has a readable trace")
        response = _attachment(self._lines(format, selected, group), name, "application/x-ndjson")
        response.headers["x-turngate-left-out"] = str(damaged)
        return response

    async def _lines(self, format: str, selected: Members, group: Members) -> AsyncIterator[bytes]:
        """Yield the lines of the file in chunks, reading one rollout at a time. Advantages are computed over the whole group."""
        rewards = []
        for session, key in group if format == "rows" else ():
            rewards.append(await self._reader.run(partial(self._views.training_reward, session=session, key=key)))
        by_session = dict(
            zip((session for session, _ in group), compute_advantages(rewards, "normalised"), strict=False)
        )
        for session, key in selected:
            query = partial(
                self._views.lines, session=session, key=key, format=format, advantage=by_session.get(session)
            )
            async for chunk in _chunks(b"".join(await self._reader.run(query))):
                yield chunk


def _encode_trace(store: Store, *, session: str) -> bytes:
    with store.snapshot():
        view = load_session_view(store, session)
    return view.encode_trace()


async def _chunks(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]
        await give_way(CHUNK_S)


def _attachment(content: AsyncIterator[bytes], name: str, media_type: str) -> Response:
    """Return a response that browsers save as the file `name`. Characters that are unsafe in a header are replaced."""
    filename = _UNSAFE_IN_NAME.sub("-", name)[-120:].lstrip(".-") or "export"
    headers = {"content-disposition": f'attachment; filename="{filename}"'}
    return StreamingResponse(content, media_type=media_type, headers=headers)
