"""Emulate the client's file tools on a tree: their answers and their changes.

No real file is touched. Texts and kinds of errors are those of Claude Code, so its logs can test
the emulation; `benchmarks/commands.py` does.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from replay_pipeline.actions.paths import absolute
from replay_pipeline.workspaces import searches
from replay_pipeline.workspaces.tree import Tree, TreeFile, View

MAX_READ_LINES = 2_000
MAX_READ_LINE_CHARS = 2_000
MAX_READ_BYTES = 262_144
MAX_READ_TOKENS = 25_000
_CHARS_PER_TOKEN = 2.9
"""Of source files: two refusals that were recorded counted 2.76 and 2.90, and 71,950 characters passed."""
_CURLY = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
FILE_TOOLS = frozenset(("Read", "Edit", "MultiEdit", "Write", "Grep", "Glob"))


class ToolResult(msgspec.Struct, frozen=True):
    """The answer of a tool to a call."""

    text: str
    error_kind: str | None = None
    """None if it worked, `unknown` if it needs content that isn't known, else a value of `error_kind`."""
    found: tuple[str, ...] = ()
    """The results of a search: paths, or `path:line:text`."""

    @property
    def is_known(self) -> bool:
        """Return whether the tree had everything that the call needs."""
        return self.error_kind != "unknown"


class ToolRun:
    """Runs calls of file tools on one view, one after the other, as a client does."""

    def __init__(
        self, tree: Tree, *, cwd: str, read: Mapping[str, str | None] | None = None
    ) -> None:
        """Stand in a working directory.

        Args:
            tree: the files; they are not changed.
            cwd: what relative paths are read against.
            read: the files that the client has read or written before, each with its content
                then if that is known; None if nothing is known of it, so that it is not asked for.
        """
        self.view = View(tree)
        self.cwd = cwd
        self.read = None if read is None else dict(read)

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a call, and return the answer. Later calls see its changes."""
        tool = _TOOLS.get(name)
        if tool is None:
            return ToolResult(f"{name} is no file tool", "unknown")
        try:
            return tool(self, arguments)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return ToolResult(f"InputValidationError: {name} failed: {error!r}", "invalid_input")

    def path(self, name: str) -> str:
        """Return a path in a call as an absolute path.

        Raises:
            TypeError: the value is not a path.
        """
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is not a path")
        return absolute(name, self.cwd)

    def _file(self, path: str) -> TreeFile | ToolResult:
        """Return the file at a path, or why there is none to be had."""
        file = self.view.file(path)
        if file is None:
            return ToolResult(f"{path}: not known", "unknown")
        if file.text is not None:
            return file
        if any(each != path for each in self.view.below(path) or ()):
            return ToolResult("EISDIR: illegal operation on a directory, read", "is_directory")
        return ToolResult(f"File does not exist.{self._meant(path)}", "not_found")

    def _meant(self, path: str) -> str:
        """Return what the client asks where a file of this name has another ending."""
        folder, _, name = path.rpartition("/")
        stem = f"{folder}/{name.rpartition('.')[0] or name}."
        beside = [each for each in self.view.below(folder) or () if each.startswith(stem)]
        meant = next((each for each in sorted(beside) if "." not in each[len(stem) :]), None)
        return f" Did you mean {meant.rpartition('/')[2]}?" if meant else ""

    def _read(self, arguments: Mapping[str, Any]) -> ToolResult:
        path = self.path(arguments["file_path"])
        file = self._file(path)
        if isinstance(file, ToolResult):
            return file
        text = file.text or ""
        offset, limit = arguments.get("offset"), arguments.get("limit")
        if offset is None and limit is None and len(text.encode()) > MAX_READ_BYTES:
            size = f"{len(text.encode()) / 1024:.1f}KB"
            return ToolResult(
                f"File content ({size}) exceeds maximum allowed size (256KB). Please use offset "
                "and limit parameters to read specific portions of the file, or use the GrepTool "
                "to search for specific content.",
                "too_large",
            )
        first = max(1, int(offset or 1))
        lines = text.split("\n")[first - 1 :]
        wanted = lines[: int(limit)] if limit else lines
        n_tokens = int(sum(len(line) + 1 for line in wanted) / _CHARS_PER_TOKEN)
        if n_tokens > MAX_READ_TOKENS:
            return ToolResult(
                f"File content ({n_tokens} tokens) exceeds maximum allowed tokens (25000). Please use "
                "offset and limit parameters to read specific portions of the file, or use the "
                "GrepTool to search for specific content.",
                "too_large",
            )
        self._know(path, text)
        if wanted in ([], [""]):
            n_lines = text.count("\n") + 1
            why = f"is shorter than the provided offset ({first}). The file has {n_lines} lines"
            why = f"the file exists but {why if text else 'the contents are empty'}"
            return ToolResult(f"<system-reminder>Warning: {why}.</system-reminder>")
        lines = wanted[: int(limit or MAX_READ_LINES)]
        return ToolResult(
            "\n".join(
                f"{number:>6}→{line[:MAX_READ_LINE_CHARS]}"
                for number, line in enumerate(lines, first)
            )
        )

    def _know(self, path: str, text: str) -> None:
        if self.read is not None:
            self.read[path] = text

    def _unread(self, path: str, text: str) -> ToolResult | None:
        """Return the refusal to change a file that was not read, or not as it is now."""
        if self.read is None:
            return None
        if path not in self.read:
            return ToolResult(
                "File has not been read yet. Read it first before writing to it.", "not_read_yet"
            )
        before = self.read[path]
        if before is not None and before != text:
            return ToolResult(
                "File has been modified since read, either by the user or by a linter. Read it "
                "again before attempting to write it.",
                "modified_since_read",
            )
        return None

    def _edit(self, arguments: Mapping[str, Any]) -> ToolResult:
        return self._changed(self.path(arguments["file_path"]), [arguments])

    def _multi_edit(self, arguments: Mapping[str, Any]) -> ToolResult:
        return self._changed(self.path(arguments["file_path"]), arguments["edits"])

    def _changed(self, path: str, edits: list[Mapping[str, Any]]) -> ToolResult:
        if any(edit["old_string"] == edit["new_string"] for edit in edits):
            return ToolResult(
                "No changes to make: old_string and new_string are exactly the same.", "no_change"
            )
        file = self._file(path)
        is_new = edits[0]["old_string"] == ""
        if isinstance(file, ToolResult):
            if not (is_new and file.error_kind == "not_found"):
                return file
            text = ""
        else:
            text = file.text or ""
            if is_new and text.strip():
                return ToolResult("Cannot create new file - file already exists.", "other")
            if not is_new:
                if path.endswith(".ipynb"):
                    return ToolResult(
                        "File is a Jupyter Notebook. Use the NotebookEdit to edit this file.",
                        "other",
                    )
                if (refusal := self._unread(path, text)) is not None:
                    return refusal
        for edit in edits:
            result = replaced(text, edit["old_string"], edit["new_string"], edit.get("replace_all"))
            if isinstance(result, ToolResult):
                return result
            text = result
        self.view.write(path, text)
        self._know(path, text)
        return ToolResult(f"The file {path} has been updated.")

    def _write(self, arguments: Mapping[str, Any]) -> ToolResult:
        path, text = self.path(arguments["file_path"]), arguments["content"]
        if not isinstance(text, str):
            raise TypeError("content is not a text")
        file = self._file(path)
        if isinstance(file, TreeFile):
            if (refusal := self._unread(path, file.text or "")) is not None:
                return refusal
        elif file.error_kind == "is_directory":
            return file
        self.view.write(path, text)
        self._know(path, text)
        return ToolResult(f"File created successfully at: {path}")

    def _grep(self, arguments: Mapping[str, Any]) -> ToolResult:
        place = self.path(arguments.get("path") or self.cwd)
        return self._search(place, "Path", lambda paths: searches.grep(
            self.view, paths, place, self.cwd, arguments
        ))  # fmt: skip

    def _glob(self, arguments: Mapping[str, Any]) -> ToolResult:
        folder = self.path(arguments.get("path") or self.cwd)
        place, pattern = searches.base_of(folder, arguments["pattern"])
        if place != folder and self.view.below(place) == []:
            return ToolResult("No files found")
        return self._search(
            place, "Directory", lambda paths: searches.glob(paths, place, self.cwd, pattern)
        )

    def _search(
        self, place: str, what: str, search: Callable[[list[str]], searches.Matches]
    ) -> ToolResult:
        file = self.view.file(place)
        paths = [place] if file is not None and file.text is not None else self.view.below(place)
        if paths is None:
            return ToolResult(f"{place}: not known", "unknown")
        if not paths:
            return ToolResult(f"{what} does not exist: {place}", "not_found")
        try:
            found = search(paths)
        except searches.NotKnownError as error:
            return ToolResult(str(error), "unknown")
        except searches.PatternError as error:
            return ToolResult(f"ripgrep error: {error}", "other")
        return ToolResult(found.text, found=tuple(found.entries))


_TOOLS: dict[str, Callable[[ToolRun, Mapping[str, Any]], ToolResult]] = {
    "Read": ToolRun._read,
    "Edit": ToolRun._edit,
    "MultiEdit": ToolRun._multi_edit,
    "Write": ToolRun._write,
    "Grep": ToolRun._grep,
    "Glob": ToolRun._glob,
}


def replaced(text: str, old: str, new: str, replace_all: Any) -> str | ToolResult:
    """Return a text after one edit, or the reason why the client refuses the edit."""
    if old == "":
        return new
    # The client takes straight quotes for curly ones where the text has no straight ones.
    found = old
    if old not in text:
        at = text.translate(_CURLY).find(old.translate(_CURLY))
        found = text[at : at + len(old)] if at >= 0 else old
    n = text.count(found)
    if n == 0:
        return ToolResult(
            f"String to replace not found in file.\nString: {old}", "string_not_found"
        )
    if n > 1 and not replace_all:
        return ToolResult(
            f"Found {n} matches of the string to replace, but replace_all is false. To replace all "
            "occurrences, set replace_all to true. To replace only one occurrence, please provide "
            f"more context to uniquely identify the instance.\nString: {old}",
            "multiple_matches",
        )
    # A text that is taken out takes the end of its line with it.
    if new == "" and not found.endswith("\n") and found + "\n" in text:
        found += "\n"
    return text.replace(found, new) if replace_all else text.replace(found, new, 1)
