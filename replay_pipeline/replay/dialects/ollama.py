"""Ollama's OpenAI-compatible server, which cuts long prompts without saying so."""

from replay_pipeline.replay.dialects.base import Dialect


class Ollama(Dialect):
    """The server sets the context length (`OLLAMA_CONTEXT_LENGTH`); a request can't."""

    name = "ollama"
    ports = (11434,)
