"""Serve Dagster behind the gate on loopback: web server, daemon, and code location of one data root.

`dagster dev` starts the same parts. But here the web server runs in this process, behind the gate,
and opens no second port that would bypass the gate.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory

import dagster as dg
import uvicorn
import yaml
from dagster._cli.proxy_server_manager import ProxyServerManager
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget
from dagster._utils.interrupts import setup_interrupt_handlers
from dagster._utils.log import configure_loggers
from dagster_shared.ipc import (
    get_ipc_shutdown_pipe,
    open_ipc_subprocess,
    send_ipc_shutdown_message,
)
from dagster_webserver.app import create_app_from_workspace_process_context
from dagster_webserver.cli import (
    DEFAULT_DB_STATEMENT_TIMEOUT,
    DEFAULT_POOL_MAX_OVERFLOW,
    DEFAULT_POOL_RECYCLE,
)
from dagster_webserver.version import __version__ as web_version
from sqlalchemy.exc import SQLAlchemyError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from replay_pipeline.assets.dead_runs import reconcile, retry_dropped
from replay_pipeline.assets.gate import TOKEN, Gate
from replay_pipeline.storage.processes import python

PLACE = "/look/"


class WithPage:
    """Dagster's web application with an added page at its root.

    The folder of the page may appear, change, and disappear while it is served.
    """

    def __init__(self, app: ASGIApp, folder: Path) -> None:
        self._app = app
        self._index = folder / "index.html"
        files = StaticFiles(directory=folder, check_dir=False)
        self._files = Starlette(routes=[Mount(PLACE.rstrip("/"), files)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is about the page, and pass on the rest."""
        path = scope.get("path", "")
        if scope["type"] == "http" and path == "/" and self._index.is_file():
            response = RedirectResponse(f"{PLACE}index.html", HTTPStatus.SEE_OTHER)
            await response(scope, receive, send)
        elif scope["type"] == "http" and path == f"{PLACE}index.html" and self._index.is_file():
            # A page knows its address only here. It may read one file there, which crawlers ask for.
            robots = f"connect-src {Request(scope).base_url}robots.txt"
            page = self._index.read_text("utf-8").replace(
                "default-src", f"{robots}; default-src", 1
            )
            await HTMLResponse(page)(scope, receive, send)
        elif scope["type"] == "http" and path.startswith(PLACE) and self._index.is_file():
            await self._files(scope, receive, send)
        else:
            await self._app(scope, receive, send)


_LOG_LEVEL = "warning"
_POLL_MS = 2000
_CLOSING_S = 3
"""How long a browser's open connection may hold the end up."""
_TELL_AGAIN_S = 10.0
_POLL_S, _RECONCILED_EVERY_S = 0.5, 30.0
_MOST_DEATHS, _WITHIN_S = 5, 600.0
"""A daemon that dies so often is not started again: then a unit starts all of it anew."""


def main(workspace: str, port: int, page: Path) -> None:
    """Serve until the process is stopped. Print the address when it accepts connections."""
    configure_loggers(formatter="colored", log_level="INFO")
    setup_interrupt_handlers()
    listener = _listen(port)
    with (
        dg.DagsterInstance.get() as instance,
        _code_servers(instance, workspace) as (served, are_kept),
        _daemon(served) as given_up,
    ):
        instance.optimize_for_webserver(
            DEFAULT_DB_STATEMENT_TIMEOUT, DEFAULT_POOL_RECYCLE, DEFAULT_POOL_MAX_OVERFLOW
        )
        with WorkspaceProcessContext(
            instance,
            version=web_version,
            workspace_load_target=WorkspaceFileTarget([served]),
            code_server_log_level=_LOG_LEVEL,
        ) as context:
            token = secrets.token_urlsafe(32)
            app = create_app_from_workspace_process_context(context, "", _POLL_MS)
            server = uvicorn.Server(
                uvicorn.Config(
                    Gate(WithPage(app, page), port=port, token=token),
                    log_level=_LOG_LEVEL,
                    access_log=False,
                    proxy_headers=False,
                    timeout_graceful_shutdown=_CLOSING_S,
                )
            )
            threading.Thread(
                target=_look_after, args=(context, given_up, server, are_kept), daemon=True
            ).start()
            sys.stdout.write(f"Open http://127.0.0.1:{port}/?{TOKEN}={token}  (Ctrl-C stops it)\n")
            sys.stdout.flush()
            server.run(sockets=[listener])
    if given_up.is_set():
        sys.exit(1)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        sys.exit(f"error: 127.0.0.1:{port}: can't listen there ({error.strerror}); choose --port")
    listener.listen()
    return listener


@contextmanager
def _code_servers(
    instance: dg.DagsterInstance, workspace: str
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Start the code location once for all.

    Yields a workspace that names it by its socket, and whether a dead server is still started again:
    after one that didn't come up in time, Dagster gives up without a word.
    """
    target = WorkspaceFileTarget([workspace])
    with ProxyServerManager(instance, target, _LOG_LEVEL) as servers, TemporaryDirectory() as name:
        path = Path(name) / "workspace.yaml"
        path.write_text(yaml.safe_dump({"load_from": servers.get_code_server_specs()}), "utf-8")
        threads = servers._process_monitoring_threads
        yield str(path), lambda: bool(threads) and all(each.is_alive() for each in threads)


@contextmanager
def _daemon(workspace: str) -> Iterator[threading.Event]:
    """Keep Dagster's daemon going: sensors, schedules and the queue of runs.

    Runs are processes of their own and go on without it. Yields what is set once it has died too often.
    """
    stop, given_up = threading.Event(), threading.Event()
    keeper = threading.Thread(target=_keep, args=(workspace, stop, given_up))
    keeper.start()
    try:
        yield given_up
    finally:
        stop.set()
        keeper.join()


def _keep(workspace: str, stop: threading.Event, given_up: threading.Event) -> None:
    deaths = deque[float](maxlen=_MOST_DEATHS)
    while not stop.is_set():
        code = _run_daemon(workspace, stop)
        if stop.is_set():
            return
        why = f"signal {-code}" if code < 0 else f"code {code}"
        why += ", as the kernel does where memory is short" if code == -signal.SIGKILL else ""
        deaths.append(time.monotonic())
        if len(deaths) == _MOST_DEATHS and deaths[-1] - deaths[0] < _WITHIN_S:
            sys.stderr.write(
                f"error: Dagster's daemon ended {_MOST_DEATHS} times in {_WITHIN_S / 60:.0f} minutes, last "
                f"with {why}. Everything stops; what is paid for is kept\n"
            )
            given_up.set()
            return
        sys.stderr.write(
            f"Dagster's daemon ended with {why}: it is started again, and runs go on\n"
        )


def _run_daemon(workspace: str, stop: threading.Event) -> int:
    """Run the daemon until it ends, or is to stop."""
    reading, writing = get_ipc_shutdown_pipe()
    words = ("--log-level", "info", "--shutdown-pipe", str(reading), "--workspace", workspace)
    process = open_ipc_subprocess(python("dagster._daemon", "run", *words), pass_fds=[reading])
    while process.poll() is None and not stop.wait(_POLL_S):
        pass
    with suppress(OSError):  # it has ended already, so nobody reads
        send_ipc_shutdown_message(writing)
    while process.poll() is None:
        # Dagster's daemon may lose a signal between two of its looks at them; it buys nothing.
        with suppress(TimeoutExpired):
            process.wait(_TELL_AGAIN_S)
        process.terminate()
    os.close(reading)
    return process.returncode


def _look_after(
    context: WorkspaceProcessContext,
    given_up: threading.Event,
    server: uvicorn.Server,
    are_kept: Callable[[], bool],
) -> None:
    """End and retry what died, again and again; without daemon or code servers, end the server, too."""
    while not given_up.wait(_RECONCILED_EVERY_S):
        if not are_kept():
            sys.stderr.write(
                "error: Dagster's code server did not come up again. Everything stops; what is paid for "
                "is kept\n"
            )
            given_up.set()
            break
        # What the store or a code server refuses now, it may take the next time.
        with suppress(dg.DagsterError, SQLAlchemyError):
            reconcile(context.instance)
            retry_dropped(context)
    server.should_exit = True


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    except KeyboardInterrupt:
        sys.exit(130)
