"""The public names of the outer loop, as the published method has them.

They are loaded on first use, so that watching replicas does not need torch.
"""

import importlib
from typing import Any

_NAMES = {
    "all_reduce": "ObjectStoreAllReduce",
    "executors.base": "ReplicaHandle ReplicaResult ReplicaState ReplicaStatus ServerlessExecutor supervise",
    "executors.hf_jobs": "HFJobsExecutor",
    "executors.local": "LocalProcessExecutor",
    "executors.modal": "ModalExecutor",
    "object_store": "FileStore MemoryStore ObjectStore open_store",
    "parameters": "ParameterVector",
    "protocol": "OUTER_PRESETS OuterStep outer_preset",
    "replica": "OuterReplica OuterSettings",
    "torchft_loop": "MockManager ObjectStoreManager make_diloco_outer_loop",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"trainer.diloco.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
