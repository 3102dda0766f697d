"""What the model saw of each attachment that Claude Code logs, by type.

The client turns an attachment into a message before each request and logs only the attachment's
fields. The client's own words around the fields change with its versions. Here they are shorter.
Everything that came from the project, the user, or a tool is kept.
"""

import re
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
_MAX_DEPTH = 20
_MAX_SELECTED_CHARS = 2_000
"""The client shows no more of a selection."""
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


def _at(fields: Fields, path: str) -> Any:
    value: Any = fields
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _says(template: str) -> Callable[[Fields], str]:
    """Fill `{path.to.field}` in; nothing if the last of them is empty."""
    paths = re.findall(r"{([\w.]+)}", template)

    def say(fields: Fields) -> str:
        found = {path: _word(_at(fields, path)) for path in paths}
        if paths and not found[paths[-1]]:
            return ""
        return re.sub(r"{([\w.]+)}", lambda match: found[match[1]], template)

    return say


def _word(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else plain(value)


def _each(head: str, items: str, template: str) -> Callable[[Fields], str]:
    """Return a line of `head`, and one of `template` for each of the items; nothing if there are none."""
    say = _says(template)

    def say_each(fields: Fields) -> str:
        found = _at(fields, items)
        if isinstance(found, str) and found:
            return f"{head}\n{found}"
        lines = [
            say(item if isinstance(item, dict) else {"item": item})
            for item in (found if isinstance(found, list) else ())
        ]
        text = "\n".join(filter(None, lines))
        return f"{head}\n{text}" if text else ""

    return say_each


def _joined(*parts: Callable[[Fields], str]) -> Callable[[Fields], str]:
    return lambda fields: "\n\n".join(filter(None, (part(fields) for part in parts)))


def _named(*keys: str) -> Callable[[Fields], str]:
    """Return the name of a file, and the content under the first of the keys that has one."""

    def say(fields: Fields) -> str:
        name = next(filter(None, (_word(fields.get(k)) for k in ("filename", "path"))), "")
        text = next(filter(None, (plain(fields.get(key)) for key in keys)), "")
        return "\n".join(filter(None, (name, text)))

    return say


def _selected(fields: Fields) -> str:
    text = plain(fields.get("content"))
    if len(text) > _MAX_SELECTED_CHARS:
        text = f"{text[:_MAX_SELECTED_CHARS]}\n... (truncated)"
    lines = f"{_word(fields.get('lineStart'))} to {_word(fields.get('lineEnd'))}"
    return f"The user selected lines {lines} of {_word(fields.get('filename'))}:\n{text}"


def _diagnostics(fields: Fields) -> str:
    found = []
    for file in fields.get("files") if isinstance(fields.get("files"), list) else ():
        issues = _at(file, "diagnostics") if isinstance(file, dict) else None
        for issue in issues if isinstance(issues, list) else ():
            if isinstance(issue, dict):
                line = _word(_at(issue, "range.start.line"))
                words = (file.get("uri"), line, issue.get("severity"), issue.get("message"))
                found.append(" ".join(filter(None, map(_word, words))))
    return "New diagnostics:\n" + "\n".join(found) if found else ""


def _hook_success(fields: Fields) -> str:
    # The output of other hooks is for the user alone.
    if fields.get("hookEvent") not in ("SessionStart", "UserPromptSubmit"):
        return ""
    return _says("{hookName} hook success: {content}")(fields)


def _resource(fields: Fields) -> str:
    where = f"Resource {_word(fields.get('uri'))} of {_word(fields.get('server'))}"
    parts = []
    found = _at(fields, "content.contents")
    for item in found if isinstance(found, list) else ():
        if isinstance(item, dict):
            binary = f"[{_word(item.get('mimeType')) or 'binary'}]" if "blob" in item else ""
            parts.append(plain(item.get("text")) or binary)
    return "\n".join((where, *filter(None, parts))) if parts else f"{where}: no content"


_SERVERS_HEAD = (
    "# MCP Server Instructions\n\n"
    "The following MCP servers have provided instructions for how to use their tools and resources:\n"
)
_removed_tools = _each("Tools that are gone:", "removedNames", "{item}")

SHOWN: dict[str, Callable[[Fields], str]] = {
    "agent_listing_delta": _joined(
        _each("Agent types you can start:", "addedLines", "{item}"),
        _each("Agent types that are gone:", "removedTypes", "{item}"),
    ),
    "async_hook_response": _joined(
        _says("{response.systemMessage}"),
        _says("{response.hookSpecificOutput.additionalContext}"),
        _says("{content}"),
    ),
    "budget_usd": _says("Budget in USD: {used}/{total}, {remaining} left"),
    "compact_file_reference": _says("{filename} was read before the summary; it is not repeated."),
    "critical_system_reminder": _says("{content}"),
    "deferred_tools_delta": _joined(
        _each("Tools that can be searched for:", "addedLines", "{item}"), _removed_tools
    ),
    "diagnostics": _diagnostics,
    "directory": _says("Files in {path}:\n{content}"),
    "edited_text_file": _says("{filename} was changed by the user or a linter:\n{snippet}"),
    "file": _named("content"),
    "hook_additional_context": _says("{hookName} hook additional context: {content}"),
    "hook_blocking_error": _says("{hookName} hook blocking error: {blockingError}"),
    "hook_stopped_continuation": _says("{hookName} hook stopped continuation: {message}"),
    "hook_success": _hook_success,
    "invoked_skills": _each(
        "Skills invoked in this session:", "skills", "### {name}\n{path}\n\n{content}"
    ),
    "mcp_instructions_delta": _joined(
        _each(_SERVERS_HEAD, "addedBlocks", "{item}"), _removed_tools
    ),
    "mcp_resource": _resource,
    "memory": _named("content"),
    "nested_memory": _says("Contents of {content.path}:\n\n{content.content}"),
    "new_directory": _named("content"),
    "new_file": _named("content"),
    "opened_file_in_ide": _says("The user opened {filename} in the IDE."),
    "output_token_usage": _says("Output tokens: {turn} in this turn, {session} in all"),
    "pdf_reference": _says("PDF {filename}: {pageCount} pages, to be read by ranges of pages"),
    "plan_file_reference": _says("The plan in {planFilePath}:\n\n{planContent}"),
    "queued_command": _says("{prompt}"),
    "read_truncation_notice": _named("content", "message"),
    "relevant_memories": _each("Memories:", "memories", "{path}\n{content}"),
    "selected_lines_in_ide": _selected,
    "session_context": _says("{context.gitStatus}"),
    "skill_listing": _says("Skills you can use:\n\n{content}"),
    "task_status": _joined(
        _says("Task {taskId} ({taskType}, {status}): {description}"), _says("{deltaSummary}")
    ),
    "teammate_mailbox": _each("Messages of the team:", "messages", "{from}: {text}"),
    "token_usage": _says("Tokens: {used}/{total}, {remaining} left"),
    "total_tokens_reminder": _says("{content}"),
}
"""How the model was shown an attachment, by its type."""

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
    such text in a user message. 2.1.280 doesn't log the role.

    Args:
        fields: what was logged, with its `type`.
        value: `rendered` of the row.
        role: `renderedRole` of the row.
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
    if kind in NEVER_SHOWN:
        return ""
    if (say := SHOWN.get(kind)) is None:
        return None
    text = say(fields)
    is_own_words = kind == "queued_command"
    return text if is_own_words or not text else f"<system-reminder>\n{text}\n</system-reminder>"


def numbers_in(version: str | None) -> tuple[int, ...]:
    """Return a version as numbers that can be compared; no numbers for an unknown version."""
    return tuple(map(int, re.findall(r"\d+", version or "")[:3]))
