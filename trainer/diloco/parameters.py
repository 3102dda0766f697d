"""The trainable parameters of a model as one flat float32 vector, and an optimizer's state as bytes.

Frozen parameters never travel: with LoRA a round is as small as the adapter.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainer.errors import OuterLoopError, TrainerConfigError

__all__ = ["ParameterVector", "optimizer_tensors", "restore_optimizer", "trainable_fragment"]


class ParameterVector:
    """Reads and writes the trainable parameters of a model, in the model's own order."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not self._parameters:
            raise TrainerConfigError("the model has no trainable parameter to exchange")
        self.n = sum(parameter.numel() for _, parameter in self._parameters)

    @property
    def signature(self) -> str:
        """Hash of names and shapes: replicas of one run must agree on it."""
        shapes = [(name, list(parameter.shape)) for name, parameter in self._parameters]
        return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]

    def read(self) -> NDArray[np.float32]:
        """Return a copy of the parameters."""
        vector = np.empty(self.n, np.float32)
        at = 0
        for _, parameter in self._parameters:
            size = parameter.numel()
            flat = parameter.detach().to("cpu", torch.float32).reshape(-1)
            vector[at : at + size] = flat.numpy()
            at += size
        return vector

    @torch.no_grad()
    def write(self, vector: NDArray[np.float32]) -> None:
        """Set the parameters; each keeps its own dtype and device."""
        at = 0
        for _, parameter in self._parameters:
            size = parameter.numel()
            part = torch.from_numpy(vector[at : at + size]).reshape(parameter.shape)
            parameter.copy_(part)
            at += size


def trainable_fragment(modules: nn.Module | Iterable[nn.Module]) -> nn.Module:
    """Return a module that owns exactly the trainable parameters of the given ones."""
    given = [modules] if isinstance(modules, nn.Module) else list(modules)
    fragment = nn.Module()
    for index, module in enumerate(given):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                fragment.register_parameter(f"{index}_{name.replace('.', '_')}", parameter)
    return fragment


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's per-parameter state as named tensors."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": value.detach().cpu().contiguous()
        for index, slots in state.items()
        for name, value in slots.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load the state that `optimizer_tensors` gave; groups and their settings stay.

    Raises:
        OuterLoopError: The state belongs to another set of parameters.
    """
    state: dict[int, dict[str, Any]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value.clone()
    groups = optimizer.state_dict()["param_groups"]
    known = {index for group in groups for index in group["params"]}
    if not state.keys() <= known:
        raise OuterLoopError("the saved optimizer state belongs to other parameters")
    optimizer.load_state_dict({"state": state, "param_groups": groups})
