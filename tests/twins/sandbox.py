"""A throw-away folder with prepared files, and what a command does in it."""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TIME_LIMIT_S = 10
_LONG_AGO = 1_577_836_800  # 2020-01-01; each prepared file has a time of its own after it
_FAR_AHEAD = 2_145_916_800  # 2038: an access time that reading does not change
_ISOLATED = "TWINS_ARE_ISOLATED"
_FOLDER = "TWINS_FOLDER"

ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "dumb",
    "COLUMNS": "80",
    "EDITOR": "true",
    "GIT_PAGER": "cat",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "Ada",
    "GIT_AUTHOR_EMAIL": "ada@example.org",
    "GIT_AUTHOR_DATE": "2020-02-02T02:02:02Z",
    "GIT_COMMITTER_NAME": "Ada",
    "GIT_COMMITTER_EMAIL": "ada@example.org",
    "GIT_COMMITTER_DATE": "2020-02-02T02:02:02Z",
}

FILES = {
    "a.txt": "apple 3\nBanana 10\ncherry  2\n\n\napple 3\n  date\t7\nÉclair 1.5e1\nbanana -4\n",
    "b.txt": "apple 3\nbanana 9\ncherry 2\ndate 7 \nfig 1K\nApple 3\n",
    "long.txt": "".join(f"line {n} of {n * 7 % 11}\n" for n in range(1, 41)),
    "numbers.txt": "10\n9\n-5\n1e2\n0x1\n2K\n9\n\nJan\n1.10\n1.9\n",
    "s.txt": "a 1\nb 2\nc 3\nd 4\n",
    "t.txt": "a x\nc y\ne z\n",
    "crlf.txt": "one\r\ntwo\r\n",
    "bytes.bin": "\x00\x01apple\x7f\x00\nx\x00",
    "zeros.txt": "apple\x00banana\x00apple\x00",
    "words.txt": "a rather long line of words that has to be wrapped somewhere in its middle\nshort\n",
    "table.csv": "name,n,kind\nfig,3,x\nash,12,y\n",
    "patterns.txt": "apple\nfig\n",
    "script.sed": "s/apple/PEAR/\n2d\n",
    "sums.md5": "0123456789abcdef0123456789abcdef  a.txt\n",
    "Makefile": "all: x y\nx:\n\t@echo x $(V)\ny:\n\techo y\nfail:\n\tfalse\nd: always\nalways:\n",
    "run.sh": 'echo run "$@" $-\n',
    "run.py": "import sys\nprint(sys.argv[1:], sys.flags)\n",
    "with space.txt": "apple pie\n",
    "-n": "a file with an awkward name\n",
    ".hidden": "hidden apple\n",
    "d/x.txt": "apple in d\nfig\n",
    "d/y.log": "log of apples\n",
    "d/sub/z.txt": "deep apple\n",
    "d/.secret": "apple\n",
    "e2/x.txt": "apple in e\nfig\n",
    "e2/w.txt": "more\n",
    "aside/kept.txt": "kept\n",
    "text.b64": "YXBwbGUgcGllCg==\n",
}


class Observation(NamedTuple):
    """What a command did."""

    status: int
    printed: str
    complained: str
    tree: str


def run_isolated(command: list[str]) -> int | None:
    """Run `command` in namespaces of its own; `None` where the system does not allow that."""
    kinds = ("user", "map-root-user", "mount", "net", "pid", "fork", "mount-proc")
    wrapped = ["unshare", *(f"--{kind}" for kind in kinds)]
    if os.environ.get(_ISOLATED) or shutil.which("unshare") is None:
        return None
    tried = subprocess.run([*wrapped, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True)
    if tried.returncode != 0:
        return None
    with tempfile.TemporaryDirectory(prefix="twins-") as folder:
        environment = os.environ | {_ISOLATED: "1", _FOLDER: folder, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([*wrapped, *command], env=environment).returncode


def is_isolated() -> bool:
    """Whether this process runs in namespaces of its own."""
    return bool(os.environ.get(_ISOLATED))


@contextlib.contextmanager
def opened() -> Iterator["Sandbox"]:
    """A sandbox in a new folder, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="twins-", ignore_cleanup_errors=True) as name:
        # In namespaces of its own the process finds a folder that who started it clears away.
        folder = Path(os.environ.get(_FOLDER) or name).resolve()
        if is_isolated():
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "noatime", "tmpfs", str(folder)], check=True
            )
            for line in Path("/proc/self/mounts").read_text().splitlines():
                place = line.split()[1]
                if place != str(folder):
                    subprocess.run(["mount", "-o", "remount,bind,ro", place], capture_output=True)
        yield Sandbox(folder)


class Sandbox:
    """Runs commands, each on the prepared files as if it were the first."""

    def __init__(self, folder: Path) -> None:
        os.umask(0o022)
        self.work = folder / "w"
        self._templates = {kind: folder / kind for kind in ("plain", "repository")}
        self._output = (folder / "output").open("w+b")
        self._errors = (folder / "errors").open("w+b")
        self._kind = ""
        self._pristine: dict[str, str] = {}
        for kind, template in self._templates.items():
            _write_files(self.work)
            if kind == "repository":
                _make_repository(self.work)
            _set_times(self.work)
            self.work.rename(template)

    def observe(self, command: str, *, kind: str = "plain", stdin: str = "") -> Observation:
        """Run `command` in a bash in the folder.

        Args:
            command: The command.
            kind: Which files are there: `plain`, or `repository` with a git repository.
            stdin: What it reads.
        """
        if kind != self._kind:
            self._reset(kind)
        for file in (self._output, self._errors):
            file.seek(0)
            file.truncate()
        process = subprocess.Popen(
            ["bash", "--norc", "-c", command],
            cwd=self.work,
            env=ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=self._errors,
            start_new_session=True,
        )
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(stdin.encode())
            process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        status = _waited(process)
        tree = self._tree(kind)
        if tree != self._pristine[kind]:
            self._kind = ""
        printed, complained = (
            _read(file).replace(str(self.work), "<w>") for file in (self._output, self._errors)
        )
        return Observation(status, printed, complained, tree)

    def _reset(self, kind: str) -> None:
        if self.work.exists():
            shutil.rmtree(self.work, onerror=_made_writable)
        shutil.copytree(self._templates[kind], self.work, symlinks=True)
        _set_times(self.work)
        self._kind = kind
        self._pristine.setdefault(kind, self._tree(kind))

    def _tree(self, kind: str) -> str:
        lines = []
        for folder, folders, names in os.walk(self.work):
            if kind == "repository" and folder.endswith("/.git"):
                # The index holds inodes and times; what it says stands below.
                names = [name for name in names if name != "index"]
            root = str(self.work)
            lines += [_described(os.path.join(folder, name), root) for name in folders + names]
        if kind == "repository":
            done = subprocess.run(
                ["git", "ls-files", "--stage", "-v"],
                cwd=self.work,
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
            )
            lines.append(done.stdout)
        return "\n".join(sorted(lines))


def _waited(process: subprocess.Popen) -> int:
    try:
        with _alarm(TIME_LIMIT_S):
            return process.wait()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return -1000


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _read(file: object) -> str:
    file.seek(0)
    return file.read(1 << 22).decode("latin-1")


def _described(path: str, root: str) -> str:
    """One line on a file: kind, mode, links, content, and its time unless that is now."""
    found = os.lstat(path)
    content = ""
    if stat.S_ISLNK(found.st_mode):
        content = os.readlink(path).replace(root, "<w>")
    elif stat.S_ISREG(found.st_mode):
        content = _digest(path, found.st_ino, found.st_mtime_ns, found.st_ctime_ns)
    times = [
        "now" if _LONG_AGO + 1e8 < when < _FAR_AHEAD - 1e8 else f"{when}"
        for when in (found.st_mtime, found.st_atime)
    ]
    # Reading a folder or a link may set its access time: only that of a file says anything.
    times = times if stat.S_ISREG(found.st_mode) and is_isolated() else times[:1]
    return f"{path[len(root) :]} {found.st_mode:o} {found.st_nlink} {content} {times}"


@functools.lru_cache(maxsize=4_096)
def _digest(path: str, _inode: int, _modified: int, _changed: int) -> str:
    before = os.stat(path)
    try:
        with open(path, "rb") as file:
            digest = hashlib.blake2b(file.read(1 << 24), digest_size=8).hexdigest()
    except PermissionError:
        return "unreadable"
    if not is_isolated():
        with contextlib.suppress(OSError):
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return digest


def _made_writable(remove: object, path: str, _error: object) -> None:
    os.chmod(os.path.dirname(path), 0o700)
    if os.path.isdir(path):
        os.chmod(path, 0o700)
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def _write_files(folder: Path) -> None:
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    (folder / "link").symlink_to("a.txt")
    (folder / "folder link").symlink_to("d")
    (folder / "broken").symlink_to("nowhere")
    (folder / "run.sh").chmod(0o755)
    (folder / "locked.txt").write_text("locked\n")
    (folder / "locked.txt").chmod(0o444)
    for command in ("gzip -kn long.txt", "tar -cf data.tar d s.txt", "md5sum s.txt >> sums.md5"):
        subprocess.run(command, shell=True, cwd=folder, env=ENVIRONMENT, check=True)


def _make_repository(folder: Path) -> None:
    """Two branches, a merge, two tags, equal times, and something changed, staged and untracked."""
    script = """
    git init -q -b main . && git add a.txt b.txt d long.txt && git commit -qm 'Add fruit'
    git tag -a v1 -m 'First' && echo more >> a.txt && git commit -qam 'Add more apples'
    git switch -qc side && echo side > side.txt && git add side.txt && git commit -qm 'Fix side'
    git switch -q main && git mv b.txt moved.txt && git commit -qm 'Move b' && git tag v2
    git merge -q --no-edit side && sed -i 's/line 7/LINE 7/; s/$/ /' long.txt
    git commit -qam 'Change blanks' && git switch -q side && echo x > side.txt
    git commit -qam 'Change side' && git switch -q main && printf '*.log\\nempty/\\n' > .gitignore
    echo changed >> a.txt && echo staged >> d/x.txt && git add d/x.txt && echo late >> d/x.txt
    rm d/sub/z.txt && echo stashed >> long.txt && git stash push -q long.txt
    rm -f .git/hooks/*
    """
    subprocess.run(script, shell=True, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)


def _set_times(folder: Path) -> None:
    paths = sorted(folder.rglob("*"), key=lambda path: (-len(path.parts), str(path)))
    for number, path in enumerate([*paths, folder]):
        when = (_FAR_AHEAD, _LONG_AGO + 1_000 * number)
        os.utime(path, when, follow_symlinks=False)


_ODDITIES = (
    (re.compile(r"\x1b(?:\[[0-9;]*m|\(.)"), ""),
    (re.compile(r"<w>/"), ""),
    (re.compile(r"(?<![\w.])(?:\./+)+"), ""),
    (re.compile(r"aside/\.\./"), ""),
    (re.compile(r"//+"), "/"),
    (re.compile(r"(?<=\w)/(?=[\s:'\"\x1b\0]|$)", re.MULTILINE), ""),
    (re.compile(r"[ \t]+"), " "),
)


def without_spelling(found: Observation) -> Observation:
    """`found` without what only tells how a path was spelled: prefix, column width, order."""

    def plain(text: str) -> str:
        for pattern, to in _ODDITIES:
            text = pattern.sub(to, text)
        return "\n".join(sorted(text.strip().split("\n")))

    return Observation(found.status, plain(found.printed), plain(found.complained), found.tree)
