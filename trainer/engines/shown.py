"""Show rows as the model sees them: what it reads, what is scored, and what a budget cut."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from trainer.data.as_seen import as_seen, parts_of
from trainer.data.dataset import load_preference_data
from trainer.data.rendering import Renderer
from trainer.engines.settings_file import read_settings
from trainer.model.loading import load_tokenizer


def inspected(
    values: Mapping[str, Any], *, state_id: str | None = None, n_rows: int = 3
) -> list[dict[str, Any]]:
    """Return rows as training sees them: texts and ids of the prompt and of both sides.

    Only the tokens of the sides are scored, never the prompt. A row that is only imitated has one side. The tokenizer is that of the
    model in the run's output, or else that of the model to train.

    Raises:
        TrainerConfigError: a setting is wrong, or the tokenizer is missing.
        DatasetError: the dataset cannot be read.
    """
    config = read_settings(values)
    data = load_preference_data(config.dataset, revision=config.revision)
    checkpoint, shared = Path(config.output) / "checkpoint", config.shared
    tokenizer: Any = (
        AutoTokenizer.from_pretrained(str(checkpoint), padding_side="left")
        if checkpoint.is_dir()
        else load_tokenizer(config, data)
    )
    renderer = Renderer(tokenizer=tokenizer, **shared.rendering)
    rows = [row for row in data.sft_pairs(shared.drawn) if state_id in (None, row.get("state_id"))]
    kept = rows if state_id is not None else rows[:n_rows]
    return [as_seen(row, renderer, tokenizer) for row in kept]


def inspected_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return inspected rows as text, with each part below a heading line."""
    return "\n".join(line for number, row in enumerate(rows, 1) for line in _lines(row, number))


def _lines(row: Mapping[str, Any], number: int) -> Iterator[str]:
    yield f"══ row {number}, state {row['state_id']}, weight {row['weight']}"
    for line, text in parts_of(row):
        yield f"── {line}"
        yield text
