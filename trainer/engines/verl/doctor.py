"""Check whether the plug-in is active, because VeRL silently trains without it."""

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from trainer.engines.verl.options import PluginOptions
from trainer.errors import TrainerConfigError

SUPPORTED = ("0.9",)
BACKEND = "fsdp2"
"""The engine that `prepare` makes VeRL build."""


def require_version() -> None:
    """Check that VeRL is installed, in a version that the plug-in was tested with.

    Raises:
        TrainerConfigError: VeRL is missing, or has an untested version.
    """
    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError as error:
        raise TrainerConfigError(
            "the engine verl needs the package verl: make an environment of its own with "
            "pip install -r recipes/verl/requirements.txt"
        ) from error
    if not version.startswith(SUPPORTED):
        raise TrainerConfigError(
            f"verl {version} is installed and the plug-in was tested with {SUPPORTED[0]}.x: "
            f"pip install 'verl>={SUPPORTED[0]},<0.10'"
        )


def require_live_engine() -> None:
    """Check that VeRL would build our engine in a process like this one.

    Raises:
        TrainerConfigError: VeRL would build its own engine, and train on channel 1 alone.
    """
    from verl.workers.engine import EngineRegistry  # noqa: PLC0415 - only where VeRL is

    from trainer.engines.verl.engine import ComposerEngine  # noqa: PLC0415

    try:
        found = EngineRegistry.get_engine_cls("language_model", BACKEND)
    except (AssertionError, ValueError) as error:
        raise TrainerConfigError(f"VeRL has no {BACKEND} engine here: {error}") from error
    if not issubclass(found, ComposerEngine):
        raise TrainerConfigError(
            f"VeRL would train with {found.__name__}, on channel 1 alone: the entry point "
            "'verl.plugins' of this package is not installed, is switched off "
            "(VERL_USE_EXTERNAL_PLUGINS), or failed (see the log)"
        )


def silent_channels(metrics: Mapping[str, Any], options: PluginOptions) -> list[str]:
    """Return the channels with a weight but without metrics in a step, each with a remedy."""
    channels = (
        (2, options.alpha_sdpo, "sdpo/n_tokens"),
        (3, options.beta_replay, "replay/n_pairs"),
    )
    return [
        f"channel {n} has weight {weight} and reported nothing: the plug-in is not live in the workers"
        for n, weight, name in channels
        if weight > 0 and not _has(metrics, name)
    ]


def _has(metrics: Mapping[str, Any], name: str) -> bool:
    return any(key == name or key.endswith(f"/{name}") for key in metrics)
