"""What came back from a teacher: an answer that is paid for, or a failure with a code.

Pure functions over status, headers and bytes. A failure says whether to try again, whether the
call may have been paid, and whether its teacher must stop.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from replay_pipeline.replay.prices import nano
from replay_pipeline.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A completed, paid call. `error_code` marks an answer that holds no usable action."""

    action: Message | None
    model: str | None
    provider: str | None
    finish_reason: str | None
    generation_id: str | None
    cost_nano: int | None
    """Cost that the endpoint reported; `None` when it reports none."""
    n_prompt_tokens: int | None = None
    n_completion_tokens: int | None = None
    n_cached_tokens: int | None = None
    n_written_tokens: int | None = None
    n_reasoning_tokens: int | None = None
    error_code: str | None = None
    error_message: str | None = None
    is_replayed: bool = False
    """Served from the router's response cache: an earlier call paid for it."""
    paid_generation_id: str | None = None
    """The earlier call that paid for a replayed answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A call without an answer."""

    code: str
    message: str
    is_retryable: bool = False
    may_be_paid: bool = False
    """The request left, and no word came back: it counts at its full reservation."""
    stops_teacher: bool = False
    """Every further call to this teacher would fail alike."""
    slows_down: bool = False
    """The endpoint asks for fewer calls at once."""
    is_lasting: bool = False
    """The same request would fail again: no need to ask on the next run."""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    code: str
    what: str
    is_retryable: bool = False
    stops_teacher: bool = False
    slows_down: bool = False
    is_lasting: bool = False


_RATE = _Kind("rate_limited", "too many requests", is_retryable=True, slows_down=True)
_OVERLOADED = _Kind("overloaded", "the provider is overloaded", is_retryable=True, slows_down=True)
_UNAVAILABLE = _Kind("unavailable", "the provider is not available", is_retryable=True)
_TIMEOUT = _Kind("timeout", "the provider took too long", is_retryable=True)
_SERVER = _Kind("server_error", "the provider failed", is_retryable=True)
_KEY = _Kind(
    "key_rejected", "the API key was rejected: check the teacher's key", stops_teacher=True
)
_FORBIDDEN = _Kind(
    "forbidden", "the key may not use this model: check its permissions", stops_teacher=True
)
_CREDIT = _Kind(
    "credit_exhausted",
    "the key or account has no money left: add credits or raise the key's limit",
    stops_teacher=True,
)
_IN_FLIGHT = _Kind(
    "in_flight_budget",
    "the provider holds too much money for calls in flight",
    is_retryable=True,
    slows_down=True,
)
_TOO_DEAR = _Kind(
    "exceeds_account_budget", "this one call is dearer than the account allows", is_lasting=False
)
_CONTEXT = _Kind(
    "context_length_exceeded",
    "the state is longer than the model's context: choose a window or another model",
    is_lasting=True,
)
_MAX_TOKENS = _Kind(
    "max_tokens_exceeded",
    "more completion tokens are asked for than the model gives: lower max_completion_tokens",
    is_lasting=True,
)
_TOO_LARGE = _Kind(
    "request_too_large", "the request is too large: choose a window", is_lasting=True
)
_INVALID = _Kind("invalid_request", "the endpoint does not accept the request", is_lasting=True)
_NOT_FOUND = _Kind(
    "not_found",
    "no endpoint serves this model under the run's conditions (price, data policy, distillation, "
    "parameters)",
)
_MODERATED = _Kind("moderated", "the provider's moderation refused the state", is_lasting=True)
_REFUSED = _Kind("refused", "the model refused to answer", is_lasting=True)
_IMAGE = _Kind("invalid_image", "an image of the state is not accepted", is_lasting=True)

_BY_TYPE: dict[str, _Kind] = {
    "context_length_exceeded": _CONTEXT,
    "max_tokens_exceeded": _MAX_TOKENS,
    "token_limit_exceeded": _CONTEXT,
    "string_too_long": _TOO_LARGE,
    "authentication": _KEY,
    "permission_denied": _FORBIDDEN,
    "payment_required": _CREDIT,
    "rate_limit_exceeded": _RATE,
    "provider_overloaded": _OVERLOADED,
    "provider_unavailable": _UNAVAILABLE,
    "invalid_request": _INVALID,
    "invalid_prompt": _INVALID,
    "not_found": _NOT_FOUND,
    "precondition_failed": _INVALID,
    "payload_too_large": _TOO_LARGE,
    "unprocessable": _INVALID,
    "content_policy_violation": _MODERATED,
    "refusal": _REFUSED,
    "invalid_image": _IMAGE,
    "image_too_large": _IMAGE,
    "image_too_small": _IMAGE,
    "unsupported_image_format": _IMAGE,
    "image_not_found": _IMAGE,
    "image_download_failed": _IMAGE,
    "server": _SERVER,
    "timeout": _TIMEOUT,
}
"""OpenRouter's stable vocabulary; its last word, `unmapped`, is read by its status."""

_BY_STATUS: dict[int, _Kind] = {
    400: _INVALID,
    401: _KEY,
    402: _CREDIT,
    403: _FORBIDDEN,
    404: _NOT_FOUND,
    408: _TIMEOUT,
    413: _TOO_LARGE,
    422: _INVALID,
    429: _RATE,
    500: _SERVER,
    502: _UNAVAILABLE,
    503: _OVERLOADED,
    504: _TIMEOUT,
    524: _TIMEOUT,
    529: _OVERLOADED,
}

LASTING_CODES = frozenset(
    kind.code
    for kind in (_CONTEXT, _MAX_TOKENS, _TOO_LARGE, _INVALID, _MODERATED, _REFUSED, _IMAGE)
)
"""Failures that the same request would meet again."""

_CONTEXT_WORDS = re.compile(
    r"context (length|window|size)|maximum context|too many tokens|prompt is too long|"
    r"exceeds? the (available|model'?s) context|reduce the length",
    re.IGNORECASE,
)


def read_reply(status: int, headers: Mapping[str, str], body: bytes) -> Answer | Failure:
    """Read the reply to one call, whatever its shape."""
    try:
        reply = msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _unreadable(status, headers, body)
    if isinstance(reply, dict) and reply.get("error"):
        return _failure(status, headers, reply["error"])
    if not 200 <= status < 300:
        return _failure(status, headers, reply)
    if not isinstance(reply, dict) or not reply.get("choices"):
        return Failure(
            code="empty_reply",
            message="the endpoint sent no choices",
            is_retryable=True,
            may_be_paid=_is_billed(reply),
        )
    return _answer(reply, headers)


def read_stream(body: bytes) -> bytes:
    """Join a server-sent event stream into the body of one ordinary reply.

    Some endpoints stream although they were not asked to. A stream that stops before its end is
    given back as it is, which reads as a truncated reply.
    """
    head: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason: Any = None
    for line in body.splitlines():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        try:
            chunk = msgspec.json.decode(data)
        except msgspec.DecodeError:
            return body
        if chunk.get("error"):
            return msgspec.json.encode({"error": chunk["error"]})
        head |= {key: value for key, value in chunk.items() if value is not None}
        for choice in chunk.get("choices") or []:
            finish_reason = choice.get("finish_reason") or finish_reason
            _join_delta(message, calls, choice.get("delta") or {})
    if finish_reason is None:
        return body
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return msgspec.json.encode(
        {**head, "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}]}
    )


def _join_delta(
    message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]
) -> None:
    for name in ("content", "refusal"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or []:
        known = calls.setdefault(
            call.get("index", 0),
            {"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}},
        )
        function = call.get("function") or {}
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""


def _unreadable(status: int, headers: Mapping[str, str], body: bytes) -> Answer | Failure:
    if "text/event-stream" in headers.get("content-type", "") or body.startswith(b"data:"):
        joined = read_stream(body)
        if joined is not body:
            return read_reply(status, headers, joined)
    if 200 <= status < 300:
        return Failure(
            code="truncated_reply",
            message="the reply broke off or is not JSON",
            is_retryable=True,
            may_be_paid=True,
        )
    return _failure(status, headers, body[:300].decode("utf-8", "replace"))


def _failure(status: int, headers: Mapping[str, str], error: Any) -> Failure:
    fields = error if isinstance(error, dict) else {}
    metadata = _mapping(fields.get("metadata"))
    availability = _mapping(fields.get("availability") or metadata.get("availability"))
    code = fields.get("code")
    if isinstance(code, int) and 400 <= code < 600:
        status = code
    text = _error_text(error, fields, metadata)
    kind = _kind(status, metadata, text)
    return Failure(
        code=kind.code,
        message=_sentence(kind.what, status, text, metadata.get("provider_name")),
        is_retryable=kind.is_retryable and availability.get("retryable") is not False,
        stops_teacher=kind.stops_teacher,
        slows_down=kind.slows_down,
        is_lasting=kind.is_lasting,
        retry_after_s=_retry_after(headers, metadata, availability),
    )


def _kind(status: int, metadata: Mapping[str, Any], text: str) -> _Kind:
    if status == 402:
        return {"in_flight_budget_exhausted": _IN_FLIGHT, "weight_exceeds_budget": _TOO_DEAR}.get(
            str(metadata.get("reason")), _CREDIT
        )
    if status == 403 and (metadata.get("reasons") or metadata.get("flagged_input")):
        return _MODERATED
    if kind := _BY_TYPE.get(str(metadata.get("error_type"))):
        return kind
    if status in (400, 413, 422, 500) and _CONTEXT_WORDS.search(text):
        return _CONTEXT
    return _BY_STATUS.get(status) or (_SERVER if status >= 500 else _INVALID)


def _error_text(error: Any, fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """The provider's own words: OpenRouter keeps them in `metadata.raw`."""
    raw = metadata.get("raw")
    if isinstance(raw, dict):
        raw = _mapping(raw.get("error")).get("message") or raw.get("message")
    texts = [str(fields.get("message") or ""), str(raw or "")]
    if not fields and error:
        texts = [str(error)]
    return ": ".join(text for text in texts if text)[:500]


def _sentence(what: str, status: int, text: str, provider: Any) -> str:
    source = f"{provider}, " if provider else ""
    return f"{what} ({source}{status}{': ' + text if text else ''})"


def _retry_after(
    headers: Mapping[str, str], metadata: Mapping[str, Any], availability: Mapping[str, Any]
) -> float | None:
    waits = []
    values: tuple[Any, ...] = (
        headers.get("retry-after"),
        metadata.get("retry_after_seconds"),
        availability.get("retry_after"),
    )
    for value in values:
        try:
            waits.append(float(value))
        except (TypeError, ValueError):
            continue
    waits = [wait for wait in waits if 0 <= wait < 86_400]
    return max(waits, default=None)


def _answer(reply: dict[str, Any], headers: Mapping[str, str]) -> Answer | Failure:
    choice = _mapping(reply["choices"][0])
    usage = _mapping(reply.get("usage"))
    message = _mapping(choice.get("message"))
    finish_reason = choice.get("finish_reason")
    if choice.get("error") or finish_reason == "error":
        failure = _failure(502, headers, choice.get("error") or "the choice holds an error")
        return replace(failure, is_retryable=True, slows_down=False, may_be_paid=_is_billed(reply))
    prompt_details = _mapping(usage.get("prompt_tokens_details"))
    completion_details = _mapping(usage.get("completion_tokens_details"))
    is_replayed = headers.get("x-openrouter-cache-status", "").upper() == "HIT"
    answer = Answer(
        action=_action(message),
        model=reply.get("model"),
        provider=reply.get("provider"),
        finish_reason=finish_reason,
        generation_id=reply.get("id") or headers.get("x-generation-id"),
        cost_nano=_cost_nano(usage),
        n_prompt_tokens=usage.get("prompt_tokens"),
        n_completion_tokens=usage.get("completion_tokens"),
        n_cached_tokens=prompt_details.get("cached_tokens"),
        n_written_tokens=prompt_details.get("cache_write_tokens"),
        n_reasoning_tokens=completion_details.get("reasoning_tokens"),
        is_replayed=is_replayed,
        paid_generation_id=headers.get("x-openrouter-cache-source-id") if is_replayed else None,
    )
    problem = _problem(answer, message)
    if problem is None:
        return answer
    code, text = problem
    if code == "empty_answer" and not is_replayed and not _is_billed(reply):
        return Failure(code=code, message=text, is_retryable=True)
    return replace(answer, error_code=code, error_message=text)


def _action(message: Mapping[str, Any]) -> Message | None:
    content, tool_calls = message.get("content"), message.get("tool_calls")
    if not content and not tool_calls:
        return None
    action: Message = {"role": "assistant", "content": content or None}
    if isinstance(tool_calls, list) and tool_calls:
        action["tool_calls"] = tool_calls
    return action


def _problem(answer: Answer, message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why a paid answer holds no usable action."""
    if answer.finish_reason == "length":
        return "cut_off", "the answer was cut off: raise max_completion_tokens"
    if answer.finish_reason == "content_filter":
        return "content_filtered", "the provider filtered the answer"
    if message.get("refusal") and answer.action is None:
        return "refused", f"the model refused: {str(message['refusal'])[:300]}"
    if answer.action is None:
        return "empty_answer", "the answer holds neither text nor a tool call"
    for call in answer.action.get("tool_calls", ()):
        if text := _malformed(call):
            return "malformed_arguments", text
    return None


def _malformed(call: Any) -> str | None:
    function = _mapping(_mapping(call).get("function"))
    name = function.get("name")
    if not isinstance(name, str) or not name:
        return "a tool call names no function"
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        return None
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, TypeError):
        return f"the arguments of {name} are not JSON: {str(arguments)[:200]}"
    return None if isinstance(decoded, dict) else f"the arguments of {name} are no JSON object"


def _cost_nano(usage: Mapping[str, Any]) -> int | None:
    cost = usage.get("cost")
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        return None
    upstream = _mapping(usage.get("cost_details")).get("upstream_inference_cost")
    if usage.get("is_byok") and isinstance(upstream, int | float):
        cost += upstream
    return nano(round(cost, 12)) if cost >= 0 else None


def _is_billed(reply: Any) -> bool:
    """Whether a reply without a usable choice may cost money all the same."""
    usage = _mapping(_mapping(reply).get("usage"))
    cost = usage.get("cost")
    if isinstance(cost, int | float):
        return cost > 0
    return bool(usage.get("completion_tokens"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
