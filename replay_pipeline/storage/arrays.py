"""Build Arrow arrays from Python lists.

`pyarrow.array` imports pandas on its first call, which takes as much memory as a whole ingester.
"""

import importlib
from array import array
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import pyarrow as pa


class Numpy:
    """Numpy, loaded at its first use: ingesting and looking go without it."""

    def __getattr__(self, name: str) -> Any:
        """Return what numpy calls `name`."""
        return getattr(importlib.import_module("numpy"), name)


def array_of(values: list[Any], type_: pa.DataType) -> pa.Array:
    """Return an array of strings, numbers, truths, timestamps (in the type's unit), or lists of strings."""
    if values.count(None) == len(values):
        return pa.nulls(len(values), type_)
    if pa.types.is_list(type_):
        items = [item for value in values if value for item in value]
        offsets = _offsets([len(value) if value else 0 for value in values])
        return pa.ListArray.from_buffers(
            type_, len(values), [_validity(values), offsets], children=[string_array(items)]
        )
    if pa.types.is_string(type_):
        return string_array(values)
    if pa.types.is_boolean(type_):
        return pa.Array.from_buffers(type_, len(values), [_validity(values), _bits(values)])
    code = {pa.int32(): "i", pa.float64(): "d"}.get(type_, "q")
    numbers = array(code, [0 if value is None else value for value in values])
    return pa.Array.from_buffers(type_, len(values), [_validity(values), pa.py_buffer(numbers)])


def string_array(values: Sequence[str | bytes | None]) -> pa.Array:
    """Return an array of strings. Bytes are read as UTF-8."""
    data, lengths = _ascii(values) or _utf8(values)
    buffers = [_validity(values), _offsets(lengths), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def _ascii(values: Sequence[str | bytes | None]) -> tuple[bytes, list[int]] | None:
    """Return texts side by side and their lengths, if all are ASCII: the short way for most columns."""
    texts = [value or "" for value in values]
    try:
        joined = "".join(cast("list[str]", texts))
    except TypeError:
        return None
    return (joined.encode(), list(map(len, texts))) if joined.isascii() else None


def _utf8(values: Sequence[str | bytes | None]) -> tuple[bytes, list[int]]:
    encoded = [
        value if isinstance(value, bytes) else value.encode("utf-8", "replace") if value else b""
        for value in values
    ]
    return b"".join(encoded), list(map(len, encoded))


def _offsets(lengths: list[int]) -> pa.Buffer:
    offsets = list(accumulate(lengths, initial=0))
    if offsets[-1] >= 1 << 31:
        raise OverflowError("the texts of one array are larger than 2 GB")
    return pa.py_buffer(array("i", offsets))


def _validity(values: Sequence[Any]) -> pa.Buffer | None:
    return _bits([value is not None for value in values]) if None in values else None


def _bits(values: Sequence[Any]) -> pa.Buffer:
    """Return a bit for each value, the first one lowest."""
    digits = "".join(["1" if value else "0" for value in reversed(values)])
    return pa.py_buffer(int(digits or "0", 2).to_bytes((len(values) + 7) // 8, "little"))
