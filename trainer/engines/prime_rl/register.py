"""Add `type = "three_channels"` to PRIME-RL's algorithms, in the processes of its programs.

PRIME-RL has no plug-in hook for algorithms. Their names are in one union of configurations and one
table of classes. `replay-prime-rl` extends both and then runs PRIME-RL's launcher `rl`.
`replay-prime-orchestrator` does the same for `orchestrator`.
"""

import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from pydantic import Field, create_model

from trainer.errors import TrainerConfigError, TrainerError
from trainer.losses.channels import PREFERENCE_NUMBERS, VARIANTS, ReplayOptions

NAME = "three_channels"
COMMIT = "559b44772"
"""The commit that this adapter is written for and tested with. verifiers comes from its submodule."""
ORCHESTRATOR = "replay-prime-orchestrator"


def register() -> None:
    """Extend PRIME-RL's union and table. A second call has no effect.

    Raises:
        TrainerConfigError: PRIME-RL is missing, has another structure, or has already read its
            configurations.
    """
    algorithms = sys.modules.get("prime_rl.orchestrator.algo")
    if algorithms is not None and NAME in algorithms.ALGORITHM_CLASSES:
        return
    if "prime_rl.configs.orchestrator" in sys.modules:
        raise TrainerConfigError(
            "PRIME-RL's configurations were imported before `register()`: start its programs by "
            f"replay-prime-rl or {ORCHESTRATOR}"
        )
    try:
        import prime_rl.configs.algorithm as configs  # noqa: PLC0415 - only where it is installed
    except ImportError as error:
        raise TrainerConfigError(
            f"PRIME-RL is not installed ({error}): recipes/prime_rl/README.md says how"
        ) from error
    try:
        union: Any = configs.AlgoConfig | config_class(configs.GRPOAlgoConfig)
        configs.AlgoConfig = Annotated[union, Field(discriminator="type")]
        import prime_rl.orchestrator.algo as table  # noqa: PLC0415 - after the union is wider

        from trainer.engines.prime_rl.algorithm import (  # noqa: PLC0415
            ThreeChannelAlgorithm,
        )
    except (AttributeError, ImportError) as error:
        raise TrainerConfigError(
            f"this PRIME-RL has other hooks than commit {COMMIT}, for which the adapter is "
            f"written ({error}): check that commit out, with its submodule deps/verifiers"
        ) from error
    table.ALGORITHM_CLASSES[NAME] = ThreeChannelAlgorithm


def config_class(base: Any) -> Any:
    """Return the class of `[orchestrator.algo]` for our type: GRPO's own fields, and those of channels 2 and 3.

    `pairs` is a file from `write_pairs`. Each of the `groups_per_step` groups of rollouts in a batch
    adds its part of the step's pairs. `reference` is the file for the reference log-probs of all
    pairs, written before the first step.
    """
    variant: Any = Literal.__getitem__(tuple(VARIANTS))  # type: ignore[attr-defined]
    numbers: Any = {name: (float, getattr(ReplayOptions, name)) for name in PREFERENCE_NUMBERS}
    kind: Any = Literal["three_channels"]
    return create_model(
        "ThreeChannelsAlgoConfig",
        __base__=base,
        type=(kind, NAME),
        alpha_sdpo=(float, Field(0.0, ge=0)),
        beta_replay=(float, Field(0.0, ge=0)),
        policy_weight=(float, Field(1.0, ge=0)),
        dpo_variant=(variant, "simpo"),
        **numbers,
        pairs=(str, ""),
        pairs_per_step=(int, Field(4, ge=1)),
        groups_per_step=(int, Field(1, ge=1)),
        reference=(str, ""),
        seed=(int, 42),
    )


def main() -> int:
    """Run PRIME-RL's orchestrator with our algorithm added."""
    return _run("orchestrator")


def launch() -> int:
    """Run PRIME-RL's launcher. It starts the orchestrator by name, and finds ours first."""
    with TemporaryDirectory() as folder:
        ours = shutil.which(ORCHESTRATOR) or str(Path(sys.executable).with_name(ORCHESTRATOR))
        Path(folder, "orchestrator").symlink_to(ours)
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")])
        return _run("rl")


def _run(program: str) -> int:
    try:
        register()
    except TrainerError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    module = __import__(f"prime_rl.entrypoints.{program}", fromlist=["main"])
    return int(module.main() or 0)
