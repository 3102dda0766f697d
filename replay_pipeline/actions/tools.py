"""What the arguments of each Claude Code tool mean for agreement, and a sound default for others.

A tool that is not listed here (an MCP server's, a later version's) agrees by its canonical
arguments alone: every key counts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit, urlunsplit

Arguments = dict[str, Any]


def _unchanged(arguments: Arguments) -> Arguments:
    return arguments


@dataclass(frozen=True, kw_only=True)
class ToolSpec:
    """How the arguments of one tool are read."""

    required: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """Keys without which the tool cannot run, and their types."""
    optional: Mapping[str, type | tuple[type, ...]] = field(default_factory=dict)
    """Other keys whose type is known."""
    parts: Mapping[str, Mapping[str, type]] = field(default_factory=dict)
    """Keys that hold a list of objects, and what each of these must have."""
    labels: frozenset[str] = frozenset()
    """Keys without any effect."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Documented default by key; a tuple lists values that mean the same."""
    paths: tuple[str, ...] = ()
    """Keys that hold a path."""
    default_path: str | None = None
    """The path key that means the working directory when absent."""
    display: frozenset[str] = frozenset()
    """Keys that change how an answer is shown, not what is asked."""
    target: tuple[str, ...] = ()
    """Keys that name the object acted on; empty: the tool has no object."""
    prose: frozenset[str] = frozenset()
    """Keys with free text, in which runs of blanks do not matter."""
    canonical: Callable[[Arguments], Arguments] = _unchanged
    """Last step of the canonical form."""
    question: Callable[[Arguments], Arguments] = _unchanged
    """The arguments with different spellings of one thing made one, for the level `effect`."""

    def complaint(self, arguments: Arguments) -> str | None:
        """Why the tool could not run with these arguments; `None` if it could."""
        for key, kind in self.required.items():
            if key not in arguments:
                return f"{key} is missing"
            if type(arguments[key]) is not kind and not _has_type(arguments[key], kind):
                return f"{key} has the wrong type"
        for key, kind in self.optional.items():
            if key in arguments and not _has_type(arguments[key], kind):
                return f"{key} has the wrong type"
        for key, needed in self.parts.items():
            for part in arguments[key]:
                if not isinstance(part, dict) or not all(
                    isinstance(part.get(name), kind) for name, kind in needed.items()
                ):
                    return f"one of {key} lacks {' or '.join(needed)}"
        return None


def _has_type(value: Any, kind: type | tuple[type, ...]) -> bool:
    if type(value) is kind:
        return True
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


_NUMBER = (int, float)
_FILE = MappingProxyType({"file_path": str})


def _one_url(arguments: Arguments) -> Arguments:
    """Spell scheme, host, default port and empty path the one way."""
    try:
        parts = urlsplit(arguments["url"].strip())
        host = (parts.hostname or "").lower()
        port = parts.port
    except ValueError:
        return arguments
    if not host or parts.username or ":" in host:
        return arguments
    if port and (parts.scheme, port) not in (("http", 80), ("https", 443)):
        host = f"{host}:{port}"
    url = urlunsplit((parts.scheme, host, parts.path or "/", parts.query, parts.fragment))
    return {**arguments, "url": url}


def _plain_edits(arguments: Arguments) -> Arguments:
    edits = [
        {k: v for k, v in edit.items() if v is not None and (k, v) != ("replace_all", False)}
        for edit in arguments["edits"]
    ]
    return {**arguments, "edits": edits}


_EDIT = ToolSpec(
    required={"file_path": str, "old_string": str, "new_string": str},
    optional={"replace_all": bool},
    defaults={"replace_all": False},
    paths=("file_path",),
    target=("file_path",),
)
_TASK = ToolSpec(
    required={"prompt": str},
    labels=frozenset({"description"}),
    defaults={"run_in_background": False},
    prose=frozenset({"prompt"}),
)
_SHELL_OUTPUT = ToolSpec(defaults={"block": True}, target=("task_id", "bash_id", "shell_id"))

SPECS: Mapping[str, ToolSpec] = MappingProxyType(
    {
        "Bash": ToolSpec(
            required={"command": str},
            optional={"timeout": _NUMBER, "run_in_background": bool},
            labels=frozenset({"description"}),
            defaults={
                "timeout": 120_000,
                "run_in_background": False,
                "dangerouslyDisableSandbox": False,
            },
        ),
        "Read": ToolSpec(
            required=_FILE,
            optional={"offset": _NUMBER, "limit": _NUMBER},
            defaults={"offset": (0, 1), "limit": 2_000},
            paths=("file_path",),
            target=("file_path",),
        ),
        "Edit": _EDIT,
        "MultiEdit": ToolSpec(
            required={"file_path": str, "edits": list},
            parts={"edits": {"old_string": str, "new_string": str}},
            paths=("file_path",),
            target=("file_path",),
            canonical=_plain_edits,
        ),
        "Write": ToolSpec(
            required={"file_path": str, "content": str},
            paths=("file_path",),
            target=("file_path",),
        ),
        "NotebookEdit": ToolSpec(
            required={"notebook_path": str, "new_source": str},
            defaults={"edit_mode": "replace"},
            paths=("notebook_path",),
            target=("notebook_path",),
        ),
        "NotebookRead": ToolSpec(
            required={"notebook_path": str}, paths=("notebook_path",), target=("notebook_path",)
        ),
        "Grep": ToolSpec(
            required={"pattern": str},
            optional={"-i": bool, "multiline": bool, "path": str, "glob": str, "type": str},
            defaults={"output_mode": "files_with_matches", "-i": False, "multiline": False},
            paths=("path",),
            default_path="path",
            display=frozenset({"-n", "-A", "-B", "-C", "context", "head_limit", "offset"}),
        ),
        "Glob": ToolSpec(
            required={"pattern": str},
            optional={"path": str},
            paths=("path",),
            default_path="path",
        ),
        "LS": ToolSpec(paths=("path",), default_path="path", target=("path",)),
        "WebFetch": ToolSpec(
            required={"url": str},
            optional={"prompt": str},
            target=("url",),
            prose=frozenset({"prompt"}),
            question=_one_url,
        ),
        "WebSearch": ToolSpec(
            required={"query": str}, target=("query",), prose=frozenset({"query"})
        ),
        "Task": _TASK,
        "Agent": _TASK,
        "TodoWrite": ToolSpec(required={"todos": list}),
        "TaskUpdate": ToolSpec(target=("taskId",)),
        "TaskGet": ToolSpec(target=("taskId",)),
        "TaskOutput": _SHELL_OUTPUT,
        "AgentOutputTool": ToolSpec(target=("agentId",)),
        "BashOutput": _SHELL_OUTPUT,
        "KillShell": _SHELL_OUTPUT,
        "KillBash": _SHELL_OUTPUT,
        "TaskStop": _SHELL_OUTPUT,
        "Skill": ToolSpec(target=("skill", "command")),
        "SlashCommand": ToolSpec(required={"command": str}),
        "ExitPlanMode": ToolSpec(prose=frozenset({"plan"})),
        "ReadMcpResourceTool": ToolSpec(target=("server", "uri")),
        "ListMcpResourcesTool": ToolSpec(target=("server",)),
    }
)
"""Claude Code's tools by name."""

_DEFAULT = ToolSpec(target=("file_path", "path", "notebook_path", "uri", "url"))

_FAMILIES = {"MultiEdit": "Edit"}


def spec_of(name: str) -> ToolSpec:
    """How the arguments of tool `name` are read."""
    return SPECS.get(name, _DEFAULT)


def family_of(name: str) -> str:
    """The tool that `name` counts as: Edit and MultiEdit are one."""
    return _FAMILIES.get(name, name)
