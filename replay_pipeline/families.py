"""Model families. Models of one vendor learn from the same data, so they share one vote."""

import tomllib
from functools import lru_cache
from pathlib import Path

_KNOWN = tomllib.loads(Path(__file__).with_name("families.toml").read_text("utf-8"))


@lru_cache(maxsize=1_024)
def family_of_model(model: str | None) -> str | None:
    """Return the family of a model or vendor name in one spelling, or None without a name.

    >>> family_of_model("claude-opus-4-5-20251101"), family_of_model("anthropic/claude-opus-4.7")
    ('anthropic', 'anthropic')
    """
    if not model:
        return None
    vendor, slash, name = model.lower().rpartition("/")
    for family, beginnings in _KNOWN["models"].items():
        if name.startswith(tuple(beginnings)):
            return family
    vendor = vendor.split("/")[-1] if slash else name
    return _KNOWN["spellings"].get(vendor, vendor)
