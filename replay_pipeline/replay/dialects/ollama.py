"""Ollama's OpenAI-compatible server, which cuts long prompts without saying so."""

from replay_pipeline.replay.dialects.base import Dialect


class Ollama(Dialect):
    """Its context length is the server's setting (`OLLAMA_CONTEXT_LENGTH`), no field of a request."""

    name = "ollama"
    ports = (11434,)
