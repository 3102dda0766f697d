"""What a worker of VeRL has to know of a run: the weights and forms of channels 2 and 3."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.integrations.settings import EngineSettings
from trainer.integrations.verl.environment import VARIABLE, options_text
from trainer.losses.channels import DEFAULT_TOP_K, ReplayOptions, SDPOOptions


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """Options of one run, the same in every process."""

    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    policy_weight: float = 1.0
    sdpo: SDPOOptions = field(default_factory=lambda: SDPOOptions(estimator="teacher_topk"))
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    taid_t_end: float = 1.0
    """Where TAID's `sdpo.taid_t` goes in `max_steps` optimizer steps."""
    max_steps: int = 1
    pairs: str = ""
    """Tokenized pairs, as `pairs.write_pairs` makes them."""
    pairs_per_step: int = 4
    """Pairs of one optimizer step, over all ranks."""
    pairs_per_pass: int = 2
    """Pairs of one forward and backward pass of a rank."""
    seed: int = 42
    reference: str = ""
    """File for the reference log-probs of all pairs; written once, read on resume."""

    @property
    def top_k(self) -> int:
        """Entries of the teacher's distribution that the inference server is asked for."""
        return self.sdpo.top_k or DEFAULT_TOP_K

    def sdpo_at(self, step: int) -> SDPOOptions:
        """Channel 2 at optimizer step `step`, counted from 0: TAID's target moves linearly."""
        if self.sdpo.wrapper != "taid" or self.sdpo.taid_t is None:
            return self.sdpo
        share = min(step / max(self.max_steps, 1), 1.0)
        return self.sdpo.at(self.sdpo.taid_t + (self.taid_t_end - self.sdpo.taid_t) * share)

    def as_json(self) -> str:
        """One line for the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PluginOptions":
        """Read what `as_json` wrote.

        Raises:
            TrainerConfigError: another version of this package wrote it.
        """
        try:
            values: dict[str, Any] = json.loads(text)
            sdpo, replay = values.pop("sdpo"), values.pop("replay")
            return cls(**values, sdpo=SDPOOptions(**sdpo), replay=ReplayOptions(**replay))
        except (ValueError, TypeError, KeyError) as error:
            raise TrainerConfigError(f"{VARIABLE} is not readable: {error}") from error


def options_of(settings: EngineSettings, *, pairs: str, reference: str) -> PluginOptions:
    """The options that a settings file asks for."""
    shared = settings.shared
    own = settings.own.get("pairs_per_pass", PluginOptions.pairs_per_pass)
    return PluginOptions(
        alpha_sdpo=shared.alpha_sdpo,
        beta_replay=shared.beta_replay,
        policy_weight=shared.policy_weight,
        sdpo=settings.sdpo,
        replay=settings.replay,
        taid_t_end=shared.taid_t_end,
        max_steps=shared.max_steps,
        pairs=pairs,
        pairs_per_step=shared.pairs_per_step,
        pairs_per_pass=int(own),
        seed=shared.seed,
        reference=reference,
    )


def current_options() -> PluginOptions:
    """The options of the run that this process belongs to.

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
