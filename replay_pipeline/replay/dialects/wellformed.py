"""Bring a recorded prefix into the form that every provider accepts.

A session log contains what a model wrote, even if no provider would accept it: a tool name with
half a tag in it, an empty message, a call without a result. This module repairs each of these if
its meaning is plain. A repair depends only on earlier messages. So the prefix of a state stays,
byte for byte, the beginning of the next one, and the prompt cache hits.

Sources of the rules: OpenAI's API reference (chat completions: `tools`, `messages`) and Anthropic's
(messages, tool use), the stricter of the two wherever they differ.
"""

import hashlib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from replay_pipeline.types import Message, Tool

NO_TEXT = "[no text]"
"""Replaces an empty message, or an empty part of one."""
NO_RESULT = "[no result was recorded]"
LOST_CALL = "[result of a call that is not shown]"
NO_BEGINNING = "[the session goes on]"
"""Goes before a prefix that begins with the assistant."""
MAX_NAME = 64

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_CALL_ID = re.compile(r"[a-zA-Z0-9_-]{1,40}")
_PROPERTY = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_MAX_DEPTH = 12
_TOP_ONLY_OBJECT = ("oneOf", "anyOf", "allOf")

_arguments_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def well_formed(messages: list[Message]) -> list[Message]:
    """Return messages that no provider refuses. Messages that need no repair stay the same objects."""
    kept: list[Message] = []
    open_calls: dict[str, str] = {}
    used: set[str] = set()
    for message in messages:
        role = message.get("role")
        if role == "tool":
            sent = open_calls.pop(str(message.get("tool_call_id")), None)
            if sent is not None:
                kept.append(_result(message, sent))
                continue
            # Nothing before it asked for this result: what it says is kept as a user's words.
            message = {"role": "user", "content": f"{LOST_CALL}\n{_text(message.get('content'))}"}
            role = "user"
        kept += [_missing(sent) for sent in open_calls.values()]
        open_calls = {}
        if role == "system" and not any(each["role"] != "system" for each in kept):
            kept.append(_spoken(message, "system"))
            continue
        if role != "assistant":
            kept.append(_spoken(message, "user"))
            continue
        if not any(each["role"] == "user" for each in kept):
            kept.append({"role": "user", "content": NO_BEGINNING})
        kept.append(_assistant(message, open_calls, used))
    kept += [_missing(sent) for sent in open_calls.values()]
    if not kept or kept[-1]["role"] in ("assistant", "system"):
        # An assistant's words at the end would be taken for the beginning of its answer.
        kept.append({"role": "user", "content": NO_BEGINNING})
    return kept


def well_formed_tools(tools: list[Tool]) -> list[Tool]:
    """Return tool definitions that no provider refuses, each name once."""
    kept: dict[str, Tool] = {}
    for tool in tools:
        function = _mapping(_mapping(tool).get("function"))
        name = sent_name(function.get("name"))
        defined: dict[str, Any] = {"name": name}
        if description := function.get("description"):
            defined["description"] = _text(description)
        defined["parameters"] = _parameters(function.get("parameters"))
        kept.setdefault(name, {"type": "function", "function": defined})
    return list(kept.values())


def recorded_names(tools: list[Tool]) -> dict[str, str]:
    """Return the recorded name of each tool that is sent under another name, by the sent name."""
    names = (str(_mapping(_mapping(tool).get("function")).get("name")) for tool in tools)
    return {sent_name(name): name for name in names if not _NAME.fullmatch(name)}


@lru_cache(maxsize=4_096)
def sent_name(name: Any) -> str:
    r"""Return a tool name that every provider accepts.

    >>> sent_name("Read"), sent_name('Task" >\n<parameter name="description'), sent_name("")
    ('Read', 'Task', 'unknown_tool')
    """
    name = _clean(name) if isinstance(name, str) else ""
    if _NAME.fullmatch(name):
        return name
    if len(name) > MAX_NAME or (name and re.fullmatch(r"[\w.:/-]+", name)):
        # A long name, or one of another alphabet: shortened, and told apart by its hash.
        digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
        return re.sub(r"[^a-zA-Z0-9_-]", "_", name)[: MAX_NAME - 9] + "_" + digest
    beginning = _NAME.match(name)
    return beginning.group() if beginning else "unknown_tool"


def _result(message: Message, call_id: str) -> Message:
    content = message.get("content")
    if isinstance(content, str) and content.strip() and call_id == message["tool_call_id"]:
        return _bare(message, ("role", "content", "tool_call_id"))
    return {"role": "tool", "tool_call_id": call_id, "content": _text(content) or NO_TEXT}


def _missing(call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": NO_RESULT}


def _spoken(message: Message, role: str) -> Message:
    content = message.get("content")
    if isinstance(content, str):
        if content.strip() and message.get("role") == role:
            return _bare(message, ("role", "content"))
        return {"role": role, "content": content if content.strip() else NO_TEXT}
    if isinstance(content, list) and role == "user":
        return {"role": role, "content": [_part(each) for each in content] or NO_TEXT}
    return {"role": role, "content": _text(content) or NO_TEXT}


def _part(part: Any) -> dict[str, Any]:
    part = _mapping(part) if not isinstance(part, str) else {"type": "text", "text": part}
    url = _mapping(part.get("image_url")).get("url")
    if part.get("type") == "image_url" and isinstance(url, str) and _is_image(url):
        return {"type": "image_url", "image_url": {"url": url}}
    if part.get("type") != "text":
        return {"type": "text", "text": f"[{_clean(str(part.get('type')))[:40]} is left out]"}
    return {"type": "text", "text": _text(part.get("text")) or NO_TEXT}


_IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}|https://[!-~]+")


def _is_image(url: str) -> bool:
    return bool(_IMAGE.fullmatch(url))


def _assistant(message: Message, open_calls: dict[str, str], used: set[str]) -> Message:
    """Mend an assistant's message; its calls are noted in `open_calls`, under new ids if need be."""
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        if isinstance(content, str) and content.strip() and "tool_calls" not in message:
            return _bare(message, ("role", "content"))
        return {"role": "assistant", "content": _text(content) or NO_TEXT}
    sent = []
    for number, call in enumerate(calls):
        mended = _call(_mapping(call), used, f"{len(used)}-{number}")
        open_calls[str(_mapping(call).get("id"))] = mended["id"]
        used.add(mended["id"])
        sent.append(mended)
    if len({str(_mapping(call).get("id")) for call in calls}) < len(calls):
        # Two calls under one id: a result can be told to the last one only.
        taken = set(open_calls.values())
        open_calls.update(
            {f"\0{each['id']}": each["id"] for each in sent if each["id"] not in taken}
        )
    # `null` is the published form of a message that has calls and no words.
    return {"role": "assistant", "content": _text(content) or None, "tool_calls": sent}


def _call(call: Mapping[str, Any], used: set[str], place: str) -> dict[str, Any]:
    function = _mapping(call.get("function"))
    name, arguments, call_id = function.get("name"), function.get("arguments"), call.get("id")
    call_id = call_id if isinstance(call_id, str) else ""
    if not _CALL_ID.fullmatch(call_id) or call_id in used:
        digest = hashlib.blake2b(f"{_clean(call_id)}\0{place}".encode(), digest_size=12)
        call_id = f"call_{digest.hexdigest()}"
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": sent_name(name), "arguments": _arguments(arguments)},
    }


def _arguments(value: Any) -> str:
    if not isinstance(value, str):
        value = _text(value) or "{}"
    return _object(value)


@lru_cache(maxsize=8_192)
def _object(arguments: str) -> str:
    """Return arguments as the text of a JSON object; what is none is put into one whole."""
    try:
        _arguments_decoder.decode(arguments)
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        if not arguments.strip():
            return "{}"
        return msgspec.json.encode({"arguments": _clean(arguments)}).decode()
    return arguments


def _parameters(schema: Any) -> dict[str, Any]:
    """Mend a schema of arguments: an object, and arrays that say what they hold."""
    mended = _schema(schema, 0) if isinstance(schema, Mapping) else {}
    if mended.get("type", "object") != "object":
        mended = {}
    for name in _TOP_ONLY_OBJECT:
        mended.pop(name, None)
    return {**mended, "type": "object", "properties": _mapping(mended.get("properties"))}


def _schema(schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth >= _MAX_DEPTH:
        return {}
    mended: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            inner = _mapping(value)
            mended[key] = {
                name: _schema(_mapping(each), depth + 1)
                for name, each in inner.items()
                if isinstance(name, str) and _PROPERTY.fullmatch(name)
            }
        elif key in ("items", "additionalProperties") and isinstance(value, Mapping):
            mended[key] = _schema(value, depth + 1)
        elif isinstance(key, str):
            mended[_clean(key)] = cleaned(value)
    if "required" in mended:
        named = mended.get("properties", {})
        required = mended["required"] if isinstance(mended["required"], list) else []
        mended["required"] = [name for name in required if name in named]
        if not mended["required"]:
            del mended["required"]
    kind = mended.get("type")
    if (kind == "array" or (isinstance(kind, list) and "array" in kind)) and not isinstance(
        mended.get("items"), dict
    ):
        mended["items"] = {}
    return mended


def _bare(message: Message, keys: tuple[str, ...]) -> Message:
    """Return the message itself, unless it carries what is no part of a request."""
    if len(message) == len(keys) and all(key in message for key in keys):
        return message
    return {key: message[key] for key in keys}


def _text(value: Any) -> str:
    """Read words out of content of any shape; without any words, nothing."""
    if isinstance(value, list):
        texts = [each if isinstance(each, str) else _mapping(each).get("text") for each in value]
        value = "\n".join(each for each in texts if isinstance(each, str))
    elif value is not None and not isinstance(value, str):
        value = msgspec.json.encode(cleaned(value)).decode()
    return value if isinstance(value, str) and value.strip() else ""


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return `value` as plain JSON without lone surrogates; what can't be said in it is left out."""
    if isinstance(value, str):
        return _clean(value)
    if value is None or isinstance(value, bool | int | float):
        is_small = not isinstance(value, int) or isinstance(value, bool) or abs(value) < 2**63
        return value if is_small else str(value)[:100]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {_clean(str(key)): cleaned(each, depth + 1) for key, each in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [cleaned(each, depth + 1) for each in value]
    return None


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
