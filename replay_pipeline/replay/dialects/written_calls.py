"""Read tool calls that a model wrote into its text, in the form of its own template.

A server without the right parser, or a parser that gave up, leaves calls in the text. Such a text is no
answer in words. Each form below is the one of a template as its maker published it, or of a parser that a
server ships. Only calls of tools that the request offered are read, and only if the whole form is there:
what is left of a form makes an answer malformed.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each offered tool's arguments, by the tool's name."""


class UnclearCallError(ValueError):
    """A call in the text that can't be read without guessing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """A call as it was written: a name, and arguments as an object."""

    name: str
    arguments: dict[str, Any]


def schemas_of(request: bytes) -> Schemas:
    """Return the tools that a request offered, in OpenAI's form or Anthropic's."""
    try:
        tools = msgspec.json.decode(request, type=_Request).tools if request else []
    except (msgspec.DecodeError, RecursionError):
        return {}
    functions = [tool.get("function", tool) for tool in tools]
    return {
        each["name"]: each.get("parameters") or each.get("input_schema") or {}
        for each in functions
        if isinstance(each.get("name"), str)
    }


class _Request(msgspec.Struct):
    tools: list[dict[str, Any]] = []


def has_markup(text: str) -> bool:
    """Return whether a text has a mark of a template's calls."""
    return _MARKS.search(text) is not None


def may_hold_calls(text: str) -> bool:
    """Return whether a text has a mark of a template's calls, or begins like JSON."""
    return has_markup(text) or text.lstrip().startswith(("{", "[", "```"))


def read_written_calls(text: str, schemas: Schemas) -> tuple[str, list[WrittenCall]]:
    """Return a text without its calls, and the calls in their order.

    Without tools that the request offered, the text stays as it is.

    Raises:
        UnclearCallError: if a part of a form is left that is no whole call of an offered tool.
    """
    if not schemas:
        return text, []
    found: list[tuple[int, int, list[WrittenCall]]] = []
    for form in _FORMS:
        for match in form.pattern.finditer(text):
            if not any(start < match.end() and match.start() < end for start, end, _ in found):
                found.append((match.start(), match.end(), list(form.read(match, schemas))))
    if not found and (bare := _bare(text, schemas)):
        return "", bare
    found.sort(key=lambda each: each[0])
    rest, at = [], 0
    for start, end, _ in found:
        rest.append(text[at:start])
        at = end
    left = "".join([*rest, text[at:]])
    if found:
        left = _WRAPPERS.sub("", left).strip()
    if mark := _MARKS.search(left):
        raise UnclearCallError(f"a call is written into the text and breaks off at {mark[0]!r}")
    return left, [call for _, _, calls in found for call in calls]


def arguments_of(value: Any) -> dict[str, Any]:
    """Return arguments as an object, without what models put around them.

    Some encode them twice, name the language before them, fence them, or leave a closing tag behind.

    Raises:
        UnclearCallError: if they are no object even so.
    """
    text = value
    for _ in range(3):
        if isinstance(text, dict):
            return text
        if text is None or (isinstance(text, str) and not text.strip()):
            return {}
        if not isinstance(text, str):
            break
        text = _decoded(_AROUND.sub("", text.strip()))
    raise UnclearCallError(f"the arguments are no JSON object: {str(value)[:200]}")


def offered_name(name: str, schemas: Schemas) -> str:
    """Return the offered tool that a name means, without the namespace that some templates add.

    A name that stands for no offered tool is returned as it is.
    """
    name = name.strip()
    if name in schemas or not schemas:
        return name
    short = re.sub(r":\d+$", "", name)
    for prefix in ("functions.", "function.", "default_api.", "tools.", "functions/"):
        short = short.removeprefix(prefix)
    return short if short in schemas else name


# A language before the arguments, a fence around them, or a tag of the template behind them.
_AROUND = re.compile(
    r"\A(?:```(?:json)?\s*|json\s*(?=[{\[\"]))|(?<=[}\]\"])(?:\s*(?:```|</?[\w:]+>|<[|｜][^<>]*[|｜]>))+\s*\Z"
)


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UnclearCallError(f"the arguments are not JSON: {text[:200]}") from error


@dataclass(frozen=True, slots=True)
class _Form:
    pattern: re.Pattern[str]
    read: Callable[[re.Match[str], Schemas], Iterator[WrittenCall]]


def _call(name: str, arguments: Any, schemas: Schemas) -> WrittenCall:
    name = offered_name(name, schemas)
    if name not in schemas:
        raise UnclearCallError(f"the text calls {name!r}, which is no tool of the request")
    return WrittenCall(name=name, arguments=arguments_of(arguments))


def _of_json(value: Any, schemas: Schemas) -> Iterator[WrittenCall]:
    """Read `{"name": …, "arguments": …}` in its spellings, or a list of them.

    Raises:
        UnclearCallError: if a call has no name, or none of the request's.
    """
    for each in value if isinstance(value, list) else [value]:
        inner = each.get("function", each) if isinstance(each, dict) else each
        inner = {"name": inner, **each} if isinstance(inner, str) else inner
        name = inner.get("name") if isinstance(inner, dict) else None
        if not isinstance(name, str):
            raise UnclearCallError("a call in the text has no name")
        keys = [key for key in ("arguments", "parameters", "input", "args") if key in inner]
        yield _call(name, inner[keys[0]] if keys else {}, schemas)


def _json_form(match: re.Match[str], schemas: Schemas) -> Iterator[WrittenCall]:
    body = match["body"].strip()
    if body.startswith("["):
        yield from _of_json(_decoded(body), schemas)
        return
    # Several objects may follow each other.
    while body:
        value, body = _first_value(body)
        yield from _of_json(value, schemas)
        body = body.lstrip(";, \n")


def _first_value(text: str) -> tuple[Any, str]:
    depth, in_string, is_escaped = 0, False, False
    for index, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = char == "\\" and not is_escaped
            continue
        in_string, is_escaped = char == '"', False
        depth += (char in "{[") - (char in "}]")
        if depth == 0 and not in_string:
            return _decoded(text[: index + 1]), text[index + 1 :]
    raise UnclearCallError(f"a call in the text breaks off: {text[:200]}")


def _named_form(match: re.Match[str], schemas: Schemas) -> Iterator[WrittenCall]:
    yield _call(match["name"], match["body"], schemas)


def _tagged_form(
    match: re.Match[str], schemas: Schemas, *, parameter: re.Pattern[str]
) -> Iterator[WrittenCall]:
    """Read a form with one element for each argument, whose types the tool's schema knows.

    Raises:
        UnclearCallError: if the elements are not whole.
    """
    name = offered_name(match["name"], schemas)
    properties = schemas.get(name, {}).get("properties") or {}
    arguments = {}
    for each in parameter.finditer(match["body"]):
        groups = each.groupdict()
        told = {"true": True, "false": False}.get(groups.get("string") or "")
        arguments[each["key"].strip()] = _typed(
            each["value"], properties.get(each["key"].strip()), is_string=told
        )
    if parameter.sub("", match["body"]).strip():
        raise UnclearCallError(f"the arguments of {name} break off")
    yield _call(name, arguments, schemas)


def _typed(text: str, schema: Any, *, is_string: bool | None) -> Any:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    kinds = {kinds} if isinstance(kinds, str) else set(kinds or ())
    if is_string is None:
        is_string = "string" in kinds
    if is_string:
        return text
    try:
        return msgspec.json.decode(text.strip())
    except (msgspec.DecodeError, RecursionError):
        pass
    return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _block(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_QWEN_PARAMETER = _block(
    # The template puts a line break on each side of a value.
    r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)\s*"
)
_GLM_PARAMETER = _block(
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)(?:</arg_value>|\Z)\s*"
)
_INVOKE_PARAMETER = _block(
    r'<(?:｜DSML｜|antml:)?parameter name="(?P<key>[^"]+)"(?: string="(?P<string>true|false)")?>'
    r"(?P<value>.*?)</(?:｜DSML｜|antml:)?parameter>\s*"
)

_FORMS = (
    # Kimi K2
    _Form(
        _block(
            r"<\|tool_call_begin\|>\s*(?P<name>[\w.:/-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>"
            r"\s*(?P<body>.*?)\s*<\|tool_call_end\|>"
        ),
        _named_form,
    ),
    # DeepSeek V3 and R1: the type, the name, and fenced arguments
    _Form(
        _block(
            r"<｜tool▁call▁begin｜>\s*function\s*<｜tool▁sep｜>\s*(?P<name>[^\n<]+)\n"
            r"(?P<body>```(?:json)?\s.*?```)\s*<｜tool▁call▁end｜>"
        ),
        _named_form,
    ),
    # DeepSeek V3.1
    _Form(
        _block(
            r"<｜tool▁call▁begin｜>\s*(?P<name>[^\n<]+?)\s*<｜tool▁sep｜>\s*(?P<body>.*?)\s*"
            r"<｜tool▁call▁end｜>"
        ),
        _named_form,
    ),
    # DeepSeek V3.2 and V4 (DSML), MiniMax, Claude
    _Form(
        _block(
            r'<(?P<tag>(?:｜DSML｜|antml:)?)invoke name="(?P<name>[^"]+)">\s*(?P<body>.*?)'
            r"</(?P=tag)invoke>"
        ),
        partial(_tagged_form, parameter=_INVOKE_PARAMETER),
    ),
    # GLM-4.5 and later
    _Form(
        _block(r"<tool_call>\s*(?P<name>[\w.:/-]+)\s*(?P<body>(?:<arg_key>.*?)?)\s*</tool_call>"),
        partial(_tagged_form, parameter=_GLM_PARAMETER),
    ),
    # Qwen3-Coder, Seed-OSS, Nemotron
    _Form(
        _block(
            r"(?:<tool_call>\s*)?<function=(?P<name>[^>\s]+)>\s*"
            r"(?P<body>(?:<parameter=.*?)?)\s*</function>(?:\s*</tool_call>)?"
        ),
        partial(_tagged_form, parameter=_QWEN_PARAMETER),
    ),
    # Llama 3 in its own form
    _Form(_block(r"<function=(?P<name>[^>\s]+)>\s*(?P<body>\{.*?\})\s*</function>"), _named_form),
    # gpt-oss (harmony)
    _Form(
        _block(
            r"(?:<\|start\|>assistant)?<\|channel\|>(?:commentary|analysis) to=(?P<name>[\w.:/-]+)"
            r"(?:\s*<\|constrain\|>\w+)?\s*(?:json)?\s*<\|message\|>(?P<body>.*?)(?:<\|call\|>|\Z)"
        ),
        _named_form,
    ),
    # Qwen, Hermes, and those that took their form over. A closing tag may be missing at the end.
    _Form(_block(r"<tool_call>\s*(?P<body>[{\[].*?)\s*(?:</tool_call>|\Z)"), _json_form),
    _Form(_block(r"<tool_calls>\s*(?P<body>[{\[].*?)\s*</tool_calls>"), _json_form),
    _Form(_block(r"<\|tool_call\|>\s*(?P<body>[{\[].*?)\s*(?:<\|/tool_call\|>|\Z)"), _json_form),
    # Mistral: a list, or (since its eleventh tokenizer) a name and arguments
    _Form(_block(r"\[TOOL_CALLS\]\s*(?P<body>\[.*\])"), _json_form),
    _Form(
        _block(
            r"\[TOOL_CALLS\]\s*(?P<name>[\w.:/-]+?)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*"
            r"(?P<body>\{.*?\})\s*(?=\[TOOL_CALLS\]|</s>|\Z)"
        ),
        _named_form,
    ),
    # Llama 3.1
    _Form(_block(r"<\|python_tag\|>\s*(?P<body>\{.*\})(?:<\|eo[mt]_id\|>)?"), _json_form),
)

_WRAPPERS = re.compile(
    r"<｜tool▁calls▁(?:begin|end)｜>|<｜end▁of▁sentence｜>|<\|tool_calls_section_(?:begin|end)\|>|"
    r"</?(?:｜DSML｜|antml:|minimax:|seed:)(?:function_calls|tool_calls?)>|</?function_calls>|"
    r"</tool_call>|<\|im_end\|>|</s>|<\|eo[mt]_id\|>|<\|call\|>"
)
"""What stands around calls. It says nothing where the calls have been read."""

_MARKS = re.compile(
    r"<｜(?:tool|end)▁|｜DSML|<\|tool_call|</?tool_call|<TOOLCALL|<function=\w|</function>|<parameter=|"
    r"<arg_(?:key|value)|<arg_\Z|<(?:antml:)?invoke\b|\[TOOL_CALLS\]|<\|python_tag\||<\|action_start\||"
    r"<\|start\|>assistant|<\|channel\|>(?:commentary|analysis) to=|</?(?:minimax|seed):tool_call"
)
"""What belongs to no text that a person should read."""


_BEGINS_AS_CALL = re.compile(r'[\[{\s]*"(?:name|function|tool)"\s*:\s*"(?P<name>[^"]+)"')


def _bare(text: str, schemas: Schemas) -> list[WrittenCall]:
    """Return the calls of a text that is nothing but JSON, fenced or not, with offered tools' names.

    Raises:
        UnclearCallError: if it begins as such a call, and breaks off.
    """
    body = re.sub(r"\A```(?:json|tool_code|tool_call)?\s*\n|\n?```\s*\Z", "", text.strip()).strip()
    if not body.startswith(("{", "[")):
        return []
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        begins = _BEGINS_AS_CALL.match(body)
        if begins and offered_name(begins["name"], schemas) in schemas:
            raise UnclearCallError(
                f"a call is written into the text and breaks off: {body[:200]}"
            ) from None
        return []
    try:
        return list(_of_json(value, schemas))
    except UnclearCallError:
        return []
