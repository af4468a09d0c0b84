"""The vLLM engine, which sends token ids to `/v1/completions` or `/inference/v1/generate` and receives ids with log-probabilities.

It is written against the request and response models of vLLM 0.32. The server needs these settings:

- `--logprobs-mode processed_logprobs`, so that log-probabilities are those of the sampled distribution;
- for `api="generate"`, `--enable-scale-out` on versions that require it;
- for sampling masks, `api="generate"` and `--return-sampling-mask` (vLLM then rejects calls without `top_k`);
- for routed experts, `api="generate"` and `--enable-return-routed-experts`, which vLLM's CPU backend does not support;
- for `ranks`, an API server that honors `X-data-parallel-rank`, in front of several data-parallel ranks;
- to load weights while it serves (`pause`, `load`, …), `VLLM_SERVER_DEV_MODE=1` in its environment;
- for adapters, `--enable-lora` and `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`.

All sampling fields are sent, even neutral ones, because vLLM takes missing ones from the model's `generation_config.json`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Literal

import msgspec

from turngate.engines import http
from turngate.engines.base import Chunk, Generate, Health
from turngate.engines.http import EngineClient, Reply, clean_logprobs, is_present, make_abort_error
from turngate.engines.late_constraint import generate_after_reasoning
from turngate.engines.load import EngineLoad, parse_vllm_metrics
from turngate.engines.routed_experts import ExpertShape, RoutedExpertsReply
from turngate.engines.sampling_mask import build_masks
from turngate.engines.weights import COMMAND_S, LOAD_S, ExpectedWeights, PolicyWeights, VersionSpan, unknown_path_error
from turngate.errors import EngineError, EngineRejected, EngineUnavailable, TurngateError
from turngate.types import Constraint, Json, Sampling, TokenId

Api = Literal["completions", "generate"]

_PATHS: dict[Api, str] = {"completions": "/v1/completions", "generate": "/inference/v1/generate"}
_NAMED = "token_id:"
_LOADING = "turngate: loading "  # prefix of the weight version while weights are being loaded
_FINISH: dict[str, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length", "abort": "abort"}


class _Position(msgspec.Struct):
    """One token and its log-probability in the `generate` API."""

    token_id: TokenId
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    """Log-probabilities: `token_logprobs` in the `completions` API, `content` in the `generate` API."""

    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None  # in the form "token_id:123"
    content: list[_Position] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[VersionSpan] | None = None  # sent at the end for the whole reply; only in the `generate` API


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """The token usage at the end of a reply. vLLM reports cached tokens only with `--enable-prompt-tokens-details`."""

    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    """A whole response, or one event of a stream. Only `_EchoEvent` decodes the prompt's ids, since there may be 70,000 of them."""

    choices: tuple[_Choice, ...] = ()
    error: msgspec.Raw = msgspec.Raw()
    usage: _Usage | None = None


class _EchoChoice(_Choice):
    prompt_token_ids: list[int] | None = None  # the `completions` API sends them here


class _EchoEvent(_Event):
    choices: tuple[_EchoChoice, ...] = ()
    prompt_token_ids: list[int] | None = None  # the `generate` API sends them here


class _Candidates(msgspec.Struct):
    """The most likely tokens at one position in the `generate` API."""

    top_logprobs: list[_Position] = []


class _TopLogprobs(msgspec.Struct):
    """The most likely tokens at each position.

    The `completions` API sends them in `top_logprobs`, under names such as "token_id:123". The `generate` API sends them in `content`.
    """

    top_logprobs: list[dict[str, float] | None] | None = None
    content: list[_Candidates] | None = None


class _TopChoice(msgspec.Struct):
    logprobs: _TopLogprobs | None = None


class _TopEvent(msgspec.Struct):
    """The fields of an event that are decoded in addition to those of `_Event`, for calls with `top_logprobs`."""

    choices: tuple[_TopChoice, ...] = ()


class _MaskChoice(msgspec.Struct):
    sampling_mask: list[list[TokenId]] | None = None  # for each new token: the ids that were left to sample from


class _MaskEvent(msgspec.Struct):
    """The fields of an event that are decoded in addition to those of `_Event`, for calls with `sampling_mask`."""

    choices: tuple[_MaskChoice, ...] = ()


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str = ""  # the model that the server was started with, or an adapter's folder
    parent: str | None = None  # the base model, if this is an adapter


class _Models(msgspec.Struct):
    data: list[_Card]


class _WeightInfo(msgspec.Struct):
    weight_version: str


_ids = msgspec.json.Decoder(list[TokenId])
_decode = msgspec.json.Decoder(_Event).decode
_decode_echo = msgspec.json.Decoder(_EchoEvent).decode
_decode_top = msgspec.json.Decoder(_TopEvent).decode
_decode_masks = msgspec.json.Decoder(_MaskEvent).decode


class VLLM:
    """One vLLM API server. An empty `model` means the model that the server serves.

    `rank` pins every call to one data-parallel rank. `ranks` is the number of ranks; it matters only in a `Pool`, which keeps each session
    on one rank. `silence_s` limits the time between received bytes, so a call that is not streamed must finish within that time.
    """

    def __init__(
        self,
        url: str,
        model: str = "",
        *,
        api: Api = "completions",
        key: str | None = None,
        rank: int | None = None,
        ranks: int = 1,
        name: str = "vllm",
        connect_s: float = 10.0,
        silence_s: float | None = None,
        expert_shape: ExpertShape | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.expert_shape = expert_shape  # expected shape of routed experts, or None to accept any
        self._api = api
        self._rank = rank
        self._ranks = ranks
        self._expected = ExpectedWeights()
        self.reports_weights = True  # whether the server reports the version of its weights
        root = url.rstrip("/").removesuffix("/v1")
        self._client = EngineClient(name, root, key=key, connect_s=connect_s, silence_s=silence_s, direct=True)

    def __repr__(self) -> str:
        return f"VLLM({self._client.url!r}, {self.model!r}, api={self._api!r}, rank={self._rank})"

    async def start(self) -> None:
        await self._client.start()

    async def close(self) -> None:
        await self._client.close()

    def release(self, session: str) -> None:
        """Do nothing: vLLM manages its own cache."""

    def lanes(self) -> Sequence[VLLM]:
        """Return one engine per data-parallel rank. All of them share this engine's connections."""
        if self._ranks == 1:
            return [self]
        return [self._for_rank(rank) for rank in range(self._ranks)]

    async def health(self) -> list[Health]:
        seen = Health(url=self._client.url, ok=True, model=self.model, in_flight=self._client.in_flight)
        try:
            await self._client.ping("/health")
            models = await self._client.get("/v1/models", _Models)
            wrong = await self._wrong_weights(models)
        except TurngateError as error:  # if the weights are unknown, this is a failed check like any other
            return [msgspec.structs.replace(seen, ok=False, detail=error.message)]
        card = next((card for card in models.data if self.model in (card.id, "")), None)
        if card is None:
            return [msgspec.structs.replace(seen, ok=False, detail=_explain_served(models, self.model))]
        if wrong:
            return [msgspec.structs.replace(seen, ok=False, detail=wrong, wrong=True)]
        return [msgspec.structs.replace(seen, model=card.id, max_context=card.max_model_len)]

    async def load_report(self) -> list[EngineLoad]:
        return parse_vllm_metrics(await self._client.fetch("/metrics"))

    # ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def address(self) -> str:
        return self._client.url

    def expect(self, weights: PolicyWeights | None) -> None:
        self._expected.weights = weights

    async def pause(self) -> None:
        await self._command("/pause?mode=keep")

    async def resume(self) -> None:
        await self._command("/resume")

    async def load(self, weights: PolicyWeights, *, frozen: bool) -> None:
        if not weights.is_adapter:
            await self._reload(weights.path, str(weights.version), frozen)
            return
        served = await self._client.get("/v1/models", _Models)
        if any(card.id == weights.name for card in served.data):
            # A retry may load different weights, which must not share the old adapter's cache.
            await self.unload(weights.name)
        await self._command(
            "/v1/load_lora_adapter", {"lora_name": weights.name, "lora_path": weights.lora_path}, LOAD_S
        )

    async def reload_initial_weights(self, *, frozen: bool) -> None:
        served = await self._client.get("/v1/models", _Models)
        root = next((card.root for card in served.data if card.root and card.parent is None), "")
        await self._reload(root, "default", frozen)

    async def abort_all(self) -> None:
        await self._command("/abort_requests")

    async def unload(self, name: str) -> None:
        await self._command("/v1/unload_lora_adapter", {"lora_name": name})

    async def _reload(self, path: str, mark: str, frozen: bool) -> None:
        """Load a model, and set the weight version to `mark`.

        Until the load has succeeded, the version is `mark` with the prefix `_LOADING`, so that the health check rejects the engine. If the
        load fails, the prefix stays, because the engine would crash at its next call. If `path` is empty, only set the version with the
        prefix, and raise `EngineRejected`.
        """
        await self._command("/update_weight_version", {"new_version": _LOADING + mark})
        if not path:  # without a path, vLLM would reload the weights that it loaded last
            raise unknown_path_error(self.name)
        options = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._command("/collective_rpc", options, LOAD_S)
        if not frozen:  # frozen calls need their cache, and versions never share cache entries
            await self._command("/reset_prefix_cache")
        await self._command("/update_weight_version", {"new_version": mark})

    async def _wrong_weights(self, served: _Models) -> str:
        """Return why the engine must not be used, or an empty string if its weights are as expected or cannot be checked."""
        expected = self._expected.weights
        if expected is not None and expected.is_adapter:
            if any(card.id == expected.name for card in served.data):
                return ""
            return f"adapter {expected.name} is not loaded, probably because the engine restarted; repeat POST /admin/weights"
        if not self.reports_weights:
            return ""
        try:
            mark = (await self._client.get("/weight_info", _WeightInfo)).weight_version
        except EngineRejected:
            self.reports_weights = False  # the route does not exist, so no weights can have been loaded either
            return ""
        if mark.startswith(_LOADING):
            return f"its update to weight version {mark.removeprefix(_LOADING)} has not completed; if it failed, restart the engine"
        if expected is not None and mark != str(expected.version):
            return f"its weight version is {mark!r} instead of {expected.version}; repeat POST /admin/weights"
        return ""

    async def _command(self, path: str, body: Json = None, within_s: float = COMMAND_S) -> None:
        try:
            await self._client.command(path, {} if body is None else body, within_s)
        except EngineRejected as error:
            if not error.message.endswith(": Not Found"):
                raise
            need = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if "lora" in path else "VLLM_SERVER_DEV_MODE=1"
            raise EngineRejected(
                f"{self.name} does not serve {path.partition('?')[0]}; start it with {need} in its environment"
            ) from None

    def generate(self, request: Generate) -> AbstractAsyncContextManager[AsyncIterator[Chunk]]:
        if request.constraint is not None and request.reasoning is not None:
            return generate_after_reasoning(self._generate_once, request, request.reasoning)
        return VLLMGeneration(self, request)

    def _generate_once(self, request: Generate) -> VLLMGeneration:
        return VLLMGeneration(self, request)

    def _for_rank(self, rank: int) -> VLLM:
        lane = copy.copy(self)
        lane._rank = rank
        lane._ranks = 1
        return lane

    def _headers(self, request: Generate) -> dict[str, str]:
        headers = {"X-Request-Id": request.request_id, "X-Session-ID": request.session}
        if self._rank is not None:
            headers["X-data-parallel-rank"] = str(self._rank)
        return {name: value for name, value in headers.items() if value}

    def _body(self, request: Generate) -> bytes:
        prompt, body = _completions(request) if self._api == "completions" else _generate(request)
        body["stream"] = request.stream
        if request.stream:
            body["stream_options"] = {"include_usage": True}  # for the numbers of cached and sampled tokens
        if model := request.model or self.model:
            body["model"] = model
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        return request.body(prompt, body)

    def post(self, request: Generate, experts: RoutedExpertsReply | None = None) -> Reply:
        field = None if experts is None else experts.field
        return self._client.post(_PATHS[self._api], self._body(request), self._headers(request), field)

    def chunk(self, batch: Sequence[bytes], request: Generate) -> Chunk | None:
        """Merge the events of one read into one chunk. Return None if they add nothing."""
        echo = request.echo_prompt
        ids: list[int] = []
        names: list[str] = []  # ids that are still to be parsed; parsing them together is faster
        logprobs: list[float | None] = []
        finish: Literal["stop", "length", "abort"] | None = None
        prompt: list[int] | None = None
        cached: int | None = None
        counted: int | None = None
        spans: list[VersionSpan] | None = None
        for event in self._client.decode_all(_decode_echo if echo else _decode, batch):
            if event.error and is_present(event.error):
                raise self._client.failure_in_stream(event.error, default_status=500)
            for choice in event.choices:
                scores = choice.logprobs
                if choice.token_ids is not None:
                    ids += self._parse_names(names) + choice.token_ids
                    names = []
                    logprobs += self._logprobs(choice.token_ids, scores)
                elif scores is not None and scores.tokens is not None:
                    names += scores.tokens
                    logprobs += self._logprobs(scores.tokens, scores)
                elif choice.text:  # otherwise the event adds nothing
                    raise _make_no_ids_error(self.name)
                if choice.finish_reason is not None:
                    finish = _parse_finish(self.name, choice.finish_reason)
                    spans = choice.weight_versions
            if event.usage is not None:
                counted = event.usage.completion_tokens
                if event.usage.prompt_tokens_details is not None:
                    cached = event.usage.prompt_tokens_details.cached_tokens
            if echo:
                prompt = prompt or _prompt(event)
        ids += self._parse_names(names)
        if not ids and finish is None and prompt is None and cached is None and counted is None:
            return None
        runs = self._expected.read_runs(spans, request)
        return Chunk(ids, clean_logprobs(logprobs), finish, prompt, cached=cached, version_runs=runs, counted=counted)

    def alternatives(self, batch: Sequence[bytes], count: int) -> list[dict[int, float]]:
        """Return the `count` most likely ids for each token in the events, with their log-probabilities.

        If the sampled token is not one of these, vLLM lists it too, but it is left out here.
        """
        found: list[dict[int, float]] = []
        for event in self._client.decode_all(_decode_top, batch):
            for scores in [choice.logprobs for choice in event.choices if choice.logprobs is not None]:
                for position in scores.content or ():
                    found.append(
                        {top.token_id: top.logprob for top in position.top_logprobs if top.logprob is not None}
                    )
                for named in scores.top_logprobs or ():
                    values = named or {}
                    found.append(dict(zip(self._parse_names(list(values)), values.values(), strict=True)))
        return [dict(sorted(each.items(), key=lambda item: -item[1])[:count]) for each in found]

    def masks(self, batch: Sequence[bytes]) -> list[list[int]]:
        """Return, for each sampled token in the events, the ids that top-k, top-p and min-p left to sample from.

        The list is empty if the server does not send them.
        """
        choices = [choice for event in self._client.decode_all(_decode_masks, batch) for choice in event.choices]
        return [mask for choice in choices for mask in choice.sampling_mask or ()]

    def _parse_names(self, names: list[str]) -> list[int]:
        """Parse names such as "token_id:123". Parsing them together as one JSON list is four times as fast as parsing each one."""
        joined = ",".join(names)
        if joined.count(_NAMED) != len(names):
            raise _make_no_ids_error(self.name)
        try:
            return _ids.decode(f"[{joined.replace(_NAMED, '')}]")
        except msgspec.DecodeError:
            raise _make_no_ids_error(self.name) from None

    def _logprobs(self, ids: Sequence[int | str], scores: _Logprobs | None) -> Sequence[float | None]:
        if scores is None:
            return [None] * len(ids)
        content = scores.content
        values = scores.token_logprobs if content is None else [position.logprob for position in content]
        if values is None:
            return [None] * len(ids)
        if len(values) != len(ids):
            raise EngineError(
                f"{self.name} sent different numbers of log-probabilities ({len(values)}) and tokens ({len(ids)})"
            )
        if content is not None and [position.token_id for position in content] != list(ids):
            raise EngineError(f"{self.name} sent log-probabilities whose token ids do not match the sampled ids")
        return values


class VLLMGeneration:
    """A call as a stream of chunks. Leaving the `async with` block early aborts the call.

    This is an iterator rather than a generator, because closing a generator early makes the event loop start a task.
    """

    def __init__(self, engine: VLLM, request: Generate) -> None:
        self._engine, self._request = engine, request
        self._reply: Reply
        self._experts: RoutedExpertsReply | None = None
        if request.routed_experts is not None:
            self._experts = RoutedExpertsReply(engine.name, engine.expert_shape)
        self._sampled = 0  # tokens received so far
        self._read = False  # whether the body of a non-streamed reply was read

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        self._reply = await self._engine.post(self._request, self._experts).__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._reply.__aexit__(*error)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if self._reply.finished:
            raise StopAsyncIteration
        chunk: Chunk | None = None
        batch: list[bytes] = []
        while chunk is None:
            batch = await self._batch()
            chunk = self._engine.chunk(batch, self._request)
        if self._request.top_logprobs:
            alternatives = self._engine.alternatives(batch, self._request.top_logprobs)
            chunk = msgspec.structs.replace(chunk, alternatives=alternatives)
        if self._request.sampling_mask and (masks := self._engine.masks(batch)):
            side = build_masks(self._engine.name, self._sampled, chunk.ids, masks)
            chunk = msgspec.structs.replace(chunk, side=side)
        self._reply.finished = chunk.finish is not None
        self._sampled += len(chunk.ids)
        if chunk.finish == "abort" and not self._sampled:
            raise make_abort_error(self._engine.name)
        if self._reply.finished:
            if chunk.counted is None and self._request.stream and not self._reply.done:
                chunk = await self._read_usage(chunk)
            if chunk.counted not in (None, self._sampled) and chunk.finish != "abort":
                raise EngineError(
                    f"{self._engine.name} reported a different number of tokens ({chunk.counted}) than it sent ({self._sampled})"
                )
            if self._experts is not None and self._sampled and chunk.finish != "abort":
                experts = await self._experts.read(self._request, self._sampled)
                chunk = msgspec.structs.replace(chunk, side=chunk.side + experts)
        return chunk

    async def _read_usage(self, chunk: Chunk) -> Chunk:
        """Read the usage at the end of the reply, and add it to the last chunk. If it does not arrive, return the chunk unchanged."""
        with suppress(TurngateError, TimeoutError):  # the generation is complete
            async with asyncio.timeout(http.DRAIN_S):
                while (batch := await self._reply.batch()) is not None:
                    last = self._engine.chunk(batch, self._request)
                    if last is not None and last.counted is not None:
                        return msgspec.structs.replace(chunk, cached=last.cached, counted=last.counted)
        return chunk

    async def _batch(self) -> list[bytes]:
        """Return the next events of a streamed reply, or the whole body of any other reply as a single event."""
        batch = None
        if self._request.stream:
            batch = await self._reply.batch()
        elif not self._read:
            self._read, batch = True, [await self._reply.document()]
        if batch is not None:
            return batch
        if self._reply.done and not self._sampled:  # a `completions` stream ends like this after an abort
            raise make_abort_error(self._engine.name)
        raise EngineUnavailable(f"{self._engine.name} ended its reply before the generation finished")


def _explain_served(models: _Models, wanted: str) -> str:
    served = ", ".join(card.id for card in models.data) or "no models"
    return f"the engine serves {served}, not {wanted}" if wanted else f"the engine serves {served}"


def _parse_finish(name: str, reason: str) -> Literal["stop", "length", "abort"]:
    if reason not in _FINISH:
        raise EngineError(f"{name} sent an unknown finish reason: {reason!r}")
    return _FINISH[reason]


def _make_no_ids_error(name: str) -> EngineError:
    return EngineError(
        f"{name} sent no token ids; use a vLLM version that supports return_token_ids and return_tokens_as_token_ids"
    )


def _prompt(event: _Event) -> list[int] | None:
    if not isinstance(event, _EchoEvent):
        return None
    prompts = [choice.prompt_token_ids for choice in event.choices]
    return next((ids for ids in prompts if ids), event.prompt_token_ids)


def _completions(request: Generate) -> tuple[str, dict[str, Any]]:
    """Return the name of the prompt field and the other fields of a request to the `completions` API."""
    fields = _sampling(request)
    if request.echo_prompt:
        fields["return_token_ids"] = True  # also returns the whole prompt, which is 300 KB in a long rollout
    if not request.echo_prompt or request.top_logprobs:
        fields["return_tokens_as_token_ids"] = True  # returns sampled ids and alternatives
    return "prompt", fields


def _generate(request: Generate) -> tuple[str, dict[str, Any]]:
    return "token_ids", {
        "return_token_ids": request.echo_prompt,  # applies to the prompt; sampled ids are always returned
        "sampling_params": {**_sampling(request), "detokenize": bool(request.stop)},  # only stop strings need the text
    }


def _sampling(request: Generate) -> dict[str, Any]:
    """Return the fields that the requests to both APIs share."""
    params: dict[str, Any] = {
        **_sampling_fields(request.sampling),
        "n": 1,
        "max_tokens": request.max_tokens,
        "logprobs": request.top_logprobs,  # 0 requests only the sampled token's log-probability
        "stop_token_ids": request.stop_ids,
        "ignore_eos": False,
        # The text is discarded, but stop strings are matched against it, so it must be complete.
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
    }
    if request.stop:
        params["stop"] = request.stop
    if request.constraint is not None:
        params["structured_outputs"] = _constraint_fields(request.constraint)
    if request.routed_experts:
        params["routed_experts_prompt_start"] = request.routed_experts
    return params


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,  # -1 disables top-k in every version; 0 disables it only in newer ones
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": sampling.min_tokens,
    }
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields


def _constraint_fields(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "json_object":
        return {"json_object": True}
    if constraint.schema is None:
        raise EngineRejected(f"a {constraint.kind} constraint needs a schema")
    return {"json": constraint.schema}
