"""The loopback teacher server, a real process that speaks OpenRouter's protocol."""

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from replay_pipeline.errors import ConfigError
from replay_pipeline.storage.processes import start_environment
from replay_pipeline.testing.router import PREFIX, Bill, Request, Response, Router, Script
from replay_pipeline.types import SAMPLE_TEACHERS, TeacherSpec

if TYPE_CHECKING:
    from aiohttp import web

_HOST = "127.0.0.1"
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from {} import main; main()"


class TeacherServer:
    """Teachers on loopback in a separate process, for tests, benchmarks, and the demo.

    Args:
        answers: recorded answers: a JSON-lines file with `state_id`, `model`, `message`,
            and `finish_reason` per line, or the same as `{state_id: {model: message}}`.
        script: the assistant message for every other state (or messages by model). Without a
            script, such a state gets a 404, "no recorded answer".
        prices: dollars per million tokens, prompt and completion, by model. By default, those of a
            small catalog.
        latency: seconds per call.
        port: 0 takes a free one.

    Raises:
        ConfigError: the server can't start, because of a bad file or a used port. Raised on
            entering.
    """

    program = "replay_pipeline.testing.__main__"
    """The module that the process runs."""
    bill_type = Bill

    def __init__(
        self,
        answers: Path | str | Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
        *,
        script: Mapping[str, Any] | None = None,
        prices: Mapping[str, tuple[float, float]] | None = None,
        latency: float = 0.0,
        port: int = 0,
    ) -> None:
        self._answers = answers
        self.options: dict[str, Any] = {
            "script": script,
            "prices": dict(prices or {}),
            "latency": latency,
        }
        self._port = port
        self._process: subprocess.Popen[str] | None = None
        self._bill: Bill | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "TeacherServer":
        import aiohttp  # noqa: F401, PLC0415 -- where it is missing, the error names its extra

        if isinstance(self._answers, str | Path) and not Path(self._answers).is_file():
            raise ConfigError(f"{self._answers}: no such file of recorded answers")
        self._folder = tempfile.TemporaryDirectory(prefix="teachers-")
        script = Path(self._folder.name) / "script.json"
        options = {**self.options, "answers": self._answers_path()}
        script.write_text(json.dumps(options), "utf-8")
        root = str(Path(__file__).parents[2])
        start = _START.format(self.program)
        command = [sys.executable, "-P", "-c", start, root, str(script), str(self._port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True, env=start_environment(),
        )  # fmt: skip
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("http"):
            _, errors = self._process.communicate()
            self._folder.cleanup()
            words = errors.strip().splitlines()[-1:] or ["no reason given"]
            raise ConfigError(f"the teacher server can't start: {words[0]}")
        self._base_url = line.strip()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            self._bill = self.bill()
        if self._process is not None:
            self._process.communicate()  # its standard input ends, and so does it
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def base_url(self) -> str:
        """Return the address for `TeacherSpec.base_url`."""
        return self._base_url

    def teachers(self, models: Sequence[str] | None = None) -> tuple[TeacherSpec, ...]:
        """Return the sample's teachers, or `models`, with this server's address and without a key."""
        if models is None:
            return self.served(SAMPLE_TEACHERS)
        return self.served([TeacherSpec(name=m.split("/")[-1], model=m) for m in models])

    def served(self, specs: Sequence[TeacherSpec]) -> tuple[TeacherSpec, ...]:
        """Return these teachers with this server's address and without a key."""
        here = {"base_url": self.base_url, "api_key_env": None, "dialect": "openrouter"}
        return tuple(spec.model_copy(update=here) for spec in specs)

    def bill(self) -> Bill:
        """Return the server's own accounting, or its last one after the server has ended."""
        if self._process is None and self._bill is not None:
            return self._bill
        return msgspec.convert(self.control("_bill"), self.bill_type)

    def control(self, name: str, body: Any = None) -> Any:
        """Ask the server about itself.

        Raises:
            ConfigError: it refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base_url}/{name}", data=data)  # noqa: S310
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                message = json.load(error)["error"]["message"]
            raise ConfigError(f"teacher server: {message}") from error

    def _answers_path(self) -> str | None:
        answers = self._answers
        if answers is None:
            return None
        if not isinstance(answers, Mapping):
            return str(Path(answers).resolve())
        assert self._folder is not None
        path = Path(self._folder.name) / "answers.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for state_id, by_model in answers.items():
                for model, message in by_model.items():
                    line = {"state_id": state_id, "model": model, "message": dict(message)}
                    file.write(json.dumps(line) + "\n")
        return str(path)


def serve_teachers(
    router: Router | Script,
    *,
    port: int,
    on_ready: Callable[[str], None],
    until_eof: bool = False,
) -> None:
    """Serve teachers on this machine until the process is stopped.

    Args:
        router: what answers, or its script.
        port: 0 takes a free one.
        on_ready: called with the base URL when the server accepts connections.
        until_eof: whether to end with standard input, so that the server doesn't outlive its
            parent.

    Raises:
        ConfigError: the answers can't be read, or the port is in use.
    """
    if isinstance(router, Script):
        try:
            router = Router(router)
        except (OSError, ValueError) as error:
            raise ConfigError(str(error)) from error
    try:
        asyncio.run(_serve(router, port, on_ready, until_eof=until_eof))
    except OSError as error:
        raise ConfigError(f"{_HOST}:{port}: can't listen there ({error.strerror})") from error


async def _serve(
    router: Router, port: int, on_ready: Callable[[str], None], *, until_eof: bool
) -> None:
    from aiohttp import web  # noqa: PLC0415 -- looking and ingesting go without it

    async def answer(request: web.Request) -> web.StreamResponse:
        """Answer one request. It is computed and charged even if the client leaves."""
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Request(request.method, request.path_qs, headers, await request.read())
        return await _delivered(request, await router(asked))

    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, _HOST, port, backlog=4096).start()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError, RuntimeError):
            loop.add_signal_handler(number, ended.set)
    if until_eof:
        loop.run_in_executor(None, _wait_for_eof).add_done_callback(lambda _: ended.set())
    on_ready(f"http://{_HOST}:{runner.addresses[0][1]}{PREFIX}")
    await ended.wait()
    # No cleanup: it would wait for replies that never come.


def _wait_for_eof() -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdin.read()


async def _delivered(request: "web.Request", response: Response) -> "web.StreamResponse":
    """Send a reply, or hang up before it or within it, as a flaky server does."""
    from aiohttp import web  # noqa: PLC0415 -- looking and ingesting go without it

    if response.delivery == "never":
        await asyncio.Event().wait()
    headers = {"content-type": "application/json", **response.headers}
    if response.delivery == "whole":
        return web.Response(status=response.status, headers=headers, body=response.body)
    begun = web.StreamResponse(status=response.status, headers=headers)
    if response.delivery == "truncated":
        begun.content_length = len(response.body)
        await begun.prepare(request)
        await begun.write(response.body[: len(response.body) // 2])
    if request.transport is not None:
        request.transport.close()
    return begun
