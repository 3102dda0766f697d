"""Load a tokenizer and a causal LM as a settings file says, with adapters."""

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer

from trainer.data.dataset import PreferenceData
from trainer.data.preflight import Preflight, log_findings, preflight
from trainer.data.rendering import Renderer
from trainer.data.tiny import corpus, make_model, train_tokenizer
from trainer.errors import TrainerConfigError
from trainer.settings import PeftOptions, RunConfig, SharedSettings

logger = logging.getLogger(__name__)


def load_tokenizer(config: RunConfig, data: PreferenceData) -> Any:
    """Load the named model's tokenizer, or train a tiny one on the dataset's own text."""
    if config.model is None:
        return train_tokenizer(
            corpus(data.pairs or data.sft_pairs("answers")), vocab_size=config.tiny.vocab_size
        )
    tokenizer = fresh_tokenizer(config)
    tokenizer.padding_side = "left"
    return tokenizer


def fresh_tokenizer(config: RunConfig) -> Any:
    """Load the named model's tokenizer as its maker made it.

    Raises:
        TrainerConfigError: the tokenizer doesn't exist.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(config.model, **_source(config))
    except (OSError, ValueError) as error:
        raise TrainerConfigError(f"model={config.model}: no tokenizer there ({error})") from error
    for name in ("is_local", "local_files_only"):  # how it was found would be saved with it
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def usable_data(
    config: RunConfig, renderer: Renderer, data: PreferenceData
) -> tuple[PreferenceData, Preflight]:
    """Remove the rows that teach nothing or don't fit, and log the findings, before weights are loaded."""
    if config.model is not None:
        model = AutoConfig.from_pretrained(config.model, **_source(config))
        _check_context(model, config.shared)
    found = preflight(renderer, data, config.preflight)
    log_findings(found)
    kept = found.fitting | {"pairs": found.usable}
    rows = {name: [getattr(data, name)[i] for i in places] for name, places in kept.items()}
    return replace(data, **rows), found


def _check_context(config: Any, shared: SharedSettings) -> None:
    n_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    longest = shared.max_prompt_tokens + max(
        shared.max_response_tokens, shared.max_completion_length
    )
    if n_positions is not None and longest > n_positions:
        raise TrainerConfigError(
            f"the model has {n_positions} positions, and max_prompt_tokens="
            f"{shared.max_prompt_tokens} with max_response_tokens={shared.max_response_tokens} and "
            f"max_completion_length={shared.max_completion_length} would need {longest}"
        )


def load_model(config: RunConfig, tokenizer: Any, *, seed: int) -> Any:
    """Load the named causal LM, with an adapter if the settings say so, or make a tiny one."""
    if config.model is None:
        tiny = config.tiny
        model: Any = make_model(
            tokenizer,
            hidden_size=tiny.hidden_size,
            n_layers=tiny.n_layers,
            n_heads=tiny.n_heads,
            is_mimetic=tiny.is_mimetic,
            seed=seed,
        )
    else:
        model = load_base(config)
    return model if config.peft is None else with_adapter(model, config.peft)


def load_base(config: RunConfig) -> Any:
    """Load the named causal LM itself.

    Raises:
        TrainerConfigError: it cannot be loaded in this form.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, and of no use before

    options: dict[str, Any] = {"dtype": getattr(torch, config.dtype)}
    if config.attention is not None:
        options["attn_implementation"] = config.attention
    try:
        return AutoModelForCausalLM.from_pretrained(config.model, **options, **_source(config))
    except (OSError, ValueError, ImportError) as error:
        raise TrainerConfigError(f"model={config.model}: cannot be loaded ({error})") from error


def _source(config: RunConfig) -> dict[str, Any]:
    return {"revision": config.model_revision, "trust_remote_code": config.trust_remote_code}


def with_adapter(model: Any, options: PeftOptions) -> Any:
    """Freeze a model and add LoRA adapters.

    Raises:
        TrainerConfigError: the model has no such layers.
    """
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=_targets(model, options),
        layers_to_transform=layer_range(
            options.layers, model.config.get_text_config().num_hidden_layers
        ),
    )
    try:
        with without_peft_warnings():
            adapted: Any = get_peft_model(model, lora)
    except ValueError as error:
        raise TrainerConfigError(f"peft.targets={options.targets!r}: {error}") from error
    n_trained, n_all = adapted.get_nb_trainable_parameters()
    logger.info("LoRA trains %d of %d parameters", n_trained, n_all)
    return adapted


@contextlib.contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Hide only the warning about peft's use of a deprecated name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*gradient_checkpointing", FutureWarning)
        yield


def _targets(model: Any, options: PeftOptions) -> str | list[str]:
    is_attention = options.targets == "attention"
    if not is_attention and (options.targets != "all-linear" or options.layers is None):
        return options.targets
    # peft takes a range of layers with names only.
    head = model.get_output_embeddings()
    found = {
        name.rpartition(".")[2]
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
        and m is not head
        and (not is_attention or _ATTENTION.search(name.rpartition(".")[0]))
    }
    if not found:
        raise TrainerConfigError(
            f"peft.targets={options.targets!r}: no such layers in {type(model).__name__}; name them"
        )
    return sorted(found)


_ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
"""In the path of a module: it is a part of an attention layer, whatever the architecture."""


def layer_range(layers: str | None, n_layers: int) -> list[int] | None:
    """Parse `12-29` as layers 12 to 29, `last 10` as the last ten, and `None` as all layers.

    `last 60%` means that share of the layers, and at least one layer.

    Raises:
        TrainerConfigError: the range is invalid, or exceeds the model.
    """
    if layers is None:
        return None
    if found := re.fullmatch(r"last (\d+)\s*%", layers):
        n_last = max(round(n_layers * int(found[1]) / 100), 1)
        first, last = n_layers - n_last, n_layers - 1
    elif found := re.fullmatch(r"last (\d+)", layers):
        first, last = n_layers - int(found[1]), n_layers - 1
    elif found := re.fullmatch(r"(\d+)-(\d+)", layers):
        first, last = int(found[1]), int(found[2])
    else:
        raise TrainerConfigError(
            f"peft.layers={layers!r}: write first-last, as 12-29, or `last 10`, or `last 60%`"
        )
    if not 0 <= first <= last < n_layers:
        raise TrainerConfigError(
            f"peft.layers={layers!r}: the model has the layers 0-{n_layers - 1}"
        )
    return list(range(first, last + 1))


def merged(config: RunConfig, adapter: Any) -> Any:
    """Merge a saved adapter into its base model, which is loaded again: the run's own doesn't change."""
    from peft import PeftModel  # noqa: PLC0415 - only for those who train adapters

    base = load_base(config)
    with without_peft_warnings():
        return PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
