"""Pack named arrays and a header into the bytes of a safetensors file, for transfer and storage."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trainer.errors import OuterLoopError


def sha256(*parts: bytes | NDArray[Any]) -> str:
    """Return the hexadecimal SHA-256 of bytes or contiguous arrays."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def pack_tensors(header: Mapping[str, Any], tensors: Mapping[str, NDArray]) -> bytes:
    """Return arrays and a JSON header as bytes. Equal inputs give equal bytes."""
    # One metadata entry only: safetensors writes several in no fixed order.
    text = json.dumps(header, sort_keys=True)
    named = {name: np.asarray(value, order="C") for name, value in tensors.items()}
    return save(named, metadata={"header": text})


def unpack_tensors(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Return the header and the arrays of `pack_tensors`.

    Raises:
        OuterLoopError: The bytes aren't such a file.
    """
    try:
        # safetensors gives a file's metadata only to who reads the file from a path.
        size = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["header"])
        return header, load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise OuterLoopError(f"{len(data)} bytes are damaged: {error}") from error


def seal_tensors(header: Mapping[str, Any], tensors: Mapping[str, NDArray]) -> bytes:
    """Return the bytes of `pack_tensors`, including a hash of header and arrays."""
    return pack_tensors({**header, "sha256": _seal_of(header, tensors)}, tensors)


def unseal_tensors(data: bytes) -> tuple[dict[str, Any], dict[str, NDArray]]:
    """Return the header and the writable arrays of `seal_tensors`.

    Raises:
        OuterLoopError: The bytes aren't such a file, or were changed.
    """
    header, tensors = unpack_tensors(data)
    if header.pop("sha256", None) != _seal_of(header, tensors):
        raise OuterLoopError(f"{len(data)} bytes are damaged: their hash does not match")
    return header, {name: value.copy() for name, value in tensors.items()}


def _seal_of(header: Mapping[str, Any], tensors: Mapping[str, NDArray]) -> str:
    arrays = [np.asarray(tensors[name], order="C") for name in sorted(tensors)]
    return sha256(json.dumps(header, sort_keys=True).encode(), *arrays)
