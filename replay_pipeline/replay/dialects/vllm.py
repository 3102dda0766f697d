"""vLLM's OpenAI-compatible server."""

from replay_pipeline.replay.dialects.base import Dialect


class Vllm(Dialect):
    """Start vLLM with `--enable-auto-tool-choice` and a tool-call parser. It allows parallel calls."""

    name = "vllm"
    is_whole = True
