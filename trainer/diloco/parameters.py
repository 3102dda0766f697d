"""Convert the trainable parameters of a model to one flat float32 vector, and a state dict to arrays.

Frozen parameters are never sent, so with LoRA a round is as small as the adapter.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from trainer.errors import TrainerConfigError


class ParameterVector:
    """The trainable parameters of a model, for reading and writing in the model's own order.

    They are looked up each time, because sharding (FSDP2) replaces them. Sharded parameters are
    read and written by all ranks together, and every rank has the whole vector.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if not self._parameters():
            raise TrainerConfigError("the model has no trainable parameter to exchange")
        self.n = sum(parameter.numel() for _, parameter in self._parameters())

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self._model.named_parameters() if p.requires_grad]

    @property
    def signature(self) -> str:
        """Hash of names and shapes, which must be the same for all replicas of a run."""
        shapes = [(name, list(parameter.shape)) for name, parameter in self._parameters()]
        return hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]

    def read(self) -> NDArray[np.float32]:
        """Return a copy of the parameters."""
        return flat_vector(parameter for _, parameter in self._parameters())

    def write(self, vector: NDArray[np.float32]) -> None:
        """Set the parameters. Each keeps its dtype and device."""
        fill_from(vector, (parameter for _, parameter in self._parameters()))


def flat_vector(tensors: Iterable[Tensor]) -> NDArray[np.float32]:
    """Return the values of tensors as one float32 copy."""
    whole = (t.full_tensor() if isinstance(t, DTensor) else t for t in tensors)
    flat = [tensor.detach().to("cpu", torch.float32).reshape(-1) for tensor in whole]
    return torch.cat(flat).numpy()


@torch.no_grad()
def fill_from(vector: NDArray[np.float32], tensors: Iterable[Tensor]) -> None:
    """Set tensors to the values of a `flat_vector`. Each keeps its dtype and device."""
    at = 0
    for tensor in tensors:
        part = torch.from_numpy(vector[at : at + tensor.numel()]).reshape(tensor.shape)
        at += tensor.numel()
        if isinstance(tensor, DTensor):
            # Every rank has the same values and takes its own of them: nothing is sent.
            part = distribute_tensor(
                part.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None
            )
        tensor.copy_(part)


def trainable_part(module: nn.Module) -> nn.Module:
    """Return a module with exactly the trainable parameters of another one."""
    part = nn.Module()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            part.register_parameter(name.replace(".", "_"), parameter)
    return part


def tensors_of_state(state: Any) -> dict[str, NDArray]:
    """Return a state dict, such as an optimizer's, as named arrays, which contain no code."""
    leaves, spec = tree_flatten(state)
    tensors = {
        str(index): leaf.detach().cpu().contiguous().clone().numpy()
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    }
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tree = json.dumps({"spec": treespec_dumps(spec), "leaves": rest})
    return tensors | {"tree": np.frombuffer(tree.encode(), np.uint8)}


def state_of_tensors(tensors: Mapping[str, NDArray]) -> Any:
    """Return the state dict from the result of `tensors_of_state`."""
    tree = json.loads(tensors["tree"].tobytes())
    leaves = tree["leaves"]
    for index, values in tensors.items():
        if index != "tree":
            leaves[int(index)] = torch.from_numpy(values.copy())
    return tree_unflatten(leaves, treespec_loads(tree["spec"]))
