"""Resolve paths as text against a working directory, without looking at any file."""

import posixpath
import re
from functools import lru_cache

_LEADING_CD = re.compile(
    r"""\s*cd[ ]+(?:'(?P<single>[^']*)'|"(?P<double>[^"$`\\!]*)"|(?P<bare>[\w./@%+=:,-]+))"""
    r"""[ ]*(?:&&|;|\n)(?=\s*\S)"""
)
_HOME = re.compile(r"(/(?:home|Users)/[^/]+|/root)(?=/|$)")


@lru_cache(maxsize=16_384)
def absolute(path: str, cwd: str | None) -> str:
    """Return `path` resolved against `cwd`, without `.`, `..`, `//`, and a trailing slash.

    Without a working directory, a relative path stays relative. `~` is expanded if the working
    directory shows the home folder. A Windows path doesn't change.
    """
    if "\\" in path:
        return path
    if path == "~" or path.startswith("~/"):
        home = home_of(cwd)
        if home is None:
            return path
        path = home + path[1:]
    elif cwd and not path.startswith("/"):
        path = f"{cwd}/{path}"
    normal = posixpath.normpath(path)
    return normal[1:] if normal.startswith("//") else normal


@lru_cache(maxsize=16_384)
def relative(path: str, cwd: str | None) -> str:
    """Return `path` relative to `cwd` if it lies inside that folder, else in absolute form."""
    path = absolute(path, cwd)
    if not cwd:
        return path
    folder = absolute(cwd, None)
    if path == folder:
        return "."
    inside = folder if folder == "/" else folder + "/"
    return path[len(inside) :] if path.startswith(inside) else path


def home_of(cwd: str | None) -> str | None:
    """Return the home folder above a working directory, if the path shows one."""
    match = _HOME.match(cwd or "")
    return match.group(1) if match else None


def without_needless_cd(command: str, cwd: str | None) -> str:
    """Return a shell command without a leading `cd` into the folder where it already is."""
    match = _LEADING_CD.match(command)
    if not cwd or match is None:
        return command
    folder = match["single"] or match["double"] or match["bare"] or ""
    if absolute(folder, cwd) != absolute(cwd, None):
        return command
    return command[match.end() :].lstrip()
