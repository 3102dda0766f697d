"""Run a shell command on a copy of a tree, in a sandbox without network, home, keys, or other processes.

The tree goes in and comes out as a tar stream. Nothing is written to this machine's disk, and links
that the command creates are never followed. The command can read the system's programs and the
paths in the settings, but not write to them.
"""

import contextlib
import io
import os
import posixpath
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, cycle
from pathlib import Path
from typing import IO

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.workspaces.box import Watch, filter_file, join_new_keyring
from replay_pipeline.workspaces.git import GitCommit, Repository

_NOBODY = 65_534
_RESULT_BYTES = 64_000_000
"""What comes out of a box at most: output, names and changed files."""
_BOX = "/run"
_OBJECTS = "/run/objects"
_GUARD = "/run/guard"
_BEGUN = b"begun\0"
_SCRIPT = r"""
exec 8>&"$4" 9>&"$5" 1>&2
printf 'begun\0' >&9
cd "$1" || exit 97
tar -xf - 2>/dev/null || exit 97
if [ -e .git/HEAD ]; then
  git config core.fsync none; git read-tree HEAD 2>/dev/null; git update-index -q --refresh >/dev/null 2>&1
fi
began=$(date +%s.%N); sleep 0.02
( cd "$2" && exec bash -c "$3" ) < /dev/null >&8 2>&8 8>&- 9>&-
status=$?
kill -9 -1
cd "$1" || exit 97
{ printf '%s\0' "$status"; find . -path ./.git -prune -o \( -type f -o -type l \) -print0; printf '\0'
  find . -path ./.git -prune -o \( -type f -o -type l \) -newerct "@$began" -print0 |
  tar -cf - --null -T - 2>/dev/null; } >&9
"""
"""What runs in the box: folder of the tree, working directory, command and where its output goes.

It runs in a copy of bash that nobody may read, so that the kernel hides its open files from the command.
Before it tells anything, it ends every other process of the box: none can change what it tells.
"""


class CommandLimits(msgspec.Struct, frozen=True):
    """Limits for one command."""

    timeout_s: float = 60.0
    memory_bytes: int = 2_000_000_000
    """Memory of all processes together."""
    disk_bytes: int = 512_000_000
    """Size of the tree, `/tmp`, and all else that can be written, together. It is in memory."""
    n_processes: int = 128
    output_bytes: int = 1_000_000


class Ran(msgspec.Struct, frozen=True):
    """The result of a command: exit status, output, and file changes."""

    status: int | None
    """Its exit status; None if it ran out of time."""
    output: str
    changes: dict[str, str | None]
    """Changed files by absolute path; None for a deleted file."""
    is_repeatable: bool = False
    """Whether it ran twice on the same files with the same result. The caller sets it."""


class Sandbox:
    """Runs commands in bubblewrap."""

    def __init__(self, *, limits: CommandLimits | None = None, mounts: Sequence[Path] = ()) -> None:
        """Look for the program, and whether it may make a box here.

        Args:
            limits: of each command.
            mounts: folders of this machine that commands may read.

        Raises:
            ConfigError: it is not there or may not, or libseccomp is not there; the message says what to do.
        """
        self.limits = limits or CommandLimits()
        self.mounts = [path.expanduser().resolve() for path in mounts]
        program = shutil.which("bwrap")
        if program is None:
            raise ConfigError(_missing("it is not installed"))
        self._program = program
        self._bash = shutil.which("bash") or "/bin/bash"
        self._is_root = os.geteuid() == 0
        try:
            ran = self.run("echo it works", root="/work", files={}, cwd="/work")
        except (OSError, subprocess.SubprocessError, ConfigError) as error:
            raise ConfigError(_missing(str(error))) from error
        if ran.output != "it works\n":
            raise ConfigError(_missing(f"a first command said {ran.output[:200]!r}"))

    def run(
        self,
        command: str,
        *,
        root: str,
        files: Mapping[str, bytes],
        cwd: str,
        objects: Path | None = None,
    ) -> Ran:
        """Run a command on a tree.

        Args:
            command: the command for `bash -c`.
            root: the folder of the tree, which has the same path in the sandbox.
            files: all files in it, by path relative to `root`.
            cwd: the working directory.
            objects: the folder of git's objects, if `files` has a `.git` folder from `git_files`.

        Raises:
            ConfigError: the sandbox can't be created.
        """
        # A thread of its own, because a session keyring is a thread's, and the box ends with the thread.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self._run, command, root, files, cwd, objects).result()

    def _run(
        self, command: str, root: str, files: Mapping[str, bytes], cwd: str, objects: Path | None
    ) -> Ran:
        join_new_keyring()
        with ExitStack() as opened:
            ends = [opened.enter_context(os.fdopen(end, mode)) for end, mode in _pipes(2)]
            output, printed, result, told = ends
            guard = opened.enter_context(Path(self._bash).open("rb"))
            rules = opened.enter_context(filter_file())
            given = [each.fileno() for each in (printed, told, guard, rules)]
            box = self._box(root, objects, guard=given[2], rules=given[3])
            process = subprocess.Popen(
                [*box, "-c", _SCRIPT, "box", root, cwd, command, *map(str, given[:2])],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=given,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                # Of root, the kernel counts no processes.
                user=_NOBODY if self._is_root else None,
                group=_NOBODY if self._is_root else None,
                extra_groups=[] if self._is_root else None,
            )
            printed.close()
            told.close()
            watch = Watch(
                process,
                self.limits.memory_bytes,
                self.limits.disk_bytes,
                ("/tmp", _BOX, "/dev/shm", root),
            )
            answer, complaint, said = _exchanged(
                process, _packed(files), (result, output), watch, self.limits
            )
        if answer == b"":
            why = complaint.decode("utf-8", "replace").strip()
            raise ConfigError(f"bubblewrap could not create the sandbox: {why[:500]}")
        if answer is None or answer == _BEGUN:
            # It took too long or too much, or the command has ended the box itself.
            return Ran(None, "", {})
        return _unpacked(answer.removeprefix(_BEGUN), said, root, files)

    def can_read(self, folder: Path) -> bool:
        """Return whether commands in the sandbox can read a folder. If this process is root, they run as nobody."""
        if not self._is_root:
            return True
        folders = [folder.resolve(), *folder.resolve().parents]
        return all(each.stat().st_mode & 0o001 for each in folders if each.exists())

    def _box(self, root: str, objects: Path | None, *, guard: int, rules: int) -> list[str]:
        limits, disk = self.limits, ["--size", str(self.limits.disk_bytes), "--tmpfs"]
        system = [word for link in ("bin", "sbin", "lib", "lib64") for word in _system(link)]
        # Debian's Java doesn't start without its settings.
        java = map(str, sorted(Path("/etc").glob("java-*")))
        for place in ("/etc/alternatives", "/etc/ld.so.cache", *java):
            system += ["--ro-bind-try", place, place]
        mounts = [word for place in self.mounts for word in ("--ro-bind-try", place, place)]
        return [
            self._program, "--unshare-all", "--unshare-user", "--disable-userns",
            "--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL",
            "--hostname", "box", "--setenv", "PATH", self._path(), "--setenv", "LANG", "C.UTF-8",
            "--setenv", "HOME", "/nonexistent", "--ro-bind", "/usr", "/usr", *system,
            "--proc", "/proc", "--dev", "/dev", *disk, "/dev/shm", "--remount-ro", "/dev",
            *disk, "/tmp", *disk, _BOX,
            "--perms", "0111", "--ro-bind-data", str(guard), _GUARD, "--seccomp", str(rules),
            *(["--ro-bind", str(objects), _OBJECTS] if objects else []),
            *disk, root, *map(str, mounts), "--remount-ro", "/", "--chdir", "/",
            "prlimit", f"--nproc={limits.n_processes}", f"--data={limits.memory_bytes}", "--core=0",
            f"--fsize={limits.disk_bytes}", f"--cpu={int(limits.timeout_s) + 1}", "--", _GUARD,
        ]  # fmt: skip

    def _path(self) -> str:
        mounted = [str(path / "bin") for path in self.mounts if (path / "bin").is_dir()]
        return ":".join([*mounted, "/usr/local/bin", "/usr/bin", "/bin"])


def _exchanged(
    process: subprocess.Popen[bytes],
    data: bytes,
    ends: tuple[IO[bytes], IO[bytes]],
    watch: Watch,
    limits: CommandLimits,
) -> tuple[bytes | None, bytes, bytes]:
    """Return what the guard wrote, what went wrong, and what the command printed.

    The first is None of a command that took too long, wrote too much, or used too much.
    """
    alarm = threading.Timer(limits.timeout_s, process.kill)
    alarm.start()
    complaint, said = bytearray(), bytearray()
    threads = [
        threading.Thread(target=_collect, args=(process.stderr, complaint, 100_000)),
        threading.Thread(target=_collect, args=(ends[1], said, limits.output_bytes)),
        threading.Thread(target=watch.run),
        threading.Thread(target=_feed, args=(process, data)),
    ]
    for thread in threads:
        thread.start()
    result = ends[0].read(_RESULT_BYTES + 1)
    if len(result) > _RESULT_BYTES:
        process.kill()
    process.wait()
    is_stopped = not alarm.is_alive() or len(result) > _RESULT_BYTES
    alarm.cancel()
    for thread in threads:
        thread.join()
    is_stopped |= watch.has_stopped
    return (None if is_stopped else result), bytes(complaint), bytes(said)


def _pipes(n: int) -> Iterator[tuple[int, str]]:
    for end, mode in zip(chain.from_iterable(os.pipe() for _ in range(n)), cycle(("rb", "wb"))):
        # Numbers below ten are those of the script in the box: one given there would be overwritten.
        numbers = [end]
        while numbers[-1] < 10:
            numbers.append(os.dup(end))
        *low, high = numbers
        for number in low:
            os.close(number)
        yield high, mode


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(data)


def _collect(stream: IO[bytes] | None, into: bytearray, most: int) -> None:
    """Read a stream to its end, and keep its first bytes."""
    assert stream is not None
    with stream:
        while piece := stream.read(1 << 16):
            into += piece[: most - len(into)]


def _system(name: str) -> list[str]:
    """Return how a folder of the system is there in the box: a link into `/usr`, or bound."""
    place = Path("/") / name
    if place.is_symlink():
        return ["--symlink", str(place.readlink()), str(place)]
    return ["--ro-bind-try", str(place), str(place)]


def _missing(why: str) -> str:
    return (
        f"commands cannot be run in bubblewrap here ({why}). Install it (`apt-get install bubblewrap`), "
        'or set `workspaces.execute = "files"`, which runs no command'
    )


def _packed(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = 0o755 if data[:2] == b"#!" else 0o644
            tar.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def _unpacked(result: bytes, said: bytes, root: str, files: Mapping[str, bytes]) -> Ran:
    """Read what the guard told: the status, the names of all files, and an archive of those that changed.

    Names and contents are the command's; nothing of them reaches the disk.
    """
    status, _, rest = result.partition(b"\0")
    listed, _, archive = rest.partition(b"\0\0")
    changed: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for entry in tar:
                content = tar.extractfile(entry) if entry.isreg() else None
                data = content.read() if content is not None else b""
                link = f"-> {entry.linkname}" if entry.issym() else None
                changed[posixpath.normpath(entry.name)] = link or data.decode("utf-8", "replace")
    except tarfile.TarError:
        return Ran(None, "", {})
    names = {posixpath.normpath(name) for name in _texts(listed)}
    gone = [name for name in files if name not in names and not _is_git(name)]
    same = {name for name in changed if changed[name].encode() == files.get(name)}
    changes = {name: text for name, text in changed.items() if name not in same}
    return Ran(
        int(status) if status.isdigit() else None,
        said.decode("utf-8", "replace"),
        {f"{root}/{name}": changes.get(name) for name in sorted({*changes, *gone})},
    )


_NO_REF_NAME = re.compile(r"[\x00-\x20~^:?*\[\\\x7f]|\.\.|@\{|//|\.lock(?:/|$)|(?:^|/)\.|[/.]$")
_CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = false\n\tfileMode = false"


def _is_ref_name(name: str) -> bool:
    """Return whether a branch may be called so; merges also name those of a remote."""
    return not _NO_REF_NAME.search(name) and not name.startswith(("origin/", "remotes/"))


def _texts(data: bytes) -> Iterable[str]:
    return (each.decode("utf-8", "replace") for each in data.split(b"\0") if each)


def _is_git(name: str) -> bool:
    return name == ".git" or name.startswith(".git/")


def git_files(
    repository: Repository, commit: GitCommit, branch: str | None, moment: float
) -> dict[str, bytes]:
    """Return a `.git` folder for a copy at a commit. It uses the repository's objects.

    The repository's settings and hooks are not copied.
    """
    refs: dict[str, str] = {}
    for name in filter(_is_ref_name, repository.tips):
        # Where a branch stood then. What it was merged into has its commits too, but not as its own.
        if (newest := repository.tip_at(name, moment)) is not None:
            refs[f"refs/heads/{name}"] = newest.id
            if name in repository.remote_branches:
                refs[f"refs/remotes/origin/{name}"] = newest.id
    refs.pop(f"refs/heads/{branch}", None)
    head = f"ref: refs/heads/{branch}" if branch and branch != "HEAD" else commit.id
    files = {
        ".git/HEAD": head,
        ".git/config": _CONFIG,
        ".git/objects/info/alternates": _OBJECTS,
        ".git/packed-refs": "\n".join(f"{refs[name]} {name}" for name in sorted(refs)),
        ".git/refs/.keep": "",
    }
    if head != commit.id:
        files[f".git/refs/heads/{branch}"] = commit.id
    return {name: f"{text}\n".encode() if text else b"" for name, text in files.items()}
