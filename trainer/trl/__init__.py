"""The three channels on TRL. Only this package imports `trl`."""

from trainer.trl.config import ComposerConfig
from trainer.trl.trainer import ComposerReplicationTrainer

__all__ = ["ComposerConfig", "ComposerReplicationTrainer"]
