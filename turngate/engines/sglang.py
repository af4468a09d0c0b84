"""The SGLang engine, which sends token ids to SGLang's `/generate` API and receives sampled ids with their log-probabilities.

It is tested against SGLang 0.5.23 on a CPU (`tests/real/test_sglang.py`). What cannot be tested on that server (older versions, adapters,
grammars and data-parallel ranks) is tested against a stand-in server.

Peculiarities of SGLang's wire format:

- Every event of a stream repeats all tokens so far, unless the server uses incremental streaming. Depending on the version, incremental
  streaming applies to the ids, the log-probabilities, or both. `completion_tokens` always counts all tokens so far, so comparing it with
  a list's length shows whether the list is incremental.
- To select an adapter, `lora_path` is set to the name under which the adapter was loaded.
- `/abort_request` stops every request whose id *starts* with the given one. Our request ids end in a fixed number
  of random digits, so each id matches only itself.
"""

from __future__ import annotations

import asyncio
import copy
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

import msgspec
import orjson

from turngate.engines.base import Chunk, Generate, Health
from turngate.engines.http import DECODE_ERRORS, EngineClient, Reply, align_logprobs, is_present, make_abort_error
from turngate.engines.late_constraint import generate_after_reasoning
from turngate.engines.load import EngineLoad, OldSGLangLoads, SGLangLoads
from turngate.engines.routed_experts import ExpertShape, RoutedExpertsReply
from turngate.engines.sampling_mask import MAX_KEPT, build_masks
from turngate.engines.weights import COMMAND_S, LOAD_S, ExpectedWeights, PolicyWeights, VersionSpan, unknown_path_error
from turngate.errors import EngineError, EngineRejected, EngineUnavailable, TurngateError
from turngate.types import Constraint, Sampling, TokenId

T = TypeVar("T")

_LOADING = "turngate: loading "  # prefix of the weight version during a load
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Position(msgspec.Struct, array_like=True):
    """One token: `[logprob, token_id, text]`. The text is not decoded."""

    logprob: float | None
    token_id: TokenId


class _Finish(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    output_token_logprobs: list[_Position] | None = None
    output_top_logprobs: list[list[_Position] | None] | None = None  # only if requested
    cached_tokens: int | None = None
    weight_versions: list[VersionSpan] | None = None  # of all tokens so far; missing in old SGLang versions
    # Only if requested: the ids that were left to sample from, and the log-probabilities of the sampled ids among them.
    output_token_sampling_mask: list[list[TokenId]] | None = None
    output_token_sampling_logprobs: list[float] | None = None


class _Event(msgspec.Struct):
    """A whole response, or one event of a stream."""

    meta_info: _Meta | None = None
    output_ids: list[TokenId] | None = None
    error: msgspec.Raw = msgspec.Raw()


class _EchoEvent(_Event):
    prompt_token_ids: list[int] | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None  # missing in old SGLang versions


class _ServerInfo(msgspec.Struct):
    context_length: int | None = None  # null unless the server was started with a context length


class _Done(msgspec.Struct):
    """The reply to a command, such as a weight update. A rejection may have HTTP status 200."""

    success: bool = True
    message: str | None = None
    error_message: str | None = None


class _Card(msgspec.Struct):
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


_decode = msgspec.json.Decoder(_Event).decode
_decode_echo = msgspec.json.Decoder(_EchoEvent).decode


class SGLang:
    """One SGLang server, or an SGLang router in front of several.

    `rank` pins every call to one data-parallel rank of the server. `ranks` is the number of ranks; it matters only in a `Pool`, which keeps
    each session on one rank. `silence_s` limits the time between received bytes, so a call that is not streamed must finish within that
    time.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        key: str | None = None,
        rank: int | None = None,
        ranks: int = 1,
        name: str = "sglang",
        connect_s: float = 10.0,
        silence_s: float | None = None,
        expert_shape: ExpertShape | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self._expert_shape = expert_shape  # the shape of routed experts, which SGLang does not report
        self._rank = rank
        self._ranks = ranks
        self._initial: _ModelInfo | None = None  # the model that the server had before the first load; None until then
        self._client = EngineClient(name, url, key=key, connect_s=connect_s, silence_s=silence_s, direct=True)
        self._aborts: set[asyncio.Task[None]] = set()
        self._description: tuple[str, int | None] | None = None
        self._expected = ExpectedWeights()
        self.reports_weights = False  # only new SGLang versions report them, and only for whole models
        self._has_loads = True  # whether the server has the route /v1/loads

    def __repr__(self) -> str:
        return f"SGLang({self._client.url!r}, {self.model!r}, rank={self._rank})"

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await asyncio.gather(*self._aborts)
        await self._client.close()

    def release(self, session: str) -> None:
        """Do nothing: SGLang manages its own cache."""

    def lanes(self) -> Sequence[SGLang]:
        """Return one engine per data-parallel rank. All of them share this engine's connections."""
        if self._ranks == 1:
            return [self]
        return [self._for_rank(rank) for rank in range(self._ranks)]

    async def health(self) -> list[Health]:
        seen = Health(url=self._client.url, ok=True, model=self.model, in_flight=self._client.in_flight)
        try:
            await self._client.ping("/health")
            if self._description is None:  # requested only once, because the server queries every rank for it
                self._description = await self._describe()
            wrong = await self._wrong_weights()
        except TurngateError as error:
            return [msgspec.structs.replace(seen, ok=False, detail=error.message)]
        if wrong:
            return [msgspec.structs.replace(seen, ok=False, detail=wrong, wrong=True)]
        served, context = self._description
        return [msgspec.structs.replace(seen, model=self.model or served, max_context=context)]

    async def load_report(self) -> list[EngineLoad]:
        if self._has_loads:
            try:
                return (await self._client.get("/v1/loads?include=core", SGLangLoads)).to_loads()
            except EngineRejected:
                self._has_loads = False  # an older SGLang version
        return SGLangLoads(await self._client.get("/get_load", OldSGLangLoads)).to_loads()

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        if request.constraint is not None and request.reasoning is not None:
            return generate_after_reasoning(self._generate_once, request, request.reasoning)
        return self._generate_once(request)

    @asynccontextmanager
    async def _generate_once(self, request: Generate) -> AsyncIterator[AsyncIterator[Chunk]]:
        rid = f"{request.request_id or 'turngate'}-{uuid.uuid4().hex}"
        experts = None
        if request.routed_experts is not None:
            experts = RoutedExpertsReply(self.name, self._expert_shape)
        field = None if experts is None else experts.field
        async with self._client.post("/generate", self._body(request, rid), _headers(request), field) as reply:
            try:
                yield self._chunks(reply, request, experts)
            finally:
                if reply.sent and not reply.finished:
                    self._abort(rid)

    def _for_rank(self, rank: int) -> SGLang:
        lane = copy.copy(self)
        lane._rank = rank
        lane._ranks = 1
        return lane

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return self._client.url

    def expect(self, weights: PolicyWeights | None) -> None:
        self._expected.weights = weights

    async def _wrong_weights(self) -> str:
        """Return why the engine must not be used, or an empty string if its weights are as expected or cannot be checked."""
        mark = (await self._client.get("/get_model_info", _ModelInfo)).weight_version
        if mark is not None and mark.startswith(_LOADING):
            return (
                f"its update to weight version {mark.removeprefix(_LOADING)} has not completed; if it failed, load weights again "
                "or restart the engine"
            )
        expected = self._expected.weights
        self.reports_weights = mark is not None and expected is not None and not expected.is_adapter
        if not self.reports_weights or expected is None or mark == str(expected.version):
            return ""
        return f"its weight version is {mark!r} instead of {expected.version}; repeat POST /admin/weights"

    async def pause(self) -> None:
        await self._command("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        await self._command("/continue_generation", {})

    async def load(self, weights: PolicyWeights, *, frozen: bool) -> None:
        if weights.is_adapter:
            body: dict[str, Any] = {"lora_name": weights.name, "lora_path": weights.lora_path}
            await self._command("/load_lora_adapter", body, LOAD_S)
            return
        present = await self._client.get("/get_model_info", _ModelInfo)
        mark = present.weight_version
        if self._initial is None and not (mark is not None and mark.startswith(_LOADING)):
            self._initial = present
        await self._reload(weights.path, None if mark is None else str(weights.version), frozen)

    async def reload_initial_weights(self, *, frozen: bool) -> None:
        initial = self._initial
        if initial is None:  # the weights that the server has now may not be the initial ones
            mark = (await self._client.get("/get_model_info", _ModelInfo)).weight_version
            initial = _ModelInfo(weight_version=None if mark is None else mark.removeprefix(_LOADING))
        await self._reload(initial.model_path, initial.weight_version, frozen)

    async def abort_all(self) -> None:
        await self._command("/abort_request", {"abort_all": True})

    async def unload(self, name: str) -> None:
        await self._command("/unload_lora_adapter", {"lora_name": name})

    async def _reload(self, path: str, mark: str | None, frozen: bool) -> None:
        """Load a model, and set the weight version to `mark`. If `mark` is None, the server has no weight version.

        During the load, the version is `mark` with the prefix `_LOADING`, so that the health check rejects the engine. If the load fails,
        the prefix stays, because the engine may have the new weights: SGLang also reports a failure if it has loaded them but cannot flush
        its cache. If `path` is empty, only set the version with the prefix, and raise `EngineRejected`.
        """
        if mark is not None:
            await self._set_weight_version(_LOADING + mark)
        if not path:
            raise unknown_path_error(self.name)
        await self._command("/update_weights_from_disk", {"model_path": path, "flush_cache": not frozen}, LOAD_S)
        if mark is not None:
            await self._set_weight_version(mark)

    async def _set_weight_version(self, mark: str) -> None:
        await self._command("/update_weight_version", {"new_version": mark, "abort_all_requests": False})

    async def _command(self, path: str, body: dict[str, Any], within_s: float = COMMAND_S) -> None:
        answer = await self._client.command(path, body, within_s)
        try:
            done = msgspec.json.decode(answer or b"{}", type=_Done)
        except DECODE_ERRORS:
            return  # some endpoints reply with a line of text
        if not done.success:
            reason = self._client.redact(done.message or done.error_message or "no reason given")
            raise EngineRejected(f"{self.name}: {path} failed: {reason}")

    async def _describe(self) -> tuple[str, int | None]:
        model = await self._client.get("/get_model_info", _ModelInfo)
        server = await self._client.get("/get_server_info", _ServerInfo)
        if server.context_length is not None:
            return model.model_path, server.context_length
        models = await self._client.get("/v1/models", _Models)
        return model.model_path, models.data[0].max_model_len if models.data else None

    def _abort(self, rid: str) -> None:
        """Abort a request.

        Closing the connection also aborts it, but only after several seconds, and not behind every router.
        """
        task = asyncio.create_task(self._send_abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _send_abort(self, rid: str) -> None:
        with suppress(TurngateError):  # the connection is closed anyway
            await self._client.notify("/abort_request", orjson.dumps({"rid": rid}))

    def _body(self, request: Generate, rid: str) -> bytes:
        body: dict[str, Any] = {
            "rid": rid,
            "sampling_params": _sampling(request),
            "return_logprob": True,
            "logprob_start_len": -1,  # sampled tokens only: log-probabilities of the prompt need a prefill without the cache
            "top_logprobs_num": request.top_logprobs,
            "return_text_in_logprobs": False,
            "stream": request.stream,
        }
        if request.cache_salt:
            body["extra_key"] = request.cache_salt  # keeps cache entries with different salts apart
        if self._rank is not None:
            body["routed_dp_rank"] = self._rank
            body["data_parallel_rank"] = self._rank  # the name of this field in early 0.5 versions
        if request.echo_prompt:
            body["return_prompt_token_ids"] = True
        if request.routed_experts is not None:
            body["return_routed_experts"] = True
            body["routed_experts_start_len"] = request.routed_experts
        if request.sampling_mask and 0 < request.sampling.top_k <= MAX_KEPT:  # SGLang rejects other values
            body["return_sampling_mask"] = True
        if request.model:
            body["lora_path"] = request.model
        return request.body("input_ids", body)

    async def _chunks(
        self, reply: Reply, request: Generate, experts: RoutedExpertsReply | None
    ) -> AsyncIterator[Chunk]:
        batches = reply.events() if request.stream else reply.whole()
        sampled, echo = 0, request.echo_prompt
        async for batch in batches:
            chunk = self._chunk(batch, sampled, echo, request)
            if not chunk.ids and chunk.finish is None and chunk.prompt is None:
                continue
            sampled += len(chunk.ids)
            echo = echo and chunk.prompt is None  # every event repeats the prompt, so it is decoded only once
            reply.finished = chunk.finish is not None
            if chunk.finish == "abort" and not sampled:
                raise make_abort_error(self.name)
            if experts is not None and reply.finished and sampled and chunk.finish != "abort":
                chunk = msgspec.structs.replace(chunk, side=chunk.side + await experts.read(request, sampled))
            yield chunk
            if reply.finished:
                return
        raise EngineUnavailable(f"{self.name} ended its reply before the generation finished")

    def _chunk(self, batch: Sequence[bytes], sampled: int, echo: bool, request: Generate) -> Chunk:
        """Merge the events of one read into one chunk. `sampled` is the number of tokens in earlier chunks."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        finish: Literal["stop", "length", "abort"] | None = None
        prompt: list[int] | None = None
        alternatives: list[dict[int, float]] = []
        masks: list[list[int]] = []
        meta = _Meta(0)
        for data in batch:
            event = self._client.decode(_decode_echo if echo else _decode, data)
            if is_present(event.error):
                raise self._client.failure_in_stream(event.error, default_status=400)
            if event.meta_info is None:
                raise EngineError(f"{self.name} sent an event without meta_info")
            meta = event.meta_info
            finish = self._finish(meta.finish_reason)
            new, new_logprobs = _select_new(self.name, event.output_ids, event.meta_info, sampled + len(ids))
            tops = event.meta_info.output_top_logprobs
            if tops is not None:
                added = _slice_new(self.name, tops, sampled + len(ids), event.meta_info.completion_tokens)
                alternatives += [{t.token_id: t.logprob for t in top or () if t.logprob is not None} for top in added]
            if meta.output_token_sampling_mask is not None and meta.output_token_sampling_logprobs is not None:
                seen, total = sampled + len(ids), meta.completion_tokens
                masks += _slice_new(self.name, meta.output_token_sampling_mask, seen, total)
                new_logprobs = list(_slice_new(self.name, meta.output_token_sampling_logprobs, seen, total))
            ids += new
            logprobs += new_logprobs
            if isinstance(event, _EchoEvent):
                prompt = event.prompt_token_ids
        runs = self._expected.read_runs(meta.weight_versions, request)
        side = build_masks(self.name, sampled, ids, masks) if masks else ()
        return Chunk(ids, logprobs, finish, prompt, None, alternatives or None, meta.cached_tokens, runs, side=side)

    def _finish(self, reason: _Finish | None) -> Literal["stop", "length", "abort"] | None:
        if reason is None:
            return None
        if reason.status_code is not None:  # a rejection or failure, reported as the end of a generation
            raise self._client.failure(reason.status_code, (reason.message or "").encode())
        if reason.type not in _FINISH:
            raise EngineError(f"{self.name} sent an unknown finish reason: {reason.type!r}")
        return _FINISH[reason.type]


def _select_new(
    name: str, output_ids: list[int] | None, meta: _Meta, seen: int
) -> tuple[list[int], list[float | None]]:
    """Return the ids and log-probabilities that an event adds. `seen` is the number of tokens before the event."""
    total = meta.completion_tokens
    positions = meta.output_token_logprobs
    added = None if positions is None else _slice_new(name, positions, seen, total)
    if output_ids is not None:
        ids = list(_slice_new(name, output_ids, seen, total))
    elif added is not None:  # old SGLang versions send the ids only with the log-probabilities
        ids = [position.token_id for position in added]
    else:
        raise EngineError(f"{name} sent no token ids")
    if added is None:
        return ids, align_logprobs(name, ids, None)
    if [position.token_id for position in added] != ids:
        raise EngineError(f"{name} sent log-probabilities whose token ids do not match the sampled ids")
    return ids, align_logprobs(name, ids, [position.logprob for position in added])


def _slice_new(name: str, items: Sequence[T], seen: int, total: int) -> Sequence[T]:
    """Return the new items of a list that contains either all `total` items, or only those after the first `seen`."""
    if len(items) == total:
        return items[seen:]
    if len(items) == total - seen:
        return items
    raise EngineError(
        f"{name} sent ids, log-probabilities or sampling masks for the wrong number of tokens: {len(items)} instead of {total} (all) or "
        f"{total - seen} (only the new ones)"
    )


def _headers(request: Generate) -> dict[str, str]:
    headers = {"X-Request-Id": request.request_id, "X-SMG-Routing-Key": request.session}
    return {name: value for name, value in headers.items() if value}


def _sampling(request: Generate) -> dict[str, Any]:
    params: dict[str, Any] = {
        **_sampling_fields(request.sampling),
        "n": 1,
        "max_new_tokens": request.max_tokens,
        "stop_token_ids": request.stop_ids,
        "ignore_eos": False,
        # The text is discarded, but stop strings are matched against it, so it must be complete.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    if request.stop:
        params["stop"] = request.stop
    if request.constraint is not None:
        params["json_schema"] = _schema(request.constraint)
    return params


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return all sampling fields, even neutral ones, because SGLang takes missing ones from `preferred_sampling_params`."""
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # -1 turns it off
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens,
    }
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    return fields


def _schema(constraint: Constraint) -> str:
    """Encode the constraint as a JSON schema. SGLang needs a schema even to request an arbitrary JSON object."""
    if constraint.kind == "json_object":
        return '{"type": "object"}'
    if constraint.schema is None:
        raise EngineRejected(f"a {constraint.kind} constraint needs a schema")
    return orjson.dumps(constraint.schema).decode()
