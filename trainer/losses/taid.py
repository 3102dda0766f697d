"""TAID, whose target moves from the student's own distribution to the teacher's.

Dimensions in names: `B` sequences, `T` tokens, `V` vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.errors import TrainerConfigError
from trainer.losses.divergence import check_same_shape, masked_sum, without_uncounted


def taid_per_token(student_logits: Tensor, teacher_logits: Tensor, *, t: float) -> Tensor:
    """Compute the cross-entropy of the interpolated target, per token: [..., V] to [...].

    The target is `softmax((1 - t) student.detach() + t teacher)`. The gradient on the student's
    logits is `q - p_t`. It is zero at `t = 0`, and that of the forward KL at `t = 1`.

    Source: TAID, Shing et al. 2025, arXiv:2501.16937, eq. 3.

    Raises:
        TrainerConfigError: `t` is outside [0, 1].
    """
    if not 0.0 <= t <= 1.0:
        raise TrainerConfigError(f"taid t={t} is not in [0, 1]")
    check_same_shape(student_logits, teacher_logits)
    if student_logits.element_size() < 4:
        student_logits, teacher_logits = student_logits.float(), teacher_logits.float()
    teacher = teacher_logits.detach()
    # A weight of zero must not meet an infinite logit: 0 * -inf is NaN.
    if t == 0.0:
        mixed = student_logits.detach()
    elif t == 1.0:
        mixed = teacher
    else:
        mixed = (1.0 - t) * student_logits.detach() + t * teacher
    target = F.softmax(mixed, dim=-1)
    student_logp = F.log_softmax(student_logits, dim=-1)
    terms = torch.where(student_logits.isinf(), 0.0, target * student_logp)
    return -terms.sum(-1)


def taid_loss(
    student_logits: Tensor, teacher_logits: Tensor, mask: Tensor | None = None, *, t: float
) -> Tensor:
    """Compute temporally adaptive interpolated distillation of logits [B, T, V], mean over [B, T].

    It is a cross-entropy, so its value contains the entropy of the moving target. Watch the
    gradient, or `taid_per_token` minus that entropy, instead of the value.

    >>> student = torch.zeros(1, 1, 2, requires_grad=True)
    >>> taid_loss(student, torch.tensor([[[0.9, 0.1]]]).log(), t=1.0).backward()
    >>> student.grad  # the student's probabilities minus the teacher's
    tensor([[[-0.4000,  0.4000]]])

    Source: TAID, arXiv:2501.16937, eq. 3 and the authors' reduction over counted tokens.
    """
    check_same_shape(student_logits, teacher_logits)
    if mask is not None:
        student_logits = without_uncounted(student_logits, mask)
        teacher_logits = without_uncounted(teacher_logits, mask)
    per_token = taid_per_token(student_logits, teacher_logits, t=t)
    counted = torch.ones_like(per_token) if mask is None else mask.to(per_token.dtype)
    return masked_sum(per_token, counted) / counted.sum().clamp_min(1.0)


class TAIDScheduler:
    """The schedule that moves `t` from `t_start` to `t_end`, faster while the loss falls.

    Every update moves at least to the linear schedule. The momentum term adds `alpha sigmoid(m) (1
    - t)`. With the paper's `alpha = 5e-4`, it has no effect below a few thousand steps; with 0.1,
    it visibly adapts. Under data parallelism, pass the *all-reduced* loss to `update_t`, or the
    replicas drift apart.

    >>> scheduler = TAIDScheduler(10, disable_adaptive=True)
    >>> for step in range(6):
    ...     _ = scheduler.update_t(1.0, step)
    >>> round(scheduler.t, 6)  # halfway from 0.4 to 1
    0.7

    Source: TAID, arXiv:2501.16937, algorithm 1.
    """

    def __init__(
        self,
        num_train_steps: int,
        t_start: float = 0.4,
        t_end: float = 1.0,
        alpha: float = 5e-4,
        beta: float = 0.99,
        disable_adaptive: bool = False,  # noqa: FBT001, FBT002 - the published signature
    ) -> None:
        """Start at `t_start`.

        Raises:
            TrainerConfigError: a negative number of steps, or not `0 <= t_start <= t_end <= 1`.
        """
        if num_train_steps < 1 or not 0.0 <= t_start <= t_end <= 1.0:
            raise TrainerConfigError(
                f"TAID needs num_train_steps >= 1 and 0 <= t_start <= t_end <= 1, not "
                f"{num_train_steps}, {t_start}, {t_end}"
            )
        self.num_train_steps = num_train_steps
        self.t_start, self.t_end = t_start, t_end
        self.alpha, self.beta = alpha, beta
        self.disable_adaptive = disable_adaptive
        self._t = t_start
        self._previous_loss: float | None = None
        self._momentum = 0.0

    @property
    def t(self) -> float:
        """Return the present interpolation weight of the teacher."""
        return self._t

    def update_t(self, loss: Tensor | float, global_step: int) -> float | None:
        """Advance after an optimizer step, and return the adaptive step, or None at the first call."""
        loss = float(loss.detach()) if isinstance(loss, Tensor) else float(loss)
        linear = self.t_start + (self.t_end - self.t_start) * global_step / self.num_train_steps
        if self._previous_loss is None:
            self._previous_loss = loss
            return None
        relative = (self._previous_loss - loss) / (self._previous_loss + 1e-15)
        self._momentum = self.beta * self._momentum + (1.0 - self.beta) * relative
        step = self.alpha * _sigmoid(self._momentum) * (1.0 - self._t)
        reached = linear if self.disable_adaptive else max(linear, self._t + step)
        self._t = min(self.t_end, reached)
        self._previous_loss = loss
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"t": self._t, "previous_loss": self._previous_loss, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        self._t = float(state["t"])
        self._momentum = float(state["momentum"])
        previous = state["previous_loss"]
        self._previous_loss = None if previous is None else float(previous)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
