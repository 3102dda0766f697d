"""The options of a run for VeRL's workers: the shared settings, and the places of its files.

They travel in an environment variable, because Ray may start workers on any machine, and VeRL's
worker configurations have no field for a plug-in.
"""

import json
import os
from dataclasses import asdict, dataclass

from trainer.errors import TrainerConfigError
from trainer.losses.channels import DEFAULT_TOP_K, SDPOOptions
from trainer.settings import RunConfig, SharedSettings

VARIABLE = "REPLAY_VERL_OPTIONS"
BACKEND = "fsdp2"
"""The engine that `prepare` makes VeRL build."""


@dataclass(kw_only=True)
class PluginOptions(SharedSettings):
    """Options of one run, which are the same in every process."""

    sdpo_estimator: str = "teacher_topk"
    """The only form that an inference server can support."""
    pairs: str = ""
    """File of tokenized pairs from `write_pairs`."""
    pairs_per_pass: int = 2
    """Pairs per forward and backward pass of a rank."""
    reference: str = ""
    """File for the reference log-probs of all pairs, written once and read on resume."""

    @property
    def top_k(self) -> int:
        """Return the number of entries of the teacher's distribution to request from the inference server."""
        return self.sdpo_top_k or DEFAULT_TOP_K

    def sdpo_at(self, step: int) -> SDPOOptions:
        """Return the options of channel 2 at optimizer step `step`, counted from 0. TAID's target moves linearly."""
        if self.sdpo_wrapper != "taid":
            return self.sdpo
        share = min(step / max(self.max_steps, 1), 1.0)
        return self.sdpo.at(self.taid_t_start + (self.taid_t_end - self.taid_t_start) * share)

    def as_json(self) -> str:
        """Return the options as one line for the environment."""
        return json.dumps(asdict(self))


def plugin_options(settings: RunConfig, *, pairs: str, reference: str) -> PluginOptions:
    """Return the options that a settings file asks for."""
    own = settings.own.get("pairs_per_pass", PluginOptions.pairs_per_pass)
    return PluginOptions(
        **asdict(settings.shared), pairs=pairs, pairs_per_pass=int(own), reference=reference
    )


def current_options() -> PluginOptions:
    """Return the options of the run that this process belongs to.

    Raises:
        TrainerConfigError: it belongs to no run, or to one of another version of this package.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        raise TrainerConfigError(
            f"{VARIABLE} is not set in this worker: start with `replay-train verl`, or put it "
            "into ray_kwargs.ray_init.runtime_env.env_vars"
        )
    try:
        return PluginOptions(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise TrainerConfigError(f"{VARIABLE} is not readable: {error}") from error


def verl_environment(options: PluginOptions, **more: str) -> dict[str, str]:
    """Return the environment for the VeRL process: that of this process plus the options."""
    return {**os.environ, VARIABLE: options.as_json(), **more}
