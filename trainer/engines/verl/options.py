"""What a worker of VeRL has to know of a run: the shared settings, and where its files are."""

import json
from dataclasses import asdict, dataclass

from trainer.engines.verl.environment import VARIABLE, options_text
from trainer.errors import TrainerConfigError
from trainer.losses.channels import DEFAULT_TOP_K, SDPOOptions
from trainer.settings import RunConfig, SharedSettings


@dataclass(kw_only=True)
class PluginOptions(SharedSettings):
    """Options of one run, the same in every process."""

    sdpo_estimator: str = "teacher_topk"
    """All that an inference server can send."""
    pairs: str = ""
    """Tokenized pairs, as `pairs.write_pairs` makes them."""
    pairs_per_pass: int = 2
    """Pairs of one forward and backward pass of a rank."""
    reference: str = ""
    """File for the reference log-probs of all pairs; written once, read on resume."""

    @property
    def top_k(self) -> int:
        """Return entries of the teacher's distribution that the inference server is asked for."""
        return self.sdpo_top_k or DEFAULT_TOP_K

    def sdpo_at(self, step: int) -> SDPOOptions:
        """Return channel 2 at optimizer step `step`, from 0: TAID's target moves linearly."""
        if self.sdpo_wrapper != "taid":
            return self.sdpo
        share = min(step / max(self.max_steps, 1), 1.0)
        return self.sdpo.at(self.taid_t_start + (self.taid_t_end - self.taid_t_start) * share)

    def as_json(self) -> str:
        """Write one line for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PluginOptions":
        """Read the output of `as_json`.

        Raises:
            TrainerConfigError: another version of this package wrote it.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise TrainerConfigError(f"{VARIABLE} is not readable: {error}") from error


def options_of(settings: RunConfig, *, pairs: str, reference: str) -> PluginOptions:
    """Return the options that a settings file asks for."""
    own = settings.own.get("pairs_per_pass", PluginOptions.pairs_per_pass)
    return PluginOptions(
        **asdict(settings.shared), pairs=pairs, pairs_per_pass=int(own), reference=reference
    )


def current_options() -> PluginOptions:
    """Return the options of the run that this process belongs to.

    Raises:
        TrainerConfigError: it belongs to none.
    """
    text = options_text()
    if text is None:
        raise TrainerConfigError(
            f"{VARIABLE} is not set in this worker: start with `python -m trainer verl`, or put it "
            "into ray_kwargs.ray_init.runtime_env.env_vars"
        )
    return PluginOptions.from_json(text)
