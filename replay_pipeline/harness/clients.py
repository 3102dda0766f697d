"""How each client is started in an empty home, and how its requests are read."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay_pipeline.harness.listener import KeptRequest, ToolReply
from replay_pipeline.harness.reminders import idle_calls, listing_calls
from replay_pipeline.harness.slots import AskedRequest
from replay_pipeline.types import Tool

_KEY = "sk-ant-not-a-key-0000000000000000"
"""What a client sends where it wants a key; it opens nothing."""
SUBTASK = "Look around."
_QUIET = {
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_BUG_COMMAND": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The values with which a client is started."""

    home: Path
    folder: Path
    url: str
    words: str
    """What the user says."""
    model: str | None = None
    is_headless: bool = False
    """Whether it runs without a terminal, as when a program starts it."""
    is_planning: bool = False
    """Whether it is started in plan mode, if it has a flag for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """A client program whose harness can be learned."""

    agent: str
    """Its name in the column `agent` of sessions."""
    program: str
    """The name of its executable."""
    prepare: Callable[[Start], tuple[list[str], dict[str, str]]]
    """Writes its settings, and returns arguments and environment variables."""
    read: Callable[[KeptRequest], tuple[list[str], list[Tool], list[tuple[str, list[str]]]] | None]
    """Returns system texts, tools, and messages of a request, or `None` if it isn't part of a conversation."""
    is_interactive: bool = False
    """Whether it is started in a terminal, as users start it."""
    has_subagents: bool = False


def version_in(kept: KeptRequest) -> str | None:
    """Return the client's version as the request names it."""
    agent = kept.headers.get("user-agent", "")
    match = re.search(r"/(\d+\.\d+\.\d+)", agent)
    # A client that leaves this to the library that it calls with names the library's version.
    return match[1] if match and not agent.startswith("OpenAI/") else None


def params_in(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request, without its contents and names of people."""
    left_out = ("model", "messages", "system", "tools", "metadata", "stream", "input", "instructions",
                "prompt_cache_key", "client_metadata", "contents", "systemInstruction")  # fmt: skip
    return {key: value for key, value in body.items() if key not in left_out}


def request_in(
    client: ClientProgram, kept: KeptRequest, words: str, values: Mapping[str, str]
) -> AskedRequest | None:
    """Return a request as sent, or `None` if it isn't part of a conversation."""
    found = client.read(kept)
    if found is None:
        return None
    system, tools, messages = found
    return AskedRequest(
        system=system,
        tools=tools,
        messages=messages,
        params=params_in(kept.body),
        words=words,
        values=values,
    )


N_ASKED = 4
"""After this many requests of a conversation, a client has shown all its texts."""


def leading_calls(kept: KeptRequest, n_before: int) -> tuple[ToolReply, ...]:
    """Return calls that make Claude Code start a helper and then remind the model of its task list.

    Args:
        kept: a request of the conversation.
        n_before: how many requests of the conversation were answered before.
    """
    tools = {str(t.get("name")): t for t in kept.body.get("tools") or () if isinstance(t, dict)}
    names = set(tools)
    helper = next((each for each in ("Agent", "Task") if each in names), None)
    arguments: dict[str, Any] = {
        "description": "Look",
        "prompt": SUBTASK,
        "subagent_type": "general-purpose",
    }
    if helper and "run_in_background" in json.dumps(tools[helper].get("input_schema")):
        # Its end would be told beside the reminder.
        arguments["run_in_background"] = False
    steps = (
        (ToolReply(helper, arguments),) if helper else idle_calls(names),
        idle_calls(names),
        (*listing_calls(names), *idle_calls(names)),
    )
    return steps[n_before] if n_before < len(steps) else ()


def texts_of(content: Any) -> list[str]:
    """Return the texts of a content, which is a string or a list of blocks."""
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, list) else []
    return [
        each["text"]
        for each in blocks
        if isinstance(each, dict) and isinstance(each.get("text"), str)
    ]


def _claude_code(start: Start) -> tuple[list[str], dict[str, str]]:
    place = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    settings = {
        "hasCompletedOnboarding": True,
        "theme": "dark",
        "numStartups": 3,
        "customApiKeyResponses": {"approved": [_KEY[-20:]], "rejected": []},
        "projects": {str(start.folder): place},
    }
    (start.home / ".claude.json").write_text(json.dumps(settings), "utf-8")
    # Newer versions check calls with a model, which is not here, and else wait for the user.
    folder = start.home / ".claude"
    folder.mkdir()
    unchecked = {"useAutoModeDuringPlan": False, "permissions": {"disableAutoMode": "disable"}}
    (folder / "settings.json").write_text(json.dumps(unchecked), "utf-8")
    arguments = [
        *(["-p"] if start.is_headless else []),
        start.words,
        "--allowedTools",
        "Task,Agent",
        "--permission-mode",
        "plan" if start.is_planning else "default",
    ]
    env = {"ANTHROPIC_BASE_URL": start.url, "ANTHROPIC_API_KEY": _KEY, **_QUIET}
    return [*arguments, *(["--model", start.model] if start.model else [])], env


def _read_messages(
    kept: KeptRequest,
) -> tuple[list[str], list[Tool], list[tuple[str, list[str]]]] | None:
    body = kept.body
    if not kept.path.endswith("/messages") or not body.get("tools"):
        return None
    tools = [
        {
            "type": "function",
            "function": {
                "name": str(tool.get("name")),
                **({"description": tool["description"]} if tool.get("description") else {}),
                "parameters": tool.get("input_schema") or {"type": "object"},
            },
        }
        for tool in body["tools"]
    ]
    messages = [(str(each.get("role")), texts_of(each.get("content"))) for each in body["messages"]]
    return texts_of(body.get("system")), tools, messages


def _codex(start: Start) -> tuple[list[str], dict[str, str]]:
    folder = start.home / ".codex"
    folder.mkdir()
    (folder / "config.toml").write_text(
        'model_provider = "loopback"\napproval_policy = "never"\n'
        f"{f'model = {json.dumps(start.model)}' if start.model else ''}\n"
        '[model_providers.loopback]\nname = "loopback"\nwire_api = "responses"\n'
        f'env_key = "NO_KEY"\nbase_url = "{start.url}"\n',
        "utf-8",
    )
    return ["exec", "--skip-git-repo-check", start.words], {"NO_KEY": _KEY}


def _read_responses(
    kept: KeptRequest,
) -> tuple[list[str], list[Tool], list[tuple[str, list[str]]]] | None:
    body = kept.body
    items = [item for item in body.get("input") or () if isinstance(item, dict)]
    # Newer versions put their tools into an item of the conversation, and the instructions as well.
    offered = [
        *(body.get("tools") or ()),
        *(tool for item in items for tool in item.get("tools") or ()),
    ]
    if not kept.path.endswith("/responses") or not offered:
        return None
    tools = [
        {
            "type": "function",
            "function": {
                "name": str(tool.get("name") or tool.get("type")),
                **({"description": tool["description"]} if tool.get("description") else {}),
                "parameters": tool.get("parameters") or {"type": "object"},
            },
        }
        for tool in offered
    ]
    messages = [
        (str(item["role"]), texts)
        for item in items
        if item.get("role") and (texts := texts_of(item.get("content")))
    ]
    first = next((n for n, (role, _) in enumerate(messages) if role == "user"), len(messages))
    told = [text for _, texts in messages[:first] for text in texts]
    return [*texts_of(body.get("instructions") or ""), *told], tools, messages[first:]


def _opencode(start: Start) -> tuple[list[str], dict[str, str]]:
    folder = start.home / ".config" / "opencode"
    folder.mkdir(parents=True)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "loopback",
        "options": {"baseURL": start.url, "apiKey": _KEY},
        "models": {"any": {"name": "any"}},
    }
    settings = {"provider": {"loopback": provider}, "model": "loopback/any", "autoupdate": False}
    (folder / "opencode.json").write_text(json.dumps(settings), "utf-8")
    return ["run", start.words], {}


def _read_chat(
    kept: KeptRequest,
) -> tuple[list[str], list[Tool], list[tuple[str, list[str]]]] | None:
    body = kept.body
    if not kept.path.endswith("/chat/completions") or not body.get("tools"):
        return None
    messages = [(str(each.get("role")), texts_of(each.get("content"))) for each in body["messages"]]
    first = next((n for n, (role, _) in enumerate(messages) if role != "system"), len(messages))
    system = [text for _, texts in messages[:first] for text in texts]
    return system, body["tools"], messages[first:]


def _copilot(start: Start) -> tuple[list[str], dict[str, str]]:
    env = {
        "COPILOT_PROVIDER_BASE_URL": start.url,
        "COPILOT_PROVIDER_API_KEY": _KEY,
        "COPILOT_MODEL": start.model or "gpt-4.1",
        "COPILOT_OFFLINE": "true",
        "COPILOT_AUTO_UPDATE": "false",
    }
    return ["-p", start.words], env


def _gemini(start: Start) -> tuple[list[str], dict[str, str]]:
    folder = start.home / ".gemini"
    folder.mkdir()
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    (folder / "settings.json").write_text(json.dumps(settings), "utf-8")
    env = {
        "GEMINI_API_KEY": _KEY,
        "GOOGLE_GEMINI_BASE_URL": start.url,
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    # Without a model the client asks a small one first which to take.
    return ["-p", start.words, "--model", start.model or _GEMINI_MODEL], env


_GEMINI_MODEL = "gemini-2.5-pro"


def _read_gemini(
    kept: KeptRequest,
) -> tuple[list[str], list[Tool], list[tuple[str, list[str]]]] | None:
    body = kept.body
    if not kept.path.endswith(":streamGenerateContent") or not body.get("tools"):
        return None
    tools = [
        {
            "type": "function",
            "function": {
                "name": str(tool.get("name")),
                "description": str(tool.get("description") or ""),
                "parameters": tool.get("parametersJsonSchema")
                or tool.get("parameters")
                or {"type": "object"},
            },
        }
        for group in body["tools"]
        for tool in group.get("functionDeclarations") or ()
    ]
    messages = [
        ("user" if each.get("role") == "user" else "assistant", texts_of(each.get("parts")))
        for each in body["contents"]
    ]
    return texts_of((body.get("systemInstruction") or {}).get("parts")), tools, messages


CLIENTS: dict[str, ClientProgram] = {
    client.agent: client
    for client in (
        ClientProgram(
            agent="claude_code",
            program="claude",
            prepare=_claude_code,
            read=_read_messages,
            is_interactive=True,
            has_subagents=True,
        ),
        ClientProgram(agent="codex", program="codex", prepare=_codex, read=_read_responses),
        ClientProgram(agent="opencode", program="opencode", prepare=_opencode, read=_read_chat),
        ClientProgram(agent="copilot", program="copilot", prepare=_copilot, read=_read_chat),
        ClientProgram(agent="gemini_cli", program="gemini", prepare=_gemini, read=_read_gemini),
    )
}
"""Clients whose harness can be learned, by agent."""
