"""Real servers on real weights: started from an environment of their own, ended with the tests."""

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from replay_pipeline.types import TeacherSpec

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-frameworks" / "engines" / "bin" / "python"
MODELS = ROOT / "build" / "real-model"
SMOL = MODELS / "smollm2-135m-instruct"
START_S = 300


@dataclass
class Engine:
    """A server that runs, and how it is asked."""

    name: str
    teacher: TeacherSpec
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, body: dict) -> tuple[int, dict]:
        """Send a body as it is; give status and reply."""
        request = urllib.request.Request(
            f"{self.teacher.base_url}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(ValueError):
                return error.code, json.load(error)
            return error.code, {}


def commands(port: int) -> dict[str, tuple[list[str], str]]:
    """Command and model name of each server."""
    python, at = str(PYTHON), ["--host", "127.0.0.1", "--port", str(port)]
    gguf = str(MODELS / "gguf" / f"{SMOL.name}.gguf")
    return {
        "transformers": ([python, "-m", "transformers.cli.transformers", "serve", str(SMOL), *at], str(SMOL)),
        "llama.cpp": ([python, "-m", "llama_cpp.server", "--model", gguf, "--n_ctx", "2048",
                       "--n_threads", "2", *at], "smollm2"),
    }  # fmt: skip


@contextlib.contextmanager
def served(name: str, folder: Path) -> Iterator[Engine]:
    """Run a server until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, model = commands(port)[name]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder)
    teacher = TeacherSpec.model_validate(
        {
            "name": name, "model": model, "base_url": f"http://127.0.0.1:{port}/v1",
            "api_key_env": None, "dialect": name, "price": {"prompt": 1e-7, "completion": 4e-7},
            "max_concurrency": 1, "timeout_s": 300, "family": name,
        }
    )  # fmt: skip
    try:
        until = time.monotonic() + START_S
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < until, log.read_text()[-2000:]
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{teacher.base_url}/models", timeout=5).close()
                break
            time.sleep(0.5)
        yield Engine(name, teacher, process, log)
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="session", params=["transformers", "llama.cpp"])
def engine(request, tmp_path_factory):
    with served(request.param, tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture(scope="session")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    with served("transformers", folder) as one, served("llama.cpp", folder) as other:
        yield one, other
