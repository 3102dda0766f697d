"""The outer loop: replicas that share nothing but an object store.

Public names are loaded on first use, so that who only watches replicas needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.diloco.all_reduce import ObjectStoreAllReduce
    from trainer.diloco.asynchronous import AsyncReplica
    from trainer.diloco.executors.base import (
        ReplicaHandle,
        ReplicaResult,
        ReplicaState,
        ReplicaStatus,
        ServerlessExecutor,
        supervise,
    )
    from trainer.diloco.executors.hf_jobs import HFJobsExecutor
    from trainer.diloco.executors.local import LocalProcessExecutor
    from trainer.diloco.executors.modal import ModalExecutor
    from trainer.diloco.fragments import FragmentedReplica
    from trainer.diloco.inner import make_inner_optimizer
    from trainer.diloco.object_store import FileStore, MemoryStore, ObjectStore, open_store
    from trainer.diloco.outer_step import OUTER_PRESETS, OuterStep, outer_preset
    from trainer.diloco.parameters import ParameterVector
    from trainer.diloco.replica import OuterReplica, OuterSettings
    from trainer.diloco.torchft_loop import (
        MockManager,
        ObjectStoreManager,
        make_diloco_outer_loop,
        make_torchft_manager,
    )

_HOMES = {
    "OUTER_PRESETS": "trainer.diloco.outer_step",
    "AsyncReplica": "trainer.diloco.asynchronous",
    "FileStore": "trainer.diloco.object_store",
    "FragmentedReplica": "trainer.diloco.fragments",
    "HFJobsExecutor": "trainer.diloco.executors.hf_jobs",
    "LocalProcessExecutor": "trainer.diloco.executors.local",
    "MemoryStore": "trainer.diloco.object_store",
    "MockManager": "trainer.diloco.torchft_loop",
    "ModalExecutor": "trainer.diloco.executors.modal",
    "ObjectStore": "trainer.diloco.object_store",
    "ObjectStoreAllReduce": "trainer.diloco.all_reduce",
    "ObjectStoreManager": "trainer.diloco.torchft_loop",
    "OuterReplica": "trainer.diloco.replica",
    "OuterSettings": "trainer.diloco.replica",
    "OuterStep": "trainer.diloco.outer_step",
    "ParameterVector": "trainer.diloco.parameters",
    "ReplicaHandle": "trainer.diloco.executors.base",
    "ReplicaResult": "trainer.diloco.executors.base",
    "ReplicaState": "trainer.diloco.executors.base",
    "ReplicaStatus": "trainer.diloco.executors.base",
    "ServerlessExecutor": "trainer.diloco.executors.base",
    "make_diloco_outer_loop": "trainer.diloco.torchft_loop",
    "make_inner_optimizer": "trainer.diloco.inner",
    "make_torchft_manager": "trainer.diloco.torchft_loop",
    "open_store": "trainer.diloco.object_store",
    "outer_preset": "trainer.diloco.outer_step",
    "supervise": "trainer.diloco.executors.base",
}

__all__ = [
    "OUTER_PRESETS",
    "AsyncReplica",
    "FileStore",
    "FragmentedReplica",
    "HFJobsExecutor",
    "LocalProcessExecutor",
    "MemoryStore",
    "MockManager",
    "ModalExecutor",
    "ObjectStore",
    "ObjectStoreAllReduce",
    "ObjectStoreManager",
    "OuterReplica",
    "OuterSettings",
    "OuterStep",
    "ParameterVector",
    "ReplicaHandle",
    "ReplicaResult",
    "ReplicaState",
    "ReplicaStatus",
    "ServerlessExecutor",
    "make_diloco_outer_loop",
    "make_inner_optimizer",
    "make_torchft_manager",
    "open_store",
    "outer_preset",
    "supervise",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
