"""Build Arrow arrays from Python lists.

`pyarrow.array` imports pandas on its first call, which takes as much memory as a whole ingester.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa


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
        bits = np.packbits(np.array(list(map(bool, values)), bool), bitorder="little")
        return pa.Array.from_buffers(type_, len(values), [_validity(values), pa.py_buffer(bits)])
    dtype = {
        pa.int32(): np.int32,
        pa.int64(): np.int64,
        pa.float64(): np.float64,
    }.get(type_, np.int64)
    numbers = np.array([0 if value is None else value for value in values], dtype)
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
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] >= 1 << 31:
        raise OverflowError("the texts of one array are larger than 2 GB")
    return pa.py_buffer(offsets.astype(np.int32))


def _validity(values: Sequence[Any]) -> pa.Buffer | None:
    is_null = [value is None for value in values]
    if not any(is_null):
        return None
    return pa.py_buffer(np.packbits(~np.array(is_null), bitorder="little"))
