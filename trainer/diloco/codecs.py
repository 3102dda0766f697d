"""Bytes for transfer and storage: named arrays, and pseudo-gradients with 32 bits to less than one.

All are safetensors files: arrays and one JSON header. A codec is the wire format of one vector.

The sender keeps the error of a lossy codec and adds it to its next pseudo-gradient (error
feedback). So the codec delays information instead of dropping it.

Blocks are runs of consecutive values of the flat vector. Scales are bfloat16, rounded up. Their
range is that of float32, so even a post-training delta of 1e-9 has a scale.
"""

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from trainer.errors import OuterLoopError, TrainerConfigError

Vector = NDArray[np.float32]
Parts = dict[str, NDArray]


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


@dataclass(frozen=True)
class Codec:
    """One wire format for a flat float32 vector.

    `encode` returns named arrays. `decode` takes these and the length, and returns the values that
    every reader will see.
    """

    name: str
    encode: Callable[[Vector], Parts]
    decode: Callable[[Mapping[str, NDArray], int], Vector]
    is_lossy: bool = True


def codec_named(name: str) -> Codec:
    """Return a codec by its name.

    Raises:
        TrainerConfigError: The codec is unknown.
    """
    if name not in CODECS:
        raise TrainerConfigError(f"codec {name!r} is unknown: choose one of {', '.join(CODECS)}")
    return CODECS[name]


def encode_payload(codec: Codec, vector: Vector) -> bytes:
    """Return a vector as the bytes of a safetensors file.

    Raises:
        OuterLoopError: A value isn't finite, so the delta would spoil every replica.
    """
    if not np.isfinite(np.dot(vector, vector)) and not np.isfinite(vector).all():
        raise OuterLoopError("a pseudo-gradient is not finite: lower the inner learning rate")
    return pack_tensors({"codec": codec.name, "n": int(vector.size)}, codec.encode(vector))


def decode_payload(codec: Codec, payload: bytes, n: int) -> Vector:
    """Return the vector of a payload made by `encode_payload`.

    Raises:
        OuterLoopError: The bytes aren't such a file, have another codec or length, or have values
            that aren't finite.
    """
    header, parts = unpack_tensors(payload)
    if header != {"codec": codec.name, "n": n}:
        raise OuterLoopError(
            f"payload has the header {header}, but {n} values of {codec.name} were expected"
        )
    try:
        vector = codec.decode(parts, n)
    except (ValueError, KeyError, IndexError, TypeError, zlib.error) as error:
        raise OuterLoopError(f"payload of {len(payload)} bytes is damaged: {error}") from error
    if vector.shape != (n,) or not np.isfinite(np.dot(vector, vector)):
        raise OuterLoopError("payload has values that are not finite")
    return vector


def _squeeze(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Huffman-code bytes: bitmaps of few ones have few distinct bytes, and no repeats to find."""
    coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY, wbits=-15)
    return np.frombuffer(coder.compress(data.tobytes()) + coder.flush(), np.uint8)


def _unsqueeze(data: NDArray[np.uint8], n_bytes: int) -> NDArray[np.uint8]:
    decoder = zlib.decompressobj(wbits=-15)
    raw = decoder.decompress(data.tobytes(), n_bytes + 1)
    if len(raw) != n_bytes:
        raise ValueError(f"{len(raw)} bytes where {n_bytes} were expected")
    return np.frombuffer(raw, np.uint8)


TRITS = 5
"""Three-valued digits in a byte: 3**5 = 243."""

_DIGITS = np.arange(243)[:, None] // 3 ** np.arange(TRITS) % 3
_SIGNS = (_DIGITS - 1).astype(np.int8)


def _pack_signs(signs: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Pack values of -1, 0 and 1 five to a byte; a Huffman code then sees them jointly."""
    digits = np.pad(signs, (0, -signs.size % TRITS)).view(np.uint8)
    digits += 1
    packed = digits[TRITS - 1 :: TRITS].copy()
    for place in range(TRITS - 2, -1, -1):
        packed *= 3
        packed += digits[place::TRITS]
    return packed


BLOCK, THRESHOLD, LEVEL = 2048, 0.47, 0.9
"""Values above `THRESHOLD` of their block's largest become ±`LEVEL` of it; the rest wait."""


def _encode_ternary(vector: Vector) -> Parts:
    rows = np.pad(vector, (0, -vector.size % BLOCK)).reshape(-1, BLOCK)
    largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    cut = (largest * np.float32(THRESHOLD))[:, None]
    signs = ((rows > cut).view(np.int8) - (rows < -cut).view(np.int8)).ravel()[: vector.size]
    level = (largest * np.float32(LEVEL)).view(np.uint32).astype(np.uint64)
    # Rounded up to bfloat16.
    scales = ((level + 0xFFFF) >> 16).astype(np.uint16)
    return {"scales": scales, "signs": _squeeze(_pack_signs(signs))}


def _decode_ternary(parts: Mapping[str, NDArray], n: int) -> Vector:
    scale = (parts["scales"].astype(np.uint32) << 16).view(np.float32)
    packed = _unsqueeze(parts["signs"], -(-n // TRITS))
    signs = np.zeros(scale.size * BLOCK + TRITS, np.int8)
    np.take(_SIGNS, packed, axis=0, out=signs[: packed.size * TRITS].reshape(-1, TRITS))
    signs[n:] = 0
    values = signs[: scale.size * BLOCK].reshape(-1, BLOCK) * scale[:, None]
    return values.ravel()[:n]


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("fp32", lambda v: {"values": v}, lambda parts, _: parts["values"], is_lossy=False),
        Codec("ternary", _encode_ternary, _decode_ternary),
    )
}
"""Every codec by name, from most to fewest bits."""
