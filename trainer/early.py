"""Refuse a run that can't work, before the training libraries are loaded."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainer.data.dataset import load_preference_data
from trainer.settings import RunConfig, SharedSettings, typed, without_engines


def refuse_early(values: Mapping[str, Any]) -> None:
    """Check settings, dataset, tokenizer, and the configuration of a named model.

    `read_settings`, which needs TRL, checks the other settings.

    Raises:
        TrainerConfigError: a setting is wrong, or the model does not fit.
        DatasetError: the dataset cannot be read, or too many rows would teach nothing.
    """
    told = without_engines(values)
    if not (told.get("model") and told.get("dataset") and told.get("output")):
        return
    known = {entry.name for entry in fields(SharedSettings)}
    trl = {name: value for name, value in (told.get("trl") or {}).items() if name in known}
    run = typed(RunConfig, {**told, "trl": None}, "")
    config = RunConfig(**run | {"trl": typed(SharedSettings, trl, "trl.")})
    config.check()
    from trainer.data.preflight import N_PROMPTS  # noqa: PLC0415
    from trainer.model.loading import inspect, load_tokenizer  # noqa: PLC0415

    data = load_preference_data(config.dataset, revision=config.revision)
    inspect(config, load_tokenizer(config, data), data, n_prompts=N_PROMPTS)
