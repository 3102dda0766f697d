"""A second device that any machine has: torch's `PrivateUse1`, computed on the CPU.

Its tensors are wrappers whose device is not the CPU's. An operation on tensors of both is refused,
as CUDA refuses it, so that a batch that was left behind fails here and not first on a GPU. What
CUDA allows is allowed: a number (0 dimensions) from the CPU, CPU indices, and copies between.

A process that called `register` keeps the device: use a process of its own.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "spare"

_CROSSING = {
    "copy_",
    "_to_copy",
    "_copy_from",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
}
"""Operations that CUDA takes with some of their tensors on the CPU."""

_libraries: list[torch.library.Library] = []


class SpareTensor(torch.Tensor):
    """A tensor of the spare device; `inner` holds its numbers."""

    inner: torch.Tensor
    n_synchronizations = 0
    """Times that the host waited for a number of the device."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "SpareTensor":
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=torch.device(NAME, 0),
            requires_grad=False,
        )
        wrapper.inner = inner.detach()
        return wrapper

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SpareTensor({self.inner})"

    def tolist(self) -> Any:
        SpareTensor.n_synchronizations += 1
        return self.inner.tolist()  # torch refuses it to subclasses

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()  # a wrapper has none to tell shared weights by

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name == "_local_scalar_dense":
            SpareTensor.n_synchronizations += 1
        if name not in _CROSSING:
            _refuse_cpu_tensors(func, *args, *kwargs.values())
        goes_to_cpu = False
        if "device" in kwargs and kwargs["device"] is not None:
            goes_to_cpu = torch.device(kwargs["device"]).type == "cpu"
            kwargs["device"] = "cpu"
        if goes_to_cpu:
            SpareTensor.n_synchronizations += 1
        result = func(*map(_unwrapped, args), **{k: _unwrapped(v) for k, v in kwargs.items()})
        if goes_to_cpu or name == "_local_scalar_dense":
            return result.clone() if isinstance(result, torch.Tensor) else result
        return _wrapped(func, args, kwargs, result)


def _leaves(tree: Any) -> Iterator[Any]:
    for one in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(one, (list, tuple)):
            yield from _leaves(one)
        else:
            yield one


def _refuse_cpu_tensors(func: Any, *given: Any) -> None:
    for one in _leaves(given):
        is_ours = isinstance(one, SpareTensor) or not isinstance(one, torch.Tensor)
        if not is_ours and one.dim() > 0:
            raise RuntimeError(
                f"{func}: expected all tensors on one device, found {NAME} and {one.device} "
                f"{tuple(one.shape)}"
            )


def _unwrapped(tree: Any) -> Any:
    if isinstance(tree, SpareTensor):
        return tree.inner
    if isinstance(tree, (list, tuple)):
        return [_unwrapped(one) for one in tree]
    return tree


@cache
def _places_written(func: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _wrapped(func: Any, args: Any, kwargs: Any, result: Any) -> Any:
    """Wrap what came out; what was changed in place or written into is given back as it is."""
    written = [
        kwargs.get(name, args[place] if place < len(args) else None)
        for place, name in _places_written(func)
    ]
    known = {id(one.inner): one for one in _leaves(written) if isinstance(one, SpareTensor)}

    def wrap(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return known[id(tree)] if id(tree) in known else SpareTensor(tree)
        return type(tree)(map(wrap, tree)) if isinstance(tree, (list, tuple)) else tree

    return wrap(result)


def _factories() -> Iterator[tuple[str, Any]]:
    """Find every operation that makes a tensor of none."""
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or overload.endswith("out"):
            continue
        try:
            operation = getattr(getattr(torch.ops.aten, name), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        kinds = {argument.name: str(argument.type) for argument in operation._schema.arguments}
        if "device" in kinds and not any("Tensor" in kind for kind in kinds.values()):
            yield full.removeprefix("aten::"), operation


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def _copy_from(source: Any, target: Any, non_blocking: bool = False) -> Any:
    """Do what `torch.tensor(numbers, device=...)` asks for, past `__torch_dispatch__`."""
    _unwrapped(target).copy_(_unwrapped(source))
    return target


def register() -> torch.device:
    """Add the device to this process."""
    if not _libraries:
        _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
        library = torch.library.Library("aten", "IMPL")
        for name, operation in _factories():

            def make(*args: Any, _operation: Any = operation, **kwargs: Any) -> SpareTensor:
                kwargs = {**kwargs, "device": "cpu"}
                kwargs.pop("pin_memory", None)
                return SpareTensor(_operation(*args, **kwargs))

            try:
                library.impl(name, make, "PrivateUse1")
            except RuntimeError:
                continue
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _libraries.append(library)  # a registration ends with its library
    return torch.device(NAME, 0)
