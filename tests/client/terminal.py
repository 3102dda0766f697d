"""Conversations in a terminal, as a person has them: keys are sent by tmux, and the screen is read."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from tests.client.clients import Desk
from tests.client.scripted_model import Block, ScriptedModel, call, text

_KEY = "sk-ant-not-a-key-0000000000000000"
_WAIT_S = 20.0
_PAUSE_S = 0.7


class Terminal:
    """A client in a terminal of its own."""

    def __init__(self, desk: Desk, command: list[str], model: ScriptedModel, *options: str) -> None:
        place = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
        settings = {
            "hasCompletedOnboarding": True, "theme": "dark", "numStartups": 3,
            "customApiKeyResponses": {"approved": [_KEY[-20:]], "rejected": []},
            "projects": {str(desk.project): place},
        }  # fmt: skip
        (desk.home / ".claude.json").write_text(json.dumps(settings))
        self._model, self._desk = model, desk
        self._env = desk.env(model.url) | {
            "ANTHROPIC_API_KEY": _KEY, "TERM": "xterm-256color", "LANG": "C.UTF-8"
        }  # fmt: skip
        self._socket = Path(mkdtemp()) / "tmux"  # its path may not be long
        self._tmux(
            "new-session", "-d", "-x", "120", "-y", "50", "-c", str(desk.project), "-s", "lab",
            *command, *options,
        )  # fmt: skip
        self.until(lambda: "❯" in self.screen() or ">" in self.screen())
        time.sleep(2 * _PAUSE_S)

    def screen(self) -> str:
        """Return what is on the screen."""
        return self._tmux("capture-pane", "-p", "-t", "lab")

    def keys(self, *keys: str) -> None:
        """Press keys, by the names that tmux has for them; others are typed."""
        for key in keys:
            self._tmux("send-keys", "-t", "lab", key)
            time.sleep(_PAUSE_S)

    def say(self, words: str, *, n_requests: int = 1) -> None:
        """Type something, and wait for that many requests and until the screen is still."""
        n_before = len(self._model.requests)
        self.keys(words, "Enter")
        self.until(lambda: len(self._model.requests) >= n_before + n_requests)
        self.settle()

    def settle(self) -> None:
        """Wait until nothing moves on the screen."""
        self.until(self._is_still)

    def _is_still(self) -> bool:
        before = self.screen()
        time.sleep(2 * _PAUSE_S)
        return self.screen() == before

    def until(self, is_true: Callable[[], bool]) -> None:
        """Wait for something, but not for ever: what it means for the conversation is seen there."""
        end = time.monotonic() + _WAIT_S
        while not is_true() and time.monotonic() < end:
            time.sleep(_PAUSE_S / 3)

    def close(self) -> None:
        """Leave the client."""
        self._desk.said += self.screen()
        self.keys("/exit", "Enter")
        time.sleep(2 * _PAUSE_S)
        self._tmux("kill-server")

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *arguments],
            env=self._env,
            capture_output=True,
            text=True,
        )
        return done.stdout


def _look(desk: Desk) -> Block:
    return call("Read", file_path=str(desk.project / "a.py"))


def rewound(desk: Desk, command: list[str]) -> ScriptedModel:
    """A message that its user takes back and says in another way."""
    said = [text(f"{number}.") for number in ("One", "Two", "Three", "Four")]
    model = ScriptedModel([[_look(desk)], *([each] for each in said[:3]), [_look(desk)], said[3:]])
    terminal = Terminal(desk, command, model, "--allowedTools", "Read,Edit,Bash")
    terminal.say("MAINTASK: make f return 2", n_requests=2)
    terminal.say("Second")
    terminal.keys("Escape", "Escape")
    terminal.settle()
    terminal.keys("Up", "Enter", "Enter")
    terminal.keys("C-u")
    terminal.say("Rather this")
    terminal.say("And again", n_requests=2)
    terminal.close()
    return model


def summarized(desk: Desk, command: list[str]) -> ScriptedModel:
    """`/compact`, typed, and what is said then."""
    model = ScriptedModel(
        [[_look(desk)], [text("One.")], [_look(desk)], [text("Two.")], [text("Three.")]]
    )
    terminal = Terminal(desk, command, model, "--allowedTools", "Read,Edit,Bash")
    terminal.say("MAINTASK: make f return 2", n_requests=2)
    terminal.say("/compact")
    terminal.say("And now?", n_requests=2)
    terminal.say("And then?")
    terminal.close()
    return model


def modes(desk: Desk, command: list[str]) -> ScriptedModel:
    """Every mode that shift and tab go through, a command of the user's own, a file that is named, and Escape."""
    model = ScriptedModel(
        [
            [_look(desk)], [text("One.")], [_look(desk)], [text("Two.")], [_look(desk)], [text("Three.")],
            [text("Four.")], [text("Five.")], [call("Bash", command="sleep 20")], [text("Six.")],
        ]
    )  # fmt: skip
    terminal = Terminal(desk, command, model, "--allowedTools", "Read,Edit,Bash")
    terminal.say("MAINTASK: make f return 2", n_requests=2)
    for words in ("Second", "Third"):
        terminal.keys("BTab")
        terminal.say(words, n_requests=2)
    terminal.keys("BTab")
    terminal.keys("!")
    terminal.keys("ls")
    terminal.keys("Enter")
    terminal.settle()
    terminal.say("Fourth")
    terminal.keys("Look at @a.py", "Escape", "Enter")
    terminal.settle()
    terminal.keys("Wait", "Enter")
    terminal.until(lambda: len(model.requests) >= 9)
    time.sleep(2 * _PAUSE_S)
    terminal.keys("Escape")
    terminal.settle()
    terminal.say("Why?")
    terminal.close()
    return model


def typed(desk: Desk, command: list[str]) -> ScriptedModel:
    """A task in the background, and messages that are typed while the model works and while it ends."""
    model = ScriptedModel(
        [
            [call("Bash", command="sleep 1; echo slept", run_in_background=True)],
            [call("Bash", command="sleep 5; echo waited")], [call("Bash", command="sleep 4; echo two")],
            [text("One.")], [text("Two.")], [text("Three.")], [text("Four.")], [text("Five.")],
        ]
    )  # fmt: skip
    terminal = Terminal(desk, command, model, "--allowedTools", "Read,Edit,Bash")
    terminal.say("MAINTASK: make f return 2", n_requests=2)
    terminal.keys("Rather 3, please", "Enter", "And tell me why", "Enter")
    terminal.until(lambda: len(model.requests) >= 4)
    terminal.keys("It is late", "Enter")
    terminal.until(lambda: len(model.requests) >= 6)
    terminal.settle()
    terminal.say("And now?")
    terminal.close()
    return model
