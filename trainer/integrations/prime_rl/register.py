"""Puts `type = "three_channels"` among PRIME-RL's algorithms, in the orchestrator's process.

PRIME-RL has no plug-in hook for algorithms: names live in one union of configurations and one
table of classes. `replay-prime-orchestrator` widens both, then is PRIME-RL's own `orchestrator`.
"""

import importlib.metadata
import sys
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from trainer.errors import TrainerConfigError, TrainerError
from trainer.integrations.prime_rl.algorithm import Pipeline, ThreeChannels
from trainer.integrations.prime_rl.contract import DefaultLoss, LossInputs
from trainer.integrations.prime_rl.loss import default_loss

NAME = "three_channels"


def register() -> None:
    """Widen PRIME-RL's union and table.

    Raises:
        TrainerConfigError: PRIME-RL is missing, of another shape, or has read its configurations
            already.
    """
    if "prime_rl.configs.orchestrator" in sys.modules:
        raise TrainerConfigError(
            "PRIME-RL's configurations were imported before `register()`: start the orchestrator "
            "with replay-prime-orchestrator"
        )
    try:
        import prime_rl.configs.algorithm as configs  # noqa: PLC0415 - only where it is installed
    except ImportError as error:
        raise TrainerConfigError(
            f"PRIME-RL is not installed ({error}): recipes/prime_rl/README.md says how"
        ) from error
    for name in ("AlgoConfig", "GRPOAlgoConfig"):
        if not hasattr(configs, name):
            raise TrainerConfigError(
                f"prime_rl.configs.algorithm has no {name}: this adapter was written for 0.8.0"
            )
    union: Any = configs.AlgoConfig | config_class(configs.GRPOAlgoConfig)
    configs.AlgoConfig = Annotated[union, Field(discriminator="type")]
    import prime_rl.orchestrator.algo as algorithms  # noqa: PLC0415 - after the union is wider

    ThreeChannels.pipeline = _pipeline()
    algorithms.ALGORITHM_CLASSES[NAME] = type(
        "ThreeChannelAlgorithm", (ThreeChannels, algorithms.GRPOAlgorithm), {}
    )


def config_class(base: Any) -> Any:
    """`[orchestrator.algo]` with our type: GRPO's own fields, and those of channels 2 and 3."""
    variant: Any = Literal["dpo", "dpo_norm", "simpo"]
    kind: Any = Literal["three_channels"]
    return create_model(
        "ThreeChannelsAlgoConfig",
        __base__=base,
        type=(kind, NAME),
        alpha_sdpo=(float, 0.0),
        beta_replay=(float, 0.0),
        policy_weight=(float, 1.0),
        dpo_variant=(variant, "simpo"),
        dpo_beta=(float, 0.1),
        simpo_beta=(float, 2.0),
        simpo_gamma=(float, 1.0),
        pairs=(str, ""),
        pairs_per_step=(int, 4),
        groups_per_step=(int, 1),
        reference=(str, ""),
        seed=(int, 42),
    )


def _pipeline() -> Pipeline:
    from prime_rl.orchestrator.algo.base import iter_trainable_traces  # noqa: PLC0415
    from prime_rl.orchestrator.algo.routing import assign_reference_logprobs  # noqa: PLC0415
    from prime_rl.orchestrator.trajectories import iter_trainable_branches  # noqa: PLC0415

    renderers: dict[str, Any] = {}

    def hint_ids(algorithm: Any, text: str) -> list[int]:
        from renderers.base import create_renderer, load_tokenizer  # noqa: PLC0415

        name = algorithm.clients.model_name
        if name not in renderers:
            renderer = algorithm.clients.train_client.renderer
            renderers[name] = create_renderer(load_tokenizer(name), renderer)
        message = {"role": "system", "content": text}
        return renderers[name].render_ids([message], add_generation_prompt=False)

    return Pipeline(
        trainable_traces=lambda episodes: [t for _, t in iter_trainable_traces(episodes)],
        branches=lambda trace: [branch for branch, _ in iter_trainable_branches(trace)],
        assign_reference=assign_reference_logprobs,
        hint_ids=hint_ids,
    )


def doctor() -> None:
    """Compare the installed PRIME-RL's default loss with the recorded contract, value and gradient.

    Raises:
        TrainerConfigError: they differ: this version's loss is another one than that of 0.8.0.
    """
    import torch  # noqa: PLC0415 - the message above should not have to wait for it

    generator = torch.Generator().manual_seed(0)
    sampled = -torch.rand(32, generator=generator, dtype=torch.float64)
    moved = sampled + 0.3 * torch.randn(32, generator=generator, dtype=torch.float64)
    advantages = torch.randn(32, generator=generator, dtype=torch.float64)
    seen = []
    for loss, kind in ((default_loss(), _installed_inputs()), (DefaultLoss(), LossInputs)):
        leaf = moved.clone().requires_grad_()
        value = loss(
            kind(
                trainer_logprobs=leaf,
                inference_logprobs=sampled,
                ref_logprobs=None,
                advantages=advantages,
                loss_mask=torch.ones(32, dtype=torch.bool),
                loss_weights=None,
            )
        ).loss
        (gradient,) = torch.autograd.grad(value, leaf)
        seen.append(torch.cat([value.detach()[None], gradient]))
    error = float((seen[0] - seen[1]).norm() / seen[1].norm())
    if error > 1e-6:
        raise TrainerConfigError(
            f"the installed PRIME-RL's default loss differs from that of 0.8.0 by {error:.1e}: "
            "credit as advantages may no longer have the pairwise gradient"
        )


def _installed_inputs() -> Any:
    try:
        from prime_rl.trainer.rl.loss import LossInputs as Theirs  # noqa: PLC0415
    except ImportError:
        return LossInputs
    return Theirs


def main() -> int:
    """PRIME-RL's orchestrator with our algorithm among its own."""
    try:
        register()
        doctor()
        found = importlib.metadata.entry_points(group="console_scripts", name="orchestrator")
        if not found:
            raise TrainerConfigError("PRIME-RL installs no command `orchestrator`: is it 0.8.0?")
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return int(next(iter(found)).load()() or 0)
