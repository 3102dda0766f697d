"""Train on three channels with a published preference dataset: losses, data, outer loop, and engines.

Public names are loaded on first use, so `import trainer` needs neither transformers nor TRL.
"""

import importlib
from typing import Any

_HOMES = {
    "ComposerConfig": "trainer.engines.trl",
    "ComposerDataCollator": "trainer.data.collator",
    "ComposerReplicationTrainer": "trainer.engines.trl",
    "LossComponents": "trainer.losses.compose",
    "build_batch": "trainer.data.collator",
    "compose_loss": "trainer.losses.compose",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
