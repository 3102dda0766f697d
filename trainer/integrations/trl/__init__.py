"""The three channels on TRL: the only room that imports `trl`."""

from trainer.integrations.trl.config import ComposerConfig
from trainer.integrations.trl.trainer import ComposerReplicationTrainer

__all__ = ["ComposerConfig", "ComposerReplicationTrainer"]
