"""Learn a client's harness: start it twice on loopback with different values, and store what it sends.

The first start has a git repository, and the second one plan mode.
"""

import os
import pty
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.harness.clients import (
    CLIENTS,
    N_ASKED,
    SUBTASK,
    ClientProgram,
    Start,
    leading_calls,
    request_in,
    version_in,
)
from replay_pipeline.harness.harness import Framing, Harness, Kind, words_of_day
from replay_pipeline.harness.listener import KeptRequest, Listener, ToolReply
from replay_pipeline.harness.reminders import LIST_TOOLS, ListReminder, reminders_in, without_plan
from replay_pipeline.harness.slots import AskedRequest, framing_of, values_in
from replay_pipeline.processes import variables

TIMEOUT_S = 10.0
"""How long a client may take until it has sent all that is needed."""
_POLL_S = 0.05
_GRACE_SHARE = 0.8
"""The share of the time limit that the other requests are waited for once the first one is there."""
_SHOWN_CHARS = 400


def learn(
    command: Sequence[str],
    *,
    agent: str = "claude_code",
    version: str | None = None,
    model: str | None = None,
    is_headless: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Harness:
    """Start a client in an empty home and folder, and return the harness that it sends.

    The client is started twice at the same time. Each start has its own home, folder, and process
    group. At the end, processes that are left are killed, and the folders are removed.

    Args:
        command: the program, and its first arguments.
        agent: the name of the client in `CLIENTS`.
        version: the name of the version; by default the one that the client sends.
        model: the model to use; by default the client's own choice.
        is_headless: whether it is started without a terminal (`-p`). Its system prompt and tools
            are then different.
        timeout_s: the time limit for each start.

    Raises:
        ConfigError: the client is unknown, can't be started, or sent no request in time.
    """
    client = CLIENTS.get(agent)
    if client is None:
        raise ConfigError(f"agent {agent!r} is not one of {', '.join(CLIENTS)}")
    with ThreadPoolExecutor(max_workers=2) as pool:
        starts = [
            pool.submit(
                _ask,
                client,
                command,
                model=model,
                is_headless=is_headless,
                has_git=has_git,
                timeout_s=timeout_s,
            )
            for has_git in (True, False)
        ]
        first, second = (start.result() for start in starts)
    planning = second.requests["main"]
    messages, plan = without_plan(planning.messages, first.requests["main"].messages)
    second.requests["main"] = replace(planning, messages=messages)
    found = version or first.version
    if not found:
        raise ConfigError(
            f"{' '.join(command)}: the client does not send its version; pass --version"
        )
    reminders = {
        kind: reminder
        for kind, reminder in first.reminders.items()
        if second.reminders.get(kind) == reminder
    }
    framings: dict[Kind, Framing] = {
        kind: _with_reminders(framing_of(asked, second.requests[kind]), reminders)
        for kind, asked in first.requests.items()
        if kind in second.requests
    }
    framings["main"] = msgspec.structs.replace(framings["main"], plan=plan)
    return Harness(agent=agent, version=found, how="asked", framings=framings)


def _with_reminders(framing: Framing, reminders: Mapping[str, ListReminder]) -> Framing:
    names = {tool["function"]["name"] for tool in framing.tools}
    own = {kind: each for kind, each in reminders.items() if LIST_TOOLS[kind] in names}
    return msgspec.structs.replace(framing, reminders=own)


def harness_of_request(
    body: Mapping[str, Any], *, version: str, agent: str = "claude_code"
) -> Harness:
    """Return the harness of a request that was recorded elsewhere.

    Args:
        body: the request.
        version: the version of the client that sent it.
        agent: whose client it is.

    Raises:
        ConfigError: it isn't a request of this client with tools and a first message.
    """
    client = CLIENTS[agent]
    for path in ("/messages", "/responses", "/chat/completions", ":streamGenerateContent"):
        request = request_in(client, KeptRequest(path, {}, dict(body)), "", {})
        if request is not None and (words := _last_words(request)):
            told = AskedRequest(
                system=request.system, tools=request.tools, messages=request.messages,
                params=request.params, words=words, values=values_in(request),
            )  # fmt: skip
            framings: dict[Kind, Framing] = {"main": framing_of(told)}
            return Harness(agent=agent, version=version, how="request", framings=framings)
    raise ConfigError(
        "this is not the request of a conversation: it needs tools and a first message from the user"
    )


def _last_words(request: AskedRequest) -> str | None:
    """Return the user's own words: the last text of the first message of the user."""
    texts = next((texts for role, texts in request.messages if role == "user"), [])
    return texts[-1] if texts else None


class _Asked:
    """What one start of a client sent."""

    def __init__(
        self,
        requests: dict[Kind, AskedRequest],
        version: str | None,
        reminders: dict[str, ListReminder],
    ) -> None:
        self.requests, self.version, self.reminders = requests, version, reminders


def _ask(
    client: ClientProgram,
    command: Sequence[str],
    *,
    model: str | None,
    is_headless: bool,
    has_git: bool,
    timeout_s: float,
) -> _Asked:
    mark = secrets.token_hex(4)
    words = f"Say hello to {mark}."
    answered = count()

    def answer(kept: KeptRequest) -> Sequence[ToolReply]:
        if not client.has_subagents or client.read(kept) is None or _is_helpers(kept, words):
            return ()
        return leading_calls(kept, next(answered))

    with (
        TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as aside,
        Listener(answer) as server,
    ):
        place = Path(aside).resolve()
        start = Start(
            home=place / f"home-{mark}",
            folder=place / f"work-{mark}",
            url=server.url,
            words=words,
            model=model,
            is_headless=is_headless,
            is_planning=not has_git,
        )
        for folder in (start.home, start.folder):
            folder.mkdir()
        if has_git:
            _make_repository(start.folder, start.home, mark)
        values = {
            "cwd": str(start.folder),
            "home": str(start.home),
            **words_of_day(datetime.now(UTC)),
            "url": server.url,
        }
        said = _run(client, command, start, server, timeout_s)
        requests: dict[Kind, AskedRequest] = {}
        bodies: list[Mapping[str, Any]] = []
        version = None
        for kept in server.kept:
            kind: Kind = "subagent" if _is_helpers(kept, words) else "main"
            request = request_in(client, kept, SUBTASK if kind == "subagent" else words, values)
            if request is not None:
                version = version or version_in(kept)
                requests.setdefault(kind, request)
                if kind == "main":
                    bodies.append(kept.body)
    if "main" not in requests:
        raise ConfigError(
            f"{' '.join(command)}: sent no request within {timeout_s:g} s, so it was stopped; it printed: "
            f"{said[-_SHOWN_CHARS:].strip() or 'nothing'}"
        )
    return _Asked(requests, version, reminders_in(bodies) if client.has_subagents else {})


def _is_helpers(kept: KeptRequest, words: str) -> bool:
    texts = str(kept.body.get("messages"))
    return SUBTASK in texts and words not in texts


def _run(
    client: ClientProgram, command: Sequence[str], start: Start, server: Listener, timeout_s: float
) -> str:
    """Run a client until it has sent what is wanted, ends or is out of time; returns what it printed."""
    arguments, env = client.prepare(start)

    def came() -> list[bool]:
        return [_is_helpers(each, start.words) for each in server.kept if client.read(each)]

    deadline = time.monotonic() + timeout_s
    full_env = {
        "PATH": variables().get("PATH", os.defpath),
        "HOME": str(start.home),
        "TMPDIR": str(start.home),
        "TERM": "xterm-256color",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        **env,
    }
    with _started(
        [*command, *arguments], start.folder, full_env, is_interactive=client.is_interactive
    ) as (
        process,
        said,
    ):
        is_waiting = False
        while time.monotonic() < deadline:
            with server.came:
                server.came.wait(_POLL_S)
            there = came()
            n_main = N_ASKED if client.has_subagents else 1
            is_all = there.count(False) >= n_main and True in [*there, not client.has_subagents]
            if is_all or process.poll() is not None:
                break
            if there and not is_waiting:
                is_waiting = True
                deadline = min(deadline, time.monotonic() + _GRACE_SHARE * timeout_s)
        return said()


@contextmanager
def _started(
    command: Sequence[str], folder: Path, env: Mapping[str, str], *, is_interactive: bool
) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """Start a program in a group of its own, and end the whole group at the end.

    Raises:
        ConfigError: the program cannot be started.
    """
    mine, its = pty.openpty() if is_interactive else os.pipe()
    output: list[bytes] = []

    def drain() -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(mine, 65_536):
                output.append(data)

    try:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(env),
            stdin=its if is_interactive else subprocess.DEVNULL,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
    except OSError as error:
        os.close(mine)
        raise ConfigError(f"{command[0]}: cannot be started ({error})") from error
    finally:
        os.close(its)
    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    try:
        yield process, lambda: _plain(b"".join(output))
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(1.0)
        os.close(mine)


def _plain(data: bytes) -> str:
    """Return what was printed, without the signs that move a cursor or color a text."""
    return re.sub(
        r"\x1b(?:\[[0-9;?<>=]*[A-Za-z]|\][^\x07]*\x07|.)", "", data.decode("utf-8", "replace")
    )


def _make_repository(folder: Path, home: Path, mark: str) -> None:
    """Make the folder a repository, as most folders are that clients work in."""
    (folder / "notes.txt").write_text(f"{mark}\n", "utf-8")
    env = {"PATH": variables().get("PATH", os.defpath), "HOME": str(home)}
    who = ("-c", "user.name=Nobody", "-c", "user.email=nobody@example.com")
    steps = (
        ["init", "-q", "-b", f"branch-{mark}"],
        ["add", "."],
        [*who, "commit", "-qm", f"Add {mark}"],
    )
    with suppress(OSError, subprocess.CalledProcessError):  # without git the folder stays plain
        for step in steps:
            subprocess.run(["git", *step], cwd=folder, env=env, check=True, capture_output=True)
