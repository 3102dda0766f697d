"""Open the store of a URI of any kind."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from trainer.errors import TrainerConfigError
from trainer.outer.object_store import (
    CONDITIONAL_CREATE,
    FileStore,
    FsspecStore,
    MemoryStore,
    ObjectStore,
)

_memory: dict[str, MemoryStore] = {}


def open_store(uri: str, *, options: Mapping[str, Any] | None = None) -> ObjectStore:
    """Open the store that a URI names.

    Args:
        uri: `file:///path` or a plain path, `memory://name` (one process), `s3://bucket/prefix`,
            `gs://…`, `abfs://…`, `hf://datasets/owner/name/prefix`.
        options: Options of the fsspec file system, such as `endpoint_url` for S3.

    Raises:
        TrainerConfigError: The scheme is unknown, its package is missing, or it has no conditional
            create. Without that, two replicas could commit different decisions.
    """
    scheme = urlsplit(uri).scheme
    if scheme in {"", "file", "local"}:
        return FileStore(uri.removeprefix(f"{scheme}://"))
    if scheme == "memory":
        return _memory.setdefault(uri.rstrip("/"), MemoryStore())
    if scheme == "hf":
        from trainer.outer.hub_store import HubStore  # noqa: PLC0415 - the Hub's package is optional

        return HubStore(uri, options)
    if scheme in CONDITIONAL_CREATE:
        return FsspecStore(uri, options)
    raise TrainerConfigError(
        f"{uri}: no conditional create is known for {scheme}://; use file://, s3://, gs://, "
        "abfs:// or hf://datasets/owner/name"
    )
