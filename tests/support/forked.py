"""Programs that need not load their packages anew: forked by a server that has loaded them.

`forked(COMMAND)` gives a command that does what a command of this Python does. Its process is a small
client (`forked_client`), which hands what it was given to the server, passes signals on, and ends as
the fork does; killed, it takes the fork with it.
"""

import atexit
import contextlib
import gc
import importlib
import marshal
import os
import random
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
_CLIENT = Path(__file__).with_name("forked_client.py")
_LOADED = (
    "dagster._cli",
    "httpx",
    "replay_pipeline.definitions",
    "replay_pipeline.publish",
    "replay_pipeline.replay",
    "replay_pipeline.stages.doctor",
    "replay_pipeline.testing.server",
    "rich.progress",
    "typer",
)
"""Not in here is what looks at the terminal when it is loaded."""
_READ_AT_IMPORT = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "XDG_CACHE_HOME")
_READ_AT_START = ("LC_ALL", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONWARNINGS")
DECISIVE = (*_READ_AT_IMPORT, *_READ_AT_START)
"""Variables that a fork cannot have otherwise than the server: with others, nothing is forked."""


def forked(command: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Give a command that has a command of this Python run as a fork.

    Args:
        command: a script of this environment, or this Python with `-m`, `-c` or a script, and perhaps `-P`.
    """
    return [sys.executable, "-I", "-S", str(_CLIENT), _server(), *map(os.fspath, command)]


def scripts(folder: Path, *names: str) -> Path:
    """Put commands into a folder that have scripts of this environment run as forks; gives it."""
    for name in names:
        words = " ".join(f"'{word}'" for word in forked([BIN / name]))
        (folder / name).write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


@cache
def _server() -> str:
    """Start the server of this process; gives where it listens."""
    where = Path(tempfile.mkdtemp(prefix="forked-")) / "socket"
    command = [sys.executable, "-P", __file__, str(where)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    server = subprocess.Popen(command, **pipes, start_new_session=True)
    assert server.stdin and server.stdout
    assert server.stdout.read(1), "the server of forks ended"

    def end() -> None:
        server.communicate()
        where.parent.rmdir()

    atexit.register(end)
    return str(where)


def _serve(where: str) -> list[str]:
    """Fork for each client, until standard input ends; returns in the forks, with what they are to run."""
    with warnings.catch_warnings(action="ignore"):
        for name in _LOADED:
            importlib.import_module(name)
        importlib.import_module("replay_pipeline.normalize.data_juicer").load()
    assert not {"polars", "replay_pipeline.cli.console", "torch"} & sys.modules.keys()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(where)
        listener.listen(64)
        os.write(1, b".")
        while 0 not in select.select([listener, 0], [], [])[0]:
            client, _ = listener.accept()
            with client:
                if not os.fork():
                    listener.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return _fork_for(client)
    os.unlink(where)
    os._exit(0)


def _fork_for(client: socket.socket) -> list[str]:
    """Fork once more and wait for the end of it or of the client; returns in the fork."""
    size, files, *_ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        told = marshal.loads(stream.read(int.from_bytes(size)))
    variables = told["variables"]
    if any(variables.get(name) != os.environ.get(name) for name in DECISIVE):
        client.sendall(bytes(8))  # it is to run the command itself
        os._exit(0)
    if pid := os.fork():
        client.sendall(pid.to_bytes(8))
        ended = os.pidfd_open(pid)
        if ended not in select.select([client, ended], [], [])[0]:
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            client.sendall(status.to_bytes(8))
        os._exit(0)
    os.setsid()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(told["folder"])
    os.umask(told["umask"])
    resource.setrlimit(resource.RLIMIT_FSIZE, told["file_size"])
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    tempfile.tempdir = None
    return told["words"]


def _run(program: str, *words: str) -> None:
    """Be a program, as if Python had been started with its command."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    is_safe = bool(os.environ.get("PYTHONSAFEPATH"))
    how = "script"
    if program == sys.executable:
        program, *words = words
        if program == "-P":
            is_safe, (program, *words) = True, words
        if program in ("-m", "-c"):
            how, (program, *words) = program, words
    if not is_safe:
        sys.path.insert(0, str(Path(program).parent) if how == "script" else os.getcwd())
    sys.argv = [program, *words]
    if how == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv[0] = "-c"
        exec(compile(program, "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    _run(*_serve(sys.argv[1]))
