"""Record a client's harness: start it against a server on loopback, and read the request it sends.

The server speaks as much of Anthropic's Messages, OpenAI's Responses and chat completions as a
client needs to end its turn.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

from replay_pipeline.errors import ConfigError
from replay_pipeline.ingesters.harness.harness import OF_THE_MODEL, Harness, slug_of, words_of_day
from replay_pipeline.storage.processes import variables
from replay_pipeline.types import Tool

_KEY = "sk-ant-not-a-key-0000000000000000"
"""What a client sends where it wants a key; it opens nothing."""
_AGENTS = {"claude-cli": "claude_code", "codex_exec": "codex", "codex_cli_rs": "codex"}
"""Names of agents in logs, by the names with which their clients present themselves."""
_NO_PARAMS = frozenset({"model", "messages", "system", "tools", "metadata", "stream", "input",
                        "instructions", "prompt_cache_key", "client_metadata"})  # fmt: skip
_OF_THE_MACHINE = re.compile(
    r"^.*(?:Platform|operating system is|OS Version|Shell|git repo(?:sitory)?): .*\n?", re.MULTILINE
)
"""Lines of what a client finds where it is started, which no log has."""
_POLL_S = 0.05
_SHOWN_CHARS = 400

_Kept = tuple[str, str, dict[str, Any]]
"""A request: path, the client's name and version, and body."""


def record(
    command: Sequence[str],
    *,
    agent: str | None = None,
    version: str | None = None,
    timeout_s: float = 60.0,
) -> Harness:
    """Start a client in an empty home and folder, and return the harness that it sends.

    The client gets a base URL on this machine and a key that opens nothing. When it has sent a
    request with tools, it is stopped, with all processes that it has started.

    Args:
        command: the client's program and arguments, one of which is what the user says. It gets a
            terminal, so `claude hi` is recorded as well as `claude -p hi`.
        agent: the client's name in logs; by default by what its request says.
        version: its version; by default the one that its request names.
        timeout_s: the time limit.

    Raises:
        ConfigError: the client can't be started, sent no request with tools in time, or its request
            doesn't name its version.
    """
    program = shutil.which(command[0])
    if program is None:
        raise ConfigError(f"{command[0]}: there is no such program")
    kept: SimpleQueue[_Kept] = SimpleQueue()
    with (
        TemporaryDirectory(prefix="client-", ignore_cleanup_errors=True) as aside,
        _Server(("127.0.0.1", 0), _handler_of(kept)) as server,
    ):
        threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True).start()
        home, folder = Path(aside).resolve() / "home", Path(aside).resolve() / "work"
        for each in (home, folder):
            each.mkdir()
        env = _environment(home, folder, f"http://127.0.0.1:{server.server_port}")
        terminal, screen = os.openpty()
        with (home.parent / "said").open("w+b") as said:
            process = subprocess.Popen(
                [str(Path(program).absolute()), *command[1:]], cwd=folder, env=env,
                stdin=screen, stdout=screen, stderr=screen, start_new_session=True,
            )  # fmt: skip
            os.close(screen)
            threading.Thread(target=_copy, args=(terminal, said), daemon=True).start()
            try:
                path, client, body = _first_with_tools(kept, process, timeout_s)
            except Empty:
                said.seek(0)
                words = said.read().decode("utf-8", "replace").strip()[-_SHOWN_CHARS:]
                raise ConfigError(
                    f"{' '.join(command)}: sent no request with tools within {timeout_s:g} s; it "
                    f"printed: {words or 'nothing'}"
                ) from None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                server.shutdown()
    name, _, number = client.partition("/")
    found = re.match(r"\d+(?:\.\d+)+", number)
    if not version and (found is None or name == "OpenAI"):  # the library's version, not its own
        raise ConfigError(f"its request says {client!r} of its version: pass --version")
    values = {"cwd": str(folder), "cwd_slug": slug_of(str(folder)), "home": str(home)}
    return _harness_of(
        path,
        body,
        command[1:],
        entrypoint=_entrypoint_of(client, body),
        agent=agent or _AGENTS.get(name) or re.sub(r"[^a-z0-9]+", "_", name.lower()),
        version=version or (found[0] if found else ""),
        values=values | words_of_day(datetime.now(UTC)),
    )


def _copy(terminal: int, said: BinaryIO) -> None:
    """Keep what a client writes on its terminal, until it is gone."""
    with suppress(OSError, ValueError), os.fdopen(terminal, "rb", buffering=0) as screen:
        while data := screen.read(1 << 16):
            said.write(data)


def _first_with_tools(
    kept: "SimpleQueue[_Kept]", process: "subprocess.Popen[bytes]", timeout_s: float
) -> _Kept:
    """Wait for the first request with tools: those without make titles.

    Raises:
        Empty: the client ended, or is out of time.
    """
    deadline = time.monotonic() + timeout_s
    is_over = False
    while not is_over:
        is_over = process.poll() is not None or time.monotonic() > deadline
        with suppress(Empty):
            while True:
                path, client, body = kept.get(timeout=_POLL_S)
                if _tools_in(path, body):
                    return path, client, body
    raise Empty


def _environment(home: Path, folder: Path, url: str) -> dict[str, str]:
    """Return the variables of a client. Codex reads the address from its settings alone."""
    (home / ".codex").mkdir()
    # What Claude Code asks a person at its first start.
    place = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    answers = {
        "hasCompletedOnboarding": True, "theme": "dark", "numStartups": 3,
        "customApiKeyResponses": {"approved": [_KEY[-20:]], "rejected": []},
        "projects": {str(folder): place},
    }  # fmt: skip
    (home / ".claude.json").write_text(json.dumps(answers), "utf-8")
    (home / ".codex" / "config.toml").write_text(
        'model_provider = "loopback"\napproval_policy = "never"\n'
        '[model_providers.loopback]\nname = "loopback"\nwire_api = "responses"\n'
        f'env_key = "OPENAI_API_KEY"\nbase_url = "{url}/v1"\n',
        "utf-8",
    )
    options = {"baseURL": f"{url}/v1", "apiKey": _KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"any": {}}}
    opencode = {"provider": {"loopback": provider}, "model": "loopback/any", "autoupdate": False}
    return {
        "PATH": variables().get("PATH", os.defpath),
        "HOME": str(home),
        "TMPDIR": str(home),
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": _KEY,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": _KEY,
        "OPENAI_MODEL": "any",
        "COPILOT_PROVIDER_BASE_URL": f"{url}/v1",
        "COPILOT_PROVIDER_API_KEY": _KEY,
        "COPILOT_MODEL": "gpt-4.1",
        "COPILOT_OFFLINE": "true",
        "OPENCODE_CONFIG_CONTENT": json.dumps(opencode),
        "DISABLE_TELEMETRY": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _harness_of(
    path: str,
    body: Mapping[str, Any],
    arguments: Sequence[str],
    *,
    agent: str,
    version: str,
    entrypoint: str,
    values: Mapping[str, str],
) -> Harness:
    """Return the texts around the user's words, which are one of the arguments."""
    items = body.get("messages") or body.get("input") or ()
    told = [(str(m["role"]), _texts_of(m.get("content"))) for m in items if m.get("role")]
    first = next((n for n, (role, _) in enumerate(told) if role == "user"), len(told))
    system = [*_texts_of(body.get("system") or body.get("instructions"))]
    system += [text for _, texts in told[:first] for text in texts]
    places = [
        (text.strip() not in arguments, place, number)
        for place, (role, texts) in enumerate(told)
        if role == "user"
        for number, text in enumerate(texts)
        if any(words and words in text for words in arguments)
    ]
    _, place, number = min(places, default=(True, first, 0))
    # The longest first: the folder's name may hold another value.
    spelled = sorted(((v, f"⟦{k}⟧") for k, v in values.items()), key=lambda each: -len(each[0]))
    model = str(body.get("model"))
    of_model = (model, "powered by the model", "knowledge cutoff", "Co-Authored-By: Claude ")

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(each) for key, each in value.items()}
        if isinstance(value, list):
            return [marked(each) for each in value]
        if not isinstance(value, str):
            return value
        for known, slot in spelled:
            value = value.replace(known, slot)
        lines = _OF_THE_MACHINE.sub("", value).split("\n")
        return "\n".join(
            f"{OF_THE_MODEL}{line}" if any(words in line for words in of_model) else line
            for line in lines
        )

    before = [text for _, texts in told[first:place] for text in texts]
    return Harness(
        agent=agent,
        version=version,
        entrypoint=entrypoint,
        model=model,
        system=marked([text for text in system if not text.startswith("x-anthropic-")]),
        tools=marked(_tools_in(path, body)),
        before=marked([*before, *(told[place][1][:number] if places else ())]),
        after=marked(
            [
                {"role": role, "content": "\n\n".join(texts)}
                for role, texts in told[place + 1 :]
                if role in ("system", "user", "developer")
            ]
        ),
        params={key: value for key, value in body.items() if key not in _NO_PARAMS},
    )


def _entrypoint_of(client: str, body: Mapping[str, Any]) -> str:
    """Return how Claude Code was started: it says so in a line above its prompt, or by its name."""
    first = next(iter(_texts_of(body.get("system"))), "")
    found = re.search(r"cc_entrypoint=([\w-]+)", first) or re.search(
        r"\(external, ([\w-]+)", client
    )
    return found[1] if found else ""


def _texts_of(content: Any) -> list[str]:
    blocks = [{"text": content}] if isinstance(content, str) else content or ()
    return [each["text"] for each in blocks if isinstance(each.get("text"), str)]


def _tools_in(path: str, body: Mapping[str, Any]) -> list[Tool]:
    """Return the tools of a request in OpenAI's form."""
    own = list(body.get("tools") or ())
    if path.endswith("/chat/completions"):
        return own
    if path.endswith("/responses"):
        # Newer versions of Codex put their tools into an item of the conversation.
        own += [tool for item in body.get("input") or () for tool in item.get("tools") or ()]
    return [
        {
            "type": "function",
            "function": {
                "name": str(tool.get("name") or tool.get("type")),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema")
                or tool.get("parameters")
                or {"type": "object"},
            },
        }
        for tool in own
    ]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report nothing: a client that is ended leaves its connections."""


def _handler_of(kept: "SimpleQueue[_Kept]") -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Report nothing."""

        def do_HEAD(self) -> None:
            self._send(200, b"", "text/plain")

        def do_GET(self) -> None:
            self._send(404, b"{}", "application/json")

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = self.path.partition("?")[0]
            events = next((each for end, each in _ANSWERS.items() if path.endswith(end)), None)
            if events is None:
                self._send(200, b'{"input_tokens": 1}', "application/json")
                return
            with suppress(ValueError):
                kept.put((path, self.headers.get("user-agent") or "", json.loads(data)))
            lines = "".join(
                f"event: {each.get('type', 'message')}\ndata: {json.dumps(each)}\n\n"
                for each in events
            )
            self._send(200, lines.encode(), "text/event-stream")

        def _send(self, status: int, data: bytes, kind: str) -> None:
            with suppress(OSError):  # the client may be gone already
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    return Handler


_MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "any", "content": [],
            "stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 1}}  # fmt: skip
_ITEM = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "Done.", "annotations": []}]}  # fmt: skip
_RESPONSE = {"id": "resp_1", "object": "response", "output": [_ITEM], "status": "completed",
             "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}}  # fmt: skip
_CHUNK = {"id": "chat_1", "object": "chat.completion.chunk", "model": "any"}
_ANSWERS: dict[str, list[dict[str, Any]]] = {
    "/messages": [
        {"type": "message_start", "message": _MESSAGE},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Done."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
    "/responses": [
        {"type": "response.created", "response": {**_RESPONSE, "status": "in_progress"}},
        {"type": "response.output_item.done", "output_index": 0, "item": _ITEM},
        {"type": "response.completed", "response": _RESPONSE},
    ],
    "/chat/completions": [
        {**_CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": "Done."}}]},
        {**_CHUNK, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ],
}  # fmt: skip
"""What ends a turn, as a stream of events."""
