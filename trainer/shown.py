"""The tokens of single rows, as training sees them: what is read, and what is scored."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trainer.data.budget import sides_of
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.engines.settings_file import read_settings
from trainer.model.loading import load_tokenizer


def tokens_of(values: Mapping[str, Any], state_id: str) -> list[dict[str, Any]]:
    """Return the tokens of each pair of a state: ids of the prompt, and those of both sides.

    Only the tokens of the two sides are scored; the prompt is read and never scored. The tokenizer is
    that of the model in the run's output, else that of the model that is to be trained.

    Args:
        values: the settings of a run.
        state_id: which rows of the dataset.

    Raises:
        TrainerConfigError: a setting is wrong, or there is no tokenizer.
        DatasetError: the dataset cannot be read.
    """
    config = read_settings(values)
    data = load_preference_data(config.dataset)
    checkpoint, shared = Path(config.output) / "checkpoint", config.shared
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(str(checkpoint), padding_side="left")
        if checkpoint.is_dir()
        else load_tokenizer(config, data)
    )
    renderer = Renderer(
        tokenizer=tokenizer,
        max_prompt_tokens=shared.max_prompt_tokens,
        max_response_tokens=shared.max_response_tokens,
        with_tools=shared.render_tools,
        window=shared.prompt_window,
    )
    found = []
    for row in data.pairs:
        if row.get("state_id") != state_id:
            continue
        prompt, cut = renderer.prompt(row["prompt"], row.get("tools"), sides=sides_of(row))
        sides = {side: renderer.response_ids(row[side]) for side in ("chosen", "rejected")}
        found.append(
            {
                "prompt (read, not scored)": _shown(tokenizer, prompt),
                **{f"{side} (scored)": _shown(tokenizer, ids) for side, ids in sides.items()},
                "is_prompt_cut": bool(cut),
                "cut by max_prompt_tokens": str(cut),
            }
        )
    return found


def _shown(tokenizer: Any, ids: list[int]) -> dict[str, Any]:
    return {"n_tokens": len(ids), "text": tokenizer.decode(ids), "token_ids": ids}
