"""Run llama.cpp's own server, as the `xllamacpp` wheel carries it: no compiler is needed.

python tests/engines/llama_server.py MODEL.gguf TEMPLATE.jinja PORT CONTEXT
"""

import signal
import sys
from pathlib import Path

import xllamacpp


def main(model: str, template: str, port: str, context: str) -> None:
    """Serve on loopback until the process is told to end."""
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.chat_template, params.use_jinja = Path(template).read_text("utf-8"), True
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_ctx, params.n_parallel = int(context), 1
    # Its threads wait for each other by spinning: two of them on two busy cores are twenty times
    # slower than one.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    _server = xllamacpp.Server(params)  # serves as long as it lives
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
