"""Grep and Glob over the files of a tree, with ripgrep's patterns.

RE2 matches them in time linear in the text. It reads Rust's regular expressions, which are ripgrep's, but
no sets like `[a&&b]`, and classes such as that of letters and digits know ASCII alone. A search leaves
out what a `.gitignore` names, whether git tracks it or not; ripgrep reads those of every folder above.
What the caller names itself is always searched.
"""

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute

from replay_pipeline.storage.arrays import string_array
from replay_pipeline.workspaces.tree import Tree, is_below

pc: Any = pyarrow.compute  # makes its functions at import, unknown to type checkers
MAX_GLOB_FILES = 100
_MATCH = "\x00"
"""Set around matches. A file with it is binary, and is not searched."""
_PIECE_CHARS = 16_000_000
_VCS = re.compile(r"/\.(?:git|svn|hg|bzr|jj|sl)(?:/|\Z)")
_TYPES: dict[str, tuple[str, ...]] = {
    "c": ("*.c", "*.h"),
    "cpp": ("*.cpp", "*.cc", "*.cxx", "*.hpp", "*.hh", "*.h", "*.inl"),
    "css": ("*.css", "*.scss"),
    "go": ("*.go",),
    "html": ("*.htm", "*.html", "*.ejs"),
    "java": ("*.java", "*.jsp"),
    "js": ("*.js", "*.jsx", "*.vue", "*.cjs", "*.mjs"),
    "json": ("*.json", "composer.lock"),
    "kotlin": ("*.kt", "*.kts"),
    "md": ("*.markdown", "*.md", "*.mdown", "*.mdwn", "*.mkd", "*.mkdn", "*.mdx"),
    "php": ("*.php", "*.phtml"),
    "py": ("*.py", "*.pyi"),
    "ruby": ("*.rb", "Gemfile", "Rakefile", "*.gemspec"),
    "rust": ("*.rs",),
    "sh": ("*.sh", "*.bash", "*.zsh", ".bashrc", ".zshrc"),
    "sql": ("*.sql", "*.psql"),
    "swift": ("*.swift",),
    "toml": ("*.toml", "Cargo.lock"),
    "ts": ("*.ts", "*.tsx", "*.cts", "*.mts"),
    "yaml": ("*.yaml", "*.yml"),
}
"""Globs of ripgrep's file types, the common ones."""
_TYPES |= {"markdown": _TYPES["md"], "python": _TYPES["py"], "typescript": _TYPES["ts"]}


class PatternError(ValueError):
    """Raised for an invalid pattern."""


class NotKnownError(ValueError):
    """Raised if a search needs content that isn't known."""


class Matches(msgspec.Struct, frozen=True):
    """The results of a search."""

    entries: list[str]
    """`path`, `path:count`, or lines as ripgrep prints them. Paths are relative to the working directory."""
    text: str


def base_of(place: str, pattern: str) -> tuple[str, str]:
    """Split a glob into the folder that it names and the rest."""
    if not pattern.startswith("/"):
        return place, pattern
    fixed: list[str] = []
    parts = pattern.split("/")
    while len(parts) > 1 and not any(sign in parts[0] for sign in "*?[{"):
        fixed.append(parts.pop(0))
    return "/".join(fixed) or "/", "/".join(parts)


def glob(paths: Iterable[str], place: str, cwd: str, pattern: str) -> Matches:
    """Return the paths that match a glob below `place`."""
    is_match = _matcher((pattern,))
    is_anywhere = pattern.startswith("**/")  # then folders above count as well
    hits = sorted(
        path
        for path in paths
        if not _VCS.search(path)
        and (is_match(posixpath.relpath(path, place)) or (is_anywhere and is_match(path[1:])))
    )
    entries = [_shown(path, cwd) for path in hits]
    lines = hits[:MAX_GLOB_FILES]
    if len(hits) > MAX_GLOB_FILES:
        lines.append("(Results are truncated. Consider using a more specific path or pattern.)")
    return Matches(entries, "\n".join(lines) or "No files found")


def grep(
    tree: Tree, paths: Iterable[str], place: str, cwd: str, arguments: Mapping[str, Any]
) -> Matches:
    """Return the lines, files, or counts that match a pattern.

    Raises:
        PatternError: the pattern is invalid.
        NotKnownError: the file type or a file's content is unknown.
    """
    ignores = _Ignores(tree, place)
    wanted = [path for path in paths if not _VCS.search(path) and not ignores.has(path)]
    if globs := _globs(arguments.get("glob")):
        is_match = _matcher(globs)
        inside = {path: posixpath.relpath(path, place) for path in wanted if path != place}
        wanted = [path for path in wanted if is_match(inside.get(path, posixpath.basename(path)))]
    if kind := arguments.get("type"):
        if kind not in _TYPES:
            raise NotKnownError(f"the file type {kind!r} is unknown")
        is_kind = _matcher(_TYPES[kind])
        wanted = [path for path in wanted if is_kind(posixpath.basename(path))]
    lines: dict[str, list[tuple[int, str, bool]]] = {}
    for texts in _pieces((path, _text(tree, path)) for path in wanted):
        lines |= _matching(texts, arguments)
    return _rendered(lines, place, cwd, arguments)


def _pieces(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield texts by path, some megabytes at a time: of a large tree not all are in memory at once."""
    piece: list[tuple[str, str]] = []
    n_chars = 0
    for each in texts:
        piece.append(each)
        n_chars += len(each[1])
        if n_chars > _PIECE_CHARS:
            yield piece
            piece, n_chars = [], 0
    yield piece


def _text(tree: Tree, path: str) -> str:
    file = tree.file(path)
    text = file.text if file is not None else None
    return "" if text is None or "\0" in text[:8_000] else text


def _matching(
    texts: list[tuple[str, str]], arguments: Mapping[str, Any]
) -> dict[str, list[tuple[int, str, bool]]]:
    """Return lines that match, and those of their context: number, text and whether it matches, by path.

    Raises:
        TypeError: the pattern is not a text.
    """
    pattern = arguments["pattern"]
    flags = "m" + "i" * bool(arguments.get("-i")) + "s" * bool(arguments.get("multiline"))
    expression = f"(?{flags})(?:{pattern})"
    if not isinstance(pattern, str):
        raise TypeError("pattern is not a text")
    hits = _contains([text for _, text in texts], expression)
    around = arguments.get("-C") or arguments.get("context") or 0
    before, after = around or arguments.get("-B") or 0, around or arguments.get("-A") or 0
    found: dict[str, list[tuple[int, str, bool]]] = {}
    for (path, text), hit in zip(texts, hits, strict=True):
        if not hit:
            continue
        lines = text.removesuffix("\n").split("\n")
        if arguments.get("multiline"):
            at = _lines_of_matches(text, expression)
        else:
            at = [i for i, is_hit in enumerate(_contains(lines, expression)) if is_hit]
        if not at:
            continue
        matches = set(at)
        reach = int(before), int(after)
        shown = sorted({i for m in at for i in range(max(0, m - reach[0]), m + reach[1] + 1)})
        found[path] = [(i + 1, lines[i], i in matches) for i in shown if i < len(lines)]
    return found


def _contains(texts: list[str], expression: str) -> list[bool]:
    try:
        return pc.match_substring_regex(string_array(texts), expression).to_pylist()
    except pa.ArrowInvalid as error:
        raise PatternError(str(error)) from error


def _lines_of_matches(text: str, expression: str) -> list[int]:
    marked = pc.replace_substring_regex(
        string_array([text]), f"({expression})", f"{_MATCH}\\1{_MATCH}"
    )
    found: set[int] = set()
    line = 0
    for place, piece in enumerate(marked[0].as_py().split(_MATCH)):
        if place % 2 and piece:
            found.update(range(line, line + piece.rstrip("\n").count("\n") + 1))
        line += piece.count("\n")
    return sorted(found)


def _rendered(
    lines: Mapping[str, list[tuple[int, str, bool]]],
    place: str,
    cwd: str,
    arguments: Mapping[str, Any],
) -> Matches:
    mode = arguments.get("output_mode") or "files_with_matches"
    if mode == "content":
        return _limited([*_content(lines, place, cwd, arguments)], arguments, "No matches found")
    if mode == "count":
        counts = {p: sum(is_match for _, _, is_match in found) for p, found in lines.items()}
        entries = [f"{n}" if p == place else f"{_shown(p, cwd)}:{n}" for p, n in counts.items()]
        found = _limited(entries, arguments, "No matches found")
        # The client counts what stands behind a path, and of a file that is named itself there is none.
        n, n_files = (0, 0) if place in counts else (sum(counts.values()), len(counts))
        total = f"{n} total occurrence{'s' * (n != 1)} across {n_files} file{'s' * (n_files != 1)}"
        return Matches(entries, f"{found.text}\n\nFound {total}.")
    entries = [_shown(path, cwd) for path in lines]
    found = _limited(entries, arguments, "No files found")
    n = len(entries)
    return Matches(entries, f"Found {n} file{'s' * (n != 1)}\n{found.text}" if n else found.text)


def _content(
    lines: Mapping[str, list[tuple[int, str, bool]]],
    place: str,
    cwd: str,
    arguments: Mapping[str, Any],
) -> Iterator[str]:
    """Yield lines as ripgrep writes them, `path:number:text`, with `-` around lines of the context."""
    has_context = any(arguments.get(name) for name in ("-A", "-B", "-C", "context"))
    is_numbered = bool(arguments.get("-n", True))
    before = None
    for path, found in lines.items():
        for number, text, is_match in found:
            if has_context and before not in (None, (path, number - 1)):
                yield "--"
            before = path, number
            sign = ":" if is_match else "-"
            line = f"{number}{sign}{text}" if is_numbered else text
            yield _relative(line if path == place else f"{path}{sign}{line}", cwd)


def _relative(line: str, cwd: str) -> str:
    """Return a line as the client shows it: all before its first colon is taken for a path, and made relative."""
    path, colon, rest = line.partition(":")
    if not path or not colon:
        return line
    full = posixpath.normpath(posixpath.join(cwd, path))
    return f"{posixpath.relpath(full, cwd) if is_below(full, cwd) else path}:{rest}"


def _limited(entries: list[str], arguments: Mapping[str, Any], nothing: str) -> Matches:
    first, limit = int(arguments.get("offset") or 0), int(arguments.get("head_limit") or 0)
    shown = entries[first : first + limit] if limit else entries[first:]
    return Matches(entries, "\n".join(shown) or nothing)


def _shown(path: str, cwd: str) -> str:
    return posixpath.relpath(path, cwd) if is_below(path, cwd) else path


def _globs(value: Any) -> tuple[str, ...]:
    """Return globs of a call: several are divided by blanks, or by commas outside of braces."""
    if not isinstance(value, str) or not value:
        return ()
    parts = value.split()
    return tuple(
        glob for part in parts for glob in (part.split(",") if "{" not in part else [part]) if glob
    )


@lru_cache(maxsize=256)
def _matcher(globs: tuple[str, ...]) -> Any:
    wanted = [re.compile(_expression_of(each)) for each in globs if not each.startswith("!")]
    not_wanted = [re.compile(_expression_of(each[1:])) for each in globs if each.startswith("!")]

    def is_match(path: str) -> bool:
        if any(each.fullmatch(path) for each in not_wanted):
            return False
        return not wanted or any(each.fullmatch(path) for each in wanted)

    return is_match


def _expression_of(pattern: str) -> str:
    """Return a glob as a regular expression on relative paths; without `/` it matches at any depth."""
    pattern = pattern.removeprefix("./")
    out = "" if "/" in pattern else "(?:.*/)?"
    at = depth = 0
    pattern = pattern.removeprefix("/")
    while at < len(pattern):
        sign = pattern[at]
        if pattern.startswith("**/", at):
            out, at = out + "(?:.*/)?", at + 3
            continue
        if pattern.startswith("**", at):
            out, at = out + ".*", at + 2
            continue
        if sign == "[" and (end := pattern.find("]", at + 2)) > 0:
            out += "[" + pattern[at + 1 : end].replace("!", "^", 1).replace("\\", "\\\\") + "]"
            at = end
        elif sign == "{":
            out, depth = out + "(?:", depth + 1
        elif sign == "}" and depth:
            out, depth = out + ")", depth - 1
        elif sign == "," and depth:
            out += "|"
        else:
            out += {"*": "[^/]*", "?": "[^/]"}.get(sign, re.escape(sign))
        at += 1
    return out + ")" * depth


class _Rule(msgspec.Struct, frozen=True):
    expression: re.Pattern[str]
    is_kept: bool
    """Whether what it names is taken back in: `!name`."""
    is_for_folders: bool


class _Ignores:
    """The ignore files of a tree, read when they are needed."""

    def __init__(self, tree: Tree, place: str) -> None:
        """Search below `place`, which is itself not ignored."""
        self._tree = tree
        self._place = place.rstrip("/")
        self._rules: dict[str, tuple[_Rule, ...]] = {}
        self._folders: dict[str, bool] = {self._place: False}

    def has(self, path: str) -> bool:
        """Return whether a file is ignored, or a folder that it lies in."""
        if path == self._place:
            return False
        return self._is_folder_ignored(posixpath.dirname(path)) or self._is_named(
            path, is_folder=False
        )

    def _is_folder_ignored(self, folder: str) -> bool:
        known = self._folders.get(folder)
        if known is None:
            if len(folder) <= len(self._place):
                return False
            above = self._is_folder_ignored(posixpath.dirname(folder))
            known = self._folders[folder] = above or self._is_named(folder, is_folder=True)
        return known

    def _is_named(self, path: str, *, is_folder: bool) -> bool:
        """Return whether the nearest rule that names a path leaves it out."""
        above = posixpath.dirname(path)
        while True:
            inside = path[len(above.rstrip("/")) + 1 :]
            for rule in reversed(self._rules_in(above)):
                if (is_folder or not rule.is_for_folders) and rule.expression.fullmatch(inside):
                    return not rule.is_kept
            if above in ("/", ""):
                return False
            above = posixpath.dirname(above)

    def _rules_in(self, folder: str) -> tuple[_Rule, ...]:
        if folder not in self._rules:
            file = self._tree.file(posixpath.join(folder, ".gitignore"))
            self._rules[folder] = _rules_of(file.text) if file is not None and file.text else ()
        return self._rules[folder]


@lru_cache(maxsize=256)
def _rules_of(text: str) -> tuple[_Rule, ...]:
    found: list[_Rule] = []
    for line in text.splitlines():
        pattern = line.rstrip()
        if not pattern or pattern.startswith("#"):
            continue
        is_kept = pattern.startswith("!")
        pattern = pattern[is_kept:].removeprefix("\\")
        is_for_folders = pattern.endswith("/")
        try:
            expression = re.compile(_expression_of(pattern.rstrip("/")))
        except re.error:
            continue  # git takes it for nothing as well
        found.append(_Rule(expression, is_kept, is_for_folders))
    return tuple(found)
