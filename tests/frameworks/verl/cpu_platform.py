"""VeRL on the CPU, for tests: a platform, gloo as the process group, a server on transformers.

Loaded in every process through `VERL_USE_EXTERNAL_MODULES=cpu_platform`.
"""

import contextlib
import os
import types

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def nothing(*_, **__):
    return None


def zero(*_, **__):
    return 0


DEVICE = types.SimpleNamespace(
    is_available=lambda: True,
    current_device=lambda: torch.device("cpu"),
    device_count=lambda: 1,
    set_device=nothing,
    synchronize=nothing,
    empty_cache=nothing,
    manual_seed=torch.manual_seed,
    manual_seed_all=torch.manual_seed,
    memory_allocated=zero,
    memory_reserved=zero,
    max_memory_allocated=zero,
    max_memory_reserved=zero,
    reset_peak_memory_stats=nothing,
    mem_get_info=lambda *_, **__: (0, 0),
    get_rng_state=lambda *_, **__: torch.get_rng_state(),
    set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
    get_device_name=lambda *_, **__: "cpu",
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def get_device_capability(self, device_id=0):
        return (None, None)

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, num_gpus):
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self):
        return False

    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing


def init_gloo(timeout_second=None, backend=None):
    # VeRL would ask for "cpu:gloo,cpu:gloo".
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo",
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


verl.utils.distributed.initialize_global_process_group_ray = init_gloo


def load_replica():
    from transformers_server import TransformersReplica

    return TransformersReplica


def register_rollout():
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    _ROLLOUT_REGISTRY[("transformers", "async")] = "transformers_server.TransformersAdapter"
    RolloutReplicaRegistry.register("transformers", load_replica)


register_rollout()
