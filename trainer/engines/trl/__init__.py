"""The three channels on TRL. Only this package imports `trl`."""

from trainer.engines.trl.config import ComposerConfig
from trainer.engines.trl.trainer import ComposerReplicationTrainer

__all__ = ["ComposerConfig", "ComposerReplicationTrainer"]
