"""Globs as ripgrep and git read them, and the ignore files that a search goes by.

A search leaves out what a `.gitignore` names, whether git tracks it or not. ripgrep reads the ignore
files of every folder above; what the caller names itself is always searched.
"""

import posixpath
import re
from functools import lru_cache

import msgspec

from replay_pipeline.workspaces.tree import Tree


def expression_of(pattern: str) -> str:
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


class Ignores:
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
            self._rules[folder] = _read(file.text) if file is not None and file.text else ()
        return self._rules[folder]


@lru_cache(maxsize=256)
def _read(text: str) -> tuple[_Rule, ...]:
    found: list[_Rule] = []
    for line in text.splitlines():
        pattern = line.rstrip()
        if not pattern or pattern.startswith("#"):
            continue
        is_kept = pattern.startswith("!")
        pattern = pattern[is_kept:].removeprefix("\\")
        is_for_folders = pattern.endswith("/")
        try:
            expression = re.compile(expression_of(pattern.rstrip("/")))
        except re.error:
            continue  # git takes it for nothing as well
        found.append(_Rule(expression, is_kept, is_for_folders))
    return tuple(found)
