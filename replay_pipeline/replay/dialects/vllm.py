"""vLLM's OpenAI-compatible server."""

from replay_pipeline.replay.dialects.base import Dialect


class Vllm(Dialect):
    """It needs `--enable-auto-tool-choice` and a tool-call parser, and lets calls be parallel."""

    name = "vllm"
    is_whole = True
