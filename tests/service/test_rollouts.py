"""Rollouts of the service from start to result: grading, failures, modes, queueing and full disks."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests import kit
from tests.kit import calls, say, until
from tests.service.kit import KEY, Service, run_service
from tests.service.test_config import ROW
from tests.speed import scaled
from turngate.client.gate import RemoteGate
from turngate.client.gateway import GatewayClient
from turngate.engines.base import Generate
from turngate.engines.scripted import ScriptedTurn
from turngate.errors import BadRequest, Busy, NotFound, Stopping, StoreError
from turngate.service.catalog import Endpoint
from turngate.service.config import Clamp
from turngate.service.request import Base64File, SweRolloutRequest
from turngate.service.result import RolloutEvent
from turngate.service.storage import ServiceStorage

pytestmark = [pytest.mark.process, pytest.mark.full]

DOUBLE = 'print(ask("Hi"))\nopen("out.txt", "w").write(2 * open("data/in.txt").read())'


@pytest.mark.real
async def test_rollout_is_run_and_graded() -> None:
    async with run_service([say("Hello.")]) as service:
        result = await service.rollouts.run(
            service.request(
                DOUBLE,
                task_id="suite/double",
                upload_files={"data/in.txt": "abc"},
                setup_shell="echo made > made.txt",
                test_script="echo looked; grep -qx abcabc out.txt && [ -f made.txt ]",
            )
        )
        assert (result.done, result.status, result.kind, result.reward) == (True, "finished", "graded", 1.0)
        assert (result.task_id, result.agent, result.model_key, result.model, result.mode) == (
            "suite/double",
            "shell",
            KEY,
            "m",
            "exact",
        )
        assert (result.exit_code, result.error, result.stop, result.capture) == (0, None, "", "tokens")
        expected_files = {"made.txt": "made\n", "out.txt": "abcabc", "data/in.txt": "abc"}  # uploaded files come last
        assert list(result.workdir_files.items()) == list(expected_files.items())
        assert result.log_tails == {"stdout": "Hello.\n"} and "looked" in result.verifier_output
        [turn] = result.turns
        assert (turn.text, turn.finish_reason, turn.role, turn.capture) == ("Hello.", "stop", "main", "tokens")
        assert turn.logprobs is not None and len(turn.logprobs) == turn.sampled_tokens == result.sampled_tokens
        assert 0 < sum(result.seconds.values()) <= result.wall_s + scaled(0.5) and result.clamped == []
        state = service.rollouts.state(result.rollout_id)
        assert (state.done, state.stage, state.wall_s, state.reward) == (True, "done", result.wall_s, 1.0)
        kinds = [event.kind for event in await service.all_events(result.rollout_id)]
        assert kinds[:2] == ["queued", "started"] and kinds[-1] == "ended"
        assert {"opened", "turn", "sealed", "outcome", "stage"} < set(kinds)
        async with service.rollouts.gateway(result.rollout_id) as gateway:
            assert len(await gateway.samples(result.session)) == 1


GRADES: list[tuple[str, float | None, str | None]] = [
    ("exit 1", 0.0, "graded"),
    ('echo 0.25 > "$TURNGATE_LOGS/verifier/reward.txt"', 0.25, "graded"),
    ("exit 7", None, "invalid task"),  # neither pass nor fail
    ("echo 'nothing writes reward.txt'", None, "invalid task"),
    ("", None, None),
]


async def test_test_script_decides_reward() -> None:
    async with run_service() as service:
        requests = [service.request('ask("Hi")', test_script=script) for script, _, _ in GRADES]
        results = await asyncio.gather(*map(service.rollouts.run, requests))
        for result, (_, reward, kind) in zip(results, GRADES, strict=True):
            assert (result.status, result.reward, result.kind) == ("finished", reward, kind)
            assert (result.error is not None) == (kind == "invalid task")


async def test_row_with_unavailable_image_is_invalid_task() -> None:
    async with run_service(images=("own/*",)) as service:
        result = await service.rollouts.run(SweRolloutRequest(task=ROW, model_key=KEY))
        assert (result.task_id, result.status, result.kind) == ("own__thing-1", "error", "invalid task")
        assert result.error is not None and "a local sandbox cannot run images" in result.error.message


def failing_rollouts() -> list[tuple[str, dict[str, Any], tuple[Any, ...]]]:
    return [
        ("", {"setup_shell": "echo no >&2; exit 3"}, ("error", "invalid task", "task", "setup")),
        ('ask("Break")', {"test_script": "true"}, ("error", "infrastructure fault", "engine", "agent")),
        ("sys.exit(4)", {"test_script": "true"}, ("failed", "agent failed", None, None)),
        ('ask("Hi")\ntime.sleep(3600)', {"agent_timeout_s": scaled(0.5)}, ("timed out", None, None, None)),
    ]


async def test_failures_are_results() -> None:
    broken = list(say("Break").ids[:-1])

    def script(request: Generate, n: int) -> ScriptedTurn:
        ids = request.prompt.tolist()
        breaks = any(ids[at : at + len(broken)] == broken for at in range(len(ids)))
        return ScriptedTurn(fail_before=True) if breaks else say("Done.")

    async with run_service(script) as service:
        results = await asyncio.gather(
            *(service.rollouts.run(service.request(program, **more)) for program, more, _ in failing_rollouts())
        )
        for result, (_, _, expected) in zip(results, failing_rollouts(), strict=True):
            error = result.error
            assert (result.status, result.kind, error and error.boundary, error and error.stage) == expected
            assert result.reward is None and result.wall_s > 0 and result.done
        assert results[0].error is not None and results[0].error.message == "setup_shell failed with exit code 3: no"


async def test_unusable_endpoint_is_a_result(tmp_path: Path) -> None:
    endpoints = {"vllm://x": Endpoint(url="http://127.0.0.1:9", tokenizer=str(tmp_path))}
    async with run_service(endpoints=endpoints) as service:
        result = await service.rollouts.run(service.request(model_key="vllm://x"))
        assert result.error is not None and (result.error.boundary, result.error.stage) == ("config", "gateway")
        assert (result.status, result.kind, result.reward) == ("error", "infrastructure fault", None)


async def test_messages_are_readable_during_rollout() -> None:
    async with run_service([say("One."), say(calls(("run", {"x": 1}))), say("Side.")]) as service:
        program = """
messages = [{"role": "user", "content": "Hi"}]
tool = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}
http("POST", "/v1/chat/completions", {"model": "m", "messages": messages, "tools": [tool]})
import pathlib
while not pathlib.Path("/proc/self/cwd/go").exists(): time.sleep(0.02)
messages += [{"role": "assistant", "content": "One."}, {"role": "user", "content": "More"}]
http("POST", "/v1/chat/completions", {"model": "m", "messages": messages, "tools": [tool]})
print(ask("Something else"))
"""
        rollout = service.rollouts.start(service.request(program, setup_shell="pwd > where"))
        await until(lambda: service.rollouts.state(rollout).turns == 1, 120)
        first = await service.rollouts.messages(rollout)
        assert [(one.role, one.text, one.branch) for one in first.messages] == [
            ("user", "Hi", 0),
            ("assistant", "One.", 0),
        ]
        assert not first.over and (await service.rollouts.messages(rollout, first.cursor)).messages == []
        [where] = service.root.glob("local-*/work/where")
        (where.parent / "go").touch()
        result = await service.rollouts.finalize(rollout)
        rest = await service.rollouts.messages(rollout, first.cursor)
        assert rest.over and [one.cursor for one in rest.messages] == [3, 4, 5, 6]
        assert [(one.text, one.branch) for one in rest.messages] == [
            ("More", 0),
            ("", 0),
            ("Something else", 1),
            ("Side.", 1),
        ]
        assert rest.messages[1].tool_calls[0].name == "run" and rest.messages[1].sampled
        assert result.turn_count == 3 and (await service.rollouts.messages(rollout, 0, 2)).messages == first.messages


async def test_large_results_are_clamped_with_notes() -> None:
    clamp = Clamp(text=40, turns=2, logprobs=10, files=1, file=10, all_files=100, log=10, verifier=10)
    program = """
for n in range(3): ask(f"Question {n}")
print("x" * 100)
open("b.txt", "w").write("y" * 50)
open("c.txt", "w").write("z")
open("a.bin", "wb").write(bytes(9))
"""
    async with run_service([say("word " * 40)] * 3, clamp=clamp) as service:
        result = await service.rollouts.run(service.request(program, test_script="echo 0123456789abcdef"))
        assert len(result.turns) == 2 and "turns: the oldest 1 of 3 turns left out" in result.clamped
        assert "characters left out" in result.turns[0].text and len(result.turns[0].text) < 90
        assert [turn.logprobs for turn in result.turns] == [None, None]  # never a partial list
        assert result.workdir_files == {"b.txt": "y" * 10} and result.log_tails == {"stdout": "x" * 9 + "\n"}
        expected = "\n".join(result.clamped)
        for field in (
            "turns[0].text:",
            "turns[1].logprobs:",
            "workdir_files['b.txt']: 40 of 50",
            "log_tails['stdout']: 91 of",
        ):
            assert field in expected, expected
        assert "a.bin" in expected and "verifier_output:" in expected
        page = await service.rollouts.messages(result.rollout_id)
        assert page.clamped and all(len(one.text) < 90 for one in page.messages)


async def test_undecodable_agent_output_keeps_result() -> None:
    program = r"""
for text in ("half \\ud800", "nul \\u0000", "<script>"):
    body = '{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "' + text + '"}]}]}'
    request = urllib.request.Request(URL + "/v1/chat/completions", body.encode(), {"authorization": "Bearer " + KEY})
    try: urllib.request.urlopen(request, timeout=3600).read()
    except urllib.error.HTTPError as error: print(error.code)
sys.stdout.flush()
os.write(1, b"\xff\xfe\x00")
open(b"odd-\xff", "wb").write(b"x")
os.symlink("/etc/passwd", "link")
"""
    async with run_service() as service:
        result = await service.rollouts.run(service.request(program))
        assert (result.status, result.error) == ("finished", None) and result.turn_count >= 1
        assert result.workdir_files == {} and "files left out because their names are not valid UTF-8 (1)" in "".join(
            result.clamped
        )
        assert (await service.rollouts.messages(result.rollout_id)).messages


async def test_request_options_reach_session() -> None:
    endpoints = {KEY: Endpoint(model="m", thinking=True, session={"limits": {"turns": 3}})}
    async with run_service(endpoints=endpoints) as service:
        request = service.request('ask("Hi")', thinking=False, max_tokens_cap=77)
        result = await service.rollouts.run(request)
        async with service.rollouts.gateway(result.rollout_id) as gateway:
            config = (await gateway.trace(result.session)).config
        assert (config.max_tokens, config.template_kwargs) == (77, {"enable_thinking": False})
        assert config.limits == {"turns": 3}
        assert service.engine.received[-1].max_tokens == 77


# ── callers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_rollout_survives_cancelled_caller() -> None:
    async with run_service() as service:
        caller = asyncio.create_task(service.rollouts.run(service.request('print(ask("Hi"))')))
        await until(lambda: service.rollouts.list().rollouts, 120)
        [state] = service.rollouts.list().rollouts
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        result = await service.rollouts.finalize(state.rollout_id)
        assert result.status == "finished"
        owner = asyncio.create_task(service.rollouts.run(service.request("time.sleep(600)"), abort_if_cancelled=True))
        await until(lambda: len(service.rollouts.list().rollouts) == 2, 120)
        owner.cancel()
        with pytest.raises(asyncio.CancelledError):
            await owner
        assert service.rollouts.list().rollouts[0].status == "cancelled"


async def test_finalize_returns_same_result_to_all_callers() -> None:
    async with run_service() as service:
        rollout = service.rollouts.start(service.request('ask("Hi")\ntime.sleep(0.5)'))
        early = await service.rollouts.finalize(rollout, wait_s=0)
        assert (early.done, early.reward, early.kind) == (False, None, None) and early.wall_s >= 0
        found = await asyncio.gather(*(service.rollouts.finalize(rollout) for _ in range(5)))
        assert all(one == found[0] for one in found) and found[0].done
        assert await service.rollouts.finalize(rollout, wait_s=0) == found[0]
        assert (await service.rollouts.abort(rollout)).status == "finished"  # already finished


async def test_full_queue_is_busy_and_listed() -> None:
    async with run_service(running=1, queued=1) as service:
        first = service.rollouts.start(service.request("time.sleep(600)", task_id="first"))
        second = service.rollouts.start(service.request(task_id="second"))
        with pytest.raises(Busy, match=r"the queue is full \(running: 1, waiting: 1\)"):
            service.rollouts.start(service.request())
        await service.wait_for_stage(first, "agent")
        listing = service.rollouts.list()
        assert [one.rollout_id for one in listing.rollouts] == [second, first]
        assert (listing.running, listing.queued, listing.more) == (1, 1, False)
        assert [one.task_id for one in service.rollouts.list("queued").rollouts] == ["second"]
        assert [one.task_id for one in service.rollouts.list(before=second).rollouts] == ["first"]
        assert service.rollouts.list(limit=1).more
        await service.rollouts.abort(first)
        assert (await service.rollouts.finalize(second)).status == "finished"
        assert {one.status for one in service.rollouts.list("done").rollouts} == {"finished", "cancelled"}


async def test_queued_inputs_are_on_disk_and_bounded() -> None:
    async with run_service(running=1, queued_bytes=40_000_000) as service:
        first = service.rollouts.start(service.request("time.sleep(600)"))
        large = {f"{n}.bin": Base64File(base64.b64encode(bytes(6_000_000)).decode()) for n in range(4)}
        files: dict[str, str | Base64File] = {"a.txt": "here", **large}
        program = 'print(sum(os.path.getsize(f"{n}.bin") for n in range(4)))'
        second = service.rollouts.start(service.request(program, upload_files=files, test_script="grep -q here a.txt"))
        place = service.data / "service" / "inputs" / second
        await until((place / "tests" / "test.sh").exists, 120)
        assert (place / "files" / "3.bin").stat().st_size == 6_000_000
        with pytest.raises(Busy, match="of 40,000,000 bytes"):
            service.rollouts.start(service.request(program, upload_files=files))
        third = service.rollouts.start(service.request('print("small")'))
        await service.rollouts.abort(first)
        result = await service.rollouts.finalize(second)
        assert (result.reward, result.log_tails["stdout"]) == (1.0, "24000000\n")
        assert result.workdir_files == {"a.txt": "here"} and not place.exists()
        assert (await service.rollouts.finalize(third)).status == "finished"
        again = service.rollouts.start(service.request(program, upload_files=files))
        assert (await service.rollouts.abort(again)).status == "cancelled"  # while its files are being written


async def test_invalid_arguments_start_nothing() -> None:
    async with run_service(most_agent_timeout_s=scaled(100)) as service:
        for wrong, param in (
            ({"agent_timeout_s": scaled(101)}, "agent_timeout_s"),
            ({"model_key": "vllm://none"}, "model_key"),
            ({"agent": "pi"}, "agent"),
            ({"agent": "/tmp/evil.toml"}, "agent"),
            ({"mode": "observe"}, "mode"),
            ({"mode": "direct"}, "mode"),
            ({"endpoint_url": "https://example.com"}, "endpoint_url"),
            ({"thinking": True}, "thinking"),
            ({"upload_files": {"../x": ""}}, "upload_files"),
        ):
            with pytest.raises(BadRequest) as raised:
                service.rollouts.start(service.request(**wrong))
            assert raised.value.param == param and param in raised.value.message
        for ask in (
            service.rollouts.finalize,
            service.rollouts.events,
            service.rollouts.messages,
            service.rollouts.abort,
        ):
            with pytest.raises(NotFound) as missing:
                await ask("nobody")
            assert missing.value.param == "rollout_id"
        with pytest.raises(BadRequest, match="limit"):
            service.rollouts.list(limit=0)
        with pytest.raises(BadRequest, match="status"):
            service.rollouts.list("finishd")
        assert service.rollouts.list().rollouts == []
    with pytest.raises(Stopping):
        service.rollouts.start(service.request())


async def test_oldest_rollouts_are_removed() -> None:
    async with run_service(keep=1) as service:
        first, second = [await service.rollouts.run(service.request('open("x", "w")')) for _ in range(2)]
        assert [one.rollout_id for one in service.rollouts.list().rollouts] == [second.rollout_id]
        with pytest.raises(NotFound):
            await service.rollouts.finalize(first.rollout_id)
        kept = service.data / "service"
        await until(lambda: not list(kept.glob(f"*/{first.rollout_id}*")), 120)
        assert (service.rollouts.artifacts_folder(second.rollout_id) / "work" / "x").exists()


async def test_full_disk_loses_no_events_and_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    keep, failed = ServiceStorage.add_event, list[str]()

    def add_or_fail(self: ServiceStorage, rollout: str, event: RolloutEvent) -> None:
        if event.kind in ("turn", "sealed") and event.kind not in failed:
            failed.append(event.kind)
            raise StoreError("the disk is full")
        keep(self, rollout, event)

    def fail_to_write(self: ServiceStorage, *_: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(ServiceStorage, "add_event", add_or_fail)
    monkeypatch.setattr(ServiceStorage, "write_result", fail_to_write)
    async with run_service() as service:
        result = await service.rollouts.run(service.request('ask("Hi")'))
        events = await service.all_events(result.rollout_id)
        seen = [event.seq for event in events if event.seq is not None]
        assert failed == ["turn", "sealed"] and [event.kind for event in events].count("turn") == 1
        assert seen == sorted(set(seen)) and [event.cursor for event in events] == list(range(1, len(events) + 1))
        assert (result.status, result.turn_count) == ("finished", 1)
        assert await service.rollouts.finalize(result.rollout_id) == result
        assert len((await service.rollouts.messages(result.rollout_id)).messages) == 2


async def test_results_are_written_once_disk_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_write(self: ServiceStorage, *_: object) -> None:
        raise StoreError("the disk is full")

    async with run_service(data=tmp_path) as service:
        with monkeypatch.context() as full:
            full.setattr(ServiceStorage, "write_result", fail_to_write)
            first = await service.rollouts.run(service.request('ask("Hi")', test_script="true"))
        assert list((tmp_path / "service" / "results").iterdir()) == []
        await service.rollouts.run(service.request())
        messages = await service.rollouts.messages(first.rollout_id)
        written = tmp_path / "service" / "results" / f"{first.rollout_id}.json"
        while not written.exists():  # it is written after the second result is returned
            await asyncio.sleep(0.01)
        with monkeypatch.context() as full:
            full.setattr(ServiceStorage, "write_result", fail_to_write)
            last = await service.rollouts.run(service.request())
    async with run_service(data=tmp_path) as service:
        assert [await service.rollouts.finalize(one.rollout_id) for one in (first, last)] == [first, last]
        assert await service.rollouts.messages(first.rollout_id) == messages and first.reward == 1.0


async def test_failed_deletion_keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_to_delete(self: ServiceStorage, *_: object) -> None:
        raise StoreError("the disk is full")

    async with run_service(keep=1) as service:
        with monkeypatch.context() as full:
            full.setattr(ServiceStorage, "delete_rows", fail_to_delete)
            first, second = [await service.rollouts.run(service.request()) for _ in range(2)]
            await until(lambda: not service.rollouts.list("running").rollouts, 120)
        assert await service.rollouts.finalize(first.rollout_id) == first
        third = await service.rollouts.run(service.request())
        await until(lambda: len(service.rollouts.list().rollouts) == 1, 120)
        assert [one.rollout_id for one in service.rollouts.list().rollouts] == [third.rollout_id]
        with pytest.raises(NotFound):
            await service.rollouts.finalize(second.rollout_id)


# ── other modes ─────────────────────────────────────────────────────────────────────────────────────────────────────


class ChatEndpoint:
    """A custom endpoint with OpenAI's chat API. Records the headers it receives."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.redirects = False

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.redirects:
            raise web.HTTPTemporaryRedirect("http://127.0.0.1:1/steal")
        body = await request.json()
        message = {"role": "assistant", "content": f"Heard {body['messages'][-1]['content']}."}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        if not body.get("stream"):
            return web.json_response({"id": "x", "object": "chat.completion", "model": "m", "choices": [choice]})
        reply = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await reply.prepare(request)
        delta = {"choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}
        await reply.write(f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n".encode())
        return reply


@asynccontextmanager
async def run_endpoint() -> AsyncIterator[ChatEndpoint]:
    endpoint = ChatEndpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield endpoint
    finally:
        await runner.cleanup()


SECRET = "sk-marked-secret"
SHOW = 'print(ask("this"))\nprint(os.environ, open("/proc/self/environ").read())'


def files_with_secret(service: Service) -> list[str]:
    """Files of the service that contain the secret."""
    files = [path for path in service.data.rglob("*") if path.is_file()]
    return [path.name for path in files if SECRET.encode() in path.read_bytes()]


@pytest.fixture
def hosted_endpoint(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("MARKED", SECRET)
    return {"model": "gpt-x", "key_env": "MARKED"}


async def test_catalog_endpoint_is_observed_with_its_key(hosted_endpoint: dict[str, Any]) -> None:
    async with run_endpoint() as endpoint:
        async with run_service(endpoints={"openai://gpt": Endpoint(url=endpoint.url, **hosted_endpoint)}) as service:
            with pytest.raises(BadRequest, match="choose one of: observe"):
                service.rollouts.start(service.request(model_key="openai://gpt", mode="direct"))
            result = await service.rollouts.run(service.request(SHOW, model_key="openai://gpt"))
            assert "Heard this." in result.log_tails["stdout"] and SECRET not in result.log_tails["stdout"]
            assert [(turn.text, turn.capture, turn.logprobs) for turn in result.turns] == [
                ("Heard this.", "text", None)
            ]
            assert (result.mode, result.capture, result.turns[0].sampled_tokens) == ("observe", "text", None)
            assert files_with_secret(service) == []
        assert {headers["authorization"] for headers in endpoint.headers} == {f"Bearer {SECRET}"}


async def test_custom_endpoint_gets_no_key(hosted_endpoint: dict[str, Any]) -> None:
    async with run_endpoint() as endpoint:
        host = endpoint.url.removeprefix("http://")
        custom = {"model_key": "openai://gpt", "endpoint_url": endpoint.url}
        policy = {"endpoints": {"openai://gpt": Endpoint(**hosted_endpoint)}, "allowed_hosts": [host], "running": 1}
        async with run_service(**policy) as service:
            # One at a time, so that the gateway stops and starts again.
            observed = await asyncio.gather(*(service.rollouts.run(service.request(SHOW, **custom)) for _ in range(2)))
            assert [(one.status, one.mode, one.turn_count) for one in observed] == [("finished", "observe", 1)] * 2
            that = service.request('print(ask("that"))', mode="black_box", test_script="true", **custom)
            direct = await service.rollouts.run(that)
            assert direct.log_tails == {"stdout": "Heard that.\n"} and (direct.mode, direct.reward) == ("direct", 1.0)
            assert (direct.turns, direct.turn_count, direct.capture, direct.session) == ([], 0, "none", "")
            assert any("so no turns are recorded" in note and "1 call" in note for note in direct.notes)
            kinds = {event.kind for event in await service.all_events(direct.rollout_id)}
            assert kinds == {"queued", "started", "stage", "ended"}
            endpoint.redirects = True
            moved = await service.rollouts.run(service.request('ask("that")', mode="direct", **custom))
            assert (moved.status, moved.reward) == ("error", None) and "not followed" in moved.log_tails["stderr"]
        assert len(endpoint.headers) >= 4 and not any("authorization" in headers for headers in endpoint.headers)
        assert not any(SECRET in value for headers in endpoint.headers for value in headers.values())


async def test_gate_mode_lets_trainer_answer() -> None:
    async with run_service() as service:
        rollout = service.rollouts.start(service.request('print(ask("Hi"))', mode="interception_gate"))
        await until(lambda: service.rollouts.state(rollout).gateway, 120)
        [key] = service.data.glob("gateways/*-gate-*/admin-key")
        url = service.rollouts.state(rollout).gateway
        async with GatewayClient(url, key.read_text().strip()) as client, RemoteGate(client) as gate:
            async for call in gate:
                ids = list(say("From the trainer.").ids)
                await call.answer(ids, [-0.5] * len(ids))
                break
        result = await service.rollouts.finalize(rollout)
        assert result.log_tails == {"stdout": "From the trainer.\n"} and result.mode == "gate"
        assert set(result.turns[0].logprobs or ()) == {-0.5}


async def test_existing_gateway_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kit.gateway([say("From elsewhere.")]) as other:
        monkeypatch.setenv("OTHER_KEY", other.app.admin_key)
        entries = {"gateway://other": Endpoint(url=other.root, key_env="OTHER_KEY", model="m")}
        async with run_service(endpoints=entries) as service:
            result = await service.rollouts.run(service.request('print(ask("Hi"))', model_key="gateway://other"))
            assert result.log_tails == {"stdout": "From elsewhere.\n"} and result.turn_count == 1
            assert (await other.show(result.session))["status"] == "sealed"
            monkeypatch.setenv("OTHER_KEY", "wrong-" + "0" * 20)
        async with run_service(endpoints=entries) as service:
            refused = await service.rollouts.run(service.request(model_key="gateway://other"))
            assert refused.error is not None and refused.error.stage == "gateway"
            assert "0" * 20 not in refused.error.message
