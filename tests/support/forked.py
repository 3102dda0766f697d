"""Programs that need not load their packages again: forked by a server that has loaded them.

`forked(COMMAND)` gives a command that does what a command of this Python does. Its process is a small
client (`forked_client`), which hands what it was given to the server, passes signals on, and ends as
the fork does; killed, it takes the fork with it. All workers of a test run share the servers.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import marshal
import multiprocessing.spawn
import os
import random
import resource
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

_PYTHON = sys.executable  # which tests replace
BIN = Path(_PYTHON).parent
_CLIENT = Path(__file__).with_name("forked_client.py")
_LIBRARIES = (
    "boto3", "dill", "fsspec", "httpx_aiohttp", "jsonschema", "matplotlib", "multiprocess", "pandas",
    "pyarrow.dataset", "pyarrow.parquet", "pydantic", "rich.progress", "torch._dynamo", "typer",
)  # fmt: skip
LOADED = {
    "libraries": _LIBRARIES,
    "teachers": ("tests.support.teachers",),
    "trainer": (
        "accelerate",
        "datasets",
        "trainer.engines.trl.run",
        "transformers.models.qwen2.modeling_qwen2",
    ),
    "pipeline": (
        "dagster._cli",
        "httpx",
        "replay_pipeline.assets.definitions",
        "replay_pipeline.publish",
        "replay_pipeline.replay",
        "replay_pipeline.stages.views.doctor",
        "replay_pipeline.testing.server",
        "rich.progress",
        "typer",
    ),
}
"""What programs of a kind need. Not in here is what looks at the terminal when it is loaded, and in
`libraries` neither code of ours nor what looks for a hub."""
_WORDS = {
    "libraries": "*",
    "teachers": "*replay_pipeline.testing.__main__* | *tests.support.teachers*",
    "trainer": "*'-m trainer'* | *replay_train* | *torch* | *benchmarks*",
    "pipeline": "*",
}
"""What a shell finds in the commands of a kind."""
_READ_AT_IMPORT = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "XDG_CACHE_HOME")
_READ_AT_START = ("LC_ALL", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONWARNINGS")
DECISIVE = {
    "libraries": ("OMP_NUM_THREADS", *_READ_AT_START),
    "teachers": _READ_AT_START,
    "trainer": (*_READ_AT_IMPORT, *_READ_AT_START),
    "pipeline": (*_READ_AT_IMPORT, *_READ_AT_START),
}
"""Variables that a fork cannot have otherwise than the server: with others, nothing is forked."""


def forked(
    command: Sequence[str | os.PathLike[str]], kind: str = "pipeline", *, children: str = ""
) -> list[str]:
    """Give a command that has a command of this Python run as a fork.

    Args:
        command: a script of this environment, or this Python with `-m`, `-c` or a script, perhaps after
            `-B`, `-P` or `-u`; with other options nothing is forked.
        kind: what is loaded already, a key of `LOADED`.
        children: what the program takes for this Python when it starts programs by itself, such as
            `forked_python()`; by default this Python.
    """
    client = [_PYTHON, "-I", "-S", str(_CLIENT), _server(kind), children]
    return [*client, *map(os.fspath, command)]


def fork_of(process: subprocess.Popen[Any]) -> int:
    """Give the number of the process that does the work of a forked command."""
    name = Path(f"/proc/{process.pid}/comm")
    while not (number := name.read_text().strip()).isdigit():
        assert process.poll() is None
        time.sleep(0.001)
    return int(number)


@cache
def scripts() -> Path:
    """Give a folder with commands of this environment that run as forks, for a shell's PATH."""
    python = forked_python()
    folder = Path(python).with_name(f"bin-{os.getpid()}")
    folder.mkdir()
    (folder / "python").symlink_to(python)
    for name in ("dagster", "replay-pipeline", "replay-train"):
        kind = "trainer" if name == "replay-train" else "pipeline"
        words = shlex.join(forked([BIN / name], kind, children=python))
        _write_script(folder / name, f'exec {words} "$@"')
    return folder


@cache
def forked_python(*kinds: str) -> str:
    """Give a Python whose programs run as forks, and theirs, for what starts programs by itself.

    Args:
        kinds: keys of `LOADED`; the first that a command's words name is taken, and this Python if
            they name none.
    """
    kinds = kinds or ("teachers", "trainer", "pipeline")
    script = Path(_server(kinds[0])).with_name(f"python-{os.getpid()}-{len(kinds)}")
    cases = ""
    for kind in kinds:
        words = shlex.join(forked([BIN / "python"], kind, children=str(script)))
        cases += f'{_WORDS[kind]}) exec {words} "$@";; '
    _write_script(script, f'case "$*" in {cases}*) exec {shlex.quote(_PYTHON)} "$@";; esac')
    return str(script)


def _write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)


@cache
def _server(kind: str) -> str:
    """Start the server of a kind, unless another worker has; gives where it listens."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    folder = Path(tempfile.gettempdir()) / f"forked-{run}-{kind}"
    folder.mkdir(mode=0o700, exist_ok=True)
    where, users = folder / "socket", folder / "users"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_first = not users.exists()
        if is_first:
            os.mkfifo(users)
            # It ends with the last process that has this open.
            reading = os.open(users, os.O_RDONLY | os.O_NONBLOCK)
        os.open(users, os.O_WRONLY)
        if is_first:
            subprocess.run([_PYTHON, "-P", __file__, kind, str(where)], stdin=reading, check=True)
            os.close(reading)
    return str(where)


def _serve(kind: str, where: str) -> list[str]:
    """Fork for each client, until standard input ends; returns in the forks, with what they are to run."""
    with warnings.catch_warnings(action="ignore"):
        for name in LOADED[kind]:
            importlib.import_module(name)
        if kind == "pipeline":
            importlib.import_module("replay_pipeline.normalize.data_juicer").load()
    assert not {"polars", "replay_pipeline.cli.console"} & sys.modules.keys()
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen(64)
        if os.fork():
            os._exit(0)  # it is there
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):  # who waits for their end waits for that of what the starter wrote
            os.dup2(nowhere, number)
        os.close(nowhere)
        told = _fork_for_clients(listener, DECISIVE[kind])
    if told is None:
        shutil.rmtree(Path(where).parent)
        os._exit(0)
    return _as_told(told)


@dataclass(frozen=True)
class _Fork:
    pid: int
    ended: int
    """A file that can be read once the process has ended."""
    client: socket.socket

    def tell_end(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.tell(status)
        self.close()

    def tell(self, number: int) -> None:
        with contextlib.suppress(OSError):  # it was killed
            self.client.sendall(number.to_bytes(8))

    def close(self) -> None:
        os.close(self.ended)
        self.client.close()


def _fork_for_clients(listener: socket.socket, decisive: tuple[str, ...]) -> dict[str, Any] | None:
    """Fork for each client; returns in the forks with what they are told, here at the end of input."""
    forks: list[_Fork] = []
    while True:
        ended, clients = [fork.ended for fork in forks], [fork.client for fork in forks]
        ready, _, _ = select.select([0, listener, *ended, *clients], [], [])
        for fork in forks[:]:
            if fork.ended in ready:
                fork.tell_end()
                forks.remove(fork)
            elif fork.client in ready or 0 in ready:  # it was killed, or the tests have ended
                os.kill(fork.pid, signal.SIGKILL)
        if 0 in ready:
            return None
        if listener in ready:
            client, _ = listener.accept()
            told = _received(client)
            if told is None or not _can_fork(told, decisive):
                with contextlib.suppress(OSError), client:
                    client.sendall(bytes(8))  # it runs its command itself
            elif pid := os.fork():
                forks.append(_Fork(pid, os.pidfd_open(pid), client))
                forks[-1].tell(pid)
            else:
                client.close()
                for fork in forks:
                    fork.close()
                return told
            for file in told["here"] if told else ():
                os.close(file)


def _received(client: socket.socket) -> dict[str, Any] | None:
    """What a client tells, with its files `here`; nothing if it was killed."""
    files: list[int] = []
    try:
        size, files, *_ = socket.recv_fds(client, 8, 64)
        with client.makefile("rb") as stream:
            return {**marshal.loads(stream.read(int.from_bytes(size))), "here": files}
    except (ConnectionError, EOFError):
        for file in files:
            os.close(file)
        return None


def _can_fork(told: dict[str, Any], decisive: tuple[str, ...]) -> bool:
    if any(told["variables"].get(name) != os.environ.get(name) for name in decisive):
        return False
    if "pytest" in told["words"]:  # which loads packages in a way of its own
        return False
    return _options(*told["words"])[0] <= {"-B", "-P", "-u"}


def _as_told(told: dict[str, Any]) -> list[str]:
    """Make this process what the client was; gives the words of its command."""
    os.setsid()
    # First out of each other's way.
    files = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1000) for file in told["here"]]
    for file in told["here"]:
        os.close(file)
    for number, file in zip(told["files"], files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(told["folder"])
    os.umask(told["umask"])
    resource.setrlimit(resource.RLIMIT_FSIZE, told["file_size"])
    os.environ.clear()
    os.environ.update(told["variables"])
    if told["children"]:
        sys.executable = told["children"]
        multiprocessing.spawn.set_executable(told["children"])
    random.seed()
    tempfile.tempdir = None
    return told["words"]


def _options(program: str, *words: str) -> tuple[set[str], list[str]]:
    """Give the options of Python in a command, and what follows them."""
    if Path(program).parent != BIN or not Path(program).name.startswith("python"):
        return set(), [program, *words]
    options = list(takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c"), words))
    return set(options), [*words[len(options) :]]


def _run(program: str, *words: str) -> None:
    """Be a program, as if Python had been started with its command."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    options, (program, *words) = _options(program, *words)
    if "-u" in options:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    is_safe = bool(os.environ.get("PYTHONSAFEPATH")) or "-P" in options
    how = "script"
    if program in ("-m", "-c"):
        how, (program, *words) = program, words
    if not is_safe:
        sys.path.insert(0, str(Path(program).parent) if how == "script" else str(Path.cwd()))
    sys.argv = [program, *words]
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv[0] = "-c"
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(program, run_name="__main__")


def _exit_status(words: Sequence[str]) -> int:
    """Run a program; gives the status that Python would end with."""
    try:
        _run(*words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 (as the interpreter does)
        sys.excepthook(*sys.exc_info())
    else:
        return 0
    return 1


if __name__ == "__main__":
    status = _exit_status(_serve(*sys.argv[1:]))
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Libraries take down threads at the end, and those of the server are not in its forks.
    os._exit(status)
