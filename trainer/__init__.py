"""Train on three channels with a published preference dataset: losses, data, outer loop, and engines.

Public names are loaded on first use, so `import trainer` needs neither transformers nor TRL.
"""

# ruff: noqa: F401 - `__all__` is made of `_HOMES`

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.data.collator import ComposerDataCollator, build_batch
    from trainer.losses.compose import LossComponents, compose_loss
    from trainer.trl import ComposerConfig, ComposerReplicationTrainer

_HOMES = {
    "ComposerConfig": "trainer.trl",
    "ComposerDataCollator": "trainer.data.collator",
    "ComposerReplicationTrainer": "trainer.trl",
    "LossComponents": "trainer.losses.compose",
    "build_batch": "trainer.data.collator",
    "compose_loss": "trainer.losses.compose",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
