"""The loopback teachers as strict as a real router, and failing on demand."""

import asyncio
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import msgspec

from replay_pipeline.testing import Bill, Script
from replay_pipeline.testing import TeacherServer as PlainTeacherServer
from replay_pipeline.testing.__main__ import run
from replay_pipeline.testing.catalog import BYTES_PER_TOKEN, SUPPORTED_PARAMETERS, ServedModel
from replay_pipeline.testing.router import (
    PREFIX,
    Request,
    Response,
    Router,
    as_json,
    refusal,
    state_of,
)
from tests.support.provider_rules import complaint, unsupported

PAID_FAULTS = frozenset(
    {"length", "content_filter", "malformed_arguments", "empty_paid", "refusal", "overcharge",
     "drop_after", "truncate", "stall", "stream", "truncate_stream", "no_usage", "hidden_cost"}
)  # fmt: skip
"""Faults after which the call is charged anyway."""

FREE_FAULTS = frozenset(
    {"status", "error_200", "choice_error", "empty_choices", "empty_answer", "drop_before",
     "not_json", "capacity", "stream_error"}
)  # fmt: skip
"""Faults after which the call costs nothing."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """A rule that makes some calls fail."""

    kind: str
    probability: float = 1.0
    times: int | None = None
    """The most calls that it hits."""
    model: str | None = None
    state_id: str | None = None
    status: int = 500
    message: str = "a fault was asked for"
    error_type: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    retry_after_s: float | None = None
    factor: float = 2.0
    """Factor by which an overcharged call exceeds its price."""
    max_in_flight: int = 0
    """Number of calls at once above which `capacity` answers 429."""

    @classmethod
    def parse(cls, rules: Iterable[Mapping[str, Any]]) -> list[Self]:
        """Read rules from plain data.

        Raises:
            ValueError: a kind or field is unknown.
        """
        names = {each.name for each in fields(cls)}
        faults = []
        for rule in rules:
            if unknown := rule.keys() - names:
                raise ValueError(f"fault {dict(rule)}: unknown {', '.join(sorted(unknown))}")
            fault = cls(**rule)
            if fault.kind not in PAID_FAULTS | FREE_FAULTS:
                kinds = ", ".join(sorted(PAID_FAULTS | FREE_FAULTS))
                raise ValueError(f"fault kind {fault.kind!r} is not one of {kinds}")
            faults.append(fault)
        return faults

    def hits(self, model: str, state_id: str, n_in_flight: int, chance: random.Random) -> bool:
        """Return whether this call fails, and count down `times`."""
        if self.model not in (None, model) or self.state_id not in (None, state_id):
            return False
        if self.times == 0 or (self.kind == "capacity" and n_in_flight <= self.max_in_flight):
            return False
        if self.probability < 1.0 and chance.random() >= self.probability:
            return False
        if self.times is not None:
            self.times -= 1
        return True


_KEPT = PAID_FAULTS - {"drop_after", "truncate", "truncate_stream", "stall"}
"""The router keeps whatever it has sent whole with a 200, however little it is worth."""
_UNDISTILLABLE = ("anthropic/", "openai/")


@dataclass(slots=True)
class FlakyBill(Bill):
    """The bill, with what a strict router tells beside it."""

    n_replayed: int = 0
    """Calls that the response cache answered for free."""
    faults: dict[str, int] = field(default_factory=dict)
    """Calls that met a fault, by kind."""


@dataclass(kw_only=True)
class FlakyScript(Script):
    """What a strict router needs to know besides."""

    faults: list[dict[str, Any]] = field(default_factory=list)
    key: str | None = None
    """If set, the only API key that is accepted."""
    credit_usd: float | None = None
    """If set, calls are refused after this much was charged."""
    latency: Any = 0.0
    """Seconds per call, or `{"median_s", "p95_s"}` of a log-normal distribution."""
    seed: int = 0


class FlakyRouter(Router):
    """Refuses what OpenRouter and providers refuse, keeps replies as it does, and fails on demand."""

    def __init__(self, script: FlakyScript) -> None:
        super().__init__(script)
        self.rules = script
        self.bill = FlakyBill()
        self._faults = Fault.parse(script.faults)
        self._chance = random.Random(script.seed)
        self._latency_chance = random.Random(script.seed + 1)
        self._latencies: list[float] = []
        self._replies: dict[bytes, tuple[bytes, str]] = {}
        self._generations: dict[str, dict[str, Any]] = {}
        self._faulted: Counter[str] = Counter()

    async def __call__(self, request: Request) -> Response:
        url = urlsplit(request.target)
        path = url.path.removeprefix(PREFIX)
        if path == "/_faults":
            try:
                self._faults = Fault.parse(msgspec.json.decode(request.body))
            except (ValueError, TypeError) as error:
                return refusal(400, str(error))
            return as_json({})
        if path == "/_latency":
            self.rules.latency = msgspec.json.decode(request.body)
            return as_json({})
        if path == "/_bill":
            return as_json(asdict(self.bill) | {"faults": dict(self._faulted)})
        if path == "/_latencies":
            return as_json(self._latencies)
        key = self.rules.key
        if key and path[:2] != "/_" and request.headers.get("authorization") != f"Bearer {key}":
            return refusal(401, "No auth credentials found", error_type="authentication")
        if path == "/key":
            usage, limit = self.bill.total_nano / 1e9, self.rules.credit_usd
            left = None if limit is None else limit - usage
            return as_json({"data": {
                "label": "loopback", "usage": usage, "limit": limit, "limit_remaining": left,
                "is_free_tier": False,
            }})  # fmt: skip
        if path == "/generation":
            name = parse_qs(url.query).get("id", [""])[0]
            if name not in self._generations:
                return refusal(404, "Generation not found", error_type="not_found")
            return as_json({"data": self._generations[name]})
        return await super().__call__(request)

    async def answer(
        self, request: Request, body: Mapping[str, Any], model: ServedModel
    ) -> Response:
        name = hashlib.blake2b(request.body, digest_size=16).digest()
        use_cache = request.headers.get("x-openrouter-cache") == "true"
        if use_cache and name in self._replies:
            return self._replay(name)
        if (problem := complaint(body)) is not None:
            return refusal(400, problem, error_type="invalid_request")
        if (refused := self._refusal(body, model, len(request.body))) is not None:
            return refused
        fault = next(
            (f for f in self._faults
             if f.hits(model.model, state_of(body), self.n_in_flight, self._chance)), None,
        )  # fmt: skip
        if fault is not None:
            self._faulted[fault.kind] += 1
            if (failure := _free_failure(fault)) is not None:
                return failure
        recorded = self.recorded(body, model)
        if isinstance(recorded, Response):
            return recorded
        message, finish = _spoiled(
            fault.kind if fault else None, dict(recorded.message), recorded.finish_reason
        )
        recorded = msgspec.structs.replace(recorded, message=message, finish_reason=finish)
        kind = fault.kind if fault else None
        if kind == "overcharge":
            dearer = {
                each: round((getattr(model, each) or 0) * fault.factor)
                for each in ("prompt", "completion", "cache_read")
            }
            model = replace(model, **dearer)
        reply = await self.reply(body, model, recorded)
        if kind == "hidden_cost":
            del reply["usage"]["cost"]
        if kind == "no_usage":
            del reply["usage"]
        payload = msgspec.json.encode(reply)
        response = _deliver(payload, reply, fault, is_stream=bool(body.get("stream")))
        if use_cache:
            if fault is None or kind in _KEPT:
                self._replies[name] = (payload, reply["id"])
            response.headers["x-openrouter-cache-status"] = "MISS"
        return response

    async def wait(self) -> None:
        seconds = self.rules.latency
        if isinstance(seconds, dict):
            sigma = math.log(seconds["p95_s"] / seconds["median_s"]) / 1.6449
            seconds = self._latency_chance.lognormvariate(math.log(seconds["median_s"]), sigma)
        self._latencies.append(seconds)
        await asyncio.sleep(seconds)

    def _replay(self, name: bytes) -> Response:
        payload, source = self._replies[name]
        self.bill.n_replayed += 1
        reply = msgspec.json.decode(payload)
        reply["usage"] = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, "cost": 0}
        return as_json(reply, {"x-openrouter-cache-status": "HIT",
                               "x-openrouter-cache-source-id": source})  # fmt: skip

    def book(self, model: str, question: bytes, usage: Mapping[str, int], nano: int) -> None:
        super().book(model, question, usage, nano)
        generation = f"gen-{self.bill.n_charged:08d}"
        self._generations[generation] = {
            "id": generation,
            "model": model,
            "total_cost": nano / 1e9,
            "native_tokens_prompt": usage["prompt"],
            "native_tokens_cached": usage["cached"],
            "native_tokens_completion": usage["completion"],
        }

    def _refusal(
        self, body: Mapping[str, Any], model: ServedModel, n_bytes: int
    ) -> Response | None:
        """Return what OpenRouter itself refuses before a provider sees the call."""
        n_tokens = n_bytes // BYTES_PER_TOKEN + (body.get("max_tokens") or 0)
        if n_tokens > model.context_length:
            return refusal(
                400, f"This endpoint's maximum context length is {model.context_length} tokens. "
                f"However, you requested about {n_tokens} tokens.",
                error_type="context_length_exceeded",
            )  # fmt: skip
        provider = body.get("provider") or {}
        if provider.get("enforce_distillable_text") and model.model.startswith(_UNDISTILLABLE):
            return refusal(
                404, "No endpoints found that allow distillation", error_type="not_found"
            )
        lacking = unsupported(body, set(SUPPORTED_PARAMETERS))
        if provider.get("require_parameters") and lacking:
            return refusal(404, "No endpoints found that can handle the requested parameters: "
                          f"{', '.join(lacking)}", error_type="not_found")  # fmt: skip
        limit = provider.get("max_price") or {}
        for name, price in (("prompt", model.prompt), ("completion", model.completion)):
            if name in limit and limit[name] * 10**6 < price - 1:
                return refusal(404, f"No endpoints found within max_price.{name}",
                              error_type="not_found")  # fmt: skip
        credit = self.rules.credit_usd
        if credit is not None and self.bill.total_nano >= credit * 10**9:
            return refusal(402, "Insufficient credits", error_type="payment_required")
        return None


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
        return refusal(fault.status, fault.message, headers, fault.error_type, **fault.metadata)
    if fault.kind == "capacity":
        return refusal(429, "Rate limit exceeded", headers, "rate_limit_exceeded")
    if fault.kind == "error_200":
        response = refusal(fault.status, fault.message, headers, fault.error_type)
        return Response(200, response.body, headers)
    if fault.kind == "choice_error":
        error = {"code": fault.status, "message": fault.message}
        choice = {"index": 0, "finish_reason": "error", "error": error,
                  "message": {"role": "assistant", "content": "I'll st"}}  # fmt: skip
        return as_json({"id": "gen-error", "choices": [choice]})
    if fault.kind == "empty_choices":
        return as_json({"id": "gen-empty", "choices": []})
    if fault.kind == "empty_answer":
        choice = {
            "index": 0,
            "finish_reason": None,
            "message": {"role": "assistant", "content": ""},
        }
        usage = {"prompt_tokens": 10, "completion_tokens": 0, "cost": 0}
        return as_json({"id": "gen-empty", "choices": [choice], "usage": usage})
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


class TeacherServer(PlainTeacherServer):
    """The strict server in a process of its own, with `faults`, a `key` and a `credit_usd`."""

    program = "tests.support.teachers"
    bill_type = FlakyBill

    def __init__(
        self,
        answers: Any = None,
        *,
        faults: Sequence[Mapping[str, Any]] = (),
        key: str | None = None,
        credit_usd: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(answers, **options)
        rules = {"faults": [dict(each) for each in faults], "key": key, "credit_usd": credit_usd}
        self.options |= {**rules, "seed": seed}

    def latencies(self) -> list[float]:
        """Return the seconds of each call, in order of arrival."""
        return self.control("_latencies")

    def set_latency(self, seconds: float) -> None:
        """Have every later call take so long."""
        self.control("_latency", seconds)

    def set_faults(self, faults: Sequence[Mapping[str, Any]]) -> None:
        """Replace the fault rules of the running server."""
        self.control("_faults", [dict(fault) for fault in faults])


def main() -> None:
    """Serve until standard input ends."""
    run(lambda options: FlakyRouter(FlakyScript(**options)))
