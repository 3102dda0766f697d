"""The policy's forward pass with channel 2: one backbone pass, one head, and one teacher pass.

The masks that select rows and tokens stay on the CPU. Reading them from the device would wait for
all its work.

Dimensions in names: `B` sequences, `R` those of them that the teacher sees, `P` prompt tokens
(left-padded), `C` completion tokens (right-padded), `H` hidden, `V` vocabulary, `N` hinted response
tokens.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from trainer.losses.channels import SDPOOptions, distillation_per_token
from trainer.losses.compose import PairLogps
from trainer.losses.divergence import log_probs, taken
from trainer.model.causal_lm import head_divergence, head_logps
from trainer.model.packing import packed_hidden, states_of_sequences, tree_pair_logps
from trainer.model.scoring import project, response_states
from trainer.model.tree_layout import PackedTree, TokenSequence, pack_pairs

TeacherWeights = Callable[[nn.Module], AbstractContextManager[nn.Module]]


@dataclass(frozen=True, kw_only=True)
class HintedInputs:
    """The student's batch, and the same completions after hinted prompts, all on the CPU."""

    prompt_ids: Tensor
    prompt_mask: Tensor
    teacher_prompt_ids: Tensor
    teacher_prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    mask: Tensor
    """True at the response tokens of rows with a hint, [B, C]."""

    @property
    def seen_rows(self) -> Tensor:
        """Return a mask of the rows that the teacher must see, [B]: those with a hint, or one row if there is none."""
        has_hint_B = self.mask.any(1)
        has_hint_B[0] |= ~has_hint_B.any()
        return has_hint_B

    @property
    def teacher_sequences(self) -> list[TokenSequence]:
        """Return the hinted prompt and completion of every row that the teacher sees, without padding."""
        names = ("teacher_prompt_ids", "teacher_prompt_mask", "completion_ids", "completion_mask")
        seen_rows = self.seen_rows
        return token_sequences(*(getattr(self, name)[seen_rows] for name in names))

    def of_hints(self, values_RCX: Tensor) -> Tensor:
        """Select the values of the hinted response tokens in the rows that the teacher sees."""
        return at_places(values_RCX, self.mask[self.seen_rows])


def policy_and_distillation(
    model: nn.Module,
    teacher_weights: TeacherWeights,
    inputs: HintedInputs,
    options: SDPOOptions,
    *,
    is_fused: bool,
    shared: "SharedForward | None" = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs and entropies of completions, both [B, C], and channel 2 at the hinted tokens.

    With `is_fused`, the logits of the batch are never made. `shared` already has the student's
    states. The last value is the sum of the divergence over the hinted tokens, or 0 with a graph if
    there are none.
    """
    if shared is not None:
        student_BCH, teacher_NH, teacher = shared.states(model, teacher_weights, inputs)
    else:
        student_BCH, teacher_NH, teacher = _states(model, teacher_weights, inputs)
    mask_BC = inputs.mask
    ids_BC = inputs.completion_ids.to(student_BCH.device, non_blocking=True)
    if is_fused:
        logps_BC, entropy_BC = policy_of_states(
            model, student_BCH, ids_BC, temperature=options.temperature
        )
        divergence_N = head_divergence(
            model,
            at_places(student_BCH, mask_BC),
            teacher,
            teacher_NH,
            beta=options.jsd_beta,
            temperature=options.temperature,
        )
        return logps_BC, entropy_BC, divergence_N.sum() + 0.0 * logps_BC.sum()
    student_BCV = project(model, student_BCH)
    with torch.no_grad():
        teacher_NV = project(teacher, teacher_NH)
    per_token_N = distillation_per_token(
        at_places(student_BCV, mask_BC), teacher_NV, at_places(ids_BC, mask_BC), options
    )
    logp_BCV = log_probs(student_BCV, options.temperature)
    entropy_BC = -(logp_BCV.exp() * logp_BCV).sum(-1)
    return taken(logp_BCV, ids_BC), entropy_BC, per_token_N.sum()


def policy_of_states(
    model: nn.Module, hidden_BCH: Tensor, ids_BC: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropies from the hidden states that predict the tokens, both [B, C]."""
    logps_N, entropy_N = head_logps(
        model, hidden_BCH.flatten(0, 1), ids_BC.flatten(), temperature=temperature
    )
    return logps_N.view(ids_BC.shape), entropy_N.view(ids_BC.shape)


class SharedForward:
    """One forward pass for completions, pairs, and the hinted contexts of a live teacher.

    They form a prefix tree, so that the states of a trace run once for all channels. A teacher with
    other weights needs its own tree, because keys and values depend on the weights.
    """

    def __init__(
        self, model: nn.Module, tree: PackedTree, completion_ids_BC: Tensor, *, is_live: bool
    ) -> None:
        """Keep what to run: completions first, after them the hinted ones if `is_live`."""
        self.model, self.is_live = model, is_live
        self.tree = tree.to(next(model.parameters()).device)
        self._shape = completion_ids_BC.shape

    @cached_property
    def _hidden(self) -> Tensor:
        return packed_hidden(self.model, self.tree)

    def _states(self) -> Tensor:
        return states_of_sequences(self.tree, self._hidden, self._shape[1])

    def student_states(self) -> Tensor:
        """Return the states that predict the completions, [B, C, H]."""
        return self._states()[: self._shape[0]]

    def pair_logps(self) -> PairLogps:
        """Return the summed log-probs and token counts of both sides of the tree's pairs."""
        return tree_pair_logps(self.model, self.tree, self._hidden)

    def states(
        self, model: nn.Module, teacher_weights: TeacherWeights, inputs: HintedInputs
    ) -> tuple[Tensor, Tensor, nn.Module]:
        """Return the student's states, the teacher's at hinted tokens, and the teacher."""
        n_rows, n_columns = self._shape
        student_BCH = self.student_states()  # before gradients are off: this may be the pass itself
        with torch.no_grad(), teacher_weights(model) as teacher:
            if self.is_live:
                teacher_RCH = self._states()[n_rows:]
            else:
                tree = pack_pairs([], sequences=inputs.teacher_sequences)
                tree = tree.to(student_BCH.device)
                teacher_RCH = states_of_sequences(tree, packed_hidden(teacher, tree), n_columns)
        return student_BCH, inputs.of_hints(teacher_RCH).detach(), teacher


def at_places(values_BCX: Tensor, mask_BC: Tensor) -> Tensor:
    """Select the values at a CPU mask, row by row, as `values_BCX[mask_BC]` does.

    With `values_BCX[mask_BC]`, the host would wait for the device to count them.
    """
    rows_N, columns_N = (
        one.to(values_BCX.device, non_blocking=True) for one in mask_BC.nonzero(as_tuple=True)
    )
    return values_BCX[rows_N, columns_N]


def token_sequences(
    prompt_ids_BP: Tensor, prompt_mask_BP: Tensor, ids_BC: Tensor, mask_BC: Tensor
) -> list[TokenSequence]:
    """Return the prompt and completion of every row without padding. All tensors are on the CPU."""
    columns = (prompt_ids_BP, prompt_mask_BP.sum(1), ids_BC, mask_BC.sum(1))
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(prompt[len(prompt) - n :], ids[:n_ids]) for prompt, n, ids, n_ids in rows]


def _states(
    model: nn.Module, teacher_weights: TeacherWeights, inputs: HintedInputs
) -> tuple[Tensor, Tensor, nn.Module]:
    n, device = inputs.completion_ids.size(1), next(model.parameters()).device

    def hidden(
        network: nn.Module, prompt_ids: Tensor, prompt_mask: Tensor, rows: Tensor | slice
    ) -> Tensor:
        ids_BT = torch.cat([prompt_ids, inputs.completion_ids], dim=1)[rows]
        mask_BT = torch.cat([prompt_mask, inputs.completion_mask], dim=1)[rows]
        ids_BT, mask_BT = (one.to(device, non_blocking=True) for one in (ids_BT, mask_BT))
        return response_states(network, ids_BT, mask_BT)[:, -n - 1 : -1]

    student_BCH = hidden(model, inputs.prompt_ids, inputs.prompt_mask, slice(None))
    prompts, seen_rows = (inputs.teacher_prompt_ids, inputs.teacher_prompt_mask), inputs.seen_rows
    with torch.no_grad(), teacher_weights(model) as teacher:
        teacher_RCH = hidden(teacher, *prompts, seen_rows)
    return student_BCH, inputs.of_hints(teacher_RCH), teacher
