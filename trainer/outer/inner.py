"""Inner optimizers that suit an outer loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import TrainerConfigError

MUON_LR_RATIO = 6.0
"""Muon's updates are orthogonal and so small per entry. It needs a higher rate than AdamW."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, and AdamW for embeddings, the head, norms, and biases.

    It behaves as one optimizer: hooks, schedulers, and `state_dict` see both parts.

    Source: Thérien et al. 2025, arXiv:2505.23725 (Muon inside DiLoCo).
    """

    def __init__(
        self,
        matrices: Sequence[Tensor],
        others: Sequence[Tensor],
        *,
        lr: float,
        weight_decay: float = 0.1,
    ) -> None:
        self._halves: list[torch.optim.Optimizer] = []
        if matrices:
            self._halves.append(
                torch.optim.Muon(list(matrices), lr=MUON_LR_RATIO * lr, weight_decay=weight_decay)
            )
        if others:
            self._halves.append(
                torch.optim.AdamW(list(others), lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
            )
        groups = [group for half in self._halves for group in half.param_groups]
        super().__init__(groups, {})
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step with both parts."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for half in self._halves:
            half.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both parts."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Let the halves work on this optimizer's own groups and state."""
        at = 0
        for half in self._halves:
            n = len(half.param_groups)
            half.param_groups = self.param_groups[at : at + n]
            half.state = self.state
            at += n


def make_inner_optimizer(
    model: nn.Module,
    name: str = "muon",
    *,
    lr: float,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """Return an optimizer over the trainable parameters.

    Args:
        model: The model to train.
        name: `adamw` or `muon`.
        lr: Learning rate of AdamW. Muon's is derived from it.
        weight_decay: Decoupled weight decay.

    Raises:
        TrainerConfigError: The optimizer is unknown.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if name == "adamw":
        every = [parameter for _, parameter in named]
        return torch.optim.AdamW(every, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
    if name != "muon":
        raise TrainerConfigError(f"inner optimizer {name!r}: choose adamw or muon")
    outside = _embeddings_and_head(model)
    matrices = [p for _, p in named if p.ndim == 2 and id(p) not in outside]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in chosen]
    return MuonWithAdamW(matrices, others, lr=lr, weight_decay=weight_decay)


def _embeddings_and_head(model: nn.Module) -> set[int]:
    """Return the parameters that see tokens: their rows are words, not directions."""
    n_tokens = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        or (isinstance(module, nn.Linear) and module.out_features in n_tokens)
        for parameter in module.parameters(recurse=False)
    }
