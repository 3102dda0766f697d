"""What the model saw of each attachment that Claude Code logs, by type.

The client turns an attachment into a message before each request and logs only the attachment's
fields. The client's own words around the fields change with its versions. Here they are shorter.
Everything that came from the project, the user, or a tool is kept.
"""

import re
from typing import Any

Fields = dict[str, Any]
_MAX_DEPTH = 20
_MAX_SELECTED_CHARS = 2_000
"""The client shows no more of a selection."""
_HOOKS_SHOWN = ("SessionStart", "UserPromptSubmit")
_INNER = ("text", "content", "snippet", "additionalContext", "blockingError", "message", "file",
          "prompt", "contents", "cells", "source", "output")  # fmt: skip


def plain(value: Any, depth: int = 0) -> str:
    """Return the text of a string, of blocks, or of nested content."""
    if isinstance(value, str):
        return value
    if depth > _MAX_DEPTH:
        return ""
    if isinstance(value, list):
        return "\n".join(filter(None, (plain(item, depth + 1) for item in value)))
    if isinstance(value, dict):
        if value.get("type") == "image" or "base64" in value:
            return "[image]"
        for key in _INNER:
            if text := plain(value.get(key), depth + 1):
                return text
    return ""


def _at(fields: Fields, path: str) -> str:
    """Return the words at `path.to.field`."""
    value: Any = fields
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else plain(value)


def _filled(template: str, fields: Fields) -> str:
    """Fill `{path.to.field}` in, and `{list|template}` once for each item with its `(field)`s.

    Returns an empty text if the last of them is empty.
    """
    found = [""]

    def put(match: re.Match[str]) -> str:
        name, _, inner = match[1].partition("|")
        items = fields.get(name) if inner else None
        if isinstance(items, list):
            inner = inner.replace("(", "{").replace(")", "}")
            lines = [_filled(inner, item) for item in items if isinstance(item, dict)]
            found.append("\n".join(filter(None, lines)))
        else:
            found.append(_at(fields, name))
        return found[-1]

    text = re.sub(r"{([^}]+)}", put, template)
    return text if found[-1] else ""


_SERVERS = (
    "# MCP Server Instructions\n\n"
    "The following MCP servers have provided instructions for how to use their tools and resources:\n"
)
_REMOVED_TOOLS = "Tools that are gone:\n{removedNames}"

SHOWN: dict[str, tuple[str, ...]] = {
    "agent_listing_delta": (
        "Agent types you can start:\n{addedLines}",
        "Agent types that are gone:\n{removedTypes}",
    ),
    "async_hook_response": (
        "{response.systemMessage}",
        "{response.hookSpecificOutput.additionalContext}",
        "{content}",
    ),
    "budget_usd": ("Budget in USD: {used}/{total}, {remaining} left",),
    "compact_file_reference": ("{filename} was read before the summary; it is not repeated.",),
    "critical_system_reminder": ("{content}",),
    "deferred_tools_delta": ("Tools that can be searched for:\n{addedLines}", _REMOVED_TOOLS),
    "diagnostics": ("New diagnostics:\n{files|(uri): (diagnostics)}",),
    "directory": ("Files in {path}:\n{content}",),
    "edited_text_file": ("{filename} was changed by the user or a linter:\n{snippet}",),
    "file": ("{filename}\n{content}",),
    "hook_additional_context": ("{hookName} hook additional context: {content}",),
    "hook_blocking_error": ("{hookName} hook blocking error: {blockingError}",),
    "hook_stopped_continuation": ("{hookName} hook stopped continuation: {message}",),
    "hook_success": ("{hookName} hook success: {content}",),
    "invoked_skills": (
        "Skills invoked in this session:\n{skills|### (name)\n(path)\n\n(content)}",
    ),
    "mcp_instructions_delta": (f"{_SERVERS}\n{{addedBlocks}}", _REMOVED_TOOLS),
    "mcp_resource": ("Resource {uri} of {server}:\n{content.contents}",),
    "memory": ("{path}\n{content}",),
    "nested_memory": ("Contents of {content.path}:\n\n{content.content}",),
    "new_directory": ("{path}\n{content}",),
    "new_file": ("{filename}\n{content}",),
    "opened_file_in_ide": ("The user opened {filename} in the IDE.",),
    "output_token_usage": ("Output tokens: {turn} in this turn, {session} in all",),
    "pdf_reference": ("PDF {filename}: {pageCount} pages, to be read by ranges of pages",),
    "plan_file_reference": ("The plan in {planFilePath}:\n\n{planContent}",),
    "queued_command": ("{prompt}",),
    "read_truncation_notice": ("{filename}\n{content}",),
    "relevant_memories": ("Memories:\n{memories|(path)\n(content)}",),
    "selected_lines_in_ide": (
        "The user selected lines {lineStart} to {lineEnd} of {filename}:\n{content}",
    ),
    "session_context": ("{context.gitStatus}",),
    "skill_listing": ("Skills you can use:\n\n{content}",),
    "task_status": (
        "Task {taskId} ({taskType}, {status}): {description}",
        "{deltaSummary}",
    ),
    "teammate_mailbox": ("Messages of the team:\n{messages|(from): (text)}",),
    "token_usage": ("Tokens: {used}/{total}, {remaining} left",),
    "total_tokens_reminder": ("{content}",),
}
"""How the model was shown an attachment, by its type: parts with the fields that each needs."""

SNAPSHOT = "prompt_snapshot"
"""The type of an attachment that has the system prompt and the tools. It isn't a message."""
_BEFORE_THE_REQUEST = {
    "instructions": "context",
    "session_context": "context",
    "remote_session_change": "preface",
}
"""Kinds of the turns that the model is shown before what the user typed, by the type of attachment."""
_REMINDER = re.compile(r"\s*<system-reminder>\n?(.*?)\n?</system-reminder>\s*", re.DOTALL)


def attachment_turn(fields: Fields, value: Any, role: str | None) -> tuple[str, str]:
    """Return the kind and the text of the turn that an attachment becomes, as logged.

    From 2.1.280 on, the log has the text itself. Text with the system role lacks the tags that mark
    such text in a user message. 2.1.280 doesn't log the role. `value` is `rendered` of the row.
    """
    parts = value if isinstance(value, list) else [value]
    text = "\n\n".join(filter(None, map(plain, parts)))
    kind = str(fields.get("type"))
    if kind in _BEFORE_THE_REQUEST:
        return _BEFORE_THE_REQUEST[kind], text
    match = _REMINDER.fullmatch(text)
    if kind == "queued_command" and (role == "user" or match is None):
        return "queued", text
    if role == "user":
        return "attachment", text
    return "system", match[1] if match else text


UNLOGGED = frozenset({
    "agent_mention", "auto_mode_exit", "date_change", "output_style", "plan_mode",
    "plan_mode_exit", "plan_mode_reentry", "task_reminder", "todo", "todo_reminder", "ultrathink_effort",
    "verify_plan_reminder",
})  # fmt: skip
"""Types of which the model was shown words of the client that the log does not have."""

NEVER_SHOWN = frozenset({
    "already_read_file", "auto_mode", "autocheckpointing", "background_task_status",
    "command_permissions", "companion_intro", "compaction_reminder", "context_efficiency",
    "deferred_tools_record", "dynamic_skill", "edited_image_file", "hook_cancelled", "hook_error_during_execution",
    "hook_non_blocking_error", "hook_permission_decision", "hook_system_message",
    "structured_output", "task_progress", "ultramemory",
})  # fmt: skip
"""Types that are for the client or its user, or that have only the client's own words."""


def shown(fields: Fields) -> str | None:
    """Return the text that the model was shown of an attachment, without the client's own words.

    `None` if there was such a text and the log does not have it, or if the type is unknown.
    """
    kind = fields.get("type")
    if not isinstance(kind, str):
        return None
    # The output of other hooks is for the user alone.
    is_hooks = kind == "hook_success" and fields.get("hookEvent") not in _HOOKS_SHOWN
    if kind in NEVER_SHOWN or is_hooks:
        return ""
    if kind not in SHOWN:
        return None
    selected = plain(fields.get("content")) if kind == "selected_lines_in_ide" else ""
    if len(selected) > _MAX_SELECTED_CHARS:
        fields = fields | {"content": f"{selected[:_MAX_SELECTED_CHARS]}\n... (truncated)"}
    text = "\n\n".join(filter(None, (_filled(part, fields) for part in SHOWN[kind])))
    is_own_words = kind == "queued_command"
    return text if is_own_words or not text else f"<system-reminder>\n{text}\n</system-reminder>"


def numbers_in(version: str | None) -> tuple[int, ...]:
    """Return a version as numbers that can be compared; no numbers for an unknown version."""
    return tuple(map(int, re.findall(r"\d+", version or "")[:3]))
