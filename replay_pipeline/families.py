"""Model families: models of one vendor learn from the same data, so they are one vote."""

from functools import lru_cache

_BY_NAME = (
    ("claude", "anthropic"),
    ("gpt", "openai"),
    ("chatgpt", "openai"),
    ("codex", "openai"),
    ("o1", "openai"),
    ("o3", "openai"),
    ("o4", "openai"),
    ("gemini", "google"),
    ("gemma", "google"),
    ("deepseek", "deepseek"),
    ("qwen", "qwen"),
    ("qwq", "qwen"),
    ("glm", "z-ai"),
    ("kimi", "moonshotai"),
    ("llama", "meta-llama"),
    ("mistral", "mistralai"),
    ("codestral", "mistralai"),
    ("devstral", "mistralai"),
    ("magistral", "mistralai"),
    ("grok", "x-ai"),
    ("minimax", "minimax"),
)

_SPELLINGS = {
    "zai": "z-ai",
    "zai-org": "z-ai",
    "thudm": "z-ai",
    "deepseek-ai": "deepseek",
    "meta": "meta-llama",
    "mistral": "mistralai",
    "moonshot": "moonshotai",
    "xai": "x-ai",
    "alibaba": "qwen",
    "claude": "anthropic",
}


@lru_cache(maxsize=1_024)
def family_of_model(model: str | None) -> str | None:
    """The family of a model or vendor name, under one spelling; `None` for no name.

    >>> family_of_model("claude-opus-4-5-20251101"), family_of_model("anthropic/claude-opus-4.7")
    ('anthropic', 'anthropic')
    """
    if not model:
        return None
    vendor, slash, name = model.lower().rpartition("/")
    known = next((family for prefix, family in _BY_NAME if name.startswith(prefix)), None)
    if known is not None:
        return known
    vendor = vendor.split("/")[-1] if slash else name
    return _SPELLINGS.get(vendor, vendor)
