"""A stand-in for E2B: the control API, and envd (files over HTTP, processes over Connect's JSON) behind the same port.

It follows the SDK's generated clients and protobufs (e2b 2.63): routes, field names, the envelopes of a Connect stream, the proxy's 502
for a removed sandbox, envd's exit code -1 for a process ended by a signal.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import struct
import time
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.sandboxes.standins.machine import Machine, Process, StandIn, cut, fault_of

KEY = "e2b_5ec2e75ec2e75ec2e7"
ENVD = "0.6.7"


@dataclass
class E2BStandIn(StandIn):
    max_timeout_s: int = 86_400  # the largest timeout of a sandbox
    profile: str = ""  # the profile of login shells
    page: int = 100
    keys: dict[str, str] = field(default_factory=dict)  # idempotency key → sandbox
    ends: dict[str, float] = field(default_factory=dict)
    ending: list[asyncio.Future[None]] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        if "E2b-Sandbox-Id" in request.headers:
            return await self.envd(request)
        if request.headers.get("X-API-KEY") != KEY:
            key = request.headers.get("X-API-KEY", "")
            return _error(401, f"the key {key} is not valid")
        match request.method, request.path.strip("/").split("/"):
            case "POST", ["v2", "sandboxes"]:
                return await self.create(request)
            case "GET", ["v2", "sandboxes"]:
                return self.list_sandboxes(request)
            case "DELETE", ["sandboxes", id]:
                return await self.delete(id)
            case "POST", ["sandboxes", id, "timeout"]:
                return await self.timeout(id, request)
        return _error(404, f"no route {request.method} {request.path}")

    # ---- the control API

    async def create(self, request: web.Request) -> web.Response:
        fields = await request.json()
        key = request.headers.get("Idempotency-Key", "")
        if fields["templateID"] == "nothing":
            return _error(404, "template 'nothing' not found")
        if fields.get("timeout", 15) > self.max_timeout_s:
            return _error(400, f"Timeout cannot be greater than {self.max_timeout_s} seconds")
        machine = self.machines.get(self.keys.get(key, ""))
        if machine is None:
            machine = Machine(self.folder)
            machine.create_body, machine.labels = fields, fields.get("metadata", {})
            (machine.folder / ".bash_profile").write_text(self.profile)
            self.machines[machine.id] = machine
            if key:
                self.keys[key] = machine.id
            self._expire(machine, fields.get("timeout", 15))
        return web.json_response(
            {
                "templateID": fields["templateID"],
                "sandboxID": machine.id,
                "clientID": "client",
                "envdVersion": ENVD,
                "envdAccessToken": f"token-{machine.id}",
            },
            status=201,
        )

    def list_sandboxes(self, request: web.Request) -> web.Response:
        labels = {
            urllib.parse.unquote(k): urllib.parse.unquote(v)
            for k, v in urllib.parse.parse_qsl(request.query.get("metadata", ""))
        }
        found = [m for m in self.machines.values() if m.alive and labels.items() <= m.labels.items()]
        start, size = int(request.query.get("nextToken", 0)), min(self.page, int(request.query.get("limit", 100)))
        now = datetime.now(UTC).isoformat()
        body = [
            {
                "templateID": "base",
                "sandboxID": m.id,
                "clientID": "client",
                "startedAt": now,
                "endAt": now,
                "cpuCount": 2,
                "memoryMB": 512,
                "diskSizeMB": 1024,
                "state": "running",
                "envdVersion": ENVD,
                "metadata": m.labels,
            }
            for m in found[start : start + size]
        ]
        more = {"x-next-token": str(start + size)} if start + size < len(found) else {}
        return web.json_response(body, headers=more)

    async def delete(self, id: str) -> web.Response:
        machine = self.machines.get(id)
        if machine is None or not machine.alive:
            return _error(404, f"sandbox {id} not found")
        await machine.destroy()
        return web.Response(status=204)

    async def timeout(self, id: str, request: web.Request) -> web.Response:
        machine = self.machines.get(id)
        if machine is None or not machine.alive:
            return _error(404, f"sandbox {id} not found")
        seconds = (await request.json())["timeout"]
        if seconds > self.max_timeout_s:
            return _error(400, f"Timeout cannot be greater than {self.max_timeout_s} seconds")
        self._expire(machine, seconds)
        return web.Response(status=204)

    def _expire(self, machine: Machine, seconds: float) -> None:
        self.ends[machine.id] = time.monotonic() + seconds

        async def end() -> None:
            await asyncio.sleep(seconds)
            if machine.alive and time.monotonic() >= self.ends[machine.id] - 0.01:
                await machine.destroy()

        self.ending.append(asyncio.ensure_future(end()))

    async def close(self) -> None:
        for task in self.ending:
            task.cancel()
        await super().close()

    # ---- envd

    async def envd(self, request: web.Request) -> web.StreamResponse:
        machine = self.machines.get(request.headers["E2b-Sandbox-Id"])
        if machine is None or not machine.alive:
            id = request.headers["E2b-Sandbox-Id"]
            body = {"sandboxId": id, "message": "The sandbox was not found", "code": 502}
            return web.json_response(body, status=502)
        if request.path == "/health":
            return web.Response(status=204)
        if request.headers.get("X-Access-Token") != f"token-{machine.id}":
            return _error(401, "invalid access token")
        match request.method, request.path:
            case "GET", "/files":
                return _read(Path(request.query["path"]))
            case "POST", "/files":
                return await _write(request)
            case "POST", "/process.Process/Start":
                return await self.start(machine, request)
            case "POST", "/process.Process/Connect":
                fields = _open_envelope(await request.read())
                process = machine.processes.get(fields["process"]["pid"])
                if process is None or process.ended.done():
                    return await _stream_error(request, "not_found", "process not found")
                return await self.follow(process, request, len(process.events))
            case "POST", "/process.Process/SendSignal":
                fields = await request.json()
                process = machine.processes.get(fields["process"]["pid"])
                if process is None or process.ended.done():
                    return web.json_response({"code": "not_found", "message": "process not found"}, status=404)
                process.kill()
                return web.json_response({})
        return web.json_response({"code": "unimplemented", "message": request.path}, status=404)

    async def start(self, machine: Machine, request: web.Request) -> web.StreamResponse:
        config = _open_envelope(await request.read())["process"]
        process = await machine.start([config["cmd"], *config["args"]], config.get("envs", {}), config.get("cwd"))
        return await self.follow(process, request, 0)

    async def follow(self, process: Process, request: web.Request, seen: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        fault = fault_of(request)
        if fault.lose:
            cut(request)
            return response
        await response.prepare(request)
        await response.write(_envelope({"event": {"start": {"pid": process.pid}}}))
        if fault.cut_s is not None:
            await asyncio.sleep(fault.cut_s)
            cut(request)
            return response
        with suppress(ConnectionError):  # the listener may disconnect
            async for name, chunk in process.output(seen):
                await response.write(_envelope({"event": {"data": {name: base64.b64encode(chunk).decode()}}}))
            await response.write(_envelope({"event": {"end": _end(await process.ended)}}))
            await response.write(_envelope({}, last=True))
            await response.write_eof()
        return response


def _end(code: int) -> dict[str, Any]:
    if code < 0:
        status = f"signal: {signal.strsignal(-code)}"
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    error = {"error": f"exit status {code}"} if code else {}
    return {"exitCode": code, "exited": True, "status": f"exit status {code}", **error}


def _envelope(message: dict[str, Any], last: bool = False) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", 2 if last else 0, len(data)) + data


def _open_envelope(body: bytes) -> dict[str, Any]:
    flags, length = struct.unpack(">BI", body[:5])
    assert flags == 0 and length == len(body) - 5
    message: dict[str, Any] = json.loads(body[5:])
    return message


async def _stream_error(request: web.Request, code: str, message: str) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
    await response.prepare(request)
    await response.write(_envelope({"error": {"code": code, "message": message}}, last=True))
    await response.write_eof()
    return response


def _read(path: Path) -> web.StreamResponse:
    if not path.exists():
        return _error(404, f"path '{path}' does not exist")
    if path.is_dir():
        return _error(400, f"path '{path}' is a directory")
    return web.Response(body=path.read_bytes(), content_type="application/octet-stream")


async def _write(request: web.Request) -> web.Response:
    written: list[Path] = []
    if request.content_type == "application/octet-stream":
        written.append(Path(request.query["path"]))
        written[0].parent.mkdir(parents=True, exist_ok=True)
        written[0].write_bytes(await request.read())
    else:
        async for part in await request.multipart():
            assert part.filename  # type: ignore[union-attr]
            path = Path(request.query.get("path", part.filename))  # type: ignore[union-attr]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(await part.read())  # type: ignore[union-attr]
            written.append(path)
    return web.json_response([{"path": str(path), "name": path.name, "type": "file"} for path in written])


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"code": status, "message": message}, status=status)
