"""The answers of the loopback server, in OpenRouter's protocol, from a recording or a script."""

import asyncio
import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from replay_pipeline.testing.catalog import CATALOG, SUPPORTED_PARAMETERS, ServedModel, served
from replay_pipeline.testing.faults import PAID_FAULTS, Fault
from replay_pipeline.testing.http import Request, Response
from replay_pipeline.testing.prompt_cache import BYTES_PER_TOKEN, PromptCache
from replay_pipeline.testing.rules import complaint, unsupported
from replay_pipeline.types import REHEARSAL_TEACHERS

PREFIX = "/api/v1"
_PLAYED = tuple(teacher.model for teacher in REHEARSAL_TEACHERS)
_KEPT = PAID_FAULTS - {"drop_after", "truncate", "truncate_stream", "stall"}
"""The router keeps whatever it has sent whole with a 200, however little it is worth."""
_MARKED_VENDORS = ("anthropic", "alibaba", "qwen")


class RecordedAnswer(msgspec.Struct):
    """One line of a file of recorded answers."""

    state_id: str
    model: str
    message: dict[str, Any]
    finish_reason: str | None = None
    latency_s: float = 0.0


@dataclass(slots=True)
class ModelBill:
    """The requests and charges of one model."""

    n_requests: int = 0
    n_charged: int = 0
    n_duplicates: int = 0
    """Charged calls for a question that was already charged before."""
    nano: int = 0
    n_prompt_tokens: int = 0
    n_cached_tokens: int = 0
    n_completion_tokens: int = 0


@dataclass(slots=True)
class Bill:
    """The server's own accounting, in nano-dollars."""

    total_nano: int = 0
    n_requests: int = 0
    n_charged: int = 0
    n_duplicates: int = 0
    n_replayed: int = 0
    """Calls that the response cache answered for free."""
    max_in_flight: int = 0
    models: dict[str, ModelBill] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    """Calls that met a fault, by kind."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Bill":
        """Read a bill from the server's JSON."""
        return msgspec.convert(data, cls)


@dataclass(kw_only=True)
class Script:
    """All settings that decide the server's answers."""

    answers: Path | None = None
    script: dict[str, Any] | None = None
    """The assistant message for states without a recorded answer, or messages by model."""
    latency: float | dict[str, float] = 0.0
    """Seconds per call, or `{"median_s", "p95_s"}` of a log-normal distribution, or a `{"scale"}`
    for the recorded latencies."""
    faults: list[dict[str, Any]] = field(default_factory=list)
    seed: int = 0
    key: str | None = None
    """If set, the only API key that is accepted."""
    credit_usd: float | None = None
    """If set, calls are refused after this much was charged."""
    prompt_cache_ttl_s: float = 300.0


class Router:
    """The router that answers requests and keeps the bill."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bill = Bill()
        self.latencies: list[float] = []
        self._answers = _load(script.answers)
        self._faults = Fault.parse(script.faults)
        self._chance = random.Random(script.seed)
        self._latency_chance = random.Random(script.seed + 1)
        self._prompts = PromptCache(ttl_s=script.prompt_cache_ttl_s)
        self._replies: dict[bytes, tuple[bytes, str]] = {}
        self._generations: dict[str, dict[str, Any]] = {}
        self._charged: Counter[bytes] = Counter()
        self._faulted: Counter[str] = Counter()
        self._n_in_flight = 0
        models = dict.fromkeys([*CATALOG, *_PLAYED, *(model for model, _ in self._answers)])
        self._models = {model: served(model) for model in models}

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        url = urlsplit(request.target)
        path = url.path.removeprefix(PREFIX)
        if path.startswith("/_"):
            return self._control(path, request)
        if self.script.key and request.headers.get("authorization") != f"Bearer {self.script.key}":
            return _error(401, "No auth credentials found", error_type="authentication")
        if path == "/chat/completions" and request.method == "POST":
            self._n_in_flight += 1
            self.bill.max_in_flight = max(self.bill.max_in_flight, self._n_in_flight)
            try:
                return await self._complete(request)
            finally:
                self._n_in_flight -= 1
        if path == "/models":
            return _json({"data": [model.listing() for model in self._models.values()]})
        if path == "/key":
            return _json({"data": self._key()})
        if path == "/generation":
            return self._generation(parse_qs(url.query).get("id", [""])[0])
        return _error(404, f"no such address: {path}", error_type="not_found")

    def _control(self, path: str, request: Request) -> Response:
        if path == "/_bill":
            self.bill.faults = dict(self._faulted)
            return _json(asdict(self.bill))
        if path == "/_latencies":
            return _json(self.latencies)
        if path == "/_faults":
            try:
                self._faults = Fault.parse(msgspec.json.decode(request.body))
            except (ValueError, TypeError) as error:
                return _error(400, str(error))
            return _json({})
        return _error(404, f"no such address: {path}")

    def _key(self) -> dict[str, Any]:
        usage = self.bill.total_nano / 1e9
        limit = self.script.credit_usd
        return {
            "label": "loopback",
            "usage": usage,
            "limit": limit,
            "limit_remaining": None if limit is None else limit - usage,
            "is_free_tier": False,
        }

    def _generation(self, generation_id: str) -> Response:
        if generation_id not in self._generations:
            return _error(404, "Generation not found", error_type="not_found")
        return _json({"data": self._generations[generation_id]})

    async def _complete(self, request: Request) -> Response:
        self.bill.n_requests += 1
        try:
            body = msgspec.json.decode(request.body)
            model = self._models.get(body["model"])
            messages = body["messages"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            return _error(400, f"invalid request: {error}", error_type="invalid_request")
        if model is None:
            return _error(404, f"{body['model']} is not a valid model ID", error_type="not_found")
        bill = self.bill.models.setdefault(model.model, ModelBill())
        bill.n_requests += 1
        state_id = str((body.get("metadata") or {}).get("state_id", ""))
        name = hashlib.blake2b(request.body, digest_size=16).digest()
        use_cache = request.headers.get("x-openrouter-cache") == "true"
        if use_cache and name in self._replies:
            return self._replay(name)
        if (problem := complaint(body)) is not None:
            return _error(400, problem, error_type="invalid_request")
        if (refusal := self._refusal(body, model, len(request.body))) is not None:
            return refusal
        fault = next(
            (f for f in self._faults
             if f.hits(model.model, state_id, self._n_in_flight, self._chance)), None,
        )  # fmt: skip
        if fault is not None:
            self._faulted[fault.kind] += 1
            if (failure := _free_failure(fault)) is not None:
                return failure
        recorded = self._recorded(model.model, state_id)
        if recorded is None:
            return _error(
                404, f"no recorded answer for {model.model} at state {state_id or '(none given)'}",
                error_type="not_found",
            )  # fmt: skip
        call = _BilledCall(self, model, body, messages, recorded, fault)
        reply = call.charge(hashlib.blake2b(f"{model.model}\0{state_id}".encode() + (
            b"" if state_id else name)).digest())  # fmt: skip
        await self._wait(recorded)
        call.finish()
        payload = msgspec.json.encode(reply)
        if use_cache and (fault is None or fault.kind in _KEPT):
            self._replies[name] = (payload, reply["id"])
        response = _deliver(payload, reply, fault, is_stream=bool(body.get("stream")))
        if use_cache:
            response.headers["x-openrouter-cache-status"] = "MISS"
        return response

    def _replay(self, name: bytes) -> Response:
        payload, source = self._replies[name]
        self.bill.n_replayed += 1
        reply = msgspec.json.decode(payload)
        reply["usage"] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "cost": 0}
        return _json(reply, {"x-openrouter-cache-status": "HIT",
                             "x-openrouter-cache-source-id": source})  # fmt: skip

    def _refusal(
        self, body: Mapping[str, Any], model: ServedModel, n_bytes: int
    ) -> Response | None:
        """Return what OpenRouter itself refuses before a provider sees the call."""
        n_tokens = n_bytes // BYTES_PER_TOKEN + (body.get("max_tokens") or 0)
        if n_tokens > model.context_length:
            return _error(
                400, f"This endpoint's maximum context length is {model.context_length} tokens. "
                f"However, you requested about {n_tokens} tokens.",
                error_type="context_length_exceeded",
            )  # fmt: skip
        provider = body.get("provider") or {}
        if provider.get("enforce_distillable_text") and not model.is_distillable:
            return _error(404, "No endpoints found that allow distillation", error_type="not_found")
        lacking = unsupported(body, set(SUPPORTED_PARAMETERS))
        if provider.get("require_parameters") and lacking:
            return _error(404, "No endpoints found that can handle the requested parameters: "
                          f"{', '.join(lacking)}", error_type="not_found")  # fmt: skip
        limit = provider.get("max_price") or {}
        for name, price in (("prompt", model.prompt), ("completion", model.completion)):
            if name in limit and limit[name] * 10**6 < price - 1:
                return _error(404, f"No endpoints found within max_price.{name}",
                              error_type="not_found")  # fmt: skip
        credit = self.script.credit_usd
        if credit is not None and self.bill.total_nano >= credit * 10**9:
            return _error(402, "Insufficient credits", error_type="payment_required")
        return None

    def _recorded(self, model: str, state_id: str) -> RecordedAnswer | None:
        recorded = self._answers.get((model, state_id))
        if recorded is not None or self.script.script is None:
            return recorded
        message = self.script.script
        if not {"role", "content", "tool_calls"} & message.keys():
            message = message.get(model)
        return RecordedAnswer(state_id, model, message) if message else None

    async def _wait(self, recorded: RecordedAnswer) -> None:
        latency = self.script.latency
        if isinstance(latency, dict):
            if "scale" in latency:
                seconds = recorded.latency_s * latency["scale"]
            else:
                sigma = math.log(latency["p95_s"] / latency["median_s"]) / 1.6449
                seconds = self._latency_chance.lognormvariate(math.log(latency["median_s"]), sigma)
        else:
            seconds = latency
        if seconds:
            self.latencies.append(seconds)
            await asyncio.sleep(seconds)

    def book(
        self, model: str, question: bytes, usage: Mapping[str, int], nano: int, generation: str
    ) -> None:
        """Charge one call."""
        bill = self.bill.models[model]
        is_duplicate = self._charged[question] > 0
        self._charged[question] += 1
        for each in (self.bill, bill):
            each.n_charged += 1
            each.n_duplicates += is_duplicate
        self.bill.total_nano += nano
        bill.nano += nano
        bill.n_prompt_tokens += usage["prompt"]
        bill.n_cached_tokens += usage["cached"]
        bill.n_completion_tokens += usage["completion"]
        self._generations[generation] = {
            "id": generation,
            "model": model,
            "total_cost": nano / 1e9,
            "native_tokens_prompt": usage["prompt"],
            "native_tokens_cached": usage["cached"],
            "native_tokens_completion": usage["completion"],
        }

    @property
    def prompts(self) -> PromptCache:
        """Return the prompt cache of all models."""
        return self._prompts


class _BilledCall:
    """One call that a model answers, and charges for."""

    def __init__(
        self,
        router: Router,
        model: ServedModel,
        body: Mapping[str, Any],
        messages: list[Any],
        recorded: RecordedAnswer,
        fault: Fault | None,
    ) -> None:
        self.router = router
        self.model = model
        self.recorded = recorded
        self.fault = fault
        prompt = msgspec.json.encode([body.get("tools") or [], *map(_unmarked, messages)])
        session = body.get("session_id")
        vendor = model.model.split("/")[0]
        is_marked = (
            vendor not in _MARKED_VENDORS
            or (vendor == "anthropic" and bool(body.get("cache_control")))
            or b'"cache_control"' in msgspec.json.encode(messages)
        )
        is_cacheable = bool(session) and model.cache_read is not None and is_marked
        cache = router.prompts
        self.blocks = cache.blocks(model.model, session or "", prompt) if is_cacheable else []
        self.n_prompt = max(1, -(-len(prompt) // BYTES_PER_TOKEN))
        self.n_cached = min(self.n_prompt, cache.n_cached_tokens(self.blocks, time.monotonic()))
        self.n_written = 0
        if self.blocks and model.cache_write is not None:
            self.n_written = self.n_prompt - self.n_cached

    def charge(self, question: bytes) -> dict[str, Any]:
        """Put the call on the bill and build its reply."""
        message = {"role": "assistant", "content": None, **self.recorded.message}
        kind = self.fault.kind if self.fault else None
        finish = self.recorded.finish_reason
        finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
        message, finish = _spoiled(kind, message, finish)
        n_completion = max(1, -(-len(msgspec.json.encode(message)) // BYTES_PER_TOKEN))
        n_reasoning = len(str(message.get("reasoning") or "")) // BYTES_PER_TOKEN
        nano = self.model.cost_nano(self.n_prompt, self.n_cached, self.n_written, n_completion)
        if kind == "overcharge" and self.fault:
            nano = round(nano * self.fault.factor)
        generation = f"gen-{self.router.bill.n_charged + 1:08d}"
        self.router.book(
            self.model.model, question,
            {"prompt": self.n_prompt, "cached": self.n_cached, "completion": n_completion},
            nano, generation,
        )  # fmt: skip
        usage: dict[str, Any] = {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": self.n_prompt + n_completion,
            "cost": nano / 1e9,
            "prompt_tokens_details": {
                "cached_tokens": self.n_cached,
                "cache_write_tokens": self.n_written,
            },
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        }
        if kind == "hidden_cost":
            del usage["cost"]
        reply = {
            "id": generation,
            "object": "chat.completion",
            "created": int(datetime.now(UTC).timestamp()),
            "model": self.model.model,
            "provider": self.model.provider,
            "choices": [
                {"index": 0, "finish_reason": finish, "native_finish_reason": finish,
                 "message": message}
            ],
            "usage": usage,
        }  # fmt: skip
        if kind == "no_usage":
            del reply["usage"]
        return reply

    def finish(self) -> None:
        """Note that the model has read the prompt: from now on its prefix is in the cache."""
        self.router.prompts.store(self.blocks, time.monotonic())


def _spoiled(kind: str | None, message: dict[str, Any], finish: str) -> tuple[dict[str, Any], str]:
    if kind == "length":
        return {**message, "tool_calls": None, "content": "I would first"}, "length"
    if kind == "content_filter":
        return {**message, "tool_calls": None, "content": None}, "content_filter"
    if kind == "refusal":
        return {"role": "assistant", "content": None, "refusal": "I can't help with that."}, "stop"
    if kind == "empty_paid":
        return {"role": "assistant", "content": ""}, "stop"
    if kind == "malformed_arguments":
        call = {"id": "call_1", "type": "function",
                "function": {"name": "Bash", "arguments": '{"command": "ls'}}  # fmt: skip
        return {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"
    return message, finish


def _free_failure(fault: Fault) -> Response | None:
    headers = {} if fault.retry_after_s is None else {"retry-after": str(fault.retry_after_s)}
    if fault.kind == "status":
        return _error(fault.status, fault.message, headers, fault.error_type, **fault.metadata)
    if fault.kind == "capacity":
        return _error(429, "Rate limit exceeded", headers, "rate_limit_exceeded")
    if fault.kind == "error_200":
        response = _error(fault.status, fault.message, headers, fault.error_type)
        return Response(200, response.body, headers)
    if fault.kind == "choice_error":
        error = {"code": fault.status, "message": fault.message}
        choice = {"index": 0, "finish_reason": "error", "error": error,
                  "message": {"role": "assistant", "content": "I'll st"}}  # fmt: skip
        return _json({"id": "gen-error", "choices": [choice]})
    if fault.kind == "empty_choices":
        return _json({"id": "gen-empty", "choices": []})
    if fault.kind == "empty_answer":
        choice = {
            "index": 0,
            "finish_reason": None,
            "message": {"role": "assistant", "content": ""},
        }
        usage = {"prompt_tokens": 10, "completion_tokens": 0, "cost": 0}
        return _json({"id": "gen-empty", "choices": [choice], "usage": usage})
    if fault.kind == "drop_before":
        return Response(500, b"", delivery="hang_up")
    if fault.kind == "not_json":
        return Response(fault.status, b"<html><h1>Bad gateway</h1></html>",
                        {"content-type": "text/html", **headers})  # fmt: skip
    if fault.kind == "stream_error":
        error = json.dumps({"error": {"code": fault.status, "message": fault.message}})
        body = f": OPENROUTER PROCESSING\n\ndata: {error}\n\n".encode()
        return Response(200, body, {"content-type": "text/event-stream"})
    return None


def _deliver(
    payload: bytes, reply: Mapping[str, Any], fault: Fault | None, *, is_stream: bool = False
) -> Response:
    kind = fault.kind if fault else "stream" if is_stream else None
    if kind == "drop_after":
        return Response(200, b"", delivery="hang_up")
    if kind == "stall":
        return Response(200, b"", delivery="never")
    if kind == "truncate":
        return Response(200, payload, delivery="truncated")
    if kind in ("stream", "truncate_stream"):
        body = _as_stream(reply, is_whole=kind == "stream")
        return Response(200, body, {"content-type": "text/event-stream"})
    return Response(200, payload, {"x-generation-id": str(reply["id"])})


def _as_stream(reply: Mapping[str, Any], *, is_whole: bool) -> bytes:
    choice = reply["choices"][0]
    message = choice["message"]
    delta = {"role": "assistant", "content": message.get("content")}
    if calls := message.get("tool_calls"):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    head = {key: reply[key] for key in ("id", "model", "provider")}
    head |= {"object": "chat.completion.chunk", "created": reply["created"]}
    chunks = [{**head, "choices": [{"index": 0, "delta": delta}]}]
    if is_whole:
        end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        chunks.append({**head, "choices": [end], "usage": reply["usage"]})
    lines = [": OPENROUTER PROCESSING", *(f"data: {json.dumps(chunk)}" for chunk in chunks)]
    return "\n\n".join([*lines, *(["data: [DONE]"] if is_whole else []), ""]).encode()


def _unmarked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a cache knows it: a mark, or one text as a list of one part, is no change."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{k: v for k, v in part.items() if k != "cache_control"} for part in content]
    is_text = len(parts) == 1 and parts[0].keys() == {"type", "text"}
    return {**message, "content": parts[0]["text"] if is_text else parts}


def _error(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    error_type: str | None = None,
    **metadata: Any,
) -> Response:
    if error_type:
        metadata["error_type"] = error_type
    error = {"code": status, "message": message, "metadata": metadata}
    return Response(status, msgspec.json.encode({"error": error}), dict(headers or {}))


def _json(data: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(200, msgspec.json.encode(data), dict(headers or {}))


def _load(path: Path | None) -> dict[tuple[str, str], RecordedAnswer]:
    if path is None:
        return {}
    decoder = msgspec.json.Decoder(RecordedAnswer)
    answers = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                answer = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}:{number}: no recorded answer ({error})") from error
            answers[answer.model, answer.state_id] = answer
    return answers
