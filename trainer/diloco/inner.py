"""Inner optimizers that suit an outer loop."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainer.errors import TrainerConfigError

__all__ = ["JointAdamW", "MuonWithAdamW", "make_inner_optimizer"]

MUON_LR_RATIO = 6.0
"""Muon's updates are orthogonal, hence small per entry: it wants a higher rate than AdamW."""


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, the head, norms and biases.

    One optimizer to its users: hooks, schedulers and `state_dict` see both halves.

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
        """Take one step with both halves."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for half in self._halves:
            half.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both halves."""
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


class JointAdamW(torch.optim.Optimizer):
    """AdamW that scales its steps as if it saw the gradients of all replicas.

    Adam divides by √E[g²] = √(mean² + variance). A replica's batch is N times smaller than that
    of all together, so the variance of its gradient is N times larger and its steps are shorter
    than data-parallel AdamW's, by up to √N and most where gradients are noisiest: no learning
    rate makes up for that everywhere. Here the variance is measured by how far gradients fall
    from their running mean, and the part that a mean over N replicas would remove is taken off.

    With one replica this is AdamW. Steps are bolder than a replica's own AdamW would make them:
    start at half the learning rate of data-parallel training, with a longer warm-up.

    Args:
        params: What is optimized.
        lr: Learning rate.
        n_replicas: N.
        betas: Decay of the running mean, and of both running moments.
        eps: Added to the divisor.
        weight_decay: Decoupled from the gradient, as in AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        n_replicas: int,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        if n_replicas < 1:
            raise TrainerConfigError(f"n_replicas must be at least 1, not {n_replicas}")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "n_replicas": n_replicas})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("exp_avg", "exp_avg_sq", "exp_avg_var"):
                state[name] = torch.zeros_like(parameter)
        beta_mean, beta_square = group["betas"]
        mean, square, variance = state["exp_avg"], state["exp_avg_sq"], state["exp_avg_var"]
        n_before = int(state["step"])
        expected = mean / (1 - beta_mean**n_before) if n_before else mean
        variance.lerp_((gradient - expected).square_(), 1 - beta_square)
        mean.lerp_(gradient, 1 - beta_mean)
        square.lerp_(gradient.square(), 1 - beta_square)
        state["step"] += 1

        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        joint = joint_second_moment(
            square, variance, n_replicas=group["n_replicas"], beta_mean=beta_mean
        )
        divisor = joint.div_(1 - beta_square ** (n_before + 1)).sqrt_().add_(group["eps"])
        rate = group["lr"] / (1 - beta_mean ** (n_before + 1))
        parameter.addcdiv_(mean, divisor, value=-rate)


def joint_second_moment(
    square: Tensor, variance: Tensor, *, n_replicas: int, beta_mean: float
) -> Tensor:
    """Return what the second moment of the replicas' mean gradient would be.

    Args:
        square: Second moment of one replica's gradient.
        variance: Mean squared distance of the gradient to the running mean before it.
        n_replicas: How many are averaged.
        beta_mean: Decay of that running mean, which is itself uncertain by a share of
            (1 − β) / (1 + β) of the variance.
    """
    inflation = 1 + (1 - beta_mean) / (1 + beta_mean)
    removed = variance * ((1 - 1 / n_replicas) / inflation)
    # A mean of N cannot have less than an N-th of the second moment.
    return torch.maximum(square - removed, square / n_replicas)


def make_inner_optimizer(
    model: nn.Module,
    name: str = "muon",
    *,
    lr: float,
    weight_decay: float = 0.1,
    n_replicas: int = 1,
) -> torch.optim.Optimizer:
    """Return an optimizer over the trainable parameters.

    Args:
        model: What is trained.
        name: `adamw`, `joint_adamw` (AdamW that knows of the other replicas) or `muon`.
        lr: Learning rate of AdamW; Muon's is derived from it.
        weight_decay: Decoupled weight decay.
        n_replicas: Replicas of the outer loop, for `joint_adamw`.

    Raises:
        TrainerConfigError: There is no such optimizer.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parameters = [parameter for _, parameter in named]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay)
    if name == "joint_adamw":
        return JointAdamW(parameters, lr=lr, n_replicas=n_replicas, weight_decay=weight_decay)
    if name != "muon":
        raise TrainerConfigError(f"inner optimizer {name!r}: choose adamw, joint_adamw or muon")
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
