"""An OpenEnv server that knows nothing of us, without MCP tools: guess a number."""

import socket
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """Guess the number."""

    number: int


class Answer(Observation):
    message: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number, self._n_guesses = 0, 0

    def reset(self, seed=None, episode_id=None, number=0, **_):
        self._number, self._n_guesses = number, 0
        return Answer(message=" I think of a number.")

    def step(self, action, timeout_s=None, **_):
        self._n_guesses += 1
        if action.number == self._number:
            return Answer(message="right", reward=1.0, done=True)
        return Answer(message="higher" if action.number < self._number else "lower", reward=-0.25)

    @property
    def state(self):
        return State(step_count=self._n_guesses)


if __name__ == "__main__":
    app = create_fastapi_app(Game, Guess, Answer, max_concurrent_envs=4, env_name="game")
    listener = socket.create_server(("127.0.0.1", 0))
    sys.stdout.write(f"http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
