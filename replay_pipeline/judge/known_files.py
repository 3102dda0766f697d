"""Track the contents of files through a prompt: shown, written, edited, or no longer known."""

import re
from collections.abc import Iterator, Sequence

from replay_pipeline.actions import Call
from replay_pipeline.actions.edits import Edit, are_same_change, edits_of
from replay_pipeline.actions.keys import plan_of, reach_of
from replay_pipeline.actions.paths import is_absolute

_NUMBERED = re.compile(r"^ *(\d+)(?:→|\t)(.*)$")
_REMINDER = re.compile(r"^\s*<system-reminder>.*?</system-reminder>", re.DOTALL | re.MULTILINE)
"""What the client adds to an answer; a file may hold the same words behind a line number."""
_READ_LIMIT = 2_000
_DISTINCT = 40
"""Characters of a text that hardly stands twice in a file."""
_TAKES_BACK = re.compile(
    r"\bgit\s+(?:-\S+\s+(?:/\S+\s+)?)*(?:checkout(?!\s+-[bB])|restore|reset\s+(?:\S+\s+)*--(?:hard|merge|keep)"
    r"|stash(?!\s+(?:list|show|pop|apply))|revert|switch(?!\s+-[cC])|clean|apply)\b|\bpatch\b"
)
"""Commands that may take an edit back; a formatter, a merge or a subagent hardly does."""
_PARTS = re.compile(r"&&|[;|\n]")
_READS = re.compile(
    r"\s*(?:\w+=\S+\s+)*(?:gcc|g\+\+|cc|clang|rustc|go (?:run|build|test|vet)|javac|tsc|conda|pip3?|pytest|python[\d.]* -m pytest"
    r"|docker|kubectl|cat|head|tail|wc|less|grep|diff|ls|file|chmod|xxd|od)\b"
)
"""Programs that compile, show, or check the files that they are given."""
_RUNS = r"(?:\b(?:python[\d.]*|node|deno run|bun|ruby|php|bash|sh)\s+|\./|<\s*)[^\s;|&]*"
"""What stands before the name of a file that is run, or read as input."""
_REWRITES = re.compile(
    r"\b(?:fmt|format|fix|prettier|black|gofmt|goimports|isort|codegen|generate|tidy|stash"
    r"|checkout|switch|restore|reset|revert|merge|rebase|pull|cherry-pick|apply|patch|sed -i|clean)\b"
)
"""Words of commands that may change any file of the project."""
CHANGED_BY_OTHERS = re.compile(r"was modified, either by the user or by a linter|has been modified")


class File:
    """The known contents of one file."""

    def __init__(self) -> None:
        self.content: str | None = None
        """All of it, where it is known."""
        self.written: set[str] = set()
        """All that was written as a whole and not taken back since: writing it again would undo the rest."""
        self.applied: list[Edit] = []
        """Edits that were made and not taken back since."""

    def forget(self) -> None:
        """Forget the contents of the file."""
        self.content, self.written, self.applied = None, set(), []

    def touch(self) -> None:
        """Note that the file may have changed, but that no edit was undone."""
        self.content = None

    def write(self, content: str) -> None:
        """Set the whole content."""
        self.content, self.applied = content, []
        self.written.add(content)

    def show(self, text: str, *, is_all: bool) -> None:
        """Record the answer of a read. If it differs from the known contents, somebody changed the file."""
        if is_all or (self.content is not None and text not in self.content):
            self.applied = [edit for edit in self.applied if _still_stands(edit, text, is_all)]
            self.content = f"{text}\n" if is_all else None

    def edit(self, edit: Edit) -> None:
        """Record an edit."""
        back = Edit(edit.new, edit.old, edit.is_everywhere)
        self.applied = [one for one in self.applied if one != back]
        self.applied.append(edit)
        if self.content is not None:
            self.content = _edited(self.content, edit)

    def obstacle(self, edit: Edit) -> str | None:
        """Return why an edit can't work (`applied` or `gone`), or None if nothing is known against it."""
        if not edit.old:
            return None
        if self.content is not None:
            return _obstacle_in(self.content, edit)
        if any(are_same_change((edit,), (one,)) for one in self.applied):
            return "applied"
        inside = [one for one in self.applied if edit.old in one.old and edit.old not in one.new]
        if not inside or len(edit.old.strip()) < _DISTINCT:
            return None
        return "applied" if edit.new and any(edit.new in one.new for one in inside) else "gone"


def _still_stands(edit: Edit, text: str, is_all: bool) -> bool:  # noqa: FBT001
    """Return whether a text that was read leaves it standing that an edit was made."""
    if edit.new and edit.new in text:
        return True
    return not is_all and not (edit.old and edit.old in text)


def _obstacle_in(content: str, edit: Edit) -> str | None:
    n_old = content.count(edit.old)
    n_inside = content.count(edit.new) * edit.new.count(edit.old) if edit.new else 0
    if not n_old:
        return "applied" if edit.new.strip() and edit.new in content else "gone"
    if n_inside >= n_old:
        return "applied"
    return None


def _edited(content: str, edit: Edit) -> str | None:
    """Return a content after an edit; `None` where the edit shows that it was another one."""
    if not edit.old or edit.old not in content:
        return None
    return content.replace(edit.old, edit.new, -1 if edit.is_everywhere else 1)


def shown_by_read(answer: str) -> tuple[str, int, int] | None:
    """Return the text of a read, its first line, and its number of lines, or None if it showed no file."""
    lines = _REMINDER.sub("", answer).rstrip().split("\n")
    found = [match for line in lines if (match := _NUMBERED.match(line))]
    if not found or len(found) < len(lines):
        return None
    return "\n".join(match[2] for match in found), int(found[0][1]), len(found)


class Files:
    """All files that the calls of a prompt name, tracked call by call."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}

    def __getitem__(self, path: str) -> File:
        """Look a file up by its path; one that is seen from another folder is found by its end."""
        if path in self._files:
            return self._files[path]
        if not is_absolute(path):
            for known, file in self._files.items():
                if known.endswith("/" + path):
                    return file
        return self._files.setdefault(path, File())

    def take(self, call: Call, answer: str) -> None:
        """Record a successful call and its answer."""
        path = file_path_of(call)
        if call.name in ("Edit", "MultiEdit") and path is not None:
            for edit in _edits(call):
                self[path].edit(edit)
        elif call.name == "Write" and path is not None:
            self[path].write(str(call.values().get("content", "")))
        elif call.name == "Read" and path is not None:
            shown = shown_by_read(answer)
            if shown is not None:
                values = call.values()
                is_all = not {"offset", "limit"} & values.keys() and shown[1] == 1
                self[path].show(shown[0], is_all=is_all and shown[2] < _READ_LIMIT)
        elif reach_of(call) == "anything":
            for known, file in self._files.items():
                if may_take_back(call, known):
                    file.forget()
                elif may_change(call, known):
                    file.touch()

    def told(self, text: str) -> None:
        """Record files that a user message reports as changed by somebody else."""
        if CHANGED_BY_OTHERS.search(text):
            for known, file in self._files.items():
                if known.rpartition("/")[2] in text:
                    file.forget()


def may_change(call: Call, path: str) -> bool:
    """Return whether a call that may change anything has probably changed this file."""
    if call.name != "Bash":
        return True
    if plan_of(call).keeps_files:
        return False
    command = call.values()["command"]
    return _REWRITES.search(command) is not None or path.rpartition("/")[2] in command


def may_take_back(call: Call, path: str) -> bool:
    """Return whether a call that may change anything has probably undone the edits of a file."""
    if call.name != "Bash":
        return path.rpartition("/")[2] in str(call.arguments)
    command = call.values()["command"]
    if plan_of(call).keeps_files:
        return False
    name = path.rpartition("/")[2]
    return _TAKES_BACK.search(command) is not None or any(
        name in part and not _reads(part, name) for part in _PARTS.split(command)
    )


def _reads(part: str, name: str) -> bool:
    """Return whether a command runs, compiles, copies, or shows a file, and does not write it."""
    name = re.escape(name)
    if re.search(rf"(?:>|\btee\b|\s-o|\s-i)\s*\S*{name}", part):
        return False
    is_source = rf"\s*cp\s.*{name}\s+\S"
    return bool(_READS.match(part) or re.search(_RUNS + name, part) or re.match(is_source, part))


def file_path_of(call: Call) -> str | None:
    """Return the path that a call of Claude Code's file tools names."""
    values = call.values()
    path = values.get("file_path") or values.get("notebook_path")
    return path.replace("\\", "/") if isinstance(path, str) else None


def replacements(calls: Sequence[Call]) -> Iterator[tuple[Call, tuple[Edit, ...]]]:
    """Yield the edits of each editing call."""
    for call in calls:
        if call.name in ("Edit", "MultiEdit") and (edits := _edits(call)):
            yield call, edits


def _edits(call: Call) -> tuple[Edit, ...]:
    values = call.values()
    if call.name == "Edit":
        values.pop("edits", None)  # no argument of its own
    return edits_of(values) or ()
