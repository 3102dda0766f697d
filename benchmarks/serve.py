"""What an answer of a served model costs: CPU seconds of `replay-train serve` over those of `transformers serve`.

    make real-model                         # SmolLM2-135M-Instruct; `make test-engines` installs the peer
    python benchmarks/serve.py              # 32 samples
    python benchmarks/serve.py --small      # 8
    python benchmarks/serve.py --json benchmarks/results/serve.json

Each server gives four samples of each prompt, as `replay-pipeline sample` asks for them, on one
thread: first to one client, then to 16 at once. Prompts have about 300 tokens and samples at most 48,
which differ from server to server, so the figures are CPU milliseconds per token.
`transformers serve` also runs with continuous batching.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "build/real-model/smollm2-135m-instruct"
N_CLIENTS, N_REQUESTS, N_SMALL, N_SAMPLES = 16, 32, 8, 4
START_S = 300
OURS = ["-m", "trainer", "serve", "--model"]
PEER = ["-m", "transformers.cli.transformers", "serve"]
SERVERS = {
    "trainer serve": (OURS, []),
    "transformers serve": (PEER, []),
    "transformers serve, continuous batching": (PEER, ["--continuous-batching"]),
}


def ask(url: str, number: int) -> int:
    """Ask for a sample; give its number of tokens."""
    name = sorted(topics)[number // N_SAMPLES]
    said = f"Sum up in one sentence.\n{topics[name][:1200]}"
    body = {"model": str(MODEL), "messages": [{"role": "user", "content": said}]}
    body |= {"max_tokens": 48, "temperature": 1.0, "seed": number % N_SAMPLES}
    reply = httpx.post(f"{url}/chat/completions", json=body, timeout=600)
    return reply.raise_for_status().json()["usage"]["completion_tokens"]


def measured(words: Sequence[str], more: Sequence[str], n_clients: int, n: int) -> dict[str, Any]:
    """Start a server, warm it up, ask, and stop it; give CPU seconds, wall seconds, and tokens.

    The CPU seconds of the start and of one answer are taken off: a server is asked more than once.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, *words, str(MODEL), *more, "--port", str(port)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, cwd=ROOT, **quiet) as server:
        url = f"http://127.0.0.1:{port}/v1"
        try:
            until = time.monotonic() + START_S
            while True:
                try:
                    httpx.get(f"{url}/models", timeout=5)
                    break
                except httpx.HTTPError:
                    if server.poll() is not None or time.monotonic() > until:
                        raise SystemExit(f"{' '.join(command)} does not answer") from None
                    time.sleep(0.5)
            ask(url, n)
            before_s, started = cpu_s(server.pid), time.perf_counter()
            with ThreadPoolExecutor(n_clients) as pool:
                n_tokens = sum(pool.map(lambda number: ask(url, number), range(n)))
            wall_s = time.perf_counter() - started
            spent_s = cpu_s(server.pid) - before_s
            return {
                "cpu_ms_per_token": round(1000 * spent_s / n_tokens, 1),
                "cpu_s": round(spent_s, 2),
                "wall_s": round(wall_s, 2),
                "n_tokens": n_tokens,
            }
        finally:
            server.terminate()


def cpu_s(pid: int) -> float:
    """Return the user and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_benchmark(n: int) -> dict[str, Any]:
    """Measure every server with one client and with many."""
    found = {
        f"{name}, {n_clients} client{'s' * (n_clients > 1)}": measured(*how, n_clients, n)
        for name, how in SERVERS.items()
        for n_clients in (1, N_CLIENTS)
    }
    ours = found[f"trainer serve, {N_CLIENTS} clients"]["cpu_ms_per_token"]
    peers = [r["cpu_ms_per_token"] for name, r in found.items() if name.startswith("transformers")]
    alone = found["trainer serve, 1 client"]["cpu_ms_per_token"]
    return {
        "n_requests": n,
        "servers": found,
        "one_client_over_many": round(alone / ours, 2),
        "best_peer_over_ours": round(min(peers) / ours, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_benchmark(N_SMALL if options.small else N_REQUESTS)
    for name, row in found["servers"].items():
        spent = f"{row['cpu_ms_per_token']:6.1f} CPU-ms a token, {row['cpu_s']:7.2f} CPU-s"
        print(f"{name:52} {spent}, {row['n_tokens']} tokens")
    print(f"one client over many: {found['one_client_over_many']}")
    print(f"best peer over ours:  {found['best_peer_over_ours']}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
