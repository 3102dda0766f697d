"""Log-probabilities of pairs under the original model, computed once and stored on disk."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trainer.data.collator import ComposerDataCollator
from trainer.model.pair_forward import PairForward

__all__ = ["FILE", "reference_logps"]

logger = logging.getLogger(__name__)

FILE = "reference.safetensors"
"""File next to a run's checkpoints."""


def reference_logps(
    model: nn.Module,
    pairs: Sequence[Mapping[str, Any]],
    collator: ComposerDataCollator,
    forward: PairForward,
    accelerator: Accelerator,
    folder: Path,
) -> Tensor:
    """Return the summed log-probs of both sides of each pair, [pairs, 2], on the CPU.

    Ranks share the work. Pairs of one trace run together, under the policy's autocast, so that both
    models agree before the first step. If an earlier start of the run left a file in `folder` for
    the same weights, tokens, and precision, it is read instead.
    """
    key = _key(model, pairs, collator, str(accelerator.mixed_precision))
    if (kept := _read(folder / FILE, key)) is not None:
        logger.info("reading the log-probs of the reference model from %s", folder / FILE)
        return kept
    was_training = model.training
    model.eval()
    device = accelerator.device
    found_B2 = torch.zeros(len(pairs), 2, device=device)
    order = sorted(range(len(pairs)), key=lambda i: str(pairs[i].get("session_id") or ""))
    n_ranks, rank = accelerator.num_processes, accelerator.process_index
    mine = order[len(order) * rank // n_ranks : len(order) * (rank + 1) // n_ranks]
    for start in range(0, len(mine), forward.batch_size):
        rows = mine[start : start + forward.batch_size]
        batch = collator.pairs([pairs[i] for i in rows])
        batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
        (chosen, _), (rejected, _) = forward(model, batch)
        found_B2[rows] = torch.stack([chosen, rejected], -1).float()
    model.train(was_training)
    logps_B2 = accelerator.reduce(found_B2, reduction="sum").cpu()
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({"logps": logps_B2}, folder / FILE, metadata={"key": key})
    return logps_B2


def _read(path: Path, key: str) -> Tensor | None:
    try:
        with safe_open(path, "pt") as file:
            is_ours = (file.metadata() or {}).get("key") == key
            return file.get_tensor("logps") if is_ours else None
    except (OSError, SafetensorError):
        return None


@torch.no_grad()
def _key(
    model: nn.Module,
    pairs: Sequence[Mapping[str, Any]],
    collator: ComposerDataCollator,
    precision: str,
) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, one in model.named_parameters():
        # Two sums tell weights apart well enough, and take far less than a forward pass.
        values = one.detach().float()
        told = torch.stack([values.sum(), values.square().sum()]).tolist()
        digest.update(f"{name} {told}".encode())
    for row in pairs:
        batch = collator.pairs([row])
        ids = {name: value.tolist() for name, value in batch.items() if name != "dpo_weight"}
        digest.update(json.dumps(ids).encode())
    digest.update(precision.encode())
    return digest.hexdigest()
