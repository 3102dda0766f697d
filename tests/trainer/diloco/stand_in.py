"""A replica that makes rounds without a trainer: it moves all parameters a little."""

import numpy as np

from trainer.data.dataset import load_preference_data
from trainer.diloco import OuterReplica, OuterSettings, ParameterVector, outer_preset
from trainer.engines.settings_file import read_settings
from trainer.model.loading import load_model, load_tokenizer


class OtherReplica:
    """Rank 0 of two, whose parameters are those of the run that `test_resume` makes."""

    def __init__(self, dataset, output, store, *, rounds="synchronous", n_rounds=3):
        config = read_settings(
            {
                "dataset": str(dataset), "output": str(output),
                "tiny": {"hidden_size": 32, "vocab_size": 512},
            }
        )  # fmt: skip
        tokenizer = load_tokenizer(config, load_preference_data(config.dataset))
        model = load_model(config, tokenizer, seed=42)
        view = ParameterVector(model)
        settings = OuterSettings(
            rounds=rounds, codec="ternary", outer=outer_preset("average"), n_rounds=n_rounds,
            signature=view.signature, quorum=1, first_grace_s=0.05,
        )  # fmt: skip
        self.replica = OuterReplica(store, view.read(), rank=0, world_size=2, settings=settings)
        self.replica.join()

    def make_rounds(self, n):
        for _ in range(n):
            noise = np.random.default_rng(self.replica.round_id).standard_normal(
                self.replica.theta.size
            )
            self.replica.exchange(self.replica.theta + 1e-4 * noise.astype(np.float32))
