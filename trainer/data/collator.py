"""Turn dataset rows into one padded batch for all three channels.

Dimensions in names: `B` rows, `T` tokens.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.data.hints import HintFunction, hint_for_row
from trainer.data.rendering import Renderer
from trainer.data.sampler import weight_of
from trainer.data.template import Tokenizer
from trainer.data.types import Message, PairRow
from trainer.losses.compose import Batch, pair_logps

logger = logging.getLogger(__name__)


def padded(rows: Sequence[Sequence[int]], fill: int) -> Tensor:
    """Return rows of ids or masks as one right-padded tensor, [B, T]."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], True, fill)


_SIDE = ("input_ids", "attention_mask", "response_mask")


class ComposerDataCollator:
    """The collator that turns rows of `pairs` into the batch for `compose_loss`.

    Channel 1 reads the chosen action after its prompt. Channel 2 reads the same action after the
    hinted prompt. Channel 3 compares chosen and rejected. Rows without a hint have `sdpo_mask` 0.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hint: HintFunction = hint_for_row,
        **rendering: Any,
    ) -> None:
        """Make a `Renderer` with these arguments; `hint` makes the text that only the teacher sees."""
        self.renderer = Renderer(tokenizer=tokenizer, **rendering)
        self.hint = hint
        self.pad_id = int(tokenizer.pad_token_id)

    def __call__(self, rows: Sequence[PairRow | Mapping[str, Any]]) -> dict[str, Tensor]:
        """Build the batch of these rows, on the CPU, without reference log-probs."""
        batch = self.pairs(rows)
        batch |= {key: batch[f"dpo_chosen_{key}"] for key in _SIDE}
        hints = [self.hint(row) for row in rows]
        if any(hints):
            hinted = [
                (
                    self.renderer.row_prompt_ids(row, hint=hint),
                    self.renderer.side_ids(row, "chosen"),
                )
                for row, hint in zip(rows, hints, strict=True)
            ]
            batch |= self._side(hinted, "ctx_teacher_")
            batch["sdpo_mask"] = torch.tensor([1.0 if hint else 0.0 for hint in hints])
        return batch

    def pairs(self, rows: Sequence[PairRow | Mapping[str, Any]]) -> dict[str, Tensor]:
        """Build only the tensors for channel 3."""
        prompts = [self.renderer.row_prompt_ids(row) for row in rows]
        batch = {"dpo_weight": torch.tensor([weight_of(row) for row in rows])}
        for side in ("chosen", "rejected"):
            responses = [self.renderer.side_ids(row, side) for row in rows]
            batch |= self._side(list(zip(prompts, responses, strict=True)), f"dpo_{side}_")
        return batch

    def _side(self, rows: Sequence[tuple[list[int], list[int]]], prefix: str) -> dict[str, Tensor]:
        return {
            f"{prefix}input_ids": padded([p + r for p, r in rows], self.pad_id),
            f"{prefix}attention_mask": padded([[1] * len(p + r) for p, r in rows], 0),
            f"{prefix}response_mask": padded([[0] * len(p) + [1] * len(r) for p, r in rows], 0),
        }


def add_reference_logps(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Add the summed log-probs of both responses under `model`, without gradient, to the batch."""
    with torch.no_grad():
        (chosen, _), (rejected, _) = pair_logps(model, batch)
    return {
        **batch,
        "dpo_chosen_ref_logprobs": chosen,
        "dpo_rejected_ref_logprobs": rejected,
    }


def _called(call_id: str, name: str, arguments: str) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


_ERROR = "Error: file has not been read yet"
EXAMPLE_ROW: PairRow = {
    "prompt": [
        {"role": "user", "content": "The test test_total in tests/test_cart.py fails. Fix it."},
        _called("call_1", "Edit", '{"file_path": "cart.py", "old_string": "sum(p)"}'),
        {"role": "tool", "tool_call_id": "call_1", "content": _ERROR},
    ],
    "chosen": [_called("call_2", "Read", '{"file_path": "cart.py"}')],
    "rejected": [{"role": "assistant", "content": "The test is flaky, nothing is wrong."}],
    "hint": _ERROR,
}
"""An example state of a coding agent, for a first batch."""


def build_batch(
    tokenizer: Tokenizer,
    device: str | torch.device = "cpu",
    *,
    rows: Sequence[PairRow | Mapping[str, Any]] | None = None,
    reference: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Build a batch of all three channels, by default of one built-in example.

    With `reference`, the batch has the pair's log-probs under it, which `dpo_variant="dpo"` needs.
    Without it, use `dpo_variant="simpo"` or call `add_reference_logps`.
    """
    batch = ComposerDataCollator(tokenizer)(rows if rows is not None else [EXAMPLE_ROW])
    batch = {key: value.to(device) for key, value in batch.items()}
    return add_reference_logps(reference, batch) if reference is not None else batch
