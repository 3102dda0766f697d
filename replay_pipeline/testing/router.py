"""The answers of the loopback server, in OpenRouter's protocol, from a recording or a script."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from replay_pipeline.testing.catalog import (
    BYTES_PER_TOKEN,
    CATALOG,
    PromptCache,
    ServedModel,
    served,
)
from replay_pipeline.types import REHEARSAL_TEACHERS

PREFIX = "/api/v1"
_PLAYED = tuple(teacher.model for teacher in REHEARSAL_TEACHERS)
_MARKED_VENDORS = ("anthropic", "alibaba", "qwen")


@dataclass(slots=True)
class Request:
    """One complete request."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Response:
    """One reply, and how to send it."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    delivery: Literal["whole", "truncated", "hang_up", "never"] = "whole"


class RecordedAnswer(msgspec.Struct):
    """One line of a file of recorded answers."""

    state_id: str
    model: str
    message: dict[str, Any]
    finish_reason: str | None = None


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
    max_in_flight: int = 0
    models: dict[str, ModelBill] = field(default_factory=dict)


@dataclass(kw_only=True)
class Script:
    """All settings that decide the server's answers."""

    answers: Path | None = None
    script: dict[str, Any] | None = None
    """The assistant message for states without a recorded answer, or messages by model."""
    prices: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Dollars per million tokens, prompt and completion, of models that are not in the catalog."""
    latency: float = 0.0
    """Seconds per call."""


class Router:
    """The router that answers requests and keeps the bill."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.bill = Bill()
        self.n_in_flight = 0
        self.prompts = PromptCache()
        self._answers = _load(script.answers)
        self._charged: Counter[bytes] = Counter()
        recorded = (model for model, _ in self._answers)
        models = dict.fromkeys([*CATALOG, *_PLAYED, *script.prices, *recorded])
        self.models = {model: served(model, script.prices.get(model)) for model in models}

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        path = urlsplit(request.target).path.removeprefix(PREFIX)
        if path == "/chat/completions" and request.method == "POST":
            self.n_in_flight += 1
            self.bill.max_in_flight = max(self.bill.max_in_flight, self.n_in_flight)
            try:
                return await self._complete(request)
            finally:
                self.n_in_flight -= 1
        if path == "/models":
            return as_json({"data": [model.listing() for model in self.models.values()]})
        if path == "/_bill":
            return as_json(asdict(self.bill))
        return refusal(404, f"no such address: {path}", error_type="not_found")

    async def _complete(self, request: Request) -> Response:
        self.bill.n_requests += 1
        try:
            body = msgspec.json.decode(request.body)
            model = self.models.get(body["model"])
            body["messages"]
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            return refusal(400, f"invalid request: {error}", error_type="invalid_request")
        if model is None:
            return refusal(404, f"{body['model']} is not a valid model ID", error_type="not_found")
        self.bill.models.setdefault(model.model, ModelBill()).n_requests += 1
        return await self.answer(request, body, model)

    async def answer(
        self, request: Request, body: Mapping[str, Any], model: ServedModel
    ) -> Response:
        """Answer a question to a model, and charge for it."""
        del request
        recorded = self.recorded(body, model)
        if isinstance(recorded, Response):
            return recorded
        reply = await self.reply(body, model, recorded)
        return as_json(reply, {"x-generation-id": str(reply["id"])})

    def recorded(self, body: Mapping[str, Any], model: ServedModel) -> "RecordedAnswer | Response":
        """Return the answer to a question, or the refusal where none was recorded."""
        state_id = state_of(body)
        found = self._answers.get((model.model, state_id))
        message = self.script.script
        if found is None and message is not None:
            if not {"role", "content", "tool_calls"} & message.keys():
                message = message.get(model.model)
            found = RecordedAnswer(state_id, model.model, message) if message else None
        return found or refusal(
            404,
            f"no recorded answer for {model.model} at state {state_id or '(none given)'}",
            error_type="not_found",
        )

    async def reply(
        self, body: Mapping[str, Any], model: ServedModel, recorded: RecordedAnswer
    ) -> dict[str, Any]:
        """Charge one call, wait its time, and return its reply."""
        prompt = msgspec.json.encode([body.get("tools") or [], *map(_unmarked, body["messages"])])
        blocks: list[bytes] = []
        if body.get("session_id") and model.cache_read is not None and _is_marked(body, model):
            blocks = self.prompts.blocks(model.model, body["session_id"], prompt)
        n_prompt = max(1, -(-len(prompt) // BYTES_PER_TOKEN))
        n_cached = min(n_prompt, self.prompts.n_cached_tokens(blocks, time.monotonic()))
        n_written = n_prompt - n_cached if blocks and model.cache_write is not None else 0
        message = {"role": "assistant", "content": None, **recorded.message}
        finish = recorded.finish_reason
        finish = finish or ("tool_calls" if message.get("tool_calls") else "stop")
        n_completion = max(1, -(-len(msgspec.json.encode(message)) // BYTES_PER_TOKEN))
        n_reasoning = len(str(message.get("reasoning") or "")) // BYTES_PER_TOKEN
        nano = model.cost_nano(n_prompt, n_cached, n_written, n_completion)
        state_id, generation = state_of(body), f"gen-{self.bill.n_charged + 1:08d}"
        rest = b"" if state_id else hashlib.blake2b(msgspec.json.encode(body)).digest()
        question = hashlib.blake2b(f"{model.model}\0{state_id}".encode() + rest).digest()
        usage = {"prompt": n_prompt, "cached": n_cached, "completion": n_completion}
        self.book(model.model, question, usage, nano)
        await self.wait()
        # Now the model has read the prompt: from here on its prefix is in the cache.
        self.prompts.store(blocks, time.monotonic())
        return {
            "id": generation,
            "object": "chat.completion",
            "created": int(datetime.now(UTC).timestamp()),
            "model": model.model,
            "provider": model.provider,
            "choices": [
                {"index": 0, "finish_reason": finish, "native_finish_reason": finish,
                 "message": message}
            ],
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_completion,
                "total_tokens": n_prompt + n_completion,
                "cost": nano / 1e9,
                "prompt_tokens_details": {
                    "cached_tokens": n_cached,
                    "cache_write_tokens": n_written,
                },
                "completion_tokens_details": {"reasoning_tokens": n_reasoning},
            },
        }  # fmt: skip

    async def wait(self) -> None:
        """Take the time that an answer takes."""
        await asyncio.sleep(self.script.latency)

    def book(self, model: str, question: bytes, usage: Mapping[str, int], nano: int) -> None:
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


def state_of(body: Mapping[str, Any]) -> str:
    """Return the state that a question is about."""
    return str((body.get("metadata") or {}).get("state_id", ""))


def _is_marked(body: Mapping[str, Any], model: ServedModel) -> bool:
    """Return whether a request asks for its prompt to be cached, as some vendors want it."""
    vendor = model.model.split("/")[0]
    return (
        vendor not in _MARKED_VENDORS
        or (vendor == "anthropic" and bool(body.get("cache_control")))
        or b'"cache_control"' in msgspec.json.encode(body["messages"])
    )


def _unmarked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a cache knows it: a mark, or one text as a list of one part, is no change."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [{k: v for k, v in part.items() if k != "cache_control"} for part in content]
    is_text = len(parts) == 1 and parts[0].keys() == {"type", "text"}
    return {**message, "content": parts[0]["text"] if is_text else parts}


def refusal(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    error_type: str | None = None,
    **metadata: Any,
) -> Response:
    """Return an error in OpenRouter's form."""
    if error_type:
        metadata["error_type"] = error_type
    error = {"code": status, "message": message, "metadata": metadata}
    return Response(status, msgspec.json.encode({"error": error}), dict(headers or {}))


def as_json(data: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return data as a reply."""
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
