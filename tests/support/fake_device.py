"""A second device that any machine has: torch's `PrivateUse1`, computed on the CPU.

Its tensors are wrappers whose device is not the CPU's. An operation on tensors of both is refused,
as CUDA refuses it, so that a batch that was left behind fails here and not first on a GPU. What
CUDA allows is allowed: a number (0 dimensions) from the CPU, CPU indices, and copies between.

A process that called `register` keeps the device: use a process of its own.
"""

import linecache
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

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

_WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations after which the host waits, to read a number or to learn how many there are."""

_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
_ROOT = Path(__file__).parents[2]

_libraries: list[torch.library.Library] = []


class SpareTensor(torch.Tensor):
    """A tensor of the spare device; `inner` holds its numbers."""

    inner: torch.Tensor
    waits: ClassVar[Counter[str]] = Counter()
    """Times that the host waited for the device, by package and line; while `is_watched`."""
    is_watched = False

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
        _note_wait()
        return self.inner.tolist()  # torch refuses it to subclasses

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()  # a wrapper has none to tell shared weights by

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in _WAITING or (name in _INDEXING and _has_mask(args[1])):
            _note_wait()
        if name not in _CROSSING:
            _refuse_cpu_tensors(func, *args, *kwargs.values())
        goes_to_cpu = False
        if "device" in kwargs and kwargs["device"] is not None:
            goes_to_cpu = torch.device(kwargs["device"]).type == "cpu"
            kwargs["device"] = "cpu"
        if goes_to_cpu:
            _note_wait()
        result = func(*map(_unwrapped, args), **{k: _unwrapped(v) for k, v in kwargs.items()})
        if goes_to_cpu or name == "_local_scalar_dense":
            return result.clone() if isinstance(result, torch.Tensor) else result
        return _wrapped(func, args, kwargs, result)


def _note_wait() -> None:
    """Note the innermost line that is not torch's, when the host waits."""
    if not SpareTensor.is_watched:
        return
    frame: Any = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        frame = frame.f_back
    if frame is None:  # a thread of autograd has no caller
        SpareTensor.waits["trainer: in the backward pass"] += 1
        return
    where = Path(frame.f_code.co_filename)
    package = "upstream" if "site-packages" in where.parts else where.relative_to(_ROOT).parts[0]
    line = linecache.getline(str(where), frame.f_lineno).strip()
    SpareTensor.waits[f"{package}: {where.name}:{frame.f_lineno} {line}"] += 1


def _has_mask(indices: Any) -> bool:
    """Whether the host has to count what an index marks, as for `values[mask]`."""
    kinds = (torch.bool, torch.uint8)
    return any(isinstance(one, SpareTensor) and one.dtype in kinds for one in indices)


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
    if not non_blocking:
        _note_wait()
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
