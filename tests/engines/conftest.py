"""Real servers on real weights: started as processes of their own, ended with the tests."""

import contextlib
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from replay_pipeline.types import TeacherSpec
from tests.support.ports import free_port

HERE = Path(__file__).parent
MODELS = HERE.parents[1] / "build" / "real-model"
LLAMA_CONTEXT = 4096
START_S = 300


@dataclass
class Engine:
    """A server that runs, and how it is asked."""

    name: str
    teacher: TeacherSpec
    process: subprocess.Popen[bytes]
    log: Path

    def post(self, body: dict) -> tuple[int, Any]:
        """Send a body as it is; give status and reply, a text where it is not JSON."""
        request = urllib.request.Request(
            f"{self.teacher.base_url}/chat/completions",
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode()
            with contextlib.suppress(ValueError):
                return error.code, json.loads(text)
            return error.code, text


def commands(port: int) -> dict[str, tuple[list[str], str]]:
    """Command and model name of each server.

    SmolLM2 is served with its own chat template, which drops tools without a word; Gemma 3, a base
    model without one, with a template that knows tools.
    """
    host = ["--host", "127.0.0.1", "--port", str(port)]
    smol, gemma = str(MODELS / "smollm2-135m-instruct"), str(MODELS / "gguf" / "gemma-3-270m.gguf")
    serve = ["-m", "transformers.cli.transformers", "serve"]
    llama, template = (str(HERE / name) for name in ("llama_server.py", "tools.jinja"))
    return {
        "transformers": ([*serve, smol, *host], smol),
        "checkpoints": ([*serve, *host], "named by each request"),
        "llama.cpp": ([llama, gemma, template, str(port), str(LLAMA_CONTEXT)], "gemma-3-270m"),
    }


@contextlib.contextmanager
def served(name: str, folder: Path) -> Iterator[Engine]:
    """Run a server until the block ends."""
    port = free_port()
    command, model = commands(port)[name]
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, cwd=folder
        )
    teacher = TeacherSpec.model_validate(
        {
            "name": name, "model": model, "base_url": f"http://127.0.0.1:{port}/v1",
            "api_key_env": None, "dialect": name.replace("checkpoints", "transformers"), "price": {"prompt": 1e-7, "completion": 4e-7},
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
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # a server that has loaded several models
            process.kill()
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
