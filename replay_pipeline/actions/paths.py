r"""Resolve paths as text against a working directory, without looking at any file.

On Windows one file has many names: with `\` or `/`, a drive in capitals or not, `/c/…` of Git Bash,
`/mnt/c/…` of WSL. A working directory on a drive tells that a state is there. All its paths are then read
as `C:/…`, inside the working directory in the directory's own letters, so that they compare as on any
other system.
"""

import posixpath
import re
from functools import lru_cache

_LEADING_CD = re.compile(
    r"""\s*cd[ ]+(?:/d[ ]+)?(?:'(?P<single>[^']*)'|"(?P<double>[^"$`\\!]*|[A-Za-z]:\\[^"$`!]*)"|(?P<bare>[\w./@%+=:,-]+))"""
    r"""[ ]*(?:&&|;|\n)(?=\s*\S)"""
)
_HOME = re.compile(r"(/(?:home|Users)/[^/]+|/root|[A-Z]:/[Uu]sers/[^/]+)(?=/|$)")
_DRIVE = re.compile(r"([A-Za-z]):(?=/|$)|/(?:mnt/|cygdrive/)?([A-Za-z])(?=/|$)")
_ON_DRIVE = re.compile(
    r"[A-Za-z]:[\\/]|\\\\[\w.$-]+\\|/(?:[a-z]|cygdrive/[a-z])/(?:[Uu]sers|[Ww]indows|[Pp]rogram)"
)


@lru_cache(maxsize=16_384)
def absolute(path: str, cwd: str | None) -> str:
    """Return `path` resolved against `cwd`, without `.`, `..`, `//`, and a trailing slash.

    Without a working directory, a relative path stays relative. `~` is expanded if the working
    directory shows the home folder.
    """
    place = path if cwd is None else cwd
    if is_on_windows(place):
        return _on_windows(path, cwd)
    if _ON_DRIVE.match(path) and "\\" in path and place.startswith("/mnt/"):  # of WSL
        path = _DRIVE.sub(
            lambda found: f"/mnt/{found[1].lower()}", path.replace("\\", "/"), count=1
        )
    if "\\" in path:
        return path
    if path == "~" or path.startswith("~/"):
        home = home_of(cwd)
        if home is None:
            return path
        path = home + path[1:]
    elif cwd and not path.startswith("/"):
        path = f"{cwd}/{path}"
    return _normal(path)


def is_on_windows(cwd: str | None) -> bool:
    """Return whether a working directory is on a drive of Windows."""
    return cwd is not None and _ON_DRIVE.match(cwd) is not None


def is_absolute(path: str) -> bool:
    """Return whether a path names a place without a working directory."""
    return path.startswith("/") or _ON_DRIVE.match(path) is not None


def identity(path: str) -> str:
    """Return what is equal for two names of one file: on a drive, letters are the same in capitals."""
    return path.lower() if _ON_DRIVE.match(path) else path


def spelled(path: str, cwd: str | None, *, sep: str = "\\") -> str:
    """Return an absolute path as a state on a drive writes it, with `sep` between folders."""
    is_there = is_on_windows(cwd) and _ON_DRIVE.match(path) is not None
    return path.replace("/", sep) if is_there else path


def _on_windows(path: str, cwd: str | None) -> str:
    path = path.replace("\\", "/")
    folder = _on_windows(cwd, None) if cwd else ""
    if path == "~" or path.startswith("~/"):
        path = (home_of(folder) or "~") + path[1:]
    drive = _DRIVE.match(path)
    if drive is not None:
        path = f"{(drive[1] or drive[2]).upper()}:{path[drive.end() :] or '/'}"
    elif folder and not path.startswith("/"):
        path = f"{folder}/{path}"
    is_shared = path.startswith("//")
    path = f"/{_normal(path)}" if is_shared else _normal(path)
    is_inside = folder and f"{path}/".lower().startswith(f"{folder}/".lower())
    return folder + path[len(folder) :] if is_inside else path


def _normal(path: str) -> str:
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
    match = _HOME.match(absolute(cwd, None)) if cwd else None
    return match.group(1) if match else None


def without_needless_cd(command: str, cwd: str | None) -> str:
    """Return a shell command without a leading `cd` into the folder where it already is."""
    match = _LEADING_CD.match(command)
    if not cwd or match is None:
        return command
    folder = match["single"] or match["double"] or match["bare"] or ""
    if identity(absolute(folder, cwd)) != identity(absolute(cwd, None)):
        return command
    return command[match.end() :].lstrip()
