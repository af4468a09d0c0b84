"""A stand-in for Hugging Face's sandboxes: the Hub's Jobs API, and the server in a sandbox's Job, behind the Jobs proxy.

It follows the SDK (huggingface_hub 2.4, server protocol 3): routes, field names, the events of a command as lines of JSON, the two
tokens of each request, the idle timeout, no links in paths. The SDK requires `--49983.` in a Job's address, which is part of the path
here instead of the host name.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.sandboxes.standins.machine import Machine, Process, StandIn, cut, fault_of

TOKEN = "hf_5ec2e75ec2e75ec2e7"
USER = {"id": "0123456789", "name": "someone", "type": "user"}
PORT = "--49983."


@dataclass
class HuggingFaceStandIn(StandIn):
    stages: dict[str, str] = field(default_factory=dict)
    used: dict[str, float] = field(default_factory=dict)
    idling: list[asyncio.Future[None]] = field(default_factory=list)

    async def respond(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": f"not valid: {request.headers.get('Authorization')}"}, status=401)
        match request.method, request.path.strip("/").split("/"):
            case "GET", ["api", "whoami-v2"]:
                return web.json_response(USER)
            case "POST", ["api", "jobs", "someone"]:
                return await self.run_job(request)
            case "GET", ["api", "jobs", "someone"]:
                return self.list_jobs(request)
            case "GET", ["api", "jobs", "someone", id]:
                return web.json_response(self.job(id)) if id in self.machines else _error(404, "no such job")
            case "POST", ["api", "jobs", "someone", id, "cancel"]:
                return await self.cancel(id)
            case _, ["jobs", host, *rest] if PORT in host:
                return await self.sandbox(host.partition(PORT)[0], "/".join(rest), request)
        return _error(404, f"no route {request.method} {request.path}")

    # ---- the Jobs API

    async def run_job(self, request: web.Request) -> web.Response:
        fields = await request.json()
        if fields["dockerImage"] == "nothing":
            return _error(400, "no image is called nothing")
        machine = Machine(self.folder)
        machine.create_body, machine.labels = fields, fields["labels"]
        self.machines[machine.id] = machine
        self.stages[machine.id] = "RUNNING"
        self.used[machine.id] = time.monotonic()
        self.idling.append(asyncio.ensure_future(self._idle(machine, float(fields["environment"]["SBX_IDLE_TIMEOUT"]))))
        return web.json_response(self.job(machine.id))

    def job(self, id: str) -> dict[str, Any]:
        machine = self.machines[id]
        return {
            "id": id,
            "createdAt": "2026-01-01T00:00:00.000Z",
            "dockerImage": machine.create_body["dockerImage"],
            "command": machine.create_body["command"],
            "environment": machine.create_body["environment"],
            "flavor": machine.create_body["flavor"],
            "labels": machine.labels,
            "status": {"stage": self.stages[id], "exposeUrls": [f"{self.url}/jobs/{id}{PORT}hf.jobs"]},
            "owner": USER,
            "initiator": USER,
        }

    def list_jobs(self, request: web.Request) -> web.Response:
        stages, wanted = request.query.getall("stage", []), request.query.getall("label", [])
        return web.json_response(
            [
                self.job(id)
                for id, machine in self.machines.items()
                if (not stages or self.stages[id] in stages)
                and {tuple(label.split("=", 1)) for label in wanted} <= set(machine.labels.items())
            ]
        )

    async def cancel(self, id: str) -> web.Response:
        if id not in self.machines:
            return _error(404, "no such job")
        if self.stages[id] != "RUNNING":
            return _error(409, "the job has ended already")
        await self.end(id, "CANCELED")
        return web.json_response({})

    async def end(self, id: str, stage: str) -> None:
        self.stages[id] = stage
        await self.machines[id].destroy()

    async def _idle(self, machine: Machine, seconds: float) -> None:
        while machine.alive:
            await asyncio.sleep(0.05)
            if any(not process.ended.done() for process in machine.processes.values()):
                self.used[machine.id] = time.monotonic()
            elif time.monotonic() - self.used[machine.id] > seconds:
                await self.end(machine.id, "COMPLETED")

    async def close(self) -> None:
        for task in self.idling:
            task.cancel()
        await super().close()

    # ---- the server in a Job

    async def sandbox(self, id: str, route: str, request: web.Request) -> web.StreamResponse:
        machine = self.machines.get(id)
        if machine is None or not machine.alive:
            return web.Response(status=404, text="<html>Not Found</html>", content_type="text/html")
        if route == "health":
            return web.json_response({"ok": True, "version": "0.7.0", "protocol": 3})
        secrets = machine.create_body["secrets"]
        assert isinstance(secrets, dict)
        if request.headers.get("X-Sandbox-Token") != secrets["SBX_TOKEN"]:
            return _error(403, "wrong sandbox token")
        self.used[id] = time.monotonic()
        match request.method, route.split("/"):
            case "POST", ["v1", "exec"]:
                return await self.exec(machine, request)
            case "POST", ["v1", "processes"]:
                process = await _start_process(machine, await request.json())
                return web.json_response({"id": process.id, "pid": process.pid})
            case "GET", ["v1", "processes"]:
                return web.json_response([_describe_process(process) for process in machine.processes.values()])
            case _, ["v1", "files", what]:
                return await _files(what, request)
        return _error(404, f"no route {request.method} {route}")

    async def exec(self, machine: Machine, request: web.Request) -> web.StreamResponse:
        fields = await request.json()
        process = await _start_process(machine, fields)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        fault = fault_of(request)
        if fault.lose:
            cut(request)
            return response
        await response.prepare(request)
        await response.write(_event("ping"))
        if fault.cut_s is not None:
            await asyncio.sleep(fault.cut_s)
            cut(request)
            return response
        with suppress(ConnectionError):
            async for name, chunk in process.output():
                await response.write(_event(name, data=chunk.decode(errors="replace")))
            code = await process.ended
            await response.write(
                _event(
                    "exit", exit_code=None if code < 0 else code, signal=-code if code < 0 else None, timed_out=False
                )
            )
            await response.write_eof()
        return response


async def _start_process(machine: Machine, fields: dict[str, Any]) -> Process:
    command = fields["cmd"]
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else command
    return await machine.start(argv, fields.get("env", {}), fields.get("cwd"))


def _describe_process(process: Process) -> dict[str, Any]:
    ended = process.ended.done()
    code = process.ended.result() if ended else None
    return {
        "id": process.id,
        "pid": process.pid,
        "cmd": process.argv,
        "running": not ended,
        "exit_code": None if code is None or code < 0 else code,
    }


async def _files(what: str, request: web.Request) -> web.StreamResponse:
    path = Path(request.query["path"])
    if not path.is_absolute() or any(part.is_symlink() for part in (path, *path.parents)):
        return _error(400, f"{path}: not absolute, or by way of a link")
    if what == "write":
        return await _write(path, request)
    if not path.exists():
        return _error(404, f"{path}: no such file")
    stat = path.stat()
    if what == "stat":
        kind = "dir" if path.is_dir() else "file"
        entry = {
            "name": path.name,
            "path": str(path),
            "type": kind,
            "size": stat.st_size,
            "mode": f"{stat.st_mode & 0o777:o}",
        }
        return web.json_response(entry)
    if what == "read" and path.is_file():
        offset = int(request.query.get("offset", 0))
        length = int(request.query.get("length", stat.st_size))
        return web.Response(body=path.read_bytes()[offset : offset + length])
    return _error(400, f"cannot {what} {path}")


async def _write(path: Path, request: web.Request) -> web.Response:
    path.parent.mkdir(parents=True, exist_ok=True)
    body, offset = await request.read(), request.query.get("offset")
    if offset is None:
        path.write_bytes(body)
    else:
        path.touch()
        with path.open("r+b") as file:
            file.seek(int(offset))
            file.write(body)
            if total := request.query.get("truncate_to"):
                file.truncate(int(total))
    return web.json_response({})


def _event(name: str, **fields: Any) -> bytes:
    return json.dumps({"event": name, **fields}).encode() + b"\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
