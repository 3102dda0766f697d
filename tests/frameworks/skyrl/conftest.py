"""SkyRL's own server of the Tinker API, with its JAX backend on a CPU, and a tiny Qwen3."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.trainer.published import rows_of, write_dataset
from trainer.data.tiny import corpus, train_tokenizer


@pytest.fixture(scope="session")
def dataset(tmp_path_factory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("dataset") / "pairs")


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    train_tokenizer(corpus(rows_of(8)), vocab_size=400).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def server(model, tmp_path_factory):
    """Its address. `uv run` is how it wants to be started: it starts its engine the same way."""
    folder = tmp_path_factory.mktemp("skyrl")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    binaries = Path(sys.executable).parent
    command = [
        *(str(binaries / "uv"), "run", "--no-project", "--active", "-m", "skyrl.tinker.api"),
        *("--base-model", str(model), "--backend", "jax"),
        *("--backend-config", '{"max_lora_adapters": 4, "max_lora_rank": 8}'),
        *("--host", "127.0.0.1", "--port", str(port), "--checkpoints-base", str(folder / "states")),
        *("--database-url", f"sqlite:///{folder / 'tinker.db'}"),
    ]
    environment = os.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "VIRTUAL_ENV": str(binaries.parent),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is all that takes time here
        "UV_OFFLINE": "1",
        "PYTHONPATH": "",
    }
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True, cwd=folder
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        try:
            return httpx.get(f"{address}/api/v1/healthz").status_code == 200
        except httpx.TransportError:
            return False

    try:
        deadline = time.monotonic() + 120
        while not answers():
            assert time.monotonic() < deadline, "SkyRL's server does not answer"
            time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


@pytest.fixture(autouse=True)
def key(monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-loopback")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
