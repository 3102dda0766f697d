"""Other agents that take an OpenAI endpoint: driven on loopback, their logs beside what they sent.

    python -m tests.client.others tests/data

writes the recording of Qwen Code for `make test`, with other names for folders of this machine.
"""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.client.clients import FOLDER, Place, packed
from tests.client.opencode import ChatModel

_PATHS = ("path", "file_path", "absolute_path", "filePath")
_FILLED = {"boolean": False, "integer": 1, "number": 1}
_READERS, _SHELLS = ("read", "read_file", "view"), ("bash", "run_shell_command", "shell")


class FileModel(ChatModel):
    """A model that reads a file, runs it and reads one that isn't there, by whatever tools it is offered."""

    def __init__(self, file: Path) -> None:
        super().__init__([], [])
        self._file = str(file)

    def say(self, body: dict[str, Any]) -> tuple[int, list[tuple[str, dict[str, Any]]], str, int]:
        """Return the number of a request, calls, text and tokens of its answer."""
        tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
        if not tools:
            return 0, [], "A title", 100
        self.requests.append({"messages": body["messages"]})
        number = len(self.requests)
        reader = next(tools[name] for name in _READERS if name in tools)
        shell = next(tools[name] for name in _SHELLS if name in tools)
        if number == 1:
            return number, [_call(reader, self._file)], "I look.", 100
        if number == 2:
            missing = _call(reader, f"{self._file}.missing")
            return number, [_call(shell, "python3 a.py"), missing], "", 200
        return number, [], "Done.", 300


def _call(tool: dict[str, Any], value: str) -> tuple[str, dict[str, Any]]:
    properties = tool["parameters"].get("properties", {})
    arguments = {
        name: value if name in (*_PATHS, "command")
        else _FILLED.get(properties.get(name, {}).get("type"), "Run it")
        for name in tool["parameters"].get("required") or list(properties)[:1]
    }  # fmt: skip
    return tool["name"], arguments


class OtherDesk(Place):
    """A home and a project in which another agent works."""

    def have(self, agent: str) -> FileModel:
        """Have a conversation of three requests with an agent."""
        model = FileModel(self.project / "a.py")
        command, env = AGENTS[agent](self.home, model.url)
        done = subprocess.run(
            [*command, "-p", "MAINTASK: look"], cwd=self.project,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "NO_COLOR": "1", **env},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        self.said = done.stdout + done.stderr
        model.close()
        return model


def _qwen_code(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    (home / ".qwen").mkdir()
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    }
    (home / ".qwen" / "settings.json").write_text(json.dumps(settings))
    command = packed("@qwen-code/qwen-code@0.15.10", FOLDER / "qwen-0.15.10", "cli.js")
    return [*command, "--yolo"], {
        "OPENAI_API_KEY": "none",
        "OPENAI_BASE_URL": url,
        "OPENAI_MODEL": "m1",
    }


def _pi(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    place = home / ".pi" / "agent"
    place.mkdir(parents=True)
    model = {"id": "m1", "name": "m1", "reasoning": False, "input": ["text"], "contextWindow": 100_000, "maxTokens": 4_000,
             "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}}  # fmt: skip
    lab = {"baseUrl": url, "apiKey": "none", "api": "openai-completions", "models": [model]}
    (place / "models.json").write_text(json.dumps({"providers": {"lab": lab}}))
    folder = FOLDER / "pi-0.73.1"
    program = folder / "node_modules" / ".bin" / "pi"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"]
        subprocess.run([*install, "@mariozechner/pi-coding-agent@0.73.1"], cwd=folder, check=True)
    return [str(program), "--provider", "lab", "--model", "m1"], {"PI_OFFLINE": "1"}


def _copilot(home: Path, url: str) -> tuple[list[str], dict[str, str]]:
    del home
    command = packed("@github/copilot-linux-x64@1.0.102", FOLDER / "copilot", "copilot")
    env = {
        "COPILOT_PROVIDER_BASE_URL": url, "COPILOT_PROVIDER_API_KEY": "none", "COPILOT_MODEL": "gpt-4.1",
        "COPILOT_OFFLINE": "true", "COPILOT_AUTO_UPDATE": "false",
    }  # fmt: skip
    return [*command, "--allow-all-tools"], env


AGENTS = {"qwen_code": _qwen_code, "pi": _pi, "copilot": _copilot}
"""How each agent is started, by its name."""


def main() -> None:
    """Have Qwen Code's conversation, and write its recording."""
    with TemporaryDirectory() as place:
        desk = OtherDesk(Path(place))
        model = desk.have("qwen_code")
        (log,) = desk.home.rglob("chats/*.jsonl")
        told = {"rows": log.read_text().splitlines(), "sent": model.requests}
        text = json.dumps(told, ensure_ascii=False)
        for name, other in ((desk.project, "/home/kim/tide"), (desk.home, "/home/kim")):
            text = text.replace(str(name), other)
        told = json.loads(text)
        for each in told["sent"]:
            each["messages"] = [m for m in each["messages"] if m["role"] != "system"]
        data = json.dumps(told, ensure_ascii=False).encode()
        (Path(sys.argv[1]) / "qwen_code.json.gz").write_bytes(gzip.compress(data, mtime=0))


if __name__ == "__main__":
    main()
