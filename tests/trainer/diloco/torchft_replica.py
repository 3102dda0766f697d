"""One replica under torchft's lighthouse: `torchft_replica.py LIGHTHOUSE RANK ROUNDS LOG`."""

import hashlib
import json
import os
import sys
from pathlib import Path

import torch

from trainer.diloco import OuterStep, make_diloco_outer_loop, make_torchft_manager


def main(lighthouse, rank, n_rounds, log):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    target = torch.nn.Linear(8, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load_state(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = make_torchft_manager(
        lighthouse=lighthouse,
        rank=rank,
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        load_state_dict=load_state,
        min_replicas=2,
        round_s=100.0,
    )
    dice = torch.Generator().manual_seed(rank)
    loop = make_diloco_outer_loop(
        model, inner, manager=manager, sync_every=5, outer=OuterStep(0.8, 0.5)
    )
    loss, step = torch.zeros(()), 0
    with loop, Path(log).open("a", buffering=1) as lines:
        while manager.current_step() < n_rounds:
            x_B_D = torch.randn(32, 8, generator=dice)
            loss = torch.nn.functional.mse_loss(model(x_B_D), target(x_B_D).detach())
            inner.zero_grad()
            loss.backward()
            inner.step()
            if manager.current_step() > step:
                step = manager.current_step()
                values = loop._fragments[0].original_parameters.values()
                digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in values))
                row = {"step": step, "hash": digest.hexdigest(), "loss": float(loss.detach())}
                lines.write(json.dumps(row) + "\n")
    manager.shutdown(wait=False)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
