"""The three channels on TRL: the only room that imports `trl`."""

from trainer.trl.config import ComposerConfig
from trainer.trl.trainer import ComposerReplicationTrainer

__all__ = ["ComposerConfig", "ComposerReplicationTrainer"]
