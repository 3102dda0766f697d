"""The public names of the outer loop, as the published method has them.

They are loaded on first use, so that watching replicas does not need torch.
"""

# ruff: noqa: F401 - `__all__` is made of `_HOMES`

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.outer.all_reduce import ObjectStoreAllReduce
    from trainer.outer.executors.base import (
        ReplicaHandle,
        ReplicaResult,
        ReplicaState,
        ReplicaStatus,
        ServerlessExecutor,
        supervise,
    )
    from trainer.outer.executors.hf_jobs import HFJobsExecutor
    from trainer.outer.executors.local import LocalProcessExecutor
    from trainer.outer.executors.modal import ModalExecutor
    from trainer.outer.object_store import FileStore, MemoryStore, ObjectStore, open_store
    from trainer.outer.parameters import ParameterVector
    from trainer.outer.protocol import OUTER_PRESETS, OuterStep, outer_preset
    from trainer.outer.replica import OuterReplica, OuterSettings
    from trainer.outer.torchft_loop import (
        MockManager,
        ObjectStoreManager,
        make_diloco_outer_loop,
    )

_HOMES = {
    "OUTER_PRESETS": "trainer.outer.protocol",
    "FileStore": "trainer.outer.object_store",
    "HFJobsExecutor": "trainer.outer.executors.hf_jobs",
    "LocalProcessExecutor": "trainer.outer.executors.local",
    "MemoryStore": "trainer.outer.object_store",
    "MockManager": "trainer.outer.torchft_loop",
    "ModalExecutor": "trainer.outer.executors.modal",
    "ObjectStore": "trainer.outer.object_store",
    "ObjectStoreAllReduce": "trainer.outer.all_reduce",
    "ObjectStoreManager": "trainer.outer.torchft_loop",
    "OuterReplica": "trainer.outer.replica",
    "OuterSettings": "trainer.outer.replica",
    "OuterStep": "trainer.outer.protocol",
    "ParameterVector": "trainer.outer.parameters",
    "ReplicaHandle": "trainer.outer.executors.base",
    "ReplicaResult": "trainer.outer.executors.base",
    "ReplicaState": "trainer.outer.executors.base",
    "ReplicaStatus": "trainer.outer.executors.base",
    "ServerlessExecutor": "trainer.outer.executors.base",
    "make_diloco_outer_loop": "trainer.outer.torchft_loop",
    "open_store": "trainer.outer.object_store",
    "outer_preset": "trainer.outer.protocol",
    "supervise": "trainer.outer.executors.base",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
