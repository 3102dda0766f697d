"""Read a teacher's reply: a paid answer, or a failure with a code.

Only this module reads what providers send. It never raises, for any bytes. A field of the wrong
type is read if its meaning is plain (`"10"` tokens), and left out otherwise. A reply with an
unreadable action is an answer without one, so that its cost is booked. The ledger can store and
read back everything that leaves this module.
"""

import contextlib
import email.utils
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from replay_pipeline.replay.dialects.base import as_mapping
from replay_pipeline.replay.dialects.usage import Usage, as_count, as_number, read_usage
from replay_pipeline.replay.dialects.written_calls import (
    UnclearCallError,
    arguments_of,
    has_markup,
    may_hold_calls,
    offered_name,
    read_written_calls,
    schemas_of,
)
from replay_pipeline.types import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A completed, paid call. `error_code` marks an answer without a usable action."""

    action: Message | None = None
    model: str | None = None
    provider: str | None = None
    finish_reason: str | None = None
    generation_id: str | None = None
    usage: Usage = field(default_factory=Usage)
    error_code: str | None = None
    error_message: str | None = None
    is_replayed: bool = False
    """Whether the answer came from the router's response cache, so that an earlier call paid for it."""
    paid_generation_id: str | None = None
    """The earlier call that paid for a replayed answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A call without an answer."""

    code: str
    message: str
    _: KW_ONLY
    is_retryable: bool = False
    may_be_paid: bool = False
    """Whether the request left without a reply. It then counts at its full reservation."""
    stops_teacher: bool = False
    """Whether every further call to this teacher would fail in the same way."""
    slows_down: bool = False
    """Whether the endpoint asks for fewer calls at once."""
    is_lasting: bool = False
    """Whether the same request would fail again, so that the next run needn't ask it."""
    retry_after_s: float | None = None
    generation_id: str | None = None
    """The id under which the endpoint may know the cost of the call."""


_RATE = Failure("rate_limited", "too many requests", is_retryable=True, slows_down=True)
_OVERLOADED = Failure(
    "overloaded", "the provider is overloaded", is_retryable=True, slows_down=True
)
_UNAVAILABLE = Failure("unavailable", "the provider is not available", is_retryable=True)
_TIMEOUT = Failure("timeout", "the provider took too long", is_retryable=True)
_SERVER = Failure("server_error", "the provider failed", is_retryable=True)
_KEY = Failure(
    "key_rejected", "the API key was rejected: check the teacher's key", stops_teacher=True
)
_FORBIDDEN = Failure(
    "forbidden", "the key may not use this model: check its permissions", stops_teacher=True
)
_CREDIT = Failure(
    "credit_exhausted",
    "the key or account has no money left: add credits or raise the key's limit",
    stops_teacher=True,
)
_IN_FLIGHT = Failure(
    "in_flight_budget",
    "the provider holds too much money for calls in flight",
    is_retryable=True,
    slows_down=True,
)
_TOO_DEAR = Failure("exceeds_account_budget", "this one call is dearer than the account allows")
_CONTEXT = Failure(
    "context_length_exceeded",
    "the state is longer than the model's context: choose a window or another model",
    is_lasting=True,
)
_MAX_TOKENS = Failure(
    "max_tokens_exceeded",
    "more completion tokens are asked for than the model gives: lower max_completion_tokens",
    is_lasting=True,
)
_TOO_LARGE = Failure(
    "request_too_large", "the request is too large: choose a window", is_lasting=True
)
_INVALID = Failure("invalid_request", "the endpoint does not accept the request", is_lasting=True)
_NOT_FOUND = Failure(
    "not_found",
    "no endpoint serves this model under the run's conditions (price, data policy, "
    "distillation, parameters)",
)
_MODERATED = Failure("moderated", "the provider's moderation refused the state", is_lasting=True)
_REFUSED = Failure("refused", "the model refused to answer", is_lasting=True)
_IMAGE = Failure("invalid_image", "an image of the state is not accepted", is_lasting=True)

_BY_TYPE: dict[str, Failure] = {
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

_BY_OPENAI_CODE = {
    # Sent with 429, yet no waiting brings the money back.
    "insufficient_quota": _CREDIT,
    "invalid_api_key": _KEY,
    "model_not_found": _NOT_FOUND,
    "content_filter": _MODERATED,
}

_BY_STATUS: dict[int, Failure] = {
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
"""Codes of failures that the same request would meet again."""

NO_COMPLETION = "no_completion"
"""The code of a reply that no chat endpoint sends."""
OTHER_MODEL = "other_model"
"""The code of a first answer that came from another model than the requested one."""
MALFORMED = ("malformed_call", "malformed_arguments")
"""Errors of an answer whose calls its model wrote so that nobody can carry them out."""

_CONTEXT_WORDS = re.compile(
    r"context (length|window|size)|maximum context|too many tokens|prompt is too long|"
    r"exceeds? the (available|model'?s) context|reduce the length",
    re.IGNORECASE,
)

_WRITTEN_COST = re.compile(rb'(?<!\\)"cost"\s*:\s*"?([0-9][0-9.eE+-]*)(?=["\s,}\]])')
"""A number that something follows: where the reply was cut inside it, it says nothing."""
_MOST_SHOWN = 200
_LEAST_TIME_S = 1e9
"""From so many seconds on, a number is a time (2001 and later) and no pause."""
_PLAIN_NAME = re.compile(r"\w[\w-]*")
_LONGEST_WAIT_S = 32 * 86_400.0
"""Some limits are by the month. A longer wait is no wait."""
_THINKING = re.compile(r"\A.*</think(?:ing)?>", re.DOTALL)


def read_reply(
    status: int, headers: Mapping[str, str], body: bytes, *, request: bytes = b""
) -> Answer | Failure:
    """Read the reply to one call, in any shape. Never raises.

    Calls in the text are read if `request`, the body that was sent, offered tools.
    """
    try:
        return _read(status, headers, body, request)
    except Exception as error:  # noqa: BLE001 (one odd reply must not end a run that others pay for)
        return _unreadable(status, headers, body, f"the reply can't be read ({error!r:.200})")


def _read(status: int, headers: Mapping[str, str], body: bytes, request: bytes) -> Answer | Failure:
    if "text/event-stream" in headers.get("content-type", "") or body.startswith((b"data:", b":")):
        reply = _joined(body)
    else:
        reply = _decoded(body)
    fields = as_mapping(reply)
    is_success = 200 <= status < 300
    if _is_foreign(status, fields, reply, body):
        return _no_completion(status, headers, body)
    if reply is _BROKEN:
        return _unreadable(status, headers, body, "the reply broke off or is not JSON")
    if fields.get("error") or not is_success:
        # FastAPI's servers (`transformers serve`, vLLM) say it in `detail`.
        failure = _failure(status, headers, fields.get("error") or fields.get("detail") or reply)
        return _paid(failure, fields, headers) if is_success else failure
    choices = fields.get("choices")
    if not isinstance(choices, list) or not choices:
        failure = Failure("empty_reply", "the endpoint sent no choices", is_retryable=True)
        return _paid(failure, fields, headers)
    choice = as_mapping(choices[0])
    if choice.get("error") or choice.get("finish_reason") == "error":
        failure = _failure(502, headers, choice.get("error") or "the choice holds an error")
        return _paid(replace(failure, is_retryable=True, slows_down=False), fields, headers)
    return _answer(fields, choice, headers, request)


_BROKEN = object()


def _is_foreign(status: int, fields: Mapping[str, Any], reply: Any, body: bytes) -> bool:
    """Return whether what answered is no chat endpoint: a page, a redirection, JSON of something else."""
    is_page = reply is _BROKEN and not body.lstrip().startswith((b"{", b"[", b"data:", b":"))
    if status in (404, 405) or 300 <= status < 400:
        return is_page or not fields
    is_other = bool(body.strip()) and reply is not _BROKEN and not fields.keys() & _OF_A_COMPLETION
    return 200 <= status < 300 and (is_page or is_other)


_OF_A_COMPLETION = frozenset({"choices", "error", "usage"})


def _no_completion(status: int, headers: Mapping[str, str], body: bytes) -> Failure:
    kind = headers.get("content-type", "").partition(";")[0] or "no content type"
    begins = " ".join(body.decode("utf-8", "replace").split())[:_MOST_SHOWN]
    text = (
        f"the address answers {status} with {kind}, which is not a chat completion: check its base_url; "
        f"it begins: {_clean(begins)}"
    )
    # Whoever answers with a page takes no money as a rule, but nobody has said so.
    is_success = 200 <= status < 300
    generation_id = generation_of(headers) if is_success else None
    return Failure(
        NO_COMPLETION,
        text,
        is_retryable=is_success,
        may_be_paid=is_success,
        generation_id=generation_id,
    )


def _decoded(body: bytes) -> Any:
    """Decode JSON, also where it has lone surrogates, `NaN` or numbers that are too large."""
    try:
        return msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return _clean(json.loads(body.decode("utf-8", "replace")))
    except (ValueError, RecursionError):
        return _BROKEN


def _clean(value: Any) -> Any:
    """Take out what no table and no ledger can hold: lone surrogates, `NaN` and infinities."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    return value


def _joined(body: bytes) -> Any:
    """Join a server-sent event stream into one ordinary reply.

    Some endpoints stream although they were not asked to. A stream that stops before its end
    reads as a broken reply.
    """
    head: dict[str, Any] = {}
    message: dict[str, Any] = {"role": "assistant"}
    calls: dict[int, dict[str, Any]] = {}
    finish_reason = None
    for line in body.splitlines():
        data = line[5:].strip()
        if not line.startswith(b"data:") or data == b"[DONE]":
            continue
        chunk = _decoded(data)
        if chunk is _BROKEN:
            return _BROKEN
        head |= {key: value for key, value in as_mapping(chunk).items() if value is not None}
        for choice in map(as_mapping, _items(as_mapping(chunk).get("choices"))):
            finish_reason = choice.get("finish_reason") or finish_reason
            _join_delta(message, calls, as_mapping(choice.get("delta")))
    if finish_reason is None and not head.get("error"):
        return _BROKEN
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    choice = {"finish_reason": finish_reason, "message": message}
    return {**head, "choices": [choice]}


def _join_delta(
    message: dict[str, Any], calls: dict[int, dict[str, Any]], delta: Mapping[str, Any]
) -> None:
    for name in ("content", "refusal"):
        if text := _content(delta.get(name)):
            message[name] = (message.get(name) or "") + text
    for call in map(as_mapping, _items(delta.get("tool_calls"))):
        known = calls.setdefault(
            as_count(call.get("index")) or 0,
            {"id": call.get("id"), "type": "function", "function": {"name": "", "arguments": ""}},
        )
        function = as_mapping(call.get("function"))
        for name in ("name", "arguments"):
            known["function"][name] += _text(function.get(name)) or ""


def _unreadable(
    status: int, headers: Mapping[str, str], body: bytes, message: str
) -> Answer | Failure:
    if not 200 <= status < 300:
        return _failure(status, headers, body[:300].decode("utf-8", "replace"))
    failure = Failure(
        "truncated_reply",
        message,
        is_retryable=True,
        may_be_paid=True,
        generation_id=generation_of(headers),
    )
    # The last one: a provider puts its usage at the end.
    written = _WRITTEN_COST.findall(body)
    return _paid(failure, {"usage": {"cost": written[-1].decode()}} if written else {}, headers)


def _paid(
    failure: Failure, reply: Mapping[str, Any], headers: Mapping[str, str]
) -> Answer | Failure:
    """Turn a failure that was charged into a paid answer without an action.

    It is not asked again: the provider would charge again.
    """
    usage = read_usage(reply, headers)
    is_paid = usage.n_completion_tokens if usage.cost_nano is None else usage.cost_nano
    if not is_paid:
        return failure
    return Answer(
        finish_reason="error",
        generation_id=_text(reply.get("id")) or generation_of(headers),
        error_code=failure.code,
        error_message=failure.message,
        usage=usage,
    )


def _failure(status: int, headers: Mapping[str, str], error: Any) -> Failure:
    fields = as_mapping(error)
    metadata = as_mapping(fields.get("metadata"))
    availability = as_mapping(fields.get("availability") or metadata.get("availability"))
    if 400 <= (as_count(fields.get("code")) or 0) < 600:
        status = as_count(fields.get("code")) or status
    text = _error_text(error, fields, metadata)
    kind = _kind(status, fields, metadata, text)
    provider = _text(metadata.get("provider_name"))
    source = f"{provider}, {status}" if provider else str(status)
    return replace(
        kind,
        message=f"{kind.message} ({source}{': ' + text if text else ''})",
        is_retryable=kind.is_retryable and availability.get("retryable") is not False,
        retry_after_s=_retry_after(headers, metadata, availability),
    )


def _kind(
    status: int, fields: Mapping[str, Any], metadata: Mapping[str, Any], text: str
) -> Failure:
    if status == 402:
        return {"in_flight_budget_exhausted": _IN_FLIGHT, "weight_exceeds_budget": _TOO_DEAR}.get(
            str(metadata.get("reason")), _CREDIT
        )
    if status == 403 and (metadata.get("reasons") or metadata.get("flagged_input")):
        return _MODERATED
    for word in (metadata.get("error_type"), fields.get("code"), fields.get("type")):
        if kind := _BY_TYPE.get(str(word)) or _BY_OPENAI_CODE.get(str(word)):
            return kind
    if status in (400, 413, 422, 500) and _CONTEXT_WORDS.search(text):
        return _CONTEXT
    if kind := _BY_STATUS.get(status):
        return kind
    # An error in a 200 that does not say which may pass: remembered as lasting, it never heals.
    return _INVALID if 400 <= status < 500 else _SERVER


def _error_text(error: Any, fields: Mapping[str, Any], metadata: Mapping[str, Any]) -> str:
    """Return the provider's own words: OpenRouter keeps them in `metadata.raw`."""
    raw = metadata.get("raw")
    if isinstance(raw, dict):
        raw = as_mapping(raw.get("error")).get("message") or raw.get("message")
    texts = [str(fields.get("message") or ""), str(raw or "")]
    if not fields and error:
        texts = [str(error)]
    return _clean(": ".join(text for text in texts if text)[:500])


def _retry_after(
    headers: Mapping[str, str], metadata: Mapping[str, Any], availability: Mapping[str, Any]
) -> float | None:
    waits = [
        _seconds(headers.get("retry-after")),
        _seconds(metadata.get("retry_after_seconds")),
        _seconds(availability.get("retry_after")),
        _until_reset(headers),
        _until_reset(as_mapping(metadata.get("headers"))),
    ]
    return max(
        (wait for wait in waits if wait is not None and 0 <= wait < _LONGEST_WAIT_S), default=None
    )


def _until_reset(headers: Mapping[str, Any]) -> float | None:
    """Read when a limit that is used up is lifted: in seconds, or as a time in seconds or milliseconds."""
    found = {str(name).lower(): value for name, value in headers.items()}
    reset = as_number(found.get("x-ratelimit-reset"))
    if reset is None or as_number(found.get("x-ratelimit-remaining")) not in (None, 0):
        return None
    if reset < _LEAST_TIME_S:
        return reset
    at_s = reset / 1000 if reset >= 1000 * _LEAST_TIME_S else reset
    return max(0.0, at_s - datetime.now(UTC).timestamp())


def _seconds(value: Any) -> float | None:
    """Read a pause, given in seconds or (in a header) as the date of its end."""
    if (seconds := as_number(value)) is not None:
        return seconds
    try:
        until = email.utils.parsedate_to_datetime(value)
        return max(0.0, (until - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return None


def _answer(
    reply: Mapping[str, Any], choice: Mapping[str, Any], headers: Mapping[str, str], request: bytes
) -> Answer | Failure:
    message = as_mapping(choice.get("message"))
    action, unclear = _action(message), None
    try:
        action = _meant(action, request)
    except UnclearCallError as error:
        unclear = _clean(str(error))
    answer = Answer(
        action=action,
        model=_text(reply.get("model")),
        provider=_text(reply.get("provider")),
        finish_reason=_text(choice.get("finish_reason")),
        generation_id=_text(reply.get("id")) or generation_of(headers),
        is_replayed=headers.get("x-openrouter-cache-status", "").upper() == "HIT",
        paid_generation_id=_clean(headers.get("x-openrouter-cache-source-id")),
        usage=read_usage(reply, headers),
    )
    problem = _problem(answer, message) or (("malformed_call", unclear) if unclear else None)
    if problem is None:
        return answer
    code, text = problem
    if code == "empty_answer" and not answer.is_replayed:
        return _paid(Failure(code, text, is_retryable=True), reply, headers)
    return replace(answer, error_code=code, error_message=text)


def _action(message: Mapping[str, Any]) -> Message | None:
    content, calls = _content(message.get("content")), list(_calls(message.get("tool_calls")))
    if not calls and isinstance(old := message.get("function_call"), dict):
        # The form before there were several calls, which some servers still write.
        calls = list(_calls([{"function": old}]))
    if not content and not calls:
        return None
    action: Message = {"role": "assistant", "content": content or None}
    if calls:
        action["tool_calls"] = calls
    return action


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Read tool calls into the form that every later stage relies on."""
    for call in map(as_mapping, _items(value)):
        function = as_mapping(call.get("function"))
        arguments = function.get("arguments")
        if isinstance(arguments, dict | list):
            arguments = json.dumps(arguments, ensure_ascii=False)
        name = _text(function.get("name")) or ""
        yield {
            "id": _text(call.get("id")) or "",
            "type": "function",
            "function": {"name": name, "arguments": _text(arguments) or ""},
        }


def _meant(action: Message | None, request: bytes) -> Message | None:
    """Return an action as its model meant it: calls in the text are calls, and wrappers are off.

    Raises:
        UnclearCallError: if a call is written into the text and can't be read.
    """
    if action is None:
        return None
    text = action.get("content") or ""
    if calls := action.get("tool_calls"):
        for call in calls:
            _mend(call["function"], request)
        # A parser may leave a copy of the calls in the text, which is no part of the action.
        return {**action, "content": None} if has_markup(text) else action
    text = _THINKING.sub("", text)
    if not may_hold_calls(text):
        return action
    left, written = read_written_calls(text, schemas_of(request))
    if not written:
        return action
    called = [{"function": {"name": each.name, "arguments": each.arguments}} for each in written]
    calls = [{**call, "id": f"call_{n}"} for n, call in enumerate(_calls(called))]
    return {"role": "assistant", "content": left or None, "tool_calls": calls}


def _mend(function: dict[str, str], request: bytes) -> None:
    """Take off what a template or a gateway put around a name or arguments."""
    if not _PLAIN_NAME.fullmatch(function["name"]):
        function["name"] = offered_name(function["name"], schemas_of(request))
    if _malformed(function):
        with contextlib.suppress(UnclearCallError):
            function["arguments"] = json.dumps(
                arguments_of(function["arguments"]), ensure_ascii=False
            )


def _problem(answer: Answer, message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return why a paid answer holds no usable action."""
    if answer.finish_reason == "length":
        return "cut_off", "the answer was cut off: raise max_completion_tokens"
    if answer.finish_reason == "content_filter":
        return "content_filtered", "the provider filtered the answer"
    if message.get("refusal") and answer.action is None:
        return "refused", f"the model refused: {_clean(str(message['refusal'])[:300])}"
    if answer.action is None:
        return "empty_answer", "the answer holds neither text nor a tool call"
    for call in answer.action.get("tool_calls", ()):
        if text := _malformed(call["function"]):
            return "malformed_arguments", text
    return None


def _malformed(function: Mapping[str, str]) -> str | None:
    name, arguments = function["name"], function["arguments"]
    if not name:
        return "a tool call names no function"
    try:
        decoded = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return f"the arguments of {name} are not JSON: {arguments[:200]}"
    return None if isinstance(decoded, dict) else f"the arguments of {name} are not JSON object"


def _content(value: Any) -> str | None:
    """Read text, given as it is or as a list of parts."""
    if isinstance(value, list):
        parts = (part if isinstance(part, str) else as_mapping(part).get("text") for part in value)
        return "".join(part for part in parts if isinstance(part, str))
    return _text(value)


def generation_of(headers: Mapping[str, str]) -> str | None:
    """Return the id under which the endpoint keeps a call, in a form that can be stored."""
    return _clean(headers.get("x-generation-id"))


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
