"""Compute log-probabilities of recorded tokens, and align the positions of two contexts.

Dimensions in names: `B` sequences, `T` tokens, `V` vocabulary, `N` selected tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.errors import AlignmentError, ShapeError
from trainer.losses.divergence import log_probs, taken


@dataclass(frozen=True, kw_only=True, slots=True)
class Alignment:
    """The positions of the same N response tokens in two contexts."""

    rows: Tensor
    student_positions: Tensor
    """Index of the token itself. Its logits are one position earlier."""
    teacher_positions: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return int(self.ids.numel())


def align_responses(
    student_ids_BT: Tensor,
    student_mask_BT: Tensor,
    teacher_ids_BS: Tensor,
    teacher_mask_BS: Tensor,
    *,
    row_mask_B: Tensor | None = None,
) -> Alignment:
    """Align the response tokens of two contexts that differ before the response (by a hint or padding).

    The k-th masked position of a row on one side matches the k-th on the other. Rows with
    `row_mask_B` 0 are left out.

    Raises:
        AlignmentError: a row has different numbers of response tokens, aligned positions have
            different ids, or a response starts at position 0 and so has no logits.
    """
    keep_B1 = _row_mask(student_ids_BT, row_mask_B).unsqueeze(-1)
    student_BT, teacher_BS = (student_mask_BT != 0) & keep_B1, (teacher_mask_BS != 0) & keep_B1
    n_student_B, n_teacher_B = student_BT.sum(-1), teacher_BS.sum(-1)
    if not torch.equal(n_student_B, n_teacher_B):
        row = int((n_student_B != n_teacher_B).nonzero()[0])
        raise AlignmentError(
            f"row {row}: {int(n_student_B[row])} response tokens for the student, "
            f"{int(n_teacher_B[row])} for the teacher: render both from the same response ids"
        )
    row_N, student_N = student_BT.nonzero(as_tuple=True)
    teacher_N = teacher_BS.nonzero(as_tuple=True)[1]
    ids_N = student_ids_BT[row_N, student_N]
    differ_N = ids_N != teacher_ids_BS[row_N, teacher_N]
    if bool(differ_N.any()):
        k = int(differ_N.nonzero()[0])
        raise AlignmentError(
            f"row {int(row_N[k])}: token {int(ids_N[k])} of the student at {int(student_N[k])} "
            f"meets token {int(teacher_ids_BS[row_N[k], teacher_N[k]])} of the teacher at "
            f"{int(teacher_N[k])}: render both from the same response ids"
        )
    if bool((student_N == 0).any() | (teacher_N == 0).any()):
        raise AlignmentError("a response starts at position 0: no logits predict its first token")
    return Alignment(
        rows=row_N, student_positions=student_N, teacher_positions=teacher_N, ids=ids_N
    )


def _row_mask(ids_BT: Tensor, row_mask_B: Tensor | None) -> Tensor:
    if row_mask_B is None:
        return torch.ones(ids_BT.size(0), dtype=torch.bool, device=ids_BT.device)
    return row_mask_B != 0


def token_logps(logits_BTV: Tensor, ids_BT: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute the log-prob of each token except the first, given the tokens before it, [B, T - 1].

    Raises:
        ShapeError: the shapes of logits and ids don't match.
    """
    if logits_BTV.shape[:2] != ids_BT.shape:
        raise ShapeError(f"logits {tuple(logits_BTV.shape)} do not fit ids {tuple(ids_BT.shape)}")
    logp_BTV = log_probs(logits_BTV[:, :-1], temperature)
    return taken(logp_BTV, ids_BT[:, 1:])


def response_logps(
    logits_BTV: Tensor, ids_BT: Tensor, response_mask_BT: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum the log-probability of each row's response [B], and count its tokens [B].

    A row without response tokens gets 0 and 0.
    """
    logps_BT = token_logps(logits_BTV, ids_BT)
    is_asked_BT = response_mask_BT[:, 1:] != 0
    # Not a product: elsewhere a token may be impossible, and 0 times infinity is NaN.
    return logps_BT.where(is_asked_BT, 0).sum(-1), is_asked_BT.sum(-1).to(logps_BT.dtype)
