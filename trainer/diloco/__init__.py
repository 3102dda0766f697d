"""The outer loop: replicas that share nothing but an object store."""

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
