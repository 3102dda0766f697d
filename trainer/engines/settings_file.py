"""Read a settings file for one engine. Unknown settings are refused."""

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainer.errors import TrainerConfigError
from trainer.settings import (
    HOSTS_OF_TRL,
    RunConfig,
    SharedSettings,
    mapping_of,
    section_of,
    typed,
    without_engines,
)

logger = logging.getLogger(__name__)

SPEED_ONLY = frozenset(
    {
        "disable_tqdm",
        "logging_steps",
        "max_packed_tokens",
        "pair_forward",
        "report_to",
        "use_cpu",
    }
)
"""Fields of the `trl` section that change only speed or output, and nothing that is learned."""

WITHOUT_LEASH = {
    "drift_weight": "nothing keeps the model's calls well formed",
    "balance_pairs": "a model that is trained on its own mistakes may learn to distrust itself",
}
"""What follows where fields of the `trl` section that hold a model against its first weights are
ignored. Only TRL has them."""
LEASH = frozenset({"drift_tokens", *WITHOUT_LEASH})


def read_settings(values: Mapping[str, Any], engine: str = "trl") -> RunConfig:
    """Read the settings of `engine`. An unknown setting is an error.

    Raises:
        TrainerConfigError: a field is missing, unknown, or of the wrong type, or has no counterpart
            in the engine.
    """
    told = without_engines(values)
    if engine in HOSTS_OF_TRL:
        # TRL's own fields are known only where it is installed.
        from trainer.diloco.callback import OuterOptions  # noqa: PLC0415
        from trainer.engines.trl.config import ComposerConfig  # noqa: PLC0415

        section: type = ComposerConfig
        section_of(OuterOptions, told.get("outer_options"), "outer_options.")
    else:
        section = SharedSettings
        told = _without_unused(told, engine)
    trl = typed(section, told.get("trl"), "trl.")
    own = (values.get("engines") or {}).get(engine) or {}
    missing = [name for name in ("dataset", "output") if not told.get(name)]
    if missing:
        raise TrainerConfigError(f"{' and '.join(missing)} must be set")
    run = typed(RunConfig, told, "") | {"trl": trl}
    config = RunConfig(**run, engine=engine, own=dict(own))
    config.check()
    return config


def _without_unused(values: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """Leave out and log what changes nothing under `engine`; refuse what would change something.

    Raises:
        TrainerConfigError: a setting has no counterpart in the engine.
    """
    trl = mapping_of("trl", values.get("trl"))
    known = {entry.name for entry in fields(SharedSettings)} | SPEED_ONLY | LEASH
    if foreign := sorted(set(trl) - known):
        raise TrainerConfigError(
            f"trl.{foreign[0]} has no counterpart in {engine}: remove it, and use {engine}'s own setting under engines.{engine} instead"
        )
    for name in ("outer_options", "resume_from"):
        if values.get(name):
            raise TrainerConfigError(f"{name} has no counterpart in {engine}: remove it")
    about_evaluation = {name for name in ("agreement", "evaluation", "tiny") if values.get(name)}
    for name in sorted(f"trl.{name}" for name in set(trl) & SPEED_ONLY) + sorted(about_evaluation):
        logger.info("%s: %s is not used", engine, name)
    for name, what in WITHOUT_LEASH.items():
        if trl.get(name):
            logger.warning(
                "%s ignores trl.%s, so %s; compare greedy actions before and after",
                engine,
                name,
                what,
            )
    kept = {name: value for name, value in values.items() if name not in about_evaluation}
    unused = SPEED_ONLY | LEASH
    return kept | {"trl": {name: value for name, value in trl.items() if name not in unused}}
